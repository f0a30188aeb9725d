"""Scheduled kernels as they are emitted, before host and device code are divided."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from pimflow.relay_passes.schedules import keep_registers

# What divides a function into host and device code, and stores types that need no storage here.
_NOT_RUN = (
    "tirx.SplitHostDevice",
    "tirx.MakePackedAPI",
    "tirx.FP8StorageLegalize",
    "tirx.BF16StorageLegalize",
)


def lower_kernels(
    module: tvm.IRModule, target: tvm.target.Target, disabled: tuple[str, ...] = ()
) -> tvm.IRModule:
    """The scheduled functions of a module as they are emitted, not yet divided into host and device code.

    Parameters
    ----------
    disabled : tuple of str
        Further passes of the pipeline that are left out.
    """
    named = relax.transform.AttachGlobalSymbol()(module)
    functions = {gv: f for gv, f in named.functions_items() if isinstance(f, tirx.PrimFunc)}
    host = tvm.target.Target("llvm")
    bound = tirx.transform.BindTarget(target.with_host(host))(tvm.IRModule(functions))
    pipeline, _, _ = tirx.get_tir_pipeline(keep_registers.PIPELINE)
    with tvm.transform.PassContext(disabled_pass=[*_NOT_RUN, *disabled]), target:
        return tirx.transform.LowerIntrin()(pipeline(bound))
