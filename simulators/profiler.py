"""Where the time of a PIM program comes from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from pimflow.core.program import PimProgram
from pimflow.hardware.pim import PimSpec
from pimflow.simulators.timing import TimingResult, time_program, time_trace


class PimProfiler(Protocol):
    """Times PIM programs and ``.pim`` traces.

    Attributes
    ----------
    name : str
        What the report calls it: the rules of a timing, or a simulator that was run.
    """

    @property
    def name(self) -> str: ...

    def time_program(self, program: PimProgram, pim: PimSpec) -> TimingResult:
        """Time all channels of `program`."""

    def time_trace(self, path: str | os.PathLike, pim: PimSpec) -> TimingResult:
        """Time the ``.pim`` trace of one channel."""


@dataclass(frozen=True)
class BuiltIn:
    """The timing engines of `pimflow.simulators.timing`.

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

    def time_program(self, program: PimProgram, pim: PimSpec) -> TimingResult:
        return time_program(program, pim, self.timing, self.gwrite_hiding)

    def time_trace(self, path: str | os.PathLike, pim: PimSpec) -> TimingResult:
        return time_trace(path, pim, self.timing, self.gwrite_hiding)
