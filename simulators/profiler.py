"""Protocols of profilers, which time PIM programs and GPU kernels, and the built-in profilers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from pimflow.core.program import PimProgram
from pimflow.hardware.gpu import GpuSpec
from pimflow.hardware.pim import PimSpec
from pimflow.simulators.gpu.model import KernelCost, KernelRequest, kernel_costs
from pimflow.simulators.pim.timing import TimingResult, require_timing, time_program, time_trace


class PimProfiler(Protocol):
    """Times PIM programs and ``.pim`` traces.

    Attributes
    ----------
    name : str
        Its name in reports: the rules of a timing, or a simulator.
    identity : str
        Key of its stored results: profilers that may give different results have different identities.
    """

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...

    def require_device(self, pim: PimSpec) -> None:
        """Raise `UsageError` or `SpecError` if it can time no program of device `pim`."""

    def time_program(self, program: PimProgram, pim: PimSpec) -> TimingResult:
        """Time all channels of `program`."""

    def time_trace(
        self, path: str | os.PathLike[str], pim: PimSpec, progress: Callable[[float], None] = lambda _: None
    ) -> TimingResult:
        """Time the ``.pim`` trace of one channel; `progress` is called with the share that is done."""


@dataclass(frozen=True)
class BuiltIn:
    """The timing engines of `pimflow.simulators.pim.timing`.

    Attributes
    ----------
    timing : str
        ``strict`` or ``ramulator-pimflow``.
    gwrite_hiding : bool
        ``ramulator-pimflow`` only: whether the fork hides the latency of a GWRITE.
    """

    timing: str = "strict"
    gwrite_hiding: bool = True

    @property
    def name(self) -> str:
        return self.timing

    @property
    def identity(self) -> str:
        return self.timing + ("" if self.gwrite_hiding else " without hiding")

    def require_device(self, pim: PimSpec) -> None:
        require_timing(pim, self.timing)

    def time_program(self, program: PimProgram, pim: PimSpec) -> TimingResult:
        return time_program(program, pim, self.timing, self.gwrite_hiding)

    def time_trace(
        self, path: str | os.PathLike[str], pim: PimSpec, progress: Callable[[float], None] = lambda _: None
    ) -> TimingResult:
        return time_trace(path, pim, self.timing, self.gwrite_hiding, progress)


class GpuProfiler(Protocol):
    """Times GPU kernels.

    Attributes
    ----------
    name : str
        Its name in reports, and the key of its stored results: profilers that may give different results have
        different names.
    computes : bool
        Whether costs are computed quickly, not measured or simulated, so that a search may time every split
        of a layer.
    primitives : bool
        Whether it times convolution primitives as well as operators, in a comparable way.
    """

    @property
    def name(self) -> str: ...

    computes: ClassVar[bool]
    primitives: ClassVar[bool]

    def costs(self, requests: Sequence[KernelRequest], gpu: GpuSpec, dtype: str) -> list[KernelCost]:
        """The cost of each request, in order; `KernelCost.known` tells where it comes from."""


@dataclass(frozen=True)
class Analytic:
    """The roofline of `pimflow.simulators.gpu.model`."""

    name: str = "analytic"
    computes: ClassVar[bool] = True
    primitives: ClassVar[bool] = True

    def costs(self, requests: Sequence[KernelRequest], gpu: GpuSpec, dtype: str) -> list[KernelCost]:
        return kernel_costs(requests, gpu, dtype)
