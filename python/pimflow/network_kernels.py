"""A network's kernels for the CPU one by one: how long each takes alone, and so how long all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, tirx

from pimflow import pipeline
from pimflow.core.region import MOVES
from pimflow.hardware import System
from pimflow.kernel_builds import arguments
from pimflow.placement.cache import ResultCache, sources_digest
from pimflow.primitive_profiles.primitive_machines import Machine
from pimflow.primitive_profiles.primitive_profile import KernelTime, NetworkTime
from pimflow.primitive_profiles.primitive_profiler import CALLS, Measurements, compiler
from pimflow.relay_passes import keep_registers
from pimflow.relay_passes.flat import main_bindings, operator
from pimflow.relay_passes.kernel_groups import KernelGroup, kernel_groups
from pimflow.targets import this_cpu

KERNELS_AT_ONCE = 24  # compiled as one module
# Constants come from memory, since all others were read since, and results go there; what was just computed
# is in the caches. The same is assumed of primitives (`primitive_profiler.COLD`).
COLD = "constants and results"
FLUSHED = "pimflow.flush_constants_and_results"


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """A kernel, as a network calls it.

    Attributes
    ----------
    name : str
    part : str
        One of `primitive_profile.PARTS`.
    function : PrimFunc
        Scheduled, its workspaces among its results.
    constants : tuple of int
        Which of its operands are constants.
    operands : int
        Parameters before the results.
    """

    name: str
    part: str
    function: tirx.PrimFunc
    constants: tuple[int, ...]
    operands: int

    @property
    def key(self) -> str:
        """Digest of all that its time depends on, besides the machine and the compiler."""
        code = self.function.without_attr("global_symbol").script()
        return hashlib.sha256(f"{code} {self.constants} {self.operands}".encode()).hexdigest()[:16]

    @property
    def cold(self) -> tuple[int, ...]:
        """Parameters that are in no cache when it is called: constants, and results but workspaces."""
        workspaces = int((self.function.attrs or {}).get("pimflow.workspaces", 0))
        return (*self.constants, *range(self.operands, len(self.function.params) - workspaces))


def kernel_calls(applied: tvm.IRModule, system: System) -> tuple[KernelCall, ...]:
    """Kernels that one inference of `applied` calls, in their order, for this machine's CPU.

    Parameters
    ----------
    applied : IRModule
        With primitives in place; see `compilation.with_primitives`.
    """
    target = this_cpu()
    with target:
        mod = tvm.transform.Sequential(pipeline.scheduled_phases(target, system))(applied)
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
    """Calls in a module after `pipeline.scheduled_phases`; `named` are its `parts`."""
    found = []
    for binding in main_bindings(scheduled):
        if operator(binding.value) == "call_tir":
            callee, operands = binding.value.args[0], list(binding.value.args[1].fields)
            constants = (i for i, each in enumerate(operands) if not isinstance(each, relax.Var))
            found.append(
                KernelCall(
                    name=callee.name_hint,
                    part=named.get(callee.name_hint, "other"),
                    function=scheduled[callee],
                    constants=tuple(constants),
                    operands=len(operands),
                )
            )
    return tuple(found)


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
    code = f"{COLD} {compiler()} {sources_digest(('relay_passes.keep_registers',))}"
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


def _times_ns(calls: Sequence[KernelCall]) -> Iterator[float]:
    """Medians of calls; all kernels are called once before any again, so that a disturbance meets many."""
    keep_registers.register()
    named = {f"kernel{n}": call.function for n, call in enumerate(calls)}
    functions = {name: function.with_attr("global_symbol", name) for name, function in named.items()}
    built = tvm.compile(tvm.IRModule(functions), this_cpu(), tir_pipeline=keep_registers.PIPELINE).jit()
    cold: list[tvm.runtime.Tensor] = []
    flush = tvm.get_global_func("cache_flush_cpu_non_first_arg")

    def before(first: tvm.runtime.Tensor, *_: tvm.runtime.Tensor) -> None:
        flush(first, *cold)

    tvm.register_global_func(FLUSHED, before, override=True)
    timed = []
    for name, call in zip(named, calls, strict=True):
        given = arguments(call.function, tvm.cpu())
        evaluate = built.time_evaluator(name, tvm.cpu(), number=1, repeat=1, f_preproc=FLUSHED)
        timed.append((evaluate, given, [given[i] for i in call.cold]))
    spent: list[list[float]] = [[] for _ in timed]
    for _ in range(CALLS[1]):
        for times, (evaluate, given, flushed) in zip(spent, timed, strict=True):
            cold[:] = flushed
            times.append(float(evaluate(*given).mean) * 1e9)
    return map(float, map(np.median, spent))
