"""Register tiles of kernels, which the runtime must not allocate."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir.pipeline import default_s_tir_pipeline

from pimflow.relay_passes.schedules.drop_checks import DropChecks
from pimflow.relay_passes.schedules.keep_barriers import KeepBarriers
from pimflow.relay_passes.schedules.loops import rewrite_kernels
from pimflow.relay_passes.schedules.widen_half import WidenHalf
from pimflow.relay_passes.schedules.wrap_narrow import WrapNarrow

ON_THE_STACK = {"disable_lower_builtin": tirx.IntImm("bool", 1)}  # else the runtime allocates it
PIPELINE = "pimflow"  # name of the TIR pipeline that ends with `KeepRegisters`


@tvm.transform.module_pass(opt_level=0, name="KeepRegisters")
class KeepRegisters:
    """Keep buffers of scope ``local`` in CPU kernels on the stack, where LLVM promotes them to registers.

    For buffers of 1024 bytes or more, TVM would call its runtime's allocator in each iteration of the loop
    around them. Run this pass right before ``LowerTVMBuiltin``.

    Rewrite: ``alloc_buffer(tile, scope="local") -> the same, marked``.
    Preserves: everything else.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_kernels(mod, _mark_registers)


def _mark_registers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    def mark(old: tirx.AllocBuffer) -> tirx.AllocBuffer:
        """Mark a buffer of scope ``local``."""
        if old.buffer.scope() != "local":
            return old
        return tirx.AllocBuffer(old.buffer, {**dict(old.annotations or {}), **ON_THE_STACK})

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.AllocBuffer, mark)]))


def register() -> None:
    """Register the TIR pipeline ``pimflow``: TVM's, with the passes of ours that lowering needs."""

    def pipeline() -> tuple:
        """Module passes, host passes and device passes."""
        phases, _, device = default_s_tir_pipeline()
        lowering = [tirx.transform.LowerTVMBuiltin(), tirx.transform.LowerIntrin()]
        host = [DropChecks(), KeepRegisters(), *lowering]
        emitted = tvm.transform.Sequential([KeepBarriers(phases), WrapNarrow(), WidenHalf()])
        return emitted, lambda: tvm.transform.Sequential(host), device

    tirx.register_tir_pipeline(PIPELINE, pipeline)
