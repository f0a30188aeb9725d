"""The GPU kernels of a network, before and after their schedule."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from pimflow.compiler.phases import kernel_phases
from pimflow.hardware import System
from pimflow.pim_backend.runtime.targets import target_by_name
from pimflow.relay_passes.schedules import keep_registers
from pimflow.relay_passes.schedules.schedule_gpu import ScheduleGpu

# What divides a function into host and device code, and stores types that need no storage here.
_NOT_RUN = (
    "tirx.SplitHostDevice",
    "tirx.MakePackedAPI",
    "tirx.FP8StorageLegalize",
    "tirx.BF16StorageLegalize",
)


@dataclass(frozen=True, kw_only=True)
class ScheduledKernel:
    """A function with its launches.

    Attributes
    ----------
    name : str
    plain : PrimFunc
        Before its schedule: loops without threads.
    lowered : PrimFunc
        As it is emitted, with threads, shared memory and barriers, in one function with its host code.
    """

    name: str
    plain: tirx.PrimFunc
    lowered: tirx.PrimFunc


def scheduled_kernels(
    module: tvm.IRModule, system: System, target: str = "cuda+pim"
) -> list[ScheduledKernel]:
    """The kernels of a module to which a plan was applied, or of any canonical module."""
    resolved = target_by_name(target)
    phases = kernel_phases(
        resolved,
        system.dtype,
        views=system.uses_views,
        tensor_cores=system.gpu.has_tensor_cores(system.dtype),
    )
    with resolved:
        plain = tvm.transform.Sequential(phases)(module)
        scheduled = tvm.transform.Sequential([ScheduleGpu(system.gpu.sms)])(plain)
    lowered = lower_kernels(scheduled, resolved)
    functions = {gv.name_hint: f for gv, f in plain.functions_items()}
    return [
        ScheduledKernel(name=gv.name_hint, plain=functions[gv.name_hint], lowered=func)
        for gv, func in lowered.functions_items()
    ]


def lower_kernels(module: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """The scheduled functions of a module as they are emitted, not yet divided into host and device code."""
    named = relax.transform.AttachGlobalSymbol()(module)
    functions = {gv: f for gv, f in named.functions_items() if isinstance(f, tirx.PrimFunc)}
    host = tvm.target.Target("llvm")
    bound = tirx.transform.BindTarget(target.with_host(host))(tvm.IRModule(functions))
    pipeline, _, _ = tirx.get_tir_pipeline(keep_registers.PIPELINE)
    with tvm.transform.PassContext(disabled_pass=list(_NOT_RUN)), target:
        return tirx.transform.LowerIntrin()(pipeline(bound))
