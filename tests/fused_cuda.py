"""Fused groups as kernels of one block of a GPU, their pool in shared memory, with counters."""

from collections.abc import Mapping

import tvm

from pimflow.fusion import Group, Placement
from pimflow.fusion.kernels import generator, parameters
from pimflow.fusion.kernels.execution import CUDA_THREADS, NAME
from pimflow.fusion.kernels.formula import Computation


def compile_group_for_cuda(
    group: Group, placed: Placement, computed: Mapping[str, Computation], target: tvm.target.Target
) -> tvm.runtime.Executable:
    """The function of a group, its CUDA code not compiled yet."""
    threads = parameters.KernelTarget(counts_bytes=True, threads=CUDA_THREADS)
    function = generator.generate(NAME, group, placed, computed, threads)
    # the function has its barriers; where a pool is both read and written, TVM would put them into branches
    with target, tvm.transform.PassContext(disabled_pass=["s_tir.ThreadSync"]):
        return tvm.compile(tvm.IRModule({NAME: function}), target=target)
