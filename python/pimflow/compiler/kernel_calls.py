"""The calls of CPU kernels in one inference of a network."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm import relax, tirx

from pimflow.compiler import phases
from pimflow.core.region import MOVES
from pimflow.hardware import System
from pimflow.pim_backend.runtime.targets import this_cpu_target
from pimflow.relay_passes.flat import main_bindings, operator
from pimflow.relay_passes.memory.buffers import buffers
from pimflow.relay_passes.memory.lift_workspaces import WORKSPACES
from pimflow.relay_passes.regions.kernel_groups import KernelGroup, kernel_groups

LAST_LEVEL = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One call of a kernel by a network.

    Attributes
    ----------
    part : str
        One of `primitive_selection.profile.PARTS`.
    function : PrimFunc
        The scheduled kernel; its workspaces are parameters behind its results.
    cold : tuple of int
        Indices of parameters that are in no cache when the kernel is called.
    """

    name: str
    part: str
    function: tirx.PrimFunc
    cold: tuple[int, ...]

    @property
    def key(self) -> str:
        """Digest of everything that the kernel's time depends on, except the machine and the compiler."""
        code = self.function.without_attr("global_symbol").script()
        return hashlib.sha256(f"{code} {self.cold}".encode()).hexdigest()[:16]


def kernel_calls(planned_module: tvm.IRModule, system: System) -> tuple[KernelCall, ...]:
    """Kernels that one inference of `planned_module` calls, in order, for this machine's CPU.

    Parameters
    ----------
    planned_module : IRModule
        Module with its primitives; see `compiler.build.with_primitives`.
    """
    target = this_cpu_target()
    with target:
        mod = tvm.transform.Sequential(phases.scheduling_phases(target, system))(planned_module)
    return calls_in_module(mod, kernel_parts(planned_module, system))


def kernel_parts(planned_module: tvm.IRModule, system: System) -> dict[str, str]:
    """By kernel name, its part in the network: one of `primitive_selection.profile.PARTS`."""
    groups = kernel_groups(planned_module, views=system.uses_views)
    return {f"fused_{group.title.name}": _part(group) for group in groups}


def _part(group: KernelGroup) -> str:
    kinds = {operator(binding.value) for binding in group.bindings}
    if "call_tir" in kinds:
        return "primitive"
    return "transform" if kinds <= set(MOVES) else "other"


def calls_in_module(scheduled: tvm.IRModule, parts_by_name: Mapping[str, str]) -> tuple[KernelCall, ...]:
    """Calls in a module after `compiler.phases.scheduling_phases`; `parts_by_name` has its `kernel_parts`."""
    inputs = set(scheduled["main"].params)
    spilled = live_bytes(scheduled) > last_level_bytes()
    calls = []
    for binding in main_bindings(scheduled):
        if operator(binding.value) == "call_tir":
            callee, operands = binding.value.args[0], list(binding.value.args[1].fields)
            cold = [
                i
                for i, operand in enumerate(operands)
                if not isinstance(operand, relax.Var) or operand in inputs
            ]
            function = scheduled[callee]
            if spilled:
                workspaces = int((function.attrs or {}).get(WORKSPACES, 0))
                cold += range(len(operands), len(function.params) - workspaces)
            part = parts_by_name.get(callee.name_hint, "other")
            calls.append(KernelCall(name=callee.name_hint, part=part, function=function, cold=tuple(cold)))
    return tuple(calls)


def live_bytes(scheduled: tvm.IRModule) -> int:
    """Peak bytes of live results of kernels, workspaces included."""
    allocated = tvm.transform.Sequential(phases.tensor_phases())(scheduled)
    return buffers(allocated).liveness().peak_bytes


def last_level_bytes() -> float:
    """Size of the last-level cache of this machine's CPU; infinite if unknown."""
    try:
        return float(LAST_LEVEL.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return math.inf
