"""Does every kernel keep its bits, and no tensor inside that a tile can hold?"""

from unittest.mock import patch

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_graphs import OPERATORS, constant, convolution, graph, kernels, values
from length import examples
from tvm import relax, s_tir, tirx
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import tirx as T

from pimflow.compiler import phases
from pimflow.pim_backend.runtime.targets import target_by_name
from pimflow.relay_passes.memory.lift_workspaces import LiftWorkspaces
from pimflow.relay_passes.schedules.schedule_cpu import PARALLEL, ScheduleCpu

CPU = target_by_name("llvm+pim")


def lower_kernels(mod: tvm.IRModule) -> tvm.IRModule:
    """As `ScheduleCpu` gets it."""
    with CPU:
        return tvm.transform.Sequential(phases.kernel_phases(CPU, "fp32"))(mod)


def lines(func: tirx.PrimFunc, text: str) -> list[str]:
    return [line for line in func.script().splitlines() if text in line]


def large_tensors_inside(mod: tvm.IRModule) -> int:
    """How many tensors kernels of `mod` would allocate on the heap."""
    with CPU:
        after = LiftWorkspaces()(mod)
    return sum(int((f.attrs or {}).get("pimflow.workspaces", 0)) for f in kernels(after).values())


def keeps_bits(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod`, scheduled, after every kernel was compared with itself as it was."""
    before, after = kernels(mod), kernels(ScheduleCpu()(mod))
    assert before and before.keys() == after.keys()
    for name, func in before.items():
        for result, expected in zip(values(after[name]), values(func), strict=True):
            assert result.tobytes() == expected.tobytes()
    return ScheduleCpu()(mod)


@st.composite
def convolutions(draw) -> tvm.IRModule:
    groups, inner, outer = draw(
        st.sampled_from([(1, 3, 10), (1, 16, 24), (4, 8, 6), (3, 1, 1), (16, 1, 1), (8, 1, 2), (1, 8, 1)])
    )
    n, h, w, k = draw(st.tuples(*(st.integers(1, limit) for limit in (2, 17, 17, 3))))
    attrs = {"strides": draw(st.integers(1, 2)), "padding": draw(st.integers(0, 2)), "groups": groups}
    epilogue = draw(st.sampled_from(["", "bias", "residual", "layout", "flat", "exp"]))
    prologue = draw(st.sampled_from(["", "sum", "exp", "layout"]))
    channels = groups * inner

    def network(emit, x):
        if prologue == "layout":
            x = emit(op.permute_dims(emit(op.reshape(x, (n, channels, h + k, w + k))), [0, 2, 3, 1]))
        elif prologue:
            x = emit(op.add(x, x) if prologue == "sum" else op.exp(x))
        y = emit(convolution(x, constant(groups * outer, k, k, inner), **attrs))
        if epilogue in ("layout", "flat"):
            y = emit(op.permute_dims(y, [0, 3, 1, 2]))
            return emit(op.reshape(y, (n, -1))) if epilogue == "flat" else y
        if epilogue == "residual":
            return emit(op.add(y, constant(*(int(d) for d in y.ty.shape))))
        if epilogue:
            y = emit(op.nn.relu(emit(op.add(y, constant(1, 1, 1, groups * outer)))))
        return emit(op.exp(y)) if epilogue == "exp" else y

    return lower_kernels(graph(network, (n, h + k, w + k, channels)))


@pytest.mark.long
@settings(max_examples=examples(12))
@given(convolutions())
def test_convolutions_keep_bits(mod):
    keeps_bits(mod)


@st.composite
def reductions(draw) -> tvm.IRModule:
    batch, m, k, n = draw(st.tuples(*(st.integers(1, limit) for limit in (2, 30, 40, 70))))
    kind = draw(st.sampled_from(["product", "mean", "rows", "all", "pool", "variance", "softmax"]))

    def network(emit, x):
        if kind == "product":
            return emit(op.nn.relu(emit(op.matmul(x, constant(batch, k, n)))))
        if kind == "pool":
            x = emit(op.reshape(x, (batch, m, k, 1)))
            return emit(op.nn.max_pool2d(x, (3, 3), (2, 1), (1, 1, 1, 1), layout="NHWC"))
        if kind == "softmax":
            return emit(op.nn.softmax(x))
        over = {"mean": [1], "rows": [2], "all": [0, 1, 2], "variance": [1, 2]}[kind]
        return emit((op.variance if kind == "variance" else op.mean)(x, over))

    return lower_kernels(graph(network, (batch, m, k)))


@pytest.mark.long
@settings(max_examples=examples(12))
@given(reductions())
def test_reductions_keep_bits(mod):
    keeps_bits(mod)


@st.composite
def planes(draw) -> tvm.IRModule:
    """Pools of maps of pixels side by side, and of channels side by side."""
    layout, shape = draw(st.sampled_from([("NCHW", (2, 3)), ("NCHW", (1, 40)), ("NCHW16c", (1, 2))]))
    h, w, k, stride = (draw(st.integers(*ends)) for ends in ((3, 30), (3, 60), (1, 3), (1, 2)))
    around, mean = draw(st.integers(0, k - 1)), draw(st.booleans())
    behind = draw(st.sampled_from(["", "exp", "relu"]))
    before = draw(st.booleans())
    dims = (*shape, h, w, *([16] if layout == "NCHW16c" else []))

    def network(emit, x):
        x = emit(op.exp(x)) if before else x
        kind = op.nn.avg_pool2d if mean else op.nn.max_pool2d
        y = emit(kind(x, (k, k), (stride, stride), (around,) * 4, layout=layout))
        return emit(op.exp(y) if behind == "exp" else op.nn.relu(y)) if behind else y

    return lower_kernels(graph(network, dims))


@settings(max_examples=examples(9))
@given(planes())
def test_pools_in_every_layout_keep_bits(mod):
    after = keeps_bits(mod)
    assert large_tensors_inside(after) <= 1  # what is costly to compute twice


@pytest.mark.long
@pytest.mark.parametrize("network", OPERATORS.values(), ids=OPERATORS)
def test_kernels_of_every_kind_keep_bits(network):
    mod = lower_kernels(graph(network, (1, 8, 8, 16)))
    before, after = (tvm.compile(m, CPU) for m in (mod, ScheduleCpu()(mod)))
    x = tvm.runtime.tensor(np.random.default_rng(2).standard_normal((1, 8, 8, 16), np.float32))
    results = [relax.VirtualMachine(exe, tvm.cpu())["main"](x).numpy() for exe in (before, after)]
    assert results[0].tobytes() == results[1].tobytes()


def block(emit, x):
    y = emit(convolution(x, constant(32, 3, 3, 32), padding=1))
    return emit(op.clip(emit(op.add(y, constant(1, 1, 1, 32))), 0, 6))


def test_a_convolution_has_no_tensor_inside():
    mod = lower_kernels(graph(block, (1, 28, 28, 32)))
    assert large_tensors_inside(mod) == 3  # padding, convolution, bias
    after = keeps_bits(mod)
    assert large_tensors_inside(after) == 0
    (func,) = kernels(after).values()
    assert PARALLEL <= 28 * 28 * 32 * 9 * 32
    assert lines(func, "T.parallel") and lines(func, "T.vectorized") and lines(func, "T.unroll")


@pytest.mark.long
def test_rows_of_a_pool_are_padded_as_they_are_read():
    def pool(emit, x):
        return emit(op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1, 1, 1)))

    after = keeps_bits(lower_kernels(graph(pool, (1, 64, 56, 56))))
    (func,) = kernels(after).values()
    assert len(lines(func, "if_then_else")) == 1 and lines(func, "T.parallel")
    assert large_tensors_inside(after) == 0
    wide = lower_kernels(graph(pool, (1, 2, 4, 300)))  # whose rows have no room on the stack
    assert large_tensors_inside(keeps_bits(wide)) == 0


def test_what_is_costly_is_computed_once():
    def network(emit, x):
        return emit(convolution(emit(op.exp(x)), constant(8, 3, 3, 16), padding=1))

    after = keeps_bits(lower_kernels(graph(network, (1, 14, 14, 16))))
    (func,) = kernels(after).values()
    assert [len(lines(func, text)) for text in ("T.exp", "if_then_else")] == [1, 1]
    assert large_tensors_inside(after) == 1


def test_what_flattens_the_sums_waits_for_all_of_them():
    """TVM would let each tile write the span of its elements, with sums that others have yet to form."""

    def network(emit, x):
        y = emit(op.permute_dims(emit(op.nn.avg_pool2d(x, layout="NHWC")), [0, 3, 1, 2]))
        return emit(op.reshape(y, (1, 512 * 49)))

    after = keeps_bits(lower_kernels(graph(network, (1, 7, 7, 512))))
    (func,) = kernels(after).values()
    assert lines(func, "T_reshape_intermediate[v_ax0, v_ax1] =")[0].startswith(" " * 12 + "T_reshape")
    assert large_tensors_inside(after) == 1


def test_small_kernels_wake_no_threads():
    (func,) = kernels(keeps_bits(lower_kernels(graph(block, (1, 3, 3, 32))))).values()
    assert not lines(func, "T.parallel")


@I.ir_module
class CpuScheduleBefore:
    @T.prim_func(private=True, s_tir=True)
    def total(x: T.Buffer((4, 128), "float32"), y: T.Buffer((128,), "float32")):
        shifted = T.sblock_alloc_buffer((4, 128))
        summed = T.sblock_alloc_buffer((128,))
        for i, j in T.grid(4, 128):
            with T.sblock("shifted"):
                vi, vj = T.axis.remap("SS", [i, j])
                shifted[vi, vj] = x[vi, vj] + T.float32(1)
        for j, k in T.grid(128, 4):
            with T.sblock("summed"):
                vj, vk = T.axis.remap("SR", [j, k])
                with T.init():
                    summed[vj] = T.float32(0)
                summed[vj] = summed[vj] + shifted[vk, vj]
        for j in range(128):
            with T.sblock("relu"):
                vj = T.axis.spatial(128, j)
                y[vj] = T.max(summed[vj], T.float32(0))


@I.ir_module
class CpuScheduleExpected:
    @T.prim_func(private=True, s_tir=True)
    def total(x: T.Buffer((4, 128), "float32"), y: T.Buffer((128,), "float32")):
        T.func_attr({"tirx.is_scheduled": True})
        for _, channel in T.grid(1, 2):
            with T.sblock(""):
                T.reads(x[0:4, channel * 64 : channel * 64 + 64])
                T.writes(y[channel * 64 : channel * 64 + 64])
                summed = T.sblock_alloc_buffer((128,))
                for lane in T.vectorized(64):
                    with T.sblock("summed_init"):
                        vj = T.axis.spatial(128, channel * 64 + lane)
                        T.reads()
                        T.writes(summed[vj])
                        summed[vj] = T.float32(0)
                for k in range(4):
                    for _ in T.unroll(1):
                        for lane in T.vectorized(64):
                            with T.sblock("summed_update"):
                                vj = T.axis.spatial(128, channel * 64 + lane)
                                vk = T.axis.reduce(4, k)
                                T.reads(summed[vj], x[vk, vj])
                                T.writes(summed[vj])
                                summed[vj] = summed[vj] + (x[vk, vj] + T.float32(1))
                for lane in T.vectorized(64):
                    with T.sblock("relu"):
                        vj = T.axis.spatial(128, channel * 64 + lane)
                        T.reads(summed[vj])
                        T.writes(y[vj])
                        y[vj] = T.max(summed[vj], T.float32(0))


def test_rewrite():
    after = ScheduleCpu()(CpuScheduleBefore)
    tvm.ir.assert_structural_equal(after, CpuScheduleExpected)
    tvm.ir.assert_structural_equal(ScheduleCpu()(after), after)
    keeps_bits(CpuScheduleBefore)


def test_what_is_no_plain_nest_stays():
    """A pool whose windows differ has a reduction inside of a block, and a sort is a call."""
    for name in ("adaptive pool", "sort"):
        mod = lower_kernels(graph(OPERATORS[name], (1, 8, 8, 16)))
        tvm.ir.assert_structural_equal(ScheduleCpu()(mod), mod)


@pytest.mark.long
def test_a_nest_that_no_tile_fits_stays_a_nest():
    mod = lower_kernels(graph(block, (1, 5, 5, 32)))
    with patch.object(s_tir.Schedule, "reverse_compute_at", side_effect=s_tir.ScheduleError("no")):
        (func,) = kernels(keeps_bits(mod)).values()
    assert not lines(func, "T.vectorized") and lines(func, "if_then_else") and not lines(func, "pad_temp[")


def test_a_long_chain_of_activations_stays_small():
    """Each names its operand twice: one expression of twelve would have four thousand choices."""

    def network(emit, x):
        for _ in range(11):
            x = emit(op.nn.relu(x))
        return op.nn.relu(x)

    scheduled = kernels(ScheduleCpu()(lower_kernels(graph(network, (1, 4, 4, 8)))))
    assert 12 <= sum(func.script().count("T.Select") for func in scheduled.values()) <= 12 * 15
