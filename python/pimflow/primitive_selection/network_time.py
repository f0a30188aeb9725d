"""A network's kernels for the CPU one by one: how long each takes alone, and so how long all of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm
from tvm import relax, te, tirx

from pimflow.compiler import phases
from pimflow.compiler.measurement.single_kernels import arguments
from pimflow.core.region import MOVES
from pimflow.hardware import System
from pimflow.host.result_cache import ResultCache, sources_digest
from pimflow.pim_backend.runtime.targets import this_cpu
from pimflow.primitive_selection.machines import Machine, thread_count
from pimflow.primitive_selection.measuring import CALLS, Measurements, compiler
from pimflow.primitive_selection.profile import KernelTime, NetworkTime
from pimflow.relay_passes.flat import main_bindings, operator
from pimflow.relay_passes.memory.buffers import buffers
from pimflow.relay_passes.memory.lift_workspaces import WORKSPACES
from pimflow.relay_passes.regions.kernel_groups import KernelGroup, kernel_groups
from pimflow.relay_passes.schedules import keep_registers

KERNELS_AT_ONCE = 24  # compiled as one module
# In no cache when a kernel is called is what was last touched an inference ago: constants and the network's
# inputs. All others were read since, and neighbours read theirs. Results go where others were a moment ago.
COLD = "constants, inputs, and results in a pool that no cache holds"
PREPARE = "pimflow.prepare_kernel"
# What decides a kernel's time besides its own code.
BUILT_BY = ("relay_passes.schedules.keep_registers",)
LAST_LEVEL = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """A kernel, as a network calls it.

    Attributes
    ----------
    name : str
    part : str
        One of `primitive_selection.profile.PARTS`.
    function : PrimFunc
        Scheduled, its workspaces among its results.
    cold : tuple of int
        Parameters that are in no cache when it is called.
    """

    name: str
    part: str
    function: tirx.PrimFunc
    cold: tuple[int, ...]

    @property
    def key(self) -> str:
        """Digest of all that its time depends on, besides the machine and the compiler."""
        code = self.function.without_attr("global_symbol").script()
        return hashlib.sha256(f"{code} {self.cold}".encode()).hexdigest()[:16]


def kernel_calls(applied: tvm.IRModule, system: System) -> tuple[KernelCall, ...]:
    """Kernels that one inference of `applied` calls, in their order, for this machine's CPU.

    Parameters
    ----------
    applied : IRModule
        With primitives in place; see `compiler.build.with_primitives`.
    """
    target = this_cpu()
    with target:
        mod = tvm.transform.Sequential(phases.scheduled_phases(target, system))(applied)
    return calls_in(mod, parts(applied, system))


def parts(applied: tvm.IRModule, system: System) -> dict[str, str]:
    """What kernels of `applied` do, by their names."""
    groups = kernel_groups(applied, views=system.views)
    return {f"fused_{group.title.name}": _part(group) for group in groups}


def _part(group: KernelGroup) -> str:
    kinds = {operator(binding.value) for binding in group.bindings}
    if "call_tir" in kinds:
        return "primitive"
    return "transform" if kinds <= set(MOVES) else "other"


def calls_in(scheduled: tvm.IRModule, named: Mapping[str, str]) -> tuple[KernelCall, ...]:
    """Calls in a module after `compiler.phases.scheduled_phases`; `named` are its `parts`."""
    inputs = set(scheduled["main"].params)
    spilled = live_bytes(scheduled) > last_level_bytes()
    found = []
    for binding in main_bindings(scheduled):
        if operator(binding.value) == "call_tir":
            callee, operands = binding.value.args[0], list(binding.value.args[1].fields)
            cold = [i for i, each in enumerate(operands) if not isinstance(each, relax.Var) or each in inputs]
            function = scheduled[callee]
            if spilled:
                cold += range(len(operands), len(function.params) - _workspaces(function))
            part = named.get(callee.name_hint, "other")
            found.append(KernelCall(name=callee.name_hint, part=part, function=function, cold=tuple(cold)))
    return tuple(found)


def live_bytes(scheduled: tvm.IRModule) -> int:
    """The most that is live of what kernels compute, their workspaces too."""
    allocated = tvm.transform.Sequential(phases.tensor_phases())(scheduled)
    return buffers(allocated).liveness().peak_bytes


def _workspaces(function: tirx.PrimFunc) -> int:
    return int((function.attrs or {}).get(WORKSPACES, 0))


def last_level_bytes() -> float:
    """Size of the last cache of this machine's CPU; infinite if that is not known."""
    try:
        return float(LAST_LEVEL.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return math.inf


def network_time(
    calls: Sequence[KernelCall],
    cache: ResultCache | None = None,
    known_ns: Mapping[str, float] | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> NetworkTime | None:
    """The sum of its kernels, each measured alone.

    Parameters
    ----------
    cache : ResultCache, optional
        Where times are kept, by the code of kernels, the compiler and the machine.
    known_ns : mapping of str to float, optional
        Times by `KernelCall.key`, of a stored profile; nothing is measured, and the result is None if one
        is missing.
    """
    by_key = {call.key: call for call in calls}
    keys = [call.key for call in calls]
    if known_ns is None:
        known_ns = _measured(by_key, cache, progress)
    if not all(key in known_ns for key in keys):
        return None
    times = (
        KernelTime(kernel=call.name, part=call.part, key=key, time_ns=known_ns[key])
        for call, key in zip(calls, keys, strict=True)
    )
    return NetworkTime(kernels=tuple(times))


def _measured(
    calls: Mapping[str, KernelCall], cache: ResultCache | None, progress: Callable[[float], None]
) -> dict[str, float]:
    code = f"{COLD} {compiler()} {sources_digest(BUILT_BY)}"
    kept = Measurements(cache, code, Machine().device)
    found = kept.get(calls)
    missing = [key for key in calls if key not in found]
    for begin in range(0, len(missing), KERNELS_AT_ONCE):
        keys = missing[begin : begin + KERNELS_AT_ONCE]
        new = dict(zip(keys, _times_ns([calls[key] for key in keys]), strict=True))
        kept.put(new)
        found |= new
        progress(len(found) / len(calls))
    return found


def _times_ns(calls: Sequence[KernelCall]) -> list[float]:
    timer = KernelTimer(calls)
    return list(map(float, np.median([timer.round_ns() for _ in range(CALLS[1])], axis=0)))


class KernelTimer:
    """Times kernels, each alone, on this machine.

    In a network all threads have just computed when a kernel is called. So they have here: for one that
    sleeps, or lost its core, a kernel waits.
    """

    def __init__(self, calls: Sequence[KernelCall]):
        keep_registers.register()
        named = {f"kernel{n}": call.function for n, call in enumerate(calls)} | {"wake": _wake()}
        functions = {name: function.with_attr("global_symbol", name) for name, function in named.items()}
        built = tvm.compile(tvm.IRModule(functions), this_cpu(), tir_pipeline=keep_registers.PIPELINE).jit()
        self._cold: list[tvm.runtime.Tensor] = []
        flush = tvm.get_global_func("cache_flush_cpu_non_first_arg")
        wake, woken = built["wake"], arguments(named["wake"], tvm.cpu())

        def prepare(first: tvm.runtime.Tensor, *_: tvm.runtime.Tensor) -> None:
            flush(first, *self._cold)
            wake(*woken)

        tvm.register_global_func(PREPARE, prepare, override=True)
        self._timed = []
        for n, call in enumerate(calls):
            given = arguments(call.function, tvm.cpu())
            evaluate = built.time_evaluator(f"kernel{n}", tvm.cpu(), number=1, repeat=1, f_preproc=PREPARE)
            self._timed.append((evaluate, given, [given[i] for i in call.cold]))

    def round_ns(self) -> list[float]:
        """A time of every kernel, one after the other: so a disturbance meets many, but none often."""
        times = []
        for evaluate, given, cold in self._timed:
            self._cold[:] = cold
            times.append(float(evaluate(*given).mean) * 1e9)
        return times


def _wake() -> tirx.PrimFunc:
    """A kernel in which every thread has next to nothing to do."""
    threads = thread_count()
    written = te.compute((threads, 16), lambda i, j: tirx.const(0.0, "float32"), name="woken")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([written]))
    schedule.parallel(schedule.get_loops(schedule.get_sblock("woken"))[0])
    return schedule.mod["main"]
