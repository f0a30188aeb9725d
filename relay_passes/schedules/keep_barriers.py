"""Kernels over tiles keep their barriers and buffers: some passes of TVM do not run on them."""

from __future__ import annotations

import tvm
from tvm import tirx

TILES = "pimflow.tiles"  # attribute of a function of a group of layers: its tiling, as text
SKIPPED_PASSES = ("s_tir.ThreadSync", "s_tir.CompactBufferAllocation")


@tvm.transform.module_pass(opt_level=0, name="KeepBarriers")
class KeepBarriers:
    """Run a TIR pipeline in which kernels over tiles keep their barriers.

    These kernels both read and write their pool, and TVM would put barriers into their branches. Their
    buffers already have minimum size; TVM 0.27 divides by zero when it analyses some of their conditions.

    Parameters
    ----------
    phases : Pass
        The pipeline.

    Rewrite: that of `phases`, without the passes `SKIPPED_PASSES` for functions with the attribute `TILES`.
    Preserves: everything else.
    """

    def __init__(self, phases: tvm.transform.Pass):
        self.phases = phases

    def transform_module(self, mod: tvm.IRModule, context: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        tiled = {gv: f for gv, f in mod.functions_items() if _is_tiled(f)}
        if not tiled:
            return self.phases(mod)
        others = {gv: f for gv, f in mod.functions_items() if gv not in tiled}
        with tvm.transform.PassContext(
            opt_level=context.opt_level,
            required_pass=list(context.required_pass),
            disabled_pass=[*context.disabled_pass, *SKIPPED_PASSES],
            config=dict(context.config),
        ):
            done = self.phases(tvm.IRModule(tiled, attrs=mod.attrs))
        result = self.phases(tvm.IRModule(others, attrs=mod.attrs))
        result.update(done)
        return result


def _is_tiled(function: object) -> bool:
    return isinstance(function, tirx.PrimFunc) and TILES in (function.attrs or {})
