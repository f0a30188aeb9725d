"""Does the check of GPU kernels find races, bad bounds, divergent barriers and wrong values?"""

import kernel_cases
import numpy as np
import pytest
from kernel_mutations import FAULTS, mutant
from tvm import te, tirx
from tvm.script import tirx as T

import pimflow
from pimflow.commands.shared import prepare
from pimflow.commands.shared.options import NetworkOptions
from pimflow.compiler.kernel_checks import kernels
from pimflow.compiler.kernel_checks.check import check_kernel, check_kernels
from pimflow.compiler.kernel_checks.findings import Fault
from pimflow.compiler.kernel_checks.kernels import ScheduledKernel
from pimflow.compiler.kernel_checks.lanes import KernelExecution
from pimflow.compiler.kernel_checks.launch import Purpose
from pimflow.zoo.language.decoder_parts import Experts


def network_kernels(name: str) -> list[ScheduledKernel]:
    system, options = pimflow.system(), NetworkOptions()
    prepared = prepare.prepare(prepare.load(name, options), options, system)
    return kernels.network_kernels(prepared.network.module, system)


@pytest.fixture(scope="module")
def toy():
    return network_kernels("toy")


def faults(func, *, purpose=Purpose.VALUES, **arrays):
    """What running all blocks of a function finds."""
    found: set[Fault] = set()
    by_name = {parameter.name: parameter for parameter in func.params}
    operands = {by_name[name]: array.reshape(-1) for name, array in arrays.items()}
    handlers = (lambda launch, _: np.arange(launch.blocks), lambda fault, *_: found.add(fault))
    execution = KernelExecution(func, operands, *handlers, purpose)
    execution.run()
    return found


@pytest.mark.long
def test_all_kernels_of_a_network_hold(toy):
    checks = [check_kernel(kernel) for kernel in toy]
    assert [(check.name, check.findings) for check in checks if check.findings] == []
    assert all(check.blocks == check.all_blocks and check.compared for check in checks)


@pytest.mark.long
def test_some_blocks_stand_for_a_large_kernel(toy):
    kernel = max(toy, key=lambda k: check_kernel(k).all_blocks)
    check = check_kernel(kernel, work=1)
    assert 0 < check.blocks < check.all_blocks and check.compared and not check.findings


@pytest.mark.long
def test_kernels_of_grouped_heads_hold():
    """With three heads a group, padded rows of one group were stored over those of the next."""
    kernels = [kernel for kernel in network_kernels("tiny-lm") if "_mixed_" in kernel.name]
    assert len(kernels) == 3
    assert [check_kernel(kernel).findings for kernel in kernels] == [(), (), ()]


@pytest.mark.long
def test_kernels_of_experts_hold():
    """Those that sort the router's shares, which TVM writes for a GPU, are compared with their operator."""
    plain = kernel_cases.decoder_kernels(2, 17, "fp16", Experts(count=5, used=2))
    assert len(plain.operators) == 2
    products = [kernel for kernel in plain.schedule() if "layers_0_gate" in kernel.name]
    sorts = plain.schedule(plain.operators)
    assert len(products) == 1 and len(sorts) == 2
    for kernel in products + sorts:
        check = check_kernel(kernel)
        assert check.compared and not check.findings


@pytest.mark.parametrize(("rows", "expected"), [(3, set()), (6, {Fault.BLOCKS_RACE, Fault.THREADS_RACE})])
def test_blocks_that_store_rows_of_another_race(rows, expected):
    @T.prim_func(private=True)
    def copy(x: T.Buffer((768,), "float32"), y: T.Buffer((768,), "float32")):
        z = T.launch_thread("blockIdx.z", 2)
        t = T.launch_thread("threadIdx.x", 128)
        for r in range(16):
            if r < rows and z * 3 + r < 6:
                y[(z * 3 + r) * 128 + t] = x[(z * 3 + r) * 128 + t]

    x, y = np.arange(768, dtype=np.float32), np.zeros(768, np.float32)
    assert faults(copy, x=x, y=y) == expected
    assert (x == y).all()  # in this order of blocks, values are right either way


