"""The report's details of a layer: size, candidates, PIM programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pimflow.compiler.artifact import file_stems
from pimflow.core.candidate import Candidate, Cost
from pimflow.core.json_form import report_of
from pimflow.core.program import PimProgram
from pimflow.core.region import ELEMENT_BYTES, Region
from pimflow.core.stages import whole_name
from pimflow.hardware import PimSpec
from pimflow.placement import Searched
from pimflow.placement.candidates.cached import is_cached
from pimflow.simulators.profiler import BuiltIn


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """Operators, shapes and size of a layer.

    Attributes
    ----------
    input_shapes, output_shape
        Of its tensors; feature maps are NHWC.
    macs : int
        Multiply-accumulates of convolutions, matrix products and attention; 0 of other layers.
    operand_bytes : int
        Size of inputs, weights and result in the system's storage type.
    """

    operators: tuple[str, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shape: tuple[int, ...]
    macs: int
    operand_bytes: int

    @classmethod
    def of(cls, region: Region, dtype: str) -> LayerSize:
        """From a region, with the storage type `dtype`."""
        elements = sum(region.input_elements) + region.weight_elements + region.output_elements
        return cls(
            operators=tuple(region.operators),
            input_shapes=tuple(tuple(shape) for shape in region.input_shapes),
            output_shape=tuple(region.output_shape),
            macs=region.macs,
            operand_bytes=elements * ELEMENT_BYTES[dtype],
        )


@dataclass(frozen=True, kw_only=True)
class CandidateReport:
    """A candidate of a layer, with the costs of running it by itself.

    Attributes
    ----------
    covers : tuple of str
        Layers that it computes.
    chosen : bool
        Whether it is in the plan.
    schedule : str
        Loop orders of its PIM programs.
    known : dict of str to str
        By resource, how its time is known.
    """

    name: str
    covers: tuple[str, ...]
    chosen: bool
    schedule: str
    latency_ns: float
    energy_pj: float
    moved_bytes: int
    known: dict[str, str]

    @classmethod
    def of(cls, candidate: Candidate, chosen: Candidate) -> CandidateReport:
        """From a candidate, and the one that the plan has."""
        cost = Cost.of(candidate)
        return report_of(
            cls,
            cost,
            name=candidate.name,
            covers=candidate.covers,
            chosen=candidate == chosen,
            schedule=schedule_text(candidate),
            known=known_parts(cost),
        )


def candidates_of(searched: Searched, region: Region) -> tuple[CandidateReport, ...]:
    """All candidates of a region, the fastest first; with the plan's, even if an edited plan added it."""
    chosen = searched.doing[region.name]
    found = [CandidateReport.of(each, chosen) for each in every_candidate(searched, region)]
    return tuple(sorted(found, key=lambda each: (each.latency_ns, each.name)))


def every_candidate(searched: Searched, region: Region) -> list[Candidate]:
    """Candidates that begin with a region, those that compute its attention in PIM, and the chosen one."""
    table, chosen = searched.table, searched.doing[region.name]
    candidates = list(table.candidates[region.name])
    for first in region.inputs if region.attention else ():
        of_run = (c for c in table.candidates.get(first, ()) if is_cached(c))
        candidates += [c for c in of_run if region.name in c.covers]
    return candidates if chosen in candidates else [*candidates, chosen]


def known_parts(cost: Cost) -> dict[str, str]:
    """By resource, how a cost is known."""
    return {resource: known.value for resource, known in cost.known.items()}


def schedule_text(candidate: Candidate) -> str:
    """Loop orders of a candidate; a pipeline has one for each region on PIM."""
    return candidate.rewrite.schedule or "; ".join(filter(None, candidate.rewrite.schedules))


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """A PIM program: its commands, and the utilisation of the device.

    Attributes
    ----------
    name : str
        Its layer, or a part of a layer in a pipeline.
    file : str
        In the compiled directory.
    timing : str
        The built-in engine of these figures; other simulators do not give all of them.
    commands : dict of str to int
        Over all channels, PRE and REF included.
    multipliers, bus, refresh : float
        Shares of the clocks of all channels in which the multipliers work, GWRITE and READRES occupy the
        bus, and refreshes stop the banks.
    rows : float or None
        Share of the columns of opened rows that are used.
    channel_cycles : tuple of int
        Cycles of each channel; 0 of an idle one.
    """

    name: str
    file: str
    schedule: str
    timing: str
    cycles: int
    time_ns: float
    commands: dict[str, int]
    multipliers: float
    bus: float
    rows: float | None
    refresh: float
    channel_cycles: tuple[int, ...]

    @classmethod
    def of(cls, program: PimProgram, file: str, spec: PimSpec, engine: BuiltIn) -> ProgramReport:
        """From a program, which `engine` times on `spec`."""
        found = engine.time_program(program, spec)
        clocks = max(found.cycles * len(found.channel_cycles), 1)
        bursts = found.gwrite_bursts + found.commands.get("READRES", 0) * program.readres_bursts
        return report_of(
            cls,
            found,
            name=program.region,
            file=file,
            schedule=program.schedule,
            multipliers=found.utilisation,
            bus=bursts * spec.timing["nBL"] / clocks,
            rows=found.row_utilisation,
            refresh=found.commands.get("REF", 0) * spec.timing.get("nRFC", 0) / clocks,
        )


def programs_of(searched: Searched) -> dict[str, list[ProgramReport]]:
    """The PIM programs of each layer."""
    timer = searched.maker.costs.side.profiler
    engine = timer if isinstance(timer, BuiltIn) else BuiltIn("strict")
    programs: Mapping[str, PimProgram] = searched.programs()
    stems = file_stems(programs)
    found: dict[str, list[ProgramReport]] = {}
    for name, program in programs.items():
        file = f"programs/{stems[name]}.pimprog"
        row = ProgramReport.of(program, file, searched.system.pim, engine)
        found.setdefault(whole_name(name, searched.doing), []).append(row)
    return found
