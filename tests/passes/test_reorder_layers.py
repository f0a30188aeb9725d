"""Do the kernels of a network change places, and nothing else?"""

from dataclasses import replace

import numpy as np
import pytest
import tvm
from graphs import as_module, same_bits
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_graphs import EarlyReader
from length import examples
from tvm import relax
from tvm.script import relax as R

from pimflow.errors import UsageError
from pimflow.memory.reorder import StepGraph, reorder
from pimflow.relay_passes.flat import main_bindings
from pimflow.relay_passes.memory.reorder_layers import ReorderLayers, order_constraints
from pimflow.relay_passes.regions.extract_regions import extract_regions

CHANNELS = 16


@as_module
def Branches(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    left = R.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI")
    active = R.nn.relu(left)
    right = R.nn.max_pool2d(x, layout="NHWC")
    last = R.nn.softmax(x)
    y = R.concat((active, right, last), axis=3)
    return y


@as_module
def ThreeBranchesReordered(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    last = R.nn.softmax(x)
    right = R.nn.max_pool2d(x, layout="NHWC")
    left = R.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI")
    active = R.nn.relu(left)
    y = R.concat((active, right, last), axis=3)
    return y


def test_rewrite():
    order = ["last", "right", "left", "y"]
    after = ReorderLayers(order)(Branches)
    tvm.ir.assert_structural_equal(after, ThreeBranchesReordered)
    tvm.ir.assert_structural_equal(ReorderLayers(order)(after), after)
    tvm.ir.assert_structural_equal(ReorderLayers(["left", "right", "last", "y"])(Branches), Branches)
    assert same_bits(Branches, after)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (["left", "y", "right", "last"], "before 'right'"),
        (["left", "right", "y"], "last"),
        (["left", "right", "right", "last", "y"], "every layer once"),
        (["left", "right", "last", "z"], "y"),
    ],
)
def test_what_is_no_order_is_refused(order, says):
    with pytest.raises(UsageError, match=says):
        ReorderLayers(order)(Branches)


def test_what_would_change_kernels_waits():
    assert order_constraints(EarlyReader) == {"conv": ("early",)}
    regions = extract_regions(EarlyReader).regions
    assert [r.name for r in regions] == ["sum", "early", "conv"]


@st.composite
def networks(draw) -> tvm.IRModule:
    """Layers, elementwise operators, slices and concatenations along rows, read in any way."""
    filters = np.ones((CHANNELS, 3, 3, CHANNELS), np.float32)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 8, 8, CHANNELS), "float32"))
    values: list[relax.Var] = [x]
    with builder.function("main", [x]):
        with builder.dataflow():
            for index in range(draw(st.integers(2, 14))):
                first = draw(st.sampled_from(values[-5:]))
                rows = int(first.ty.shape[1])
                same_height = [var for var in values[-6:] if int(var.ty.shape[1]) == rows]
                second = draw(st.sampled_from(same_height))
                kind = draw(st.sampled_from(["conv", "pool", "relu", "add", "add", "concat", "slice"]))
                if kind == "conv":
                    layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
                    value = relax.op.nn.conv2d(first, relax.const(filters), padding=(1, 1), **layouts)
                elif kind == "pool":
                    value = relax.op.nn.max_pool2d(first, (3, 3), padding=(1, 1), layout="NHWC")
                elif kind == "relu":
                    value = relax.op.nn.relu(first)
                elif kind == "concat" and rows < 32:
                    value = relax.op.concat([first, second], axis=1)
                elif kind == "slice" and rows > 2:
                    low = draw(st.sampled_from([0, rows // 2]))
                    value = relax.op.strided_slice(first, [1], [low], [low + rows // 2], assume_inbound=True)
                else:
                    value = relax.op.add(first, second)
                values.append(builder.emit(value, name_hint=f"t{index}"))
            mod_reads = draw(st.lists(st.sampled_from(values[1:]), min_size=1, max_size=3, unique=True))
            output = builder.emit_output(relax.Tuple([*dict.fromkeys((*mod_reads, values[-1]))]))
        builder.emit_func_output(output)
    mod = relax.transform.DeadCodeElimination(["main"])(builder.get())
    return relax.transform.CanonicalizeBindings()(mod)


def forward(mod: tvm.IRModule, graph) -> dict[str, tuple[str, ...]]:
    """What waits for what; where that is not the given order, regions are tied to it and none may move."""
    place = {region.name: step for step, region in enumerate(graph.regions)}
    predecessors = order_constraints(mod)
    assume(all(place[first] < place[name] for name, firsts in predecessors.items() for first in firsts))
    return predecessors


@settings(max_examples=examples(60), deadline=None)
@given(networks(), st.randoms(use_true_random=False))
def test_any_order_has_the_same_regions(mod, draw):
    graph = extract_regions(mod)
    required = forward(mod, graph)
    todo = {region.name: region for region in graph.regions}
    order: list[str] = []
    while todo:
        ready = [n for n, r in todo.items() if todo.keys().isdisjoint({*r.inputs, *required.get(n, ())})]
        order.append(draw.choice(ready))
        del todo[order[-1]]
    after = ReorderLayers(order)(mod)
    relax.analysis.well_formed(after)  # raises
    # Which region reads a tensor first, and may take over what PIM left undone of it, depends on the order.
    after_regions = extract_regions(after).regions
    for region, before_region in zip(after_regions, map(graph.region, order), strict=True):
        kernel = replace(before_region.kernel, fusible_inputs=region.kernel.fusible_inputs)
        assert region == replace(before_region, kernel=kernel)
    assert {b.var for b in main_bindings(after)} == {b.var for b in main_bindings(mod)}


@settings(max_examples=examples(36), deadline=None)
@given(networks())
def test_a_found_order_is_one_of_them(mod):
    graph = extract_regions(mod)
    steps = StepGraph.from_regions(graph, "fp16", predecessors=forward(mod, graph))
    reordering = reorder(steps, seconds=2)
    names = [graph.regions[step].name for step in reordering.order]
    after = extract_regions(ReorderLayers(names)(mod))
    assert after.regions == tuple(graph.region(name) for name in names)
    reordered_steps = StepGraph.from_regions(after, "fp16")
    assert reordered_steps.peak_bytes() == reordering.peak_bytes <= reordering.original_peak_bytes
