"""A separate allocation for each tensor of a network: the baseline for one pool."""

from __future__ import annotations

import tvm

from pimflow.relay_passes.memory.buffers import buffers
from pimflow.relay_passes.memory.plan_pool import with_main, with_storage


@tvm.transform.module_pass(opt_level=0, name="AllocateEach")
class AllocateEach:
    """Give each tensor a separate storage (Occamy, section II: eager and lazy memory allocation).

    Parameters
    ----------
    eager : bool
        Whether all are allocated before the first kernel (eager), or each before the first kernel that uses
        it (lazy).

    Rewrite: ``alloc_tensor(shape) -> alloc_tensor(alloc_storage(bytes), 0, shape)``; parts of a tensor lie
    in its storage. No result reuses the memory of an operand, but the kernels are those of `PlanPool`.
    Preserves: values, names.
    """

    def __init__(self, eager: bool):
        self.eager = eager

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        main_buffers = buffers(mod, in_place=False)
        used = {buffer: name for buffer, name in main_buffers.names.items() if buffer.begin >= 0}
        storages = {buffer: f"storage_{name.partition(':')[0]}" for buffer, name in used.items()}
        homes = {buffer: buffer.place() for buffer in used}
        places = {buffer: (storages[home], within) for buffer, (home, within) in homes.items()}
        sizes = {storages[home]: home.size_bytes for home, _ in homes.values()}
        main = with_storage(mod["main"], main_buffers, places, sizes, eager=self.eager)
        return with_main(mod, main, buffers(mod))
