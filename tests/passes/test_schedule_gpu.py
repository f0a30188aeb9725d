"""Does every kernel get threads, keep its values, and use tensor cores where there are products?

There is no GPU here: a schedule's values are those of its loops with the threads run one after the
other, on LLVM. That is what it means before barriers are inserted, which is TVM's part.
"""

import re
import shutil
from importlib.util import find_spec
from unittest.mock import patch

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_graphs import OPERATORS, constant, convolution, graph, kernels, values
from length import examples, long_but
from tvm import relax, s_tir, tirx
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import tirx as T
from tvm.support import nvcc

from pimflow import frontend
from pimflow.core.blocks import KernelLimits
from pimflow.core.product_tiles import BlockTile, ProductShape, fastest_tile
from pimflow.errors import UnsupportedOpError
from pimflow.relay_passes.kernels.group_kernels import GroupKernels
from pimflow.relay_passes.kernels.store_half import StoreHalf
from pimflow.relay_passes.regions import kernel_groups
from pimflow.relay_passes.schedules.loops import nodes, reduction_axes
from pimflow.relay_passes.schedules.rotated_rows import ROTATED_BYTES, is_row_by_matrix
from pimflow.relay_passes.schedules.schedule_gpu import Depthwise, Reduce, ScheduleGpu
from pimflow.relay_passes.schedules.schedule_tensor_cores import TensorCores
from pimflow.simulators.gpu import emitted

TURING = "sm_75"
COMPILER = "nvcc" if shutil.which("nvcc") else "nvrtc" if find_spec("cuda") else ""


def target(arch: str = TURING) -> tvm.target.Target:
    limits = {"max_threads_per_block": 1024, "max_shared_memory_per_block": 49152, "thread_warp_size": 32}
    return tvm.target.Target({"kind": "cuda", "arch": arch, **limits}, {"kind": "llvm"})


def lower_kernels(mod: tvm.IRModule, arch: str = TURING) -> tvm.IRModule:
    """As `ScheduleGpu` gets it."""
    transform = relax.transform
    phases = [GroupKernels(), StoreHalf(), relax.backend.DispatchSortScan(), transform.LegalizeOps()]
    phases += [transform.AnnotateTIROpPattern(), transform.FuseTIR(), transform.DeadCodeElimination(["main"])]
    with target(arch):
        return tvm.transform.Sequential(phases)(mod)


def only_kernel(network, *shapes: tuple[int, ...]) -> tirx.PrimFunc:
    (func,) = kernels(lower_kernels(graph(network, *shapes))).values()
    return func


def schedule_gpu(mod: tvm.IRModule, arch: str = TURING) -> tvm.IRModule:
    with target(arch):
        return ScheduleGpu()(mod)


def cuda_source(func: tirx.PrimFunc, arch: str = TURING) -> str:
    """The CUDA of `func`; fails where something runs outside of threads."""
    func = func.with_attrs({"global_symbol": "kernel", "target": target(arch)})
    return tvm.compile(tvm.IRModule({"kernel": func}), target=target(arch)).mod.imports[0].inspect_source()


