"""How a layer runs on PIM: its programs, a loop order each, by the time that they take."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
class PimCost:
    """What a candidate has to know of a program.

    Attributes
    ----------
    schedule : str
        Loop order.
    rows : int
        Rows of every bank that its weights take.
    banks : int
        Banks of a channel that compute.
    result_lanes : int
        Partial sums that the device leaves apart, a result.
    results : int
        Output elements.
    readres_bursts : int
        Bursts of a READRES.
    time_ns : float
    commands : dict of str to int
        Issued, over all channels.
    gwrite_bursts : int
        Bursts of all GWRITEs.
    """

    schedule: str
    rows: int
    banks: int
    result_lanes: int
    results: int
    readres_bursts: int
    time_ns: float
    commands: dict[str, int]
    gwrite_bursts: int

    @classmethod
    def of(cls, run: PimRun) -> PimCost:
        program, timing = run.program, run.timing
        return cls(
            schedule=program.schedule,
            rows=program.rows,
            banks=program.tile_banks,
            result_lanes=program.result_lanes,
            results=(program.pixel_end - program.pixel_begin) * program.geometry.oc,
            readres_bursts=program.readres_bursts,
            time_ns=timing.time_ns,
            commands=timing.commands,
            gwrite_bursts=timing.gwrite_bursts,
        )


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """A layer on PIM.

    Attributes
    ----------
    schedule : str
        The fastest loop order for the whole layer.
    costs : tuple of (int, PimCost)
        By the output rows that the GPU computes of it; rows may come up again with other loop orders.
    """

    schedule: str
    costs: tuple[tuple[int, PimCost], ...]


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

    @functools.cached_property
    def identity(self) -> str:
        """What results on it are stored under."""
        pim = replace(self.pim, sources={})
        return repr((pim, self.channels, self.dtype, self.profiler.identity, self.level))

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

    def cost(self, geometry: ConvGeometry, schedule: Schedule, name: str, gpu_rows: int) -> PimCost:
        """Of the output rows that the GPU leaves."""
        return PimCost.of(self.run(geometry, schedule, name, gpu_rows * geometry.ow))

    def ranked(self, geometry: ConvGeometry, name: str) -> list[Schedule]:
        """Every loop order for the whole layer, the fastest first, judged by one of its busiest channels."""

        def time_ns(schedule: Schedule) -> float:
            program = self.program(geometry, schedule, name, only_busiest=True)
            return self.profiler.time_program(program, self.pim).time_ns

        return sorted(self.schedules(geometry), key=time_ns)

    def layer(self, geometry: ConvGeometry, name: str, splits: Sequence[int]) -> LayerCosts:
        """The whole layer, by the loop order that suits it, and what `splits` rows on the GPU leave of it."""
        # They are ranked by one channel; of two that come close, all channels decide.
        whole = [(s, self.cost(geometry, s, name, 0)) for s in self.ranked(geometry, name)[:2]]
        best = min(whole, key=lambda found: found[1].time_ns)[0]
        return LayerCosts(
            schedule=str(best),
            costs=(
                *((0, cost) for _, cost in whole),
                *((rows, self.cost(geometry, best, name, rows)) for rows in splits),
            ),
        )


def check_rows(what: str, rows: int, pim: PimSpec, *levers: str) -> None:
    """Raise `InfeasibleError` if weights take more than the `rows` that a bank has for them."""
    bound = pim.rows_per_bank - pim.row_base
    if rows > bound:
        raise InfeasibleError(
            what, rows, bound, "rows a bank", ("more PIM channels (--pim-channels)", *levers)
        )