@pytest.mark.parametrize(
    ("barrier", "inside_warps", "expected"),
    [
        ("block", False, set()),
        ("none", False, {Fault.THREADS_RACE}),
        ("warp", True, set()),
        ("none", True, {Fault.THREADS_RACE}),
        ("warp", False, {Fault.THREADS_RACE}),
    ],
)
def test_threads_that_read_what_another_wrote_need_a_barrier_of_both(barrier, inside_warps, expected):
    @T.prim_func(private=True)
    def reverse(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
        block = T.launch_thread("blockIdx.x", 1)
        shared = T.alloc_buffer((64,), "float32", scope="shared")
        t = T.launch_thread("threadIdx.x", 64)
        shared[t] = x[t]
        if barrier == "block":
            T.tvm_storage_sync("shared")
        elif barrier == "warp":
            T.evaluate(T.call_extern("void", "__syncwarp"))
        elif inside_warps:
            T.tvm_storage_sync("warp")  # TVM writes no instruction for it
        y[t + block] = shared[t // 32 * 32 + 31 - t % 32 if inside_warps else 63 - t]

    assert faults(reverse, x=np.ones(64, np.float32), y=np.zeros(64, np.float32)) == expected


def test_a_barrier_in_a_branch_of_some_threads_is_found():
    @T.prim_func(private=True)
    def diverge(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
        block = T.launch_thread("blockIdx.x", 1)
        t = T.launch_thread("threadIdx.x", 64)
        if t < 32:
            T.tvm_storage_sync("shared")
        y[t + block] = x[t]

    found = faults(diverge, x=np.ones(64, np.float32), y=np.zeros(64, np.float32))
    assert found == {Fault.DIVERGENT_BARRIER}


@pytest.mark.parametrize("extent", [63, 64])
def test_an_access_outside_of_a_buffer_is_found(extent):
    @T.prim_func(private=True)
    def shift(x: T.Buffer((extent,), "float32"), y: T.Buffer((64,), "float32")):
        block = T.launch_thread("blockIdx.x", 1)
        t = T.launch_thread("threadIdx.x", 64)
        y[t + block] = x[t]

    found = faults(shift, x=np.ones(extent, np.float32), y=np.zeros(64, np.float32))
    assert found == (set() if extent == 64 else {Fault.OUT_OF_BOUNDS})


def test_what_two_launches_write_is_written_by_both():
    @T.prim_func(private=True)
    def halves(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
        with T.launch_thread("blockIdx.x", 1) as block:
            t = T.launch_thread("threadIdx.x", 32)
            y[t + block] = x[t]
        with T.launch_thread("blockIdx.x", 1) as block:
            t = T.launch_thread("threadIdx.x", 32)
            y[t + block + 32] = x[t + 32]

    x, y = halves.params
    arrays = {x: np.ones(64, np.float32), y: np.zeros(64, np.float32)}
    execution = KernelExecution(halves, arrays, lambda launch, _: np.arange(launch.blocks), lambda *_: None)
    execution.run()
    assert execution.written[y].all() and (arrays[y] == 1).all()


def chain(dtype):
    """Two launches of many blocks: the second reads the negatives that the first wrote."""

    @T.prim_func(private=True)
    def negate_twice(x: T.Buffer((6400,), dtype), y: T.Buffer((6400,), dtype)):
        workspace = T.alloc_buffer((6400,), dtype, scope="global")
        with T.launch_thread("blockIdx.x", 100) as block:
            t = T.launch_thread("threadIdx.x", 64)
            workspace[block * 64 + t] = T.Cast(dtype, 0) - x[block * 64 + t]
        with T.launch_thread("blockIdx.x", 100) as block:
            t = T.launch_thread("threadIdx.x", 64)
            y[block * 64 + t] = T.Cast(dtype, 0) - workspace[6399 - block * 64 - t]

    x = te.placeholder((6400,), dtype, "x")
    plain = te.create_prim_func([x, te.compute((6400,), lambda i: x[6399 - i])])
    return ScheduledKernel(name="negate_twice", plain=plain, lowered=negate_twice)


@pytest.mark.parametrize(("dtype", "compared"), [("float32", True), ("int32", False)])
def test_integers_that_no_block_wrote_are_not_compared(dtype, compared):
    """Floats are NaN there."""
    part, whole = check_kernel(chain(dtype), work=1), check_kernel(chain(dtype))
    assert part.holds and part.blocks < part.all_blocks and bool(part.compared) == compared
    assert part.unknown == (() if compared else ("y",)) and ("not compared" in part.verdict) != compared
    assert whole.holds and whole.compared == 6400 and not whole.unknown and whole.verdict == "holds"


def test_complements_of_integers_are_computed():
    @T.prim_func(private=True)
    def complement(x: T.Buffer((64,), "int32"), y: T.Buffer((64,), "int32")):
        block = T.launch_thread("blockIdx.x", 1)
        t = T.launch_thread("threadIdx.x", 64)
        y[t + block] = ~x[t]

    x, y = np.arange(-32, 32, dtype=np.int32), np.zeros(64, np.int32)
    assert faults(complement, x=x, y=y) == set() and (y == ~x).all()


def test_a_kernel_of_any_extent_is_not_checked():
    x = te.placeholder((tirx.Var("n", "int64"),), "float32", "x")
    func = te.create_prim_func([x, te.compute(x.shape, lambda i: x[i])])
    (check,) = check_kernels([ScheduledKernel(name="copy", plain=func, lowered=func)])
    assert not check.holds and check.verdict == "no meaning for the shape of x, which is no constant"


@pytest.mark.parametrize(
    ("shuffle", "argument", "expected"),
    [
        ("__shfl_sync", 5, lambda lane: 0 * lane + 5),
        ("__shfl_up_sync", 3, lambda lane: np.where(lane < 3, lane, lane - 3)),
        ("__shfl_down_sync", 4, lambda lane: np.where(lane > 27, lane, lane + 4)),
        ("__shfl_xor_sync", 1, lambda lane: lane ^ 1),
    ],
)
def test_shuffles_of_a_warp(shuffle, argument, expected):
    @T.prim_func(private=True)
    def move(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
        block = T.launch_thread("blockIdx.x", 1)
        t = T.launch_thread("threadIdx.x", 64)
        y[t + block] = T.call_pure_extern("float32", shuffle, T.uint32(0xFFFFFFFF), x[t], argument, 32)

    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    assert faults(move, x=x, y=y) == set()
    lanes = np.arange(32)
    assert (y.reshape(2, 32) - [[0], [32]] == expected(lanes)).all()


def test_blocks_at_borders_of_fused_axes_run():
    @T.prim_func(private=True)
    def copy(x: T.Buffer((420,), "float32"), y: T.Buffer((420,), "float32")):
        block = T.launch_thread("blockIdx.x", 420)
        t = T.launch_thread("threadIdx.x", 1)
        y[block // 20 * 20 + block % 20 + t] = x[block]

    borders = set()

    def choose_blocks(launch, _):
        borders.update(launch.borders)
        return np.arange(1)

    arrays = {parameter: np.ones(420, np.float32) for parameter in copy.params}
    KernelExecution(copy, arrays, choose_blocks, lambda *_: None).run()
    assert borders >= {0, 419} and {block % 20 for block in borders} >= {0, 19}


def test_all_blocks_show_what_they_read_of_a_result():
    """A block that reads what another writes is found although neither of them runs."""

    @T.prim_func(private=True)
    def double(x: T.Buffer((640,), "float32"), y: T.Buffer((640,), "float32")):
        block = T.launch_thread("blockIdx.x", 10)
        t = T.launch_thread("threadIdx.x", 64)
        value: T.let[T.float32] = T.if_then_else(block == 7 and t < 3, y[(block - 2) * 64 + t], x[t])
        y[block * 64 + t] = value * T.float32(2)

    x, y = np.ones(640, np.float32), np.ones(640, np.float32)
    assert faults(double, purpose=Purpose.RESULTS, x=x, y=y) == {Fault.BLOCKS_RACE, Fault.THREADS_RACE}
    assert (y == 1).all()  # nothing was computed


@pytest.mark.long
def test_a_fused_group_keeps_to_its_tiles():
    """Tiles of a group share one buffer: an access beyond one of them is found where they lie apart."""
    kernels = kernel_cases.planned_kernels("toy", "fp16", fuse=True, modes="gpu").schedule()
    (group,) = (kernel for kernel in kernels if kernel.regions_bytes)
    assert not check_kernel(group).findings
    broken = mutant(group, "a shared buffer of one element less", np.random.default_rng(0))
    (finding,) = check_kernel(broken).findings
    assert finding.fault is Fault.OUT_OF_BOUNDS


@pytest.mark.long
def test_rows_that_a_block_retains_keep_to_their_tiles():
    """Several tiles of a block one after the other; what the next one reads is not overwritten."""
    tiling = "tiles 1x8x1 retained in 2 bands"
    kernels = kernel_cases.planned_kernels("toy", "fp16", tiling, fuse=True, modes="gpu").schedule()
    (group,) = (kernel for kernel in kernels if kernel.regions_bytes)
    assert not check_kernel(group).findings


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_mutants_are_found(toy, fault):
    rng = np.random.default_rng(0)
    mutants = [broken for kernel in toy if (broken := mutant(kernel, fault, rng)) is not None]
    assert mutants
    assert [broken.name for broken in mutants if not check_kernel(broken).findings] == []


@pytest.mark.parametrize("reads_its_own", [True, False])
def test_a_barrier_that_orders_nothing_makes_no_mutant(reads_its_own):
    @T.prim_func(private=True)
    def move(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
        block = T.launch_thread("blockIdx.x", 1)
        shared = T.alloc_buffer((64,), "float32", scope="shared")
        t = T.launch_thread("threadIdx.x", 64)
        shared[t] = x[t]
        T.tvm_storage_sync("shared")
        y[t + block] = shared[t if reads_its_own else 63 - t]

    kernel = ScheduledKernel(name="move", plain=move, lowered=move)
    assert (mutant(kernel, "a dropped barrier", np.random.default_rng(0)) is None) == reads_its_own
