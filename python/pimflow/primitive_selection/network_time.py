"""Time of a network on the CPU: the sum over its kernels, each measured by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tvm
from tvm import te, tirx

from pimflow.compiler.kernel_calls import KernelCall
from pimflow.compiler.measurement.single_kernels import arguments
from pimflow.compiler.timing import kernel_times_ns
from pimflow.host.result_cache import ResultCache, sources_digest
from pimflow.pim_backend.runtime.targets import this_cpu_target
from pimflow.primitive_selection.machines import Machine, thread_count
from pimflow.primitive_selection.measuring import CALLS, Measurements, compiler
from pimflow.primitive_selection.profile import KernelTime, NetworkTime
from pimflow.relay_passes.schedules import keep_registers

KERNELS_AT_ONCE = 24  # compiled as one module
# Before each call, these are removed from the caches, since in a network they were last used one inference
# ago: constants and the network's inputs. Other operands were just written by the kernels before.
COLD = "constants, inputs, and results in a pool that no cache holds"
PREPARE = "pimflow.prepare_kernel"
# Modules that affect a kernel's time, besides its own code.
BUILT_BY = ("relay_passes.schedules.keep_registers",)


def network_time(
    calls: Sequence[KernelCall],
    cache: ResultCache | None = None,
    known_ns: Mapping[str, float] | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> NetworkTime | None:
    """Time of a network: the sum over its kernels, each measured by itself.

    Parameters
    ----------
    cache : ResultCache, optional
        Stores times, by the code of kernels, the compiler and the machine.
    known_ns : mapping of str to float, optional
        Times by `KernelCall.key`, from a stored profile. With it nothing is measured, and the result is None
        if a time is missing.
    """
    by_key = {call.key: call for call in calls}
    keys = [call.key for call in calls]
    if known_ns is None:
        known_ns = _measure_kernels(by_key, cache, progress)
    if not all(key in known_ns for key in keys):
        return None
    times = (
        KernelTime(kernel=call.name, part=call.part, key=key, time_ns=known_ns[key])
        for call, key in zip(calls, keys, strict=True)
    )
    return NetworkTime(kernels=tuple(times))


def _measure_kernels(
    calls: Mapping[str, KernelCall], cache: ResultCache | None, progress: Callable[[float], None]
) -> dict[str, float]:
    code = f"{COLD} {compiler()} {sources_digest(BUILT_BY)}"
    measurements = Measurements(cache, code, Machine().device)
    times_ns = measurements.get(calls)
    missing = [key for key in calls if key not in times_ns]
    for begin in range(0, len(missing), KERNELS_AT_ONCE):
        keys = missing[begin : begin + KERNELS_AT_ONCE]
        new = dict(zip(keys, _times_ns([calls[key] for key in keys]), strict=True))
        measurements.put(new)
        times_ns |= new
        progress(len(times_ns) / len(calls))
    return times_ns


def _times_ns(calls: Sequence[KernelCall]) -> list[float]:
    timer = KernelTimer(calls)
    return list(map(float, np.median([timer.round_ns() for _ in range(CALLS[1])], axis=0)))


class KernelTimer:
    """Times kernels, each by itself, on this machine.

    In a network, all threads are awake when a kernel is called, since the kernel before has just ended. Here
    a small kernel wakes them first: otherwise the kernel would wait for threads that sleep.
    """

    def __init__(self, calls: Sequence[KernelCall]):
        keep_registers.register()
        functions_by_name = {f"kernel{n}": call.function for n, call in enumerate(calls)} | {
            "wake": _wake_kernel()
        }
        functions = {
            name: function.with_attr("global_symbol", name) for name, function in functions_by_name.items()
        }
        executable = tvm.compile(
            tvm.IRModule(functions), this_cpu_target(), tir_pipeline=keep_registers.PIPELINE
        )
        self._library = executable.jit()
        self._cold: list[tvm.runtime.Tensor] = []
        flush = tvm.get_global_func("cache_flush_cpu_non_first_arg")
        wake, wake_arguments = self._library["wake"], arguments(functions_by_name["wake"], tvm.cpu())

        def prepare(first: tvm.runtime.Tensor, *_: tvm.runtime.Tensor) -> None:
            """Flush the cold operands from the caches, and wake all threads."""
            flush(first, *self._cold)
            wake(*wake_arguments)

        tvm.register_global_func(PREPARE, prepare, override=True)
        self._calls = []
        for n, call in enumerate(calls):
            tensors = arguments(call.function, tvm.cpu())
            self._calls.append((f"kernel{n}", tensors, [tensors[i] for i in call.cold]))

    def round_ns(self) -> list[float]:
        """One time of every kernel; rounds spread a disturbance over many kernels, once each."""
        times = []
        for name, tensors, cold in self._calls:
            self._cold[:] = cold
            times += kernel_times_ns(self._library, name, tvm.cpu(), tensors, 1, f_preproc=PREPARE)
        return times


def _wake_kernel() -> tirx.PrimFunc:
    """A kernel in which every thread does almost nothing."""
    threads = thread_count()
    written = te.compute((threads, 16), lambda i, j: tirx.const(0.0, "float32"), name="woken")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([written]))
    schedule.parallel(schedule.get_loops(schedule.get_sblock("woken"))[0])
    return schedule.mod["main"]
