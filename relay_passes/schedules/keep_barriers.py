"""Kernels over tiles keep their barriers and buffers: some passes of TVM do not run on them."""

from __future__ import annotations

import tvm
from tvm import tirx

from pimflow.relay_passes.schedules.loops import nodes

TILES = "pimflow.tiles"  # attribute of a function of a group of layers: its tiling, as text
SKIPPED_PASSES = ("s_tir.ThreadSync", "s_tir.CompactBufferAllocation")


ASYNC_STAGES = "software_pipeline_async_stages"  # of a loop: stages whose copies threads do not wait for
ASYNC_COPIES = {"tirx.use_async_copy": True}  # lets TVM write these as ``cp.async``


@tvm.transform.module_pass(opt_level=0, name="KeepBarriers")
class KeepBarriers:
    """Run a TIR pipeline in which kernels over tiles keep their barriers.

    These kernels both read and write their pool, and TVM would put barriers into their branches. Their
    buffers already have minimum size; TVM 0.27 divides by zero when it analyses some of their conditions.
    Asynchronous copies of other kernels stay asynchronous.

    Rewrite: that of `phases`, without the passes `SKIPPED_PASSES` for functions with the attribute `TILES`,
    and with `ASYNC_COPIES` for those with loops of `ASYNC_STAGES`.
    Preserves: everything else.
    """

    def __init__(self, phases: tvm.transform.Pass):
        self.phases = phases

    def transform_module(self, mod: tvm.IRModule, context: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        tiled = {gv: f for gv, f in mod.functions_items() if _is_tiled(f)}
        copying = {gv: f for gv, f in mod.functions_items() if gv not in tiled and _is_copying(f)}
        if not tiled and not copying:
            return self.phases(mod)
        others = {gv: f for gv, f in mod.functions_items() if gv not in tiled and gv not in copying}
        result = self.phases(tvm.IRModule(others, attrs=mod.attrs))
        for functions, disabled, config in ((tiled, SKIPPED_PASSES, {}), (copying, (), ASYNC_COPIES)):
            if not functions:
                continue
            with tvm.transform.PassContext(
                opt_level=context.opt_level,
                required_pass=list(context.required_pass),
                disabled_pass=[*context.disabled_pass, *disabled],
                config={**dict(context.config), **config},
            ):
                result.update(self.phases(tvm.IRModule(functions, attrs=mod.attrs)))
        return result


def _is_tiled(function: object) -> bool:
    return isinstance(function, tirx.PrimFunc) and TILES in (function.attrs or {})


def _is_copying(function: object) -> bool:
    """Whether a kernel has loops with asynchronous copies."""
    return isinstance(function, tirx.PrimFunc) and any(
        ASYNC_STAGES in (loop.annotations or {}) for loop in nodes(function.body, tirx.For)
    )
