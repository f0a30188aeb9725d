"""PIM programs of a layer by loop order, and their costs."""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pimflow.core.kernel import ConvGeometry
from pimflow.core.loop_order import LoopOrder
from pimflow.core.program import PimProgram
from pimflow.core.split import WHOLE, Split
from pimflow.errors import InfeasibleError, PlanError
from pimflow.hardware import PimSpec
from pimflow.hardware.spec_text import fields_text
from pimflow.hardware.systems import SCHEDULINGS
from pimflow.pim_backend.programs.lowering import NO_LIMITS, LoweringLimits, ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.simulators.pim.timing import STRICT, TimingResult
from pimflow.simulators.profiler import PimProfiler


@dataclass(frozen=True, kw_only=True)
class PimRun:
    """A program and its timing.

    Attributes
    ----------
    gpu_part : ConvGeometry, optional
        The GPU's part of a split layer, if known.
    """

    program: PimProgram
    timing: TimingResult
    gpu_part: ConvGeometry | None = None


@dataclass(frozen=True, kw_only=True)
class PimCost:
    """The figures of a timed program that candidates are made of.

    Attributes
    ----------
    rows : int
        Rows of every bank that its weights take.
    banks : int
        Banks of a channel that compute.
    result_lanes : int
        Partial sums of each result that the device does not add up.
    results : int
        Output elements.
    readres_bursts : int
        Bursts of a READRES, and of a WRBIAS.
    commands : dict of str to int
        Issued, over all channels.
    gwrite_bursts : int
        Bursts of all GWRITEs.
    write_bursts : int
        Bursts of all WRITEs.
    ahead_ns : float
        Time of the refreshes served before the program (`TimingResult.refreshes_ahead`).
    weights : str, optional
        Type of its weights in the banks, if it is not the network's.
    activations : str
        Type of its vectors; empty for that of the network.
    """

    rows: int
    banks: int
    result_lanes: int
    results: int
    readres_bursts: int
    time_ns: float
    commands: dict[str, int]
    gwrite_bursts: int
    write_bursts: int = 0
    ahead_ns: float = 0.0
    weights: str | None = None
    activations: str = ""

    @property
    def traffic_bursts(self) -> int:
        """Bursts to and from PIM."""
        latches = self.commands["READRES"] + self.commands.get("WRBIAS", 0)
        return self.gwrite_bursts + self.write_bursts + latches * self.readres_bursts

    @classmethod
    def from_run(cls, run: PimRun, pim: PimSpec) -> PimCost:
        """The cost of a timed program on the device `pim`."""
        program, timing = run.program, run.timing
        ahead_ns = timing.refreshes_ahead * pim.timing.get("nRFC", 0) * pim.tCK_ns
        return cls(
            rows=program.rows,
            banks=program.tile_banks // program.lanes,
            result_lanes=program.result_lanes,
            results=(program.pixel_end - program.pixel_begin) * program.geometry.oc,
            readres_bursts=program.readres_bursts,
            time_ns=timing.time_ns,
            commands=timing.commands,
            gwrite_bursts=timing.gwrite_bursts,
            write_bursts=sum(timing.channel_write_bursts),
            ahead_ns=ahead_ns,
            weights=program.geometry.weights,
            activations=program.activations,
        )

    @classmethod
    def from_sequence(cls, costs: Sequence[PimCost]) -> PimCost:
        """The cost of programs on the same rows in sequence."""
        commands = sum((Counter(cost.commands) for cost in costs), Counter())
        return replace(
            costs[0],
            results=sum(cost.results for cost in costs),
            time_ns=sum(cost.time_ns for cost in costs),
            commands={name: commands[name] for name in costs[0].commands},
            gwrite_bursts=sum(cost.gwrite_bursts for cost in costs),
            write_bursts=sum(cost.write_bursts for cost in costs),
            ahead_ns=sum(cost.ahead_ns for cost in costs),
        )


@dataclass(frozen=True, kw_only=True)
class LayerPimCost(PimCost):
    """The cost of PIM's part of a layer by one loop order."""

    schedule: LoopOrder


@dataclass(frozen=True, kw_only=True)
class LatchUse:
    """What the device does with results beside products: `PimProgram.initial` and `PimProgram.activation`."""

    initial: str = ""
    activation: str = ""


ONLY_SUMS = LatchUse()


