"""Create the report of a compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pimflow.core.candidate import Cost
from pimflow.core.rewrite import SplitRewrite
from pimflow.core.stages import whole_name
from pimflow.decomposition.report import DecompositionReport
from pimflow.hardware import System
from pimflow.placement import SearchResult
from pimflow.placement.solvers.capacity import loaded_weight_bytes
from pimflow.placement.solvers.evaluate import savings_pj
from pimflow.placement.solvers.plan_memory import PlanMemory

if TYPE_CHECKING:
    from pimflow.compiler.verification import Verification

from pimflow.commands.compile.conventions import convention_systems
from pimflow.commands.shared.layer_details import (
    LayerSize,
    candidate_reports,
    cost_sources,
    program_reports,
    schedule_text,
)
from pimflow.commands.shared.report import (
    BASELINE,
    Baselines,
    Changes,
    Estimate,
    GpuPart,
    PoolReport,
    RegionReport,
    Report,
)


# Long because each of more than 50 figures takes a line.
def make_report(
    search_result: SearchResult,
    verification: Verification,
    *,
    gpu_known: dict[str, int],
    gpu_part: GpuPart,
    memory: PoolReport,
    changes: Changes,
    search_seconds: float,
    wall_seconds: float,
) -> Report:
    """Create the report of a network that was searched, built and verified; conventions are added later."""
    from pimflow.compiler.verification import CHECKED_TIMING  # loads TVM, so only here

    system, baseline, evaluation = search_result.system, search_result.baseline, search_result.evaluation
    costs, violations = search_result.costs, verification.timing_violations
    placed_bytes = loaded_weight_bytes(system, search_result.candidates)
    return Report(
        model=search_result.graph.name,
        system=system.name,
        gpu=system.gpu.name,
        pim=system.pim.name,
        gpu_channels=search_result.plan.gpu_channels,
        pim_channels=system.pim_channels,
        dtype=system.dtype,
        accounting=system.accounting,
        timing=costs.pim_target.profiler.name,
        gpu_profiler=costs.profiling.gpu.name,
        gpu_known=gpu_known,
        scheduling=system.scheduling,
        copies=system.copies,
        padding=system.padding,
        splits=search_result.generator.split_policy,
        channel_sharing=system.channel_sharing,
        launches=system.launches,
        baseline=BASELINE,
        mixture_gpu_only=Baselines.from_search(search_result).mixture,
        latency_gpu_only_ns=baseline.latency_ns,
        latency_ns=evaluation.latency_ns,
        estimate=Estimate.from_search(search_result),
        speedup=search_result.speedup,
        conventions=(),
        conventions_missing=tuple(convention_systems(system)),
        accounting_terms=(),
        energy_gpu_only_pj=baseline.energy_pj,
        energy_pj=evaluation.energy_pj,
        energies_gpu_only_pj=baseline.energies_pj,
        energies_pj=evaluation.energies_pj,
        savings_pj=savings_pj(evaluation, baseline),
        verified=verification.is_verified,
        max_relative_error=verification.max_relative_error,
        tolerance=verification.bound,
        reference_deviation=verification.worst.reference_deviation,
        outputs=verification.outputs,
        regions_verified=len(_matching_regions(verification, search_result)),
        timing_violations=violations,
        timing_violations_of=None if violations is None else CHECKED_TIMING,
        violations_by_rule=verification.violations_by_rule,
        weight_load_ns=weight_load_ns(system, placed_bytes),
        weight_bytes=placed_bytes,
        peak_activation_bytes=PlanMemory(search_result.graph, system.dtype).pool_bytes(
            search_result.candidates
        ),
        regions=_regions(search_result, changes.decomposition),
        gpu_part=gpu_part,
        memory=memory,
        **vars(changes),
        assumed=system.assumptions(),
        search_seconds=search_seconds,
        wall_seconds=wall_seconds,
    )


def _regions(
    search_result: SearchResult, decomposition: DecompositionReport | None
) -> tuple[RegionReport, ...]:
    before_ns = _gpu_only_costs(search_result, search_result.baseline.region_ns, decomposition)
    before_pj = _gpu_only_costs(search_result, search_result.baseline.region_pj, decomposition)
    programs = program_reports(search_result)
    rows = []
    for region in search_result.graph.regions:
        candidate = search_result.candidate_by_region[region.name]
        rows.append(
            RegionReport(
                name=region.name,
                covers=candidate.covers,
                mode=candidate.rewrite.mode,
                gpu_share=candidate.rewrite.gpu_share,
                axis=candidate.rewrite.axis if isinstance(candidate.rewrite, SplitRewrite) else "",
                latency_gpu_only_ns=before_ns[region.name],
                latency_ns=search_result.evaluation.region_ns[region.name],
                known=cost_sources(Cost.from_candidate(candidate)),
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
        for cache in search_result.placed_caches()
        for name in (cache.keys, cache.values)
        if cache.region in right
    }


def weight_load_ns(system: System, placed_bytes: int) -> float:
    """Time to write weights into all PIM channels in parallel, each at the rate of its bus."""
    if not placed_bytes:
        return 0.0
    bytes_per_ns = system.pim.column_bytes / (system.pim.timing["nBL"] * system.pim.tCK_ns)
    return placed_bytes / (bytes_per_ns * system.pim_channels)
