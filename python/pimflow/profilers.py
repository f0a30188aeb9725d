"""Where times may come from, by name: ``gpu=analytic``, ``pim=ramulator:PATH`` and so on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pimflow.errors import UnknownNameError, UsageError
from pimflow.simulators.profiler import Analytic, GpuProfiler, PimProfiler
from pimflow.simulators.ramulator_adapter import Ramulator

FORM = "gpu=SOURCE or pim=SOURCE"


@dataclass(frozen=True)
class Source:
    """A kind of profiler.

    Attributes
    ----------
    make : callable
        From what stands after the colon.
    takes : str
        What that is; empty if nothing is.
    """

    make: Callable[[str], GpuProfiler | PimProfiler]
    takes: str = ""

    def form(self, name: str) -> str:
        return f"{name}:{self.takes}" if self.takes else name


GPU_SOURCES = {"analytic": Source(lambda _: Analytic())}


def _pim_sources(gwrite_hiding: bool) -> dict[str, Source]:
    return {"ramulator": Source(lambda path: Ramulator(path, gwrite_hiding), "PATH")}


def forms() -> list[str]:
    """Everything that `parse_profilers` takes."""
    devices = {"gpu": GPU_SOURCES, "pim": _pim_sources(True)}
    return [f"{device}={source.form(name)}" for device in devices for name, source in devices[device].items()]


def parse_profilers(
    texts: Sequence[str], gwrite_hiding: bool = True
) -> tuple[GpuProfiler | None, PimProfiler | None]:
    """The profilers that `texts` name, of the GPU and of PIM; None where none is named.

    Raises
    ------
    UsageError
        If a text has another form, names a device or source that there is none for, or a device twice.
    ProfilerError
        If what it names cannot be used.
    """
    found: dict[str, GpuProfiler | PimProfiler] = {}
    devices = {"gpu": GPU_SOURCES, "pim": _pim_sources(gwrite_hiding)}
    for text in texts:
        device, equals, rest = text.partition("=")
        name, colon, argument = rest.partition(":")
        if not equals or not name:
            raise UsageError(f"profiler '{text}' is not of the form {FORM}: {', '.join(forms())}")
        if device not in devices:
            raise UnknownNameError("device to profile", device, list(devices))
        if name not in devices[device]:
            raise UnknownNameError(f"profiler of the {device}", name, list(devices[device]))
        source = devices[device][name]
        if bool(source.takes) != bool(argument) or bool(colon) != bool(argument):
            raise UsageError(f"profiler '{text}' is not of the form {device}={source.form(name)}")
        if device in found:
            raise UsageError(f"two profilers of the {device}; give one")
        found[device] = source.make(argument)
    return found.get("gpu"), found.get("pim")
