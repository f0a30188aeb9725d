"""The report's details of a layer: size, candidates, PIM programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pimflow.compiler.artifact import file_stems
from pimflow.core.candidate import Candidate, Cost, Provenance
from pimflow.core.json_form import report_from
from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.core.program import PimProgram
from pimflow.core.region import Region
from pimflow.core.rewrite import FusedGroupRewrite, GpuRewrite, PipelineRewrite, SubstitutionRewrite
from pimflow.core.stages import whole_name
from pimflow.hardware import PimSpec
from pimflow.placement import SearchResult
from pimflow.placement.candidates.pim_attention import is_cached
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
    def from_region(cls, region: Region, dtype: str) -> LayerSize:
        """From a region, with the storage type `dtype`."""
        elements = sum(region.input_elements) + region.kernel.read_weight_elements + region.output_elements
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
    known : dict of str to Provenance
        By resource, how its time is known.
    """

    name: str
    covers: tuple[str, ...]
    chosen: bool
    schedule: str
    latency_ns: float
    energy_pj: float
    moved_bytes: int
    known: dict[str, Provenance]

    @classmethod
    def from_candidate(cls, candidate: Candidate, chosen: Candidate) -> CandidateReport:
        """From a candidate, and the one that the plan has."""
        return report_from(
            cls,
            Cost.from_candidate(candidate),
            name=candidate.name,
            covers=candidate.covers,
            chosen=candidate == chosen,
            schedule=schedule_text(candidate),
        )


def candidate_reports(search_result: SearchResult, region: Region) -> tuple[CandidateReport, ...]:
    """All candidates of a region, the fastest first; with the plan's, even if an edited plan added it."""
    chosen = search_result.candidate_by_region[region.name]
    reports = [
        CandidateReport.from_candidate(candidate, chosen)
        for candidate in all_candidates(search_result, region)
    ]
    return tuple(sorted(reports, key=lambda candidate: (candidate.latency_ns, candidate.name)))


def all_candidates(search_result: SearchResult, region: Region) -> list[Candidate]:
    """Candidates that begin with a region, those that compute its attention in PIM, and the chosen one."""
    table, chosen = search_result.table, search_result.candidate_by_region[region.name]
    candidates = list(table.candidates[region.name])
    for first in region.inputs if region.attention else ():
        cached_candidates = (c for c in table.candidates.get(first, ()) if is_cached(c))
        candidates += [c for c in cached_candidates if region.name in c.covers]
    return candidates if chosen in candidates else [*candidates, chosen]


def schedule_text(candidate: Candidate) -> str:
    """Loop orders of a candidate; a pipeline has one for each region on PIM."""
    rewrite = candidate.rewrite
    if isinstance(rewrite, PipelineRewrite):
        return "; ".join(filter(None, rewrite.schedules))
    if isinstance(rewrite, FusedGroupRewrite):
        return rewrite.tiling
    if isinstance(rewrite, SubstitutionRewrite):
        return rewrite.substitution
    return "" if isinstance(rewrite, GpuRewrite) else rewrite.schedule


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
    def from_program(cls, program: PimProgram, file: str, spec: PimSpec, engine: BuiltIn) -> ProgramReport:
        """From a program, which `engine` times on `spec`."""
        spec = spec.with_weights_of(program)
        timing = engine.time_program(program, spec)
        clocks = max(timing.cycles * len(timing.channel_cycles), 1)
        bursts = timing.gwrite_bursts + timing.commands.get("READRES", 0) * program.readres_bursts
        return report_from(
            cls,
            timing,
            name=program.region,
            file=file,
            schedule=str(program.schedule),
            multipliers=timing.utilisation,
            bus=bursts * spec.timing["nBL"] / clocks,
            rows=timing.row_utilisation,
            refresh=timing.commands.get("REF", 0) * spec.timing.get("nRFC", 0) / clocks,
        )


def program_reports(search_result: SearchResult) -> dict[str, list[ProgramReport]]:
    """The PIM programs of each layer."""
    profiler = search_result.costs.pim_target.profiler
    engine = profiler if isinstance(profiler, BuiltIn) else BuiltIn("strict")
    programs: Mapping[str, PimProgram] = search_result.programs()
    stems = file_stems(programs)
    reports: dict[str, list[ProgramReport]] = {}
    for name, program in programs.items():
        file = f"programs/{stems[name]}.pimprog"
        row = ProgramReport.from_program(program, file, search_result.system.pim, engine)
        reports.setdefault(whole_name(name, search_result.candidate_by_region), []).append(row)
    return reports
