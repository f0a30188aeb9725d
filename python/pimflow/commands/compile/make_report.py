"""Create the report of a compilation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pimflow.commands.compile.conventions import convention_systems
from pimflow.commands.shared.front import ParetoPoint
from pimflow.commands.shared.layer_details import LayerSize, candidate_reports, program_reports, schedule_text
from pimflow.commands.shared.memory_report import MemoryReport, PoolReport
from pimflow.commands.shared.plan_report import ConventionsReport, PlanReport
from pimflow.commands.shared.report import (
    EnergyReport,
    ExtraReports,
    GpuPart,
    RegionReport,
    Report,
    SystemReport,
    VerificationReport,
)
from pimflow.core.candidate import Cost
from pimflow.core.rewrite import AttentionRewrite, SplitRewrite
from pimflow.core.stages import whole_name
from pimflow.decomposition.report import DecompositionReport
from pimflow.placement import SearchResult

if TYPE_CHECKING:
    from pimflow.compiler.plan_pools import PoolChoice
    from pimflow.compiler.verification import Verification


@dataclass(frozen=True, kw_only=True)
class PlacedNetwork:
    """The plan of a network, and how it was found.

    Attributes
    ----------
    gpu_known : dict of str to int
        See `SystemReport`.
    pool : PoolChoice, optional
        See `SearchRequest.place_network`.
    front : tuple of ParetoPoint, optional
        The front of plans, if one was searched.
    """

    search_result: SearchResult
    search_seconds: float
    gpu_known: dict[str, int]
    pool: PoolChoice | None = None
    front: tuple[ParetoPoint, ...] | None = None


def make_report(
    placed: PlacedNetwork,
    verification: Verification,
    *,
    gpu_part: GpuPart,
    pool: PoolReport,
    extras: ExtraReports,
    wall_seconds: float,
) -> Report:
    """Create the report of a network that was placed, built and verified; conventions are added later."""
    search_result = placed.search_result
    return Report(
        model=search_result.graph.name,
        system=SystemReport.from_search(search_result, placed.gpu_known),
        plan=PlanReport.from_search(search_result),
        conventions=ConventionsReport(missing=tuple(convention_systems(search_result.system))),
        energy=EnergyReport.from_search(search_result),
        verification=_verification(verification, search_result),
        memory=MemoryReport.from_search(search_result, pool),
        regions=_regions(search_result, extras.decomposition),
        gpu_part=gpu_part,
        extras=extras,
        search_seconds=placed.search_seconds,
        wall_seconds=wall_seconds,
    )


def _verification(verification: Verification, search_result: SearchResult) -> VerificationReport:
    from pimflow.compiler.verification import CHECKED_TIMING  # loads TVM, so only here

    violations = verification.timing_violations
    return VerificationReport(
        verified=verification.is_verified,
        max_relative_error=verification.max_relative_error,
        tolerance=verification.bound,
        reference_deviation=verification.worst.reference_deviation,
        outputs=verification.outputs,
        samples=verification.samples,
        regions_verified=len(_matching_regions(verification, search_result)),
        timing_violations=violations,
        timing_violations_of=None if violations is None else CHECKED_TIMING,
        violations_by_rule=verification.violations_by_rule,
    )


def _regions(
    search_result: SearchResult, decomposition: DecompositionReport | None
) -> tuple[RegionReport, ...]:
    baseline, plan_times = search_result.baseline, search_result.evaluation.region_times
    before_times = baseline.region_times.items()
    before_ns, busy_before_ns, idle_before_ns, before_pj = (
        _gpu_only_costs(search_result, costs, decomposition)
        for costs in (
            {name: times.latency_ns for name, times in before_times},
            {name: times.busy_ns["gpu"] for name, times in before_times},
            {name: times.idle_ns["gpu"] for name, times in before_times},
            baseline.region_pj,
        )
    )
    programs = program_reports(search_result)
    rows = []
    for region in search_result.graph.regions:
        candidate = search_result.candidate_by_region[region.name]
        rows.append(
            RegionReport(
                name=region.name,
                reads=tuple(dict.fromkeys(n for n in region.inputs if not n.startswith("%"))),
                covers=candidate.covers,
                mode=candidate.rewrite.mode,
                gpu_share=candidate.rewrite.gpu_share,
                axis=candidate.rewrite.axis if isinstance(candidate.rewrite, SplitRewrite) else "",
                latency_gpu_only_ns=before_ns[region.name],
                busy_gpu_only_ns=busy_before_ns[region.name],
                idle_gpu_only_ns=idle_before_ns[region.name],
                latency_ns=plan_times[region.name].latency_ns,
                busy_ns=plan_times[region.name].busy_ns,
                idle_ns=plan_times[region.name].idle_ns,
                known=Cost.from_candidate(candidate).known,
                schedule=schedule_text(candidate),
                primitive=candidate.primitive,
                on_pim=region.name in candidate.pim_regions,
                pim_capable=region.name not in search_result.table.unsupported_reasons,
                reason=search_result.plan.choice(region.name).reason,
                size=LayerSize.from_region(region, search_result.system.dtype),
                energy_gpu_only_pj=before_pj[region.name],
                energy_pj=search_result.evaluation.region_pj[region.name],
                candidates=candidate_reports(search_result, region),
                programs=tuple(programs.get(region.name, ())),
            )
        )
    return tuple(rows)


def _gpu_only_costs(
    search_result: SearchResult, baseline: Mapping[str, float], decomposition: DecompositionReport | None
) -> dict[str, float]:
    """The baseline's cost of each region; of a decomposed layer, the cost stands at the chain's first."""
    remaining = dict(baseline)
    costs = {region.name: remaining.pop(region.name, 0.0) for region in search_result.graph.regions}
    for layer in decomposition.layers if decomposition else ():
        first = next((name for name in layer.chain if name in costs), None)
        if first is not None:
            costs[first] += remaining.pop(layer.name, 0.0)
    return costs


def _matching_regions(verification: Verification, search_result: SearchResult) -> set[str]:
    """PIM regions whose parts all match; appends to a cache match with the attention that reads it."""
    wrong = {
        whole_name(r.region, search_result.candidate_by_region) for r in verification.regions if not r.matches
    }
    right = {whole_name(r.region, search_result.candidate_by_region) for r in verification.regions} - wrong
    return right | {
        name
        for candidate in search_result.candidates
        for name in candidate.covers
        if isinstance(candidate.rewrite, AttentionRewrite) and candidate.covers[-1] in right
    }