def one_after_the_other(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with loops in place of threads."""
    loops = re.sub(r'T\.thread_binding\((.*?), thread="[\w.]+"\)', r"T.serial(\1)", func.script())
    return tvm.script.from_source(loops)


def same_values(func: tirx.PrimFunc, rule) -> None:
    schedule = rule.apply(func, target(), False)
    assert schedule is not None
    after = values(one_after_the_other(schedule.mod["main"]))
    for result, expected in zip(after, values(func), strict=True):
        atol = 1e-3 * np.abs(expected).max()
        np.testing.assert_allclose(result.astype(np.float32), expected.astype(np.float32), atol=atol)


# ---- depthwise ----


@st.composite
def depthwise_kernels(draw) -> tirx.PrimFunc:
    n, h, w, c = draw(st.tuples(*(st.integers(1, limit) for limit in (2, 9, 14, 12))))
    kh, kw, pad = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 2))
    attrs = {
        "strides": draw(st.sampled_from([(1, 1), (2, 2), (1, 3)])),
        "dilation": draw(st.sampled_from([(1, 1), (2, 2)])),
        "padding": (pad, draw(st.integers(0, 2)), pad, 3),
        "groups": c + 1,
    }
    multiplier, epilogue = draw(st.integers(1, 2)), draw(st.sampled_from(["", "bias", "residual"]))
    h, w = h + kh * 2, w + kw * 2

    def network(emit, x):
        y = emit(convolution(x, constant((c + 1) * multiplier, kh, kw, 1), **attrs))
        if epilogue:
            y = emit(op.nn.relu(emit(op.add(y, constant(1, 1, 1, (c + 1) * multiplier)))))
        return emit(op.add(y, constant(*(int(d) for d in y.ty.shape)))) if epilogue == "residual" else y

    return only_kernel(network, (n, h, w, c + 1))


@pytest.mark.long
@settings(max_examples=examples(15))
@given(depthwise_kernels(), st.sampled_from([1, 30]))
def test_depthwise_keeps_values(func, multiprocessors):
    same_values(func, Depthwise(KernelLimits(multiprocessors=multiprocessors)))


def test_depthwise_needs_no_barriers_and_moves_vectors():
    def network(emit, x):
        y = emit(op.clip(emit(convolution(x, constant(32, 3, 3, 1), padding=1, groups=32)), 0, 6))
        return emit(convolution(y, constant(8, 1, 1, 32)))

    func = kernels(lower_kernels(graph(network, (1, 56, 56, 32))))["fused_lv"]
    schedule = Depthwise().apply(func, target(), False)
    source = cuda_source(schedule.mod["main"])
    assert "__shared__" not in source and "__syncthreads" not in source
    assert re.search(r"\*\(half4\*\)\(\w*intermediate\w* \+", source)  # the result, rounded
    assert "x1_ptr[" not in source  # filters too are read in vectors


@pytest.mark.parametrize(
    "network",
    [
        lambda emit, x: emit(convolution(x, constant(8, 3, 3, 4), groups=4)),
        lambda emit, x: emit(op.nn.avg_pool2d(x, (3, 3), layout="NHWC")),
        lambda emit, x: emit(op.nn.relu(x)),
    ],
    ids=["grouped", "pool", "elementwise"],
)
def test_what_is_not_depthwise(network):
    assert Depthwise().apply(only_kernel(network, (1, 8, 8, 16)), target(), False) is None


# ---- tensor cores ----


@st.composite
def products(draw) -> tirx.PrimFunc:
    if draw(st.booleans()):
        batch, m, k, n = draw(st.tuples(*(st.integers(1, limit) for limit in (3, 40, 40, 40))))
        turned = draw(st.booleans())

        def network(emit, a, b):
            return emit(op.nn.relu(emit(op.matmul(a, emit(op.permute_dims(b, [0, 2, 1])) if turned else b))))

        return only_kernel(
            network, (batch, m + 1, k + 1), (batch, n + 1, k + 1) if turned else (batch, k + 1, n + 1)
        )
    groups, inner, outer = draw(st.sampled_from([(1, 3, 8), (1, 8, 24), (2, 4, 4), (3, 8, 5), (1, 16, 33)]))
    k, stride, pad = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 1))
    h, w = draw(st.integers(3, 12)), draw(st.integers(3, 12))

    def network(emit, x):
        y = convolution(x, constant(groups * outer, k, k, inner), strides=stride, padding=pad, groups=groups)
        return emit(op.add(emit(y), constant(1, 1, 1, groups * outer)))

    return only_kernel(network, (draw(st.integers(1, 2)), h, w, groups * inner))


@pytest.mark.long
@settings(max_examples=examples(9))
@given(products(), st.sampled_from([1, 30]))
def test_products_keep_values(func, multiprocessors):
    """As they are but for the intrinsics, which have no code for a CPU."""
    with patch.object(s_tir.Schedule, "tensorize", lambda *_: None):
        same_values(func, TensorCores(KernelLimits(multiprocessors=multiprocessors)))


TILES = [(16, 16, 64, 1), (64, 16, 64, 2), (16, 128, 48, 1), (64, 64, 32, 4), (128, 64, 16, 1)]


@pytest.mark.long
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("k_is_last", [True, False])
def test_tiles_of_every_form_become_cuda(tile, k_is_last):
    """Shared memory is reused for the result, which must not take an operand's type."""
    axes = [0, 2, 1] if k_is_last else [0, 1, 2]
    func = only_kernel(
        lambda emit, a, b: emit(op.matmul(a, emit(op.permute_dims(b, axes)))),
        (2, 100, 80),
        (2, 70, 80) if k_is_last else (2, 80, 70),
    )
    rule = TensorCores()
    rows, columns, depth, split = tile
    rule.choose = lambda *_: BlockTile(rows=rows, columns=columns, depth=depth, split=split)
    assert "mma_sync" in cuda_source(rule.apply(func, target(), False).mod["main"])


def test_tiles_are_large_for_large_products_and_many_for_small_ones():
    def tile(rows: int, columns: int, depth: int, **limits: int) -> BlockTile:
        shape = ProductShape(batch=1, rows=rows, columns=columns, depth=depth, run=depth)
        return fastest_tile(shape, KernelLimits(**limits))

    large = tile(12544, 512, 512)
    assert large.rows * large.columns >= 64 * 64 and large.split == 1
    assert tile(12544, 512, 512, shared_bytes=16384) != large
    small = tile(49, 160, 960)
    assert small.split > 1 and -(-49 // small.rows) * -(-160 // small.columns) * small.split >= 20
    assert tile(10000, 16, 16).columns == 16


# ---- other reductions ----


@pytest.mark.long
@pytest.mark.parametrize(
    "network",
    [
        lambda emit, x: emit(op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1), layout="NHWC")),
        lambda emit, x: emit(op.nn.relu(emit(op.mean(x, [1, 2], keepdims=True)))),
        lambda emit, x: emit(op.sum(x, [3])),
        lambda emit, x: emit(op.max(x)),
        lambda emit, x: emit(op.matmul(emit(op.reshape(x, (1, 13 * 9 * 40))), constant(13 * 9 * 40, 33))),
        lambda emit, x: emit(op.multiply(x, emit(op.mean(x, [1, 2], keepdims=True)))),
    ],
    ids=["pool", "mean", "rows", "all", "matrix-vector", "squeeze-excite"],
)
def test_reductions_keep_values(network):
    for func in kernels(lower_kernels(graph(network, (1, 13, 9, 40)))).values():
        if Reduce().apply(func, target(), False) is not None:
            same_values(func, Reduce())
            return
    pytest.fail("no reduction")


