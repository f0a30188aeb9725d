"""Is what a selection calls free in another layout free in the compiled network, and all else as it says?"""

import numpy as np
import pytest
import tvm
from graphs import outputs
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_graphs import constant, convolution, graph
from length import examples, long_but
from tvm import relax
from tvm.relax import op

from pimflow.compiler.build import LayerPrimitives, with_primitives
from pimflow.compiler.kernel_calls import kernel_parts
from pimflow.core.region import CONCAT_SUFFIX, MOVES
from pimflow.hardware import system
from pimflow.primitive_selection.layers import Layers, separate_concats
from pimflow.primitive_selection.problem import SelectionProblem
from pimflow.primitive_selection.profile import Device, Profile
from pimflow.primitives import PRIMITIVES
from pimflow.relay_passes.flat import main_bindings, operator, rebuild, shape
from pimflow.relay_passes.regions.extract_regions import extract_regions, region_groups

FEW = ("direct-hwc-7x32", "direct-chw-7x32", "direct-chwc16-7x16", "pointwise-hwc-7x32")
SIDE = 9


def steps(emit, tensors, kind, which, channels):
    """One more operator, behind the one of `tensors` that `which` picks."""
    x = tensors[which % len(tensors)]
    n, h, w, c = shape(x)
    if kind == "conv":
        return emit(convolution(x, constant(channels, 1, 1, c)))
    if kind == "window":
        y = emit(convolution(x, constant(channels, 3, 3, c), padding=1))
        return emit(op.nn.relu(emit(op.add(y, constant(1, 1, 1, channels)))))
    if kind == "max":
        return emit(op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1, 1, 1), layout="NHWC"))
    if kind == "average":
        return emit(op.nn.avg_pool2d(x, (3, 3), (1, 1), (1, 1, 1, 1), layout="NHWC"))
    if kind == "clip":
        return emit(op.clip(emit(op.multiply(x, constant(c))), -1, 1))
    if kind in ("gate", "scale"):
        pixel = emit(op.mean(x, [1, 2], keepdims=True))
        pixel = emit(convolution(pixel, constant(c, 1, 1, c))) if kind == "gate" else pixel
        return emit(op.multiply(x, pixel))
    same_shape = [t for t in tensors if shape(t)[:3] == (n, h, w) and not t.same_as(x)]
    if kind == "join":
        return emit(op.concat([x, *same_shape[-1:]], 3) if same_shape else op.nn.relu(x))
    same = [t for t in same_shape if shape(t)[3] == c]
    return emit(op.add(x, same[-1] if same else constant(1, 1, 1, c)))


@st.composite
def networks(draw, extra_kinds=()) -> tvm.IRModule:
    """Branches, joins, residuals, gates and pools in any order, and a mean."""
    kinds = st.sampled_from([*extra_kinds, "conv", "window", "max", "average", "clip", "gate", "join", "sum"])
    step = st.tuples(kinds, st.integers(0, 3), st.sampled_from([16, 32]))
    drawn = draw(st.lists(step, min_size=3, max_size=9))

    def network(emit, x):
        tensors = [emit(convolution(x, constant(16, 3, 3, 16), padding=1))]
        for kind, back, channels in drawn:
            tensors.append(steps(emit, tensors[::-1], kind, back, channels))
        last = emit(convolution(tensors[-1], constant(16, 1, 1, shape(tensors[-1])[3])))
        return relax.Tuple([emit(op.mean(last, [1, 2], keepdims=True))])

    return rebuild(graph(network, (1, SIDE, SIDE, 16)), lambda *_: None)


def problem(mod: tvm.IRModule) -> SelectionProblem:
    """With one primitive of each layout, and pools that are as fast in all."""
    layers = Layers(separate_concats(extract_regions(mod)))
    profile = Profile(
        device=Device(cpu="", model="made up", threads=1),
        code="",
        times_ns={
            (name, layer): 1.0
            for layer in layers.primitive_layers.values()
            for name in FEW
            if PRIMITIVES[name].applies(layer)
        },
        moves_ns=dict.fromkeys(layers.moves.values(), 1.0),
        pools_ns=dict.fromkeys(layers.pool_layouts, 1.0),
    )
    return SelectionProblem(graph=layers.graph, table=layers.table(profile))


