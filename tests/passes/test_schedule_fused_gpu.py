"""Does a run of layers get blocks and shared memory on a GPU, and keep its values?

There is no GPU here: see `test_schedule_gpu`.
"""

import re

import numpy as np
import pytest
import tvm
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_graphs import fused_chain, kernels
from test_schedule_gpu import COMPILER, cuda_source, lowered, one_after_the_other, scheduled, target, values
from tvm import tirx
from tvm.support import nvcc

from pimflow.relay_passes.fuse_groups import FuseGroups, activation_chains
from pimflow.relay_passes.lift_workspaces import LiftWorkspaces
from pimflow.relay_passes.schedule_fused_gpu import FusedRun

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
@settings(max_examples=5, deadline=None)
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


@pytest.mark.skipif(not COMPILER, reason="needs nvcc or NVRTC")
def test_the_compiler_takes_it():
    kernel = run(fused_chain((1, 14, 14, 51), 512, 51, activation="silu", pool=(2, 2, 0)))
    source = cuda_source(FusedRun().apply(kernel, target(), False).mod["main"])
    with target():
        assert nvcc.compile_cuda(source, target_format="cubin", compiler=COMPILER)