@dataclass(frozen=True, kw_only=True)
class PimTarget:
    """The PIM device that programs are made for, and the profiler that times them.

    Attributes
    ----------
    channels : int
        PIM channels over which a layer is distributed.
    dtype : str
        Storage type of operands and results.
    level : str
        Which loop orders are allowed: one of `hardware.systems.SCHEDULINGS`.
    """

    pim: PimSpec
    channels: int
    dtype: str
    profiler: PimProfiler
    level: str = SCHEDULINGS[-1]

    @functools.cached_property
    def identity(self) -> str:
        """The cache key of results for this device."""
        pim = replace(self.pim, sources={})
        return repr(
            (
                fields_text(pim) + pim.narrow_text,
                self.channels,
                self.dtype,
                self.profiler.identity,
                self.level,
            )
        )

    def device(self, geometry: ConvGeometry) -> PimSpec:
        """The device as it is for the weights of a layer; only the strict timing knows narrow ones."""
        if self.profiler.name != STRICT:
            return self.pim
        return self.pim.with_weights(geometry.weights, geometry.activations or self.dtype)

    def program_dtype(self, geometry: ConvGeometry) -> str:
        """Storage type of a layer's programs: that of its operands, where they are not the network's."""
        device = self.device(geometry)
        operand = device.operand(device.weights, device.activations)
        return operand.container if operand else self.dtype

    def schedules(self, geometry: ConvGeometry) -> list[LoopOrder]:
        """All loop orders of the level for `geometry`."""
        return schedules(geometry, self.device(geometry), self.program_dtype(geometry), self.level)

    def parse_schedule(self, schedule: str, geometry: ConvGeometry, region: str) -> LoopOrder:
        """The one of `schedules` that a plan calls `schedule`; raises `PlanError`, with the most similar."""
        orders = {str(order): order for order in self.schedules(geometry)}
        if schedule not in orders:
            similar = difflib.get_close_matches(schedule, orders, n=3, cutoff=0.0)
            names = ", ".join(map(repr, similar)) or "none"
            raise PlanError(
                f"region '{region}': schedule '{schedule}' is none of the {len(orders)} loop orders that "
                "this "
                f"layer has on '{self.pim.name}', such as {names}; without 'schedule' it is the fastest"
            )
        return orders[schedule]

    def program(self, request: ProgramRequest, limits: LoweringLimits = NO_LIMITS) -> PimProgram:
        """The program of `request`, whose rows count from the first that tables of the device leave."""
        request = replace(request, row_begin=self.pim.row_base + request.row_begin)
        device = self.device(request.geometry)
        dtype = self.program_dtype(request.geometry)
        return lower(request, device, dtype=dtype, channels=self.channels, limits=limits)

    def run(self, request: ProgramRequest, limits: LoweringLimits = NO_LIMITS) -> PimRun:
        """A program with its timing."""
        program = self.program(request, limits)
        return PimRun(program=program, timing=self.profiler.time_program(program, self.pim))

    def cost(
        self,
        geometry: ConvGeometry,
        schedule: LoopOrder,
        name: str,
        split: Split = WHOLE,
        latch_use: LatchUse = ONLY_SUMS,
    ) -> LayerPimCost:
        """The cost of PIM's part of a layer."""
        request = replace(_part_request(geometry, schedule, name, split), **vars(latch_use))
        run = self.run(request, LoweringLimits(timing_only=True))
        return LayerPimCost(schedule=schedule, **vars(PimCost.from_run(run, self.pim)))

    def busiest_ns(
        self, geometry: ConvGeometry, schedule: LoopOrder, name: str, split: Split = WHOLE
    ) -> float:
        """Time of one of the busiest channels: a lower bound of the time of all."""
        limits = LoweringLimits(only_busiest=True, timing_only=True)
        return self.run(_part_request(geometry, schedule, name, split), limits).timing.time_ns

    def rank_schedules(self, geometry: ConvGeometry, name: str) -> list[LoopOrder]:
        """All loop orders of the whole layer, ranked by the time of one of its busiest channels."""
        return sorted(self.schedules(geometry), key=lambda order: self.busiest_ns(geometry, order, name))

    def part_schedule(
        self, geometry: ConvGeometry, name: str, layer_schedule: LoopOrder, split: Split
    ) -> LoopOrder:
        """The loop order of PIM's part: the layer's or, if that is impossible, the fastest for the part."""
        part = split.pim_part(geometry)
        fits = part == geometry or layer_schedule in self.schedules(part)
        return layer_schedule if fits else self.rank_schedules(part, name)[0]

    def whole_layer_costs(self, geometry: ConvGeometry, name: str) -> list[LayerPimCost]:
        """Costs of the whole layer on PIM by the two loop orders that rank best, the faster first."""
        # Ranks are of one channel; between the best two, the time of all channels decides.
        costs = [self.cost(geometry, schedule, name) for schedule in self.rank_schedules(geometry, name)[:2]]
        return sorted(costs, key=lambda cost: cost.time_ns)


def _part_request(geometry: ConvGeometry, schedule: LoopOrder, name: str, split: Split) -> ProgramRequest:
    """The request for PIM's part of a layer."""
    part, begin = split.pim_part(geometry), split.pixel_begin(geometry)
    return ProgramRequest(name, part, schedule, pixel_begin=begin)


def check_rows(subject: str, rows: int, pim: PimSpec, *levers: str) -> None:
    """Raise `InfeasibleError` if `subject` takes more `rows` than a bank has."""
    if rows > pim.usable_rows:
        raise InfeasibleError(
            subject, rows, pim.usable_rows, "rows a bank", ("more PIM channels (--pim-channels)", *levers)
        )
