"""Profilers by name, such as ``gpu=analytic`` or ``pim=ramulator:PATH``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from pimflow.errors import UnknownNameError, UsageError
from pimflow.simulators.accel_sim.profiler import AccelSim, AccelSimLogs
from pimflow.simulators.gpu.learned_model import Learned
from pimflow.simulators.profiler import Analytic, GpuProfiler, PimProfiler
from pimflow.simulators.ramulator.fork import Ramulator

FORM = "gpu=SOURCE or pim=SOURCE"
CLASS_FORM = "MODULE:CLASS"
# Methods that a user's profiler must have; see `simulators.profiler`.
METHODS = {"gpu": ("costs",), "pim": ("time_program", "time_trace", "require_device")}
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ProfilerSource:
    """A kind of profiler.

    Attributes
    ----------
    make : callable
        Creates it from the text after the colon.
    takes : str
        Meaning of that text; empty if there is none.
    optional : bool
        Whether text and colon may be left out.
    """

    make: Callable[[str], GpuProfiler | PimProfiler]
    takes: str = ""
    optional: bool = False

    def form(self, name: str) -> str:
        """The syntax of the source with its argument."""
        if self.optional:
            return f"{name}[:{self.takes}]"
        return f"{name}:{self.takes}" if self.takes else name

    def accepts(self, colon: str, argument: str) -> bool:
        """Whether the source takes `argument`, or none if it is empty."""
        has_argument = bool(colon) and bool(argument)
        return has_argument == bool(self.takes) or (self.optional and not colon)


def _sources(
    gwrite_hiding: bool = True, progress: Progress = lambda _: None
) -> dict[str, dict[str, ProfilerSource]]:
    """The sources of profilers, by device and name."""

    def cuda(l2: str) -> GpuProfiler:
        """Measures kernels on a CUDA device, with a cold or a warm L2."""
        from pimflow.compiler.measurement.cuda_profiler import CudaProfiler  # loads TVM, so only to measure

        return CudaProfiler(l2, progress=progress)

    gpu = {
        "analytic": ProfilerSource(lambda _: Analytic()),
        "learned": ProfilerSource(lambda _: Learned()),
        "accel-sim": ProfilerSource(AccelSim, "PATH"),
        "accel-sim-logs": ProfilerSource(AccelSimLogs, "DIR"),
        "cuda": ProfilerSource(cuda, "cold|warm", optional=True),
    }
    return {
        "gpu": gpu,
        "pim": {"ramulator": ProfilerSource(lambda path: Ramulator(path, gwrite_hiding), "PATH")},
    }


def forms() -> list[str]:
    """The syntax of all texts that `parse_profilers` takes."""
    devices = _sources()
    source_forms = [
        f"{kind}={source.form(name)}" for kind, sources in devices.items() for name, source in sources.items()
    ]
    return source_forms + [f"{device}={CLASS_FORM}" for device in devices]


def parse_profilers(
    texts: Sequence[str], gwrite_hiding: bool = True, progress: Progress = lambda _: None
) -> tuple[GpuProfiler | None, PimProfiler | None]:
    """The profilers of the GPU and of PIM that `texts` name; None for a device without one.

    Parameters
    ----------
    gwrite_hiding : bool
        Whether Ramulator hides the latency of a GWRITE.
    progress : callable
        Called with a text for each kernel that could not be measured.

    Raises
    ------
    UsageError
        If a text has another form, names an unknown device or source, or a device for the second time.
    ProfilerError
        If a named profiler cannot be used.
    """
    profilers: dict[str, GpuProfiler | PimProfiler] = {}
    devices = _sources(gwrite_hiding, progress)
    for text in texts:
        device, equals, rest = text.partition("=")
        name, colon, argument = rest.partition(":")
        if not equals or not name:
            raise UsageError(f"profiler '{text}' is not of the form {FORM}: {', '.join(forms())}")
        if device not in devices:
            raise UnknownNameError("device to profile", device, list(devices))
        source = devices[device].get(name)
        if source is None and not argument.isidentifier():
            raise UnknownNameError(f"profiler of the {device}", name, [*devices[device], CLASS_FORM])
        if source is not None and not source.accepts(colon, argument):
            raise UsageError(f"profiler '{text}' is not of the form {device}={source.form(name)}")
        if device in profilers:
            raise UsageError(f"two profilers of the {device}; give one")
        profilers[device] = (
            source.make(argument) if source else _user_profiler(device, name, argument, devices[device])
        )
    # The sources of a device create profilers of that device.
    return cast("GpuProfiler | None", profilers.get("gpu")), cast("PimProfiler | None", profilers.get("pim"))


def _user_profiler(device: str, module: str, name: str, names: Iterable[str]) -> GpuProfiler | PimProfiler:
    """Create a profiler of a user's class, from the working directory or from an installed package."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    text = f"profiler '{device}={module}:{name}'"
    try:
        profiler = getattr(importlib.import_module(module), name)()
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise UsageError(f"{text}: {error}") from error
        raise UnknownNameError(f"profiler of the {device}", module, [*names, CLASS_FORM]) from error
    except ImportError as error:
        raise UsageError(f"{text}: {error}") from error
    except AttributeError as error:
        raise UsageError(f"{text}: {error}") from error
    if missing := [method for method in METHODS[device] if not callable(getattr(profiler, method, None))]:
        raise UsageError(f"{text} has no {' and no '.join(missing)}; docs/extending.md has a whole one")
    return cast("GpuProfiler | PimProfiler", profiler)