@st.composite
def rows_by_a_matrix(draw) -> tirx.PrimFunc:
    """One row, or a few; the matrix [n, k], as a 1x1 convolution has it; perhaps with a bias."""
    k, n, bias = draw(st.tuples(st.integers(33, 900), st.integers(1, 300), st.booleans()))

    def network(emit, x):
        y = emit(convolution(x, constant(n, 1, 1, k)))
        return emit(op.nn.relu(emit(op.add(y, constant(1, 1, 1, n))))) if bias else y

    return only_kernel(network, (1, 1, draw(st.integers(1, 2)), k))


@pytest.mark.long
@settings(max_examples=examples(15), deadline=None)
@given(rows_by_a_matrix())
def test_rotated_rows_keep_values(func):
    assert "% T.int64(" in Reduce().apply(func, target(), False).mod["main"].script()
    same_values(func, Reduce())


def test_blocks_begin_their_rows_one_after_the_other():
    """As in the traces: each 512 bytes further on, and then around."""
    assert ROTATED_BYTES == emitted.ROTATION_BYTES
    func = only_kernel(lambda emit, x: emit(convolution(x, constant(512, 1, 1, 2048))), (1, 1, 1, 2048))
    source = cuda_source(Reduce().apply(func, target(), False).mod["main"])
    begin = ROTATED_BYTES // 2  # elements of half
    assert re.search(rf"\(int\)blockIdx\.x\) \* {begin}\) \+ .*threadIdx\.x\)\) & 2047\)", source)


@pytest.mark.parametrize(
    "network",
    [
        lambda emit, x: emit(convolution(x, constant(40, 3, 3, 64))),
        lambda emit, x: emit(op.matmul(emit(op.reshape(x, (1, 576))), constant(576, 40))),
        lambda emit, x: emit(op.sum(x, [3])),
    ],
    ids=["window", "columns", "sum"],
)
def test_other_reductions_begin_where_they_did(network):
    func = only_kernel(network, (1, 3, 3, 64))
    (block,) = (b for b in nodes(func.body, s_tir.SBlock) if reduction_axes(b))
    assert not is_row_by_matrix(block)


