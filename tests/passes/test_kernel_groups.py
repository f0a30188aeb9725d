"""Is a kernel what the cost model takes it for?"""

import numpy as np
import pytest
import tvm
from graphs import as_module, conv2d_nhwc, main_module, runs_alike
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_graphs import EarlyReader
from length import examples
from test_group_kernels import GroupedResidual, LayerWithEpilogue
from tvm import relax
from tvm.script import relax as R

from pimflow.relay_passes.canonical.canonicalise import Canonicalise
from pimflow.relay_passes.flat import is_pure_reshape, main_bindings, operator
from pimflow.relay_passes.kernels.group_kernels import GroupKernels
from pimflow.relay_passes.regions import arithmetic, extract_regions, padded_inputs
from pimflow.relay_passes.regions.kernel_groups import KernelGroup, kernel_groups

BIAS = np.arange(2, dtype=np.float32)


def grouping(mod: tvm.IRModule) -> list[list[str]]:
    return [[b.var.name for b in group.bindings] for group in kernel_groups(mod)]


def result_names(mod: tvm.IRModule) -> list[str]:
    return [var.name for group in kernel_groups(mod) for var in group.extra_outputs]


# As exporters write it, and a norm: elementwise all, so one kernel with the layer.
@as_module
def Gelu(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    conv = R.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI")
    error = R.erf(R.divide(conv, R.const(1.41421354)))
    half = R.multiply(R.add(error, R.const(1.0)), R.const(0.5))
    power = R.power(half, R.const(2.0))
    y = R.sqrt(power)
    return y


def test_elementwise_operators_join_their_layer():
    assert len(grouping(Gelu)) == 1
    runs_alike(Gelu)


# A map that is scaled by what a layer makes of its mean: the layer that reads it scales it.
@as_module
def Squeezed(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    map = R.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI")
    mean = R.mean(map, axis=[1, 2], keepdims=True)
    excited = R.nn.conv2d(mean, w, data_layout="NHWC", kernel_layout="OHWI")
    scale = R.sigmoid(excited)
    scaled = R.multiply(map, scale)
    project = R.nn.conv2d(scaled, w, data_layout="NHWC", kernel_layout="OHWI")
    y = R.add(project, x)
    return y


# The same without a layer behind: a kernel of its own.
@as_module
def SqueezedLast(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    mean = R.mean(x, axis=[1, 2], keepdims=True)
    excited = R.nn.conv2d(mean, w, data_layout="NHWC", kernel_layout="OHWI")
    scale = R.sigmoid(excited)
    y = R.multiply(x, scale)
    return y


@pytest.mark.long
def test_what_scales_a_map_joins_no_layer_of_one_pixel():
    assert grouping(Squeezed) == [["map"], ["mean"], ["excited", "scale"], ["scaled", "project", "y"]]
    runs_alike(Squeezed)
    assert grouping(SqueezedLast) == [["mean"], ["excited", "scale"], ["y"]]
    runs_alike(SqueezedLast)


# What a PIM region leaves pending: bias and activation go into the kernel that reads them.
@as_module
def AfterOpaque(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    pim = R.call_dps_packed("pim", (x,), out_ty=R.Tensor((1, 4, 4, 2), "float32"))
    sum = R.add(pim, R.const(BIAS))
    active = R.nn.relu(sum)
    conv = R.nn.conv2d(active, w, data_layout="NHWC", kernel_layout="OHWI")
    y = R.nn.relu(conv)
    return y


# Two convolutions read the activation: it stays with the one that made it.
@as_module
def TwoReaders(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    stem = R.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI")
    a = R.nn.relu(stem)
    left = R.nn.conv2d(a, w, data_layout="NHWC", kernel_layout="OHWI")
    right = R.nn.conv2d(a, w, data_layout="NHWC", kernel_layout="OHWI")
    y = R.add(left, right)
    return y


# The convolution's result is read twice: nothing joins its kernel.
@as_module
def TwoActivations(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    conv = R.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI")
    a = R.nn.relu(conv)
    b = R.negative(conv)
    y = R.add(a, b)
    return y


# As rotary positions turn halves of a vector: slices, their concatenation, and sums, one kernel.
@as_module
def Rotated(x: R.Tensor((1, 3, 1, 8), "float32"), a: R.Tensor((8,), "float32")):
    kept = R.multiply(x, a)
    first = R.strided_slice(x, axes=[3], begin=[0], end=[4])
    second = R.strided_slice(x, axes=[3], begin=[4], end=[8])
    minus = R.negative(second)
    other = R.concat((minus, first), axis=3)
    crossed = R.multiply(other, a)
    sum = R.add(kept, crossed)
    return sum


# What finishes a product of PIM would be in the layer's kernel on the GPU: no concatenation takes it.
@as_module
def Finished(
    x: R.Tensor((1, 3, 1, 8), "float32"), z: R.Tensor((1, 3, 1, 8), "float32"), a: R.Tensor((8,), "float32")
):
    half = R.strided_slice(z, axes=[3], begin=[4], end=[8])
    pim = R.call_dps_packed("pim", (x,), out_ty=R.Tensor((1, 3, 1, 4), "float32"))
    active = R.nn.relu(pim)
    both = R.concat((active, half), axis=3)
    y = R.multiply(both, a)
    return y


# A layer that reads the tensor too may finish it, if PIM made it: its slices are no later kernel's.
@as_module
def ReadBefore(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    half = R.strided_slice(x, axes=[3], begin=[0], end=[1])
    minus = R.negative(half)
    other = R.strided_slice(x, axes=[3], begin=[1], end=[2])
    conv = R.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI")
    both = R.concat((minus, other), axis=3)
    y = R.add(conv, both)
    return y


# The pool reads the sum that the convolution's kernel stores: that kernel cannot wait for the pool.
@as_module
def Detour(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    sum = R.add(x, x)
    conv = R.nn.conv2d(sum, w, data_layout="NHWC", kernel_layout="OHWI")
    pool = R.nn.max_pool2d(sum, layout="NHWC")
    joined = R.add(conv, pool)
    again = R.nn.max_pool2d(pool, layout="NHWC")
    y = R.add(joined, again)
    return y


# A concatenation belongs to its only reader, if that has an anchor, not to what it joins.
@as_module
def GatherKernel(x: R.Tensor((1, 4, 4, 1), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    left = R.nn.max_pool2d(x, layout="NHWC")
    right = R.nn.softmax(x)
    both = R.concat((left, right), axis=3)
    active = R.nn.relu(both)
    conv = R.nn.conv2d(active, w, data_layout="NHWC", kernel_layout="OHWI")
    return conv


GROUPS = {
    "after-opaque": (AfterOpaque, [["pim"], ["sum", "active", "conv", "y"]], []),
    "two-readers": (TwoReaders, [["stem", "a"], ["left"], ["right", "y"]], []),
    "two-activations": (TwoActivations, [["conv"], ["a"], ["b", "y"]], []),
    "rotated": (Rotated, [["kept", "first", "second", "minus", "other", "crossed", "sum"]], []),
    "finished": (Finished, [["pim"], ["active"], ["half", "both", "y"]], []),
    "read-before": (ReadBefore, [["half", "minus"], ["other"], ["conv"], ["both", "y"]], []),
    "early-reader": (EarlyReader, [["sum"], ["early"], ["conv", "y"]], []),
    "detour": (Detour, [["sum", "conv"], ["pool"], ["joined"], ["again", "y"]], ["sum"]),
    "gathered": (GatherKernel, [["left"], ["right"], ["both", "active", "conv"]], []),
    "residual": (GroupedResidual, [["sum", "conv"], ["pool", "next"]], ["sum"]),
    "epilogue": (LayerWithEpilogue, [["conv", "sum", "scaled", "y"]], []),
}


@pytest.mark.parametrize(("mod", "expected", "stored"), GROUPS.values(), ids=GROUPS)
def test_which_operators_share_a_kernel(mod, expected, stored):
    assert grouping(mod) == expected
    assert result_names(mod) == stored
    if mod not in (AfterOpaque, Finished):
        runs_alike(mod)


@pytest.mark.parametrize("shared", [False, True])
def test_what_only_a_kernels_own_operands_read_goes_there_too(shared):
    """A bias that PIM left, before a SiLU: the sum is read twice, but by one kernel."""
    x = relax.Var("x", relax.TensorType((1, 4, 4, 8), "float32"))

    def network(builder):
        total = builder.emit(relax.op.add(x, relax.const(np.ones(8, np.float32))))
        silu = builder.emit(relax.op.multiply(total, builder.emit(relax.op.sigmoid(total))))
        y = builder.emit(conv2d_nhwc(silu, np.ones((8, 1, 1, 8), np.float32)))
        return relax.Tuple([y, total]) if shared else y

    mod = main_module([x], network)
    group, *rest = kernel_groups(mod)
    assert [operator(b.value) for b in group.bindings] == ["add", "sigmoid", "multiply", "nn.conv2d"]
    assert len(group.extra_outputs) == shared and not any(next_group.fusible for next_group in rest)
    runs_alike(mod)


# ---- any graph ----

FILTERS = {c: np.random.default_rng(c).standard_normal((2, 1, 1, c), np.float32) for c in (2, 4)}


@st.composite
def graphs_of_operators(draw, opaque: bool):
    """Up to twelve operators over two inputs of 2 channels; all results that nothing reads are outputs."""
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType((1, 2, 2, 2), "float32")) for name in ("x", "y")]
    kinds = ["relu", "add", "add", "conv", "pool", "concat", "transpose"] + ["opaque"] * 2 * opaque
    with builder.function("main", params):
        with builder.dataflow():
            pairs, quads, read = list(params), [], set()

            def operand(pool):
                var = pool[-1 - draw(st.integers(0, min(4, len(pool) - 1)))]
                read.add(var)
                return var

            for _ in range(draw(st.integers(1, 12))):
                kind = draw(st.sampled_from(kinds))
                wide = bool(quads) and draw(st.booleans())
                pool = quads if wide else pairs
                a = operand(pool)
                if kind == "relu":
                    value = relax.op.nn.relu(a)
                elif kind == "add":
                    value = relax.op.add(a, operand(pool))
                elif kind == "conv":
                    filters = relax.const(FILTERS[4 if wide else 2])
                    value = relax.op.nn.conv2d(a, filters, data_layout="NHWC", kernel_layout="OHWI")
                    pool = pairs
                elif kind == "pool":
                    value = relax.op.nn.max_pool2d(a, layout="NHWC")
                elif kind == "concat" and not wide:
                    value, pool = relax.op.concat([a, operand(pairs)], axis=3), quads
                elif kind == "opaque":
                    value = relax.op.call_dps_packed("pim", [a], out_ty=a.ty)
                else:
                    value = relax.op.permute_dims(a, [0, 2, 1, 3])
                pool.append(builder.emit(value))
            results = [v for v in (*pairs[2:], *quads) if v not in read]
            output = builder.emit_output(relax.Tuple(results) if len(results) > 1 else results[0])
        builder.emit_func_output(output)
    return builder.get()


def results(group: KernelGroup) -> set[relax.Var]:
    return {group.result, *group.extra_outputs}


@settings(max_examples=examples(180))
@given(graphs_of_operators(opaque=True))
def test_groups_of_any_graph_can_run_one_after_the_other(mod):
    bindings, groups = main_bindings(mod), kernel_groups(mod)
    assert sorted(bindings.index(b) for g in groups for b in g.bindings) == list(range(len(bindings)))
    available = set(mod["main"].params)
    for group in groups:
        inside = [b.var for b in group.bindings]
        if not group.fusible:
            assert len(inside) == 1 or (group.view and is_pure_reshape(group.bindings))
        for index, binding in enumerate(group.bindings):
            assert set(relax.analysis.free_vars(binding.value)) <= available | set(inside[:index])
        assert results(group) <= set(inside)
        available |= results(group)
    anchored = [b for g in groups for b in g.bindings if b is g.anchor]
    assert len(anchored) == sum(g.anchor is not None for g in groups)
    assert mod["main"].body.body in available


@pytest.mark.long
@settings(max_examples=examples(15))
@given(graphs_of_operators(opaque=False))
def test_any_graph_keeps_its_values(mod):
    runs_alike(mod)
    after = GroupKernels()(mod)
    tvm.ir.assert_structural_equal(GroupKernels()(after), after)


# Chains of one operator. An operand that is named twice is written twice, so most expressions grow by powers.
CHAINS = {
    "sums": lambda x: relax.op.add(x, x),
    "products": lambda x: relax.op.multiply(x, relax.const(0.5)),
    "choices": relax.op.nn.relu,
    "larger": lambda x: relax.op.maximum(x, relax.const(-1.0)),
    "bounds": lambda x: relax.op.clip(x, -1.0, 1.0),
    "swish": relax.op.nn.silu,
    "curves": relax.op.tanh,
    "exponents": relax.op.exp,
}


def chain(operator, length: int, *, layer: bool) -> tvm.IRModule:
    """`operator` so many times, one after the other, in front of a convolution if there is a `layer`."""
    x = relax.Var("x", relax.TensorType((1, 4, 4, 2), "float32"))

    def network(builder):
        y = x
        for _ in range(length - 1):
            y = builder.emit(operator(y))
        y = operator(y)
        return conv2d_nhwc(builder.emit(y), np.ones((2, 1, 1, 2), np.float32)) if layer else y

    return main_module([x], network)


@pytest.mark.long
@pytest.mark.parametrize("layer", [False, True], ids=["alone", "before a layer"])
@pytest.mark.parametrize("name", CHAINS)
def test_expressions_of_kernels_are_bounded(name, layer):
    lengths = [len(group) for group in grouping(chain(CHAINS[name], 300, layer=layer))]
    assert sum(lengths) == 300 + layer
    sizes = {"sums": 7, "products": 127, "choices": 7, "larger": 3, "bounds": 3, "swish": 7, "exponents": 255}
    sizes["curves"] = 3  # CPUs compute it with exponentials of both signs
    assert max(lengths) <= sizes[name] + layer
    assert lengths[0] >= sizes[name] // 2  # but those that fit are one kernel


@pytest.mark.long
@pytest.mark.parametrize("layer", [False, True], ids=["alone", "before a layer"])
@pytest.mark.parametrize("name", ["sums", "choices", "larger"])
def test_long_chains_keep_their_values(name, layer):
    runs_alike(chain(CHAINS[name], 10, layer=layer))


def test_a_long_chain_is_read_once(monkeypatch):
    """Kernels are found once for its regions; its operators get no types anew, which takes longest."""
    length, emitted, grouped = 40, [], []
    emit, group = relax.BlockBuilder.emit, kernel_groups

    def count_emit(self, expr, *args, **options):
        emitted.append(expr)
        return emit(self, expr, *args, **options)

    def count_groups(mod, **options):
        grouped.append(mod)
        return group(mod, **options)

    def refuse(*_):
        raise AssertionError("ConvertLayout takes the square of the operators")

    mod = chain(lambda x: relax.op.nn.relu(relax.op.add(x, relax.const(1.0))), length, layer=False)
    monkeypatch.setattr(relax.BlockBuilder, "emit", count_emit)
    monkeypatch.setattr(relax.transform, "ConvertLayout", refuse)
    canonical = Canonicalise()(mod)
    assert not emitted
    for place in (extract_regions, padded_inputs):
        monkeypatch.setattr(place, "kernel_groups", count_groups)
    graph = extract_regions.extract_regions(canonical, "chain")
    assert sum(len(region.operators) for region in graph.regions) >= length
    assert len(grouped) == 1


def test_equal_operators_are_lowered_once():
    """For their arithmetic: the time of a chain would be that of its lowering."""
    arithmetic._operator_count.cache_clear()
    extract_regions.extract_regions(chain(relax.op.exp, 60, layer=False), "chain")
    assert arithmetic._operator_count.cache_info().misses == 1