def compile_choice(mod: tvm.IRModule, choice) -> tvm.IRModule:
    primitives = {n: PRIMITIVES[c.primitive] for n, c in choice.items() if c.primitive}
    layouts = {n: c.input.layout.value for n, c in choice.items() if not c.primitive}
    return with_primitives(mod, LayerPrimitives(primitives, layouts))


def layout_moves(mod: tvm.IRModule, original: tvm.IRModule) -> set[tuple[str, str]]:
    """By tensor and reader, where the order of a tensor's bytes changes between them, by moving them."""
    region, region_names = {}, {region.name for region in separate_concats(extract_regions(original)).regions}
    for name, group in region_groups(original).items():
        for b in group.bindings:
            joined = f"{name}{CONCAT_SUFFIX}"
            region[b.var.name] = joined if operator(b.value) == "concat" and joined in region_names else name
    moves: set[tuple[str, str]] = set()
    values = {b.var: b.value for b in main_bindings(mod)}
    roots: dict[relax.Var, tuple[relax.Var, np.ndarray]] = {}  # same elements, in which order

    def root(var):
        return roots.get(var) or (var, np.arange(np.prod(shape(var))).reshape(shape(var)))

    for var, value in values.items():
        if operator(value) in MOVES and isinstance(value.args[0], relax.Var):
            source, order = root(value.args[0])
            axes = value.attrs.axes if operator(value) == "permute_dims" else None
            order = order.reshape(shape(var)) if axes is None else order.transpose([int(a) for a in axes])
            roots[var] = (source, order)
    for var, value in values.items():
        for operand in relax.analysis.free_vars(value) if var not in roots else ():
            source, order = root(operand)
            if (order.ravel() != np.arange(order.size)).any():
                moves.add((region.get(source.name, source.name), region.get(var.name, ">")))
    return moves


def pick_candidates(problem: SelectionProblem, numbers: list[int]):
    names = [region.name for region in problem.graph.regions]
    choice = {}
    for name, number in zip(names, numbers * len(names)):
        candidates = problem.table.candidates[name]
        choice[name] = candidates[number % len(candidates)]
    return choice


def selection_moves(problem: SelectionProblem, choice) -> set[tuple[str, str]]:
    transforms = problem.transforms(choice)
    return {(t.tensor.removeprefix("%"), ">" if t.reader.endswith(">") else t.reader) for t in transforms}


choices = st.lists(st.integers(0, 11), min_size=1, max_size=12)


@settings(max_examples=examples(15), deadline=None)
@given(networks(["scale"]), choices)
def test_transforms_are_those_of_the_selection(mod, numbers):
    selection = problem(mod)
    choice = pick_candidates(selection, numbers)
    assert layout_moves(compile_choice(mod, choice), mod) == selection_moves(selection, choice)


@settings(max_examples=examples(5), deadline=None)
@given(networks(["scale"]), choices)
def test_values(mod, numbers):
    choice = pick_candidates(problem(mod), numbers)
    x = np.random.default_rng(0).standard_normal((1, SIDE, SIDE, 16), np.float32)
    (reference,), (result,) = outputs(mod, [x]), outputs(compile_choice(mod, choice), [x])
    assert np.abs(result - reference).max() <= 1e-4 * max(np.abs(reference).max(), 1e-3)


@pytest.mark.parametrize("layout", long_but(["CHWc16"], ["HWC", "CHW", "CHWc16"]))
@settings(max_examples=examples(6), deadline=None)
@given(networks())
def test_in_one_layout_nothing_but_the_input_is_transformed(layout, mod):
    selection = problem(mod)
    options = selection.table.candidates.items()
    choice = {name: next(c for c in candidates if c.input.layout == layout) for name, candidates in options}
    after = compile_choice(mod, choice)
    assert {tensor for tensor, _ in layout_moves(after, mod)} <= {"p0"}
    assert list(kernel_parts(after, system()).values()).count("transform") <= (layout != "HWC")
