"""Times of a build's kernels on the device that they are built for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
import tvm
from tvm import relax

from pimflow.compiler.build import Build
from pimflow.compiler.timing import kernel_times_ns
from pimflow.host import interrupts


@dataclass(frozen=True, kw_only=True)
class LaunchTime:
    """Time of one kernel of the GPU part.

    Attributes
    ----------
    call_ns : float
        Time of one call, launched back to back on the tensors of a real inference.
    """

    kernel: str
    calls: int
    call_ns: float


def kernel_times(
    built: Build, inputs: Mapping[str, np.ndarray], number: int = 10, repeat: int = 5
) -> tuple[LaunchTime, ...]:
    """Time every kernel that one inference launches by itself, without PIM regions.

    Parameters
    ----------
    inputs : mapping of str to ndarray
        In the network's order and dtypes.
    number, repeat : int
        Calls that are averaged in a measurement, and measurements; the result is their median.
    """
    machine = relax.VirtualMachine(built.executable, built.device)
    modules = list(_modules(built.executable.jit()))
    calls: dict[str, int] = {}
    times: dict[str, float] = {}

    def measure(_function: object, symbol: str, before_call: bool, _result: object, *args: object) -> int:
        """Count a call of a kernel, and time the first; the virtual machine calls this."""
        module = next((m for m in modules if m.implements_function(symbol)), None)
        if not before_call or symbol in built.programs or module is None:
            return 0
        calls[symbol] = calls.get(symbol, 0) + 1
        if symbol not in times:
            samples_ns = kernel_times_ns(module, symbol, built.device, args, repeat, number=number)
            times[symbol] = median(samples_ns)
        return 0

    with interrupts.defer_interrupts() as hold:
        machine.set_instrument(tvm.runtime.convert(hold.allow_interrupts(measure)))
        machine["main"](*_arguments(built, inputs))
    return tuple(LaunchTime(kernel=name, calls=count, call_ns=times[name]) for name, count in calls.items())


def inference_ns(built: Build, inputs: Mapping[str, np.ndarray], runs: int = 10) -> float:
    """Median time of `runs` inferences, after one to warm up.

    Parameters
    ----------
    inputs : mapping of str to ndarray
        In the network's order and dtypes.
    """
    machine = relax.VirtualMachine(built.executable, built.device)
    return median(kernel_times_ns(machine.module, "main", built.device, _arguments(built, inputs), runs))


def _arguments(built: Build, inputs: Mapping[str, np.ndarray]) -> list[tvm.runtime.Tensor]:
    """`inputs` on the device, in the layouts of the build."""
    packed = built.states.pack(inputs)
    return [tvm.runtime.tensor(np.ascontiguousarray(x), built.device) for x in packed.values()]


def _modules(module: tvm.runtime.Module) -> Iterator[tvm.runtime.Module]:
    for imported in module.imports:
        if imported.kind != "pim":
            yield imported
        yield from _modules(imported)