def test_a_product_that_scales_a_map_is_two_launches(monkeypatch):
    """All threads share the map: `simulators.accel_sim.kernels` and the GPU model take it for granted.

    Networks have no such kernels; modules of other tools may.
    """
    monkeypatch.setattr(kernel_groups, "_is_broadcast", lambda *_: False)

    def network(emit, x, y):
        gate = emit(op.sigmoid(emit(convolution(x, constant(240, 1, 1, 10)))))
        return emit(op.multiply(y, gate))

    func = only_kernel(network, (1, 1, 1, 10), (1, 14, 14, 240))
    after = schedule_gpu(tvm.IRModule({"kernel": func}))["kernel"]
    assert len(set(re.findall(r"__global__ .*?(\w+)\(float", cuda_source(after)))) == 2
    threads = re.findall(r'thread_binding\(T.int64\((\d+)\), thread="(\w+).x"', after.script())
    assert [kind for _, kind in threads] == ["blockIdx", "threadIdx"] * 2
    assert int(threads[2][0]) * int(threads[3][0]) >= 14 * 14 * 240


# ---- the pass ----


@I.ir_module
class GpuScheduleBefore:
    @T.prim_func(private=True, s_tir=True)
    def total(x: T.Buffer((4, 200), "float32"), y: T.Buffer((200,), "float32")):
        for j, k in T.grid(200, 4):
            with T.sblock("total"):
                vj, vk = T.axis.remap("SR", [j, k])
                with T.init():
                    y[vj] = T.float32(0)
                y[vj] = y[vj] + x[vk, vj]


@I.ir_module
class GpuScheduleExpected:
    @T.prim_func(private=True, s_tir=True)
    def total(x: T.Buffer((4, 200), "float32"), y: T.Buffer((200,), "float32")):
        T.func_attr({"tirx.is_scheduled": True})
        y_local = T.sblock_alloc_buffer((200,), scope="local")
        for block in T.thread_binding(2, thread="blockIdx.x"):
            for thread in T.thread_binding(128, thread="threadIdx.x"):
                with T.sblock("total_init"):
                    vj = T.axis.spatial(200, block * 128 + thread)
                    T.where(block * 128 + thread < 200)
                    T.reads()
                    T.writes(y_local[vj])
                    y_local[vj] = T.float32(0)
                for k, _ in T.grid(4, 1):
                    with T.sblock("total_update"):
                        vj = T.axis.spatial(200, block * 128 + thread)
                        vk = T.axis.reduce(4, k + _)
                        T.where(block * 128 + thread < 200)
                        T.reads(y_local[vj], x[vk, vj])
                        T.writes(y_local[vj])
                        y_local[vj] = y_local[vj] + x[vk, vj]
                for i in range(1):
                    with T.sblock("y_local"):
                        v = T.axis.spatial(200, block * 128 + thread + i)
                        T.where(block * 128 + thread < 200)
                        T.reads(y_local[v])
                        T.writes(y[v])
                        y[v] = y_local[v]


def test_rewrite():
    after = schedule_gpu(GpuScheduleBefore)
    tvm.ir.assert_structural_equal(after, GpuScheduleExpected)
    tvm.ir.assert_structural_equal(schedule_gpu(after), after)
    same_values(GpuScheduleBefore["total"], Reduce())


def test_no_schedule_is_an_error():
    with (
        tvm.target.Target("llvm"),
        pytest.raises(UnsupportedOpError, match="'total' cannot be scheduled for llvm"),
    ):
        ScheduleGpu()(GpuScheduleBefore)


@pytest.mark.long
@pytest.mark.parametrize("network", OPERATORS.values(), ids=OPERATORS)
def test_every_kernel_gets_threads(network):
    functions = kernels(schedule_gpu(lower_kernels(graph(network, (1, 8, 8, 16)))))
    assert functions
    for func in functions.values():
        assert func.attrs["tirx.is_scheduled"]
        assert "__global__" in cuda_source(func)


@pytest.mark.parametrize("arch", long_but([], ["sm_75", "sm_90"]))
def test_a_network_uses_tensor_cores_and_compiles(arch):
    functions = kernels(schedule_gpu(lower_kernels(frontend.load("toy").module, arch), arch))
    sources = {name: cuda_source(func, arch) for name, func in functions.items()}
    multiplied = {name for name, source in sources.items() if "mma_sync" in source}
    assert multiplied == {n for n in sources if "conv" in n and "depthwise" not in n}
    if not COMPILER:
        pytest.skip("needs nvcc or NVRTC")
    for name in ("fused_block_depthwise_conv", "fused_down_conv", "fused_pool"):
        with target(arch):
            assert nvcc.compile_cuda(sources[name], target_format="cubin", compiler=COMPILER)
