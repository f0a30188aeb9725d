"""Does a run of layers get blocks and shared memory on a GPU, and keep its values?

There is no GPU here: see `test_schedule_gpu`.
"""

import itertools
import re

import numpy as np
import pytest
import tvm
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_graphs import fused_chain, kernels
from length import examples
from test_schedule_gpu import COMPILER, cuda_source, lowered, one_after_the_other, scheduled, target, values
from tvm import tirx
from tvm.support import nvcc

from pimflow.core.fused_tile import divisors, wide_width
from pimflow.placement.candidates.tiled_kernels import run_tiles, tiled_kernel
from pimflow.relay_passes.kernels.fuse_groups import FuseGroups, activation_chains, region_runs
from pimflow.relay_passes.memory.lift_workspaces import LiftWorkspaces
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.relay_passes.schedules.schedule_fused_gpu import FusedRun

POOLS = [None, (2, 2, 0), (3, 2, 0), (3, 2, 1)]


def fused(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod`, all of it one kernel that stores fp16, as `ScheduleGpu` gets it, beside casts."""
    return lowered(FuseGroups(activation_chains(mod))(mod))


def run(mod: tvm.IRModule) -> tirx.PrimFunc:
    (found,) = (f for name, f in kernels(fused(mod)).items() if name.startswith("fused_lconv"))
    return found


@given(
    pool=st.sampled_from(POOLS),
    size=st.tuples(st.integers(3, 9), st.integers(3, 13)),
    channels=st.sampled_from([(5, 12, 7), (16, 8, 1), (3, 34, 6)]),
    activation=st.sampled_from(["relu", "silu", ""]),
    ends=st.booleans(),
)
@example(pool=None, size=(8, 8), channels=(5, 12, 6), activation="relu", ends=False)
@example(pool=(2, 2, 0), size=(6, 6), channels=(5, 12, 7), activation="relu", ends=True)
@settings(max_examples=examples(5), deadline=None)
def test_a_tile_at_a_time_gives_the_same(pool, size, channels, activation, ends):
    r, c, o = channels
    o = 0 if pool and ends else o
    kernel = run(fused_chain((1, *size, r), c, o, activation=activation, pool=pool))
    schedule = FusedRun().apply(kernel, target(), False)
    after = values(one_after_the_other(schedule.mod["main"]))
    for result, expected in zip(after, values(kernel), strict=True):
        exact, bound = expected.astype(np.float32), 2e-3 * np.abs(expected.astype(np.float32)).max()
        assert np.abs(result.astype(np.float32) - exact).max() <= bound


@pytest.mark.parametrize("pool", POOLS)
def test_nothing_of_full_size_is_in_global_memory(pool):
    mod = scheduled(fused(fused_chain((1, 28, 28, 13), 128, 13, pool=pool)))
    with target():
        after = kernels(LiftWorkspaces()(mod))
    (kernel,) = (f for name, f in after.items() if name.startswith("fused_lconv"))
    assert not (kernel.attrs or {}).get("pimflow.workspaces")
    source = cuda_source(kernel)
    shared = re.findall(r"__shared__ \w+\((\d+)\) (\w+) \w+\[(\d+)\]", source)
    sizes = [int(count) * {"float": 4, "half": 2}[kind] for _, kind, count in shared]
    assert len(sizes) == (3 if pool else 2) and sum(sizes) <= 49152


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(("size", "channels"), [((28, 28), (13, 128, 51)), ((13, 17), (6, 48, 0))])
def test_what_is_priced_is_what_blocks_do(pool, size, channels):
    """Launch and shared memory of the generated code, against what the cost model is asked about."""
    r, c, o = channels
    mod = fused_chain((2, *size, r), c, 0 if pool and not o else o or 7, pool=pool)
    graph = extract_regions(mod, "chain")
    regions = [graph.region(name) for name in region_runs(mod)[0]]
    tiles = run_tiles(regions, "fp16")
    kernel = FusedRun().apply(run(mod), target(), False).mod["main"]
    (blocks,) = re.findall(
        r"T\.thread_binding\((?:T\.int64\()?(\d+)\)?, thread=\"blockIdx.x\"\)", kernel.script()
    )
    assert tiles.blocks == int(blocks)
    shared = [int(n) for n in re.findall(r"__shared__ .* \w+\[(\d+)\]", cuda_source(kernel))]
    steps = sum(bool(region.geometry or region.pooling) for region in regions)
    chunks = tiles.waits // steps
    held = [elements * tiles.blocks * chunks for elements in shared]
    for region in regions[:-1]:  # TVM may leave a place between
        assert any(0.95 * each <= tiles.touched[region.name] <= each for each in held)
    assert len(shared) == steps
    operand = tiles.touched[regions[0].inputs[0]]
    own = 2 * size[0] * size[1] * r
    assert any(operand <= each * tiles.blocks for each in shared)
    priced = tiled_kernel(regions, tiles, "fp16")
    weights = 2 * sum(region.weight_elements for region in regions)
    assert priced.input_bytes + priced.again_bytes >= 2 * operand
    assert priced.again_bytes == 2 * max(0, operand - own) + weights * (tiles.blocks - 1)


@given(
    pool=st.sampled_from(POOLS),
    size=st.tuples(st.integers(3, 20), st.integers(3, 20)),
    channels=st.sampled_from([(5, 12), (16, 64), (3, 34)]),
)
@settings(max_examples=examples(18), deadline=None)
def test_operands_are_counted_pixel_by_pixel(pool, size, channels):
    """What tiles load is what lies on the map of all that their windows reach."""
    r, c = channels
    mod = fused_chain((1, *size, r), c, 7, pool=pool)
    graph = extract_regions(mod, "chain")
    regions = [graph.region(name) for name in region_runs(mod)[0]]
    tiles = run_tiles(regions, "fp16")
    window, stride, padding = pool or (1, 1, 0)
    _, height, width, _ = regions[-1].output_shape
    wide = wide_width(width)
    for rows, columns in itertools.product(divisors(height, 8)[::-1], divisors(wide, 8)[::-1]):
        if height // rows * (wide // columns) == tiles.blocks:
            break
    assert min(rows, columns) > 1 or min(height, wide) == 1 or divisors(height, 8) == [1]

    def read(begin: int, count: int) -> set[int]:
        return {i * stride - padding + tap for i in range(begin, begin + count) for tap in range(window)}

    loaded = computed = 0
    for y, x in itertools.product(range(0, height, rows), range(0, wide, columns)):
        places = set(itertools.product(read(y, rows), read(x, columns)))
        computed += len(places) * c
        loaded += sum(0 <= i < size[0] and 0 <= j < size[1] for i, j in places) * r
    assert tiles.touched[regions[0].inputs[0]] == loaded
    assert tiles.touched[regions[0].name] == computed
    assert tiles.touched[regions[-1].name] == height * wide * 7


@pytest.mark.skipif(not COMPILER, reason="needs nvcc or NVRTC")
def test_the_compiler_takes_it():
    kernel = run(fused_chain((1, 14, 14, 51), 512, 51, activation="silu", pool=(2, 2, 0)))
    source = cuda_source(FusedRun().apply(kernel, target(), False).mod["main"])
    with target():
        assert nvcc.compile_cuda(source, target_format="cubin", compiler=COMPILER)
