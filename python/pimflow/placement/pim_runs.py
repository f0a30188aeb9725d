"""How a layer runs on PIM: its programs, a loop order each, by the time that they take."""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.core.program import PimProgram
from pimflow.core.region import ConvGeometry
from pimflow.errors import InfeasibleError
from pimflow.hardware import PimSpec
from pimflow.hardware.system import SCHEDULINGS
from pimflow.pim_backend.lowering import lower
from pimflow.pim_backend.schedule import Schedule, schedules
from pimflow.simulators.profiler import PimProfiler
from pimflow.simulators.timing import TimingResult


@dataclass(frozen=True, kw_only=True)
class PimRun:
    """A program and how long it takes."""

    program: PimProgram
    timing: TimingResult


@dataclass(frozen=True, kw_only=True)
class PimSide:
    """Where programs run.

    Attributes
    ----------
    pim : PimSpec
    channels : int
        PIM channels that a layer is spread over.
    dtype : str
        Storage type of operands and results.
    profiler : PimProfiler
        What times them.
    level : str
        Which loop orders they may take: one of `hardware.system.SCHEDULINGS`.
    """

    pim: PimSpec
    channels: int
    dtype: str
    profiler: PimProfiler
    level: str = SCHEDULINGS[-1]

    def schedules(self, geometry: ConvGeometry) -> list[Schedule]:
        """Every loop order of the level that computes `geometry`."""
        return schedules(geometry, self.pim, self.dtype, self.level)

    def program(
        self,
        geometry: ConvGeometry,
        schedule: Schedule,
        name: str,
        pixel_begin: int = 0,
        row_begin: int = 0,
        only_busiest: bool = False,
    ) -> PimProgram:
        """The program of the output pixels from `pixel_begin` on, with its weights at `row_begin`.

        `only_busiest` leaves one channel, of those with most to do.
        """
        return lower(
            geometry,
            self.pim,
            region=name,
            dtype=self.dtype,
            channels=self.channels,
            schedule=schedule,
            pixel_begin=pixel_begin,
            row_begin=self.pim.row_base + row_begin,
            only_busiest=only_busiest,
        )

    def run(self, geometry: ConvGeometry, schedule: Schedule, name: str, pixel_begin: int = 0) -> PimRun:
        """A program, timed."""
        program = self.program(geometry, schedule, name, pixel_begin)
        return PimRun(program=program, timing=self.profiler.time_program(program, self.pim))

    def ranked(self, geometry: ConvGeometry, name: str) -> list[Schedule]:
        """Every loop order for the whole layer, the fastest first, judged by one of its busiest channels."""

        def time_ns(schedule: Schedule) -> float:
            program = self.program(geometry, schedule, name, only_busiest=True)
            return self.profiler.time_program(program, self.pim).time_ns

        return sorted(self.schedules(geometry), key=time_ns)


def check_rows(what: str, rows: int, pim: PimSpec, *levers: str) -> None:
    """Raise `InfeasibleError` if weights take more than the `rows` that a bank has for them."""
    bound = pim.rows_per_bank - pim.row_base
    if rows > bound:
        raise InfeasibleError(
            what, rows, bound, "rows a bank", ("more PIM channels (--pim-channels)", *levers)
        )
