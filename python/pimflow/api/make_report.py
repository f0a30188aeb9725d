"""Create the report of a compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pimflow.core.candidate import Cost
from pimflow.core.stages import whole_name
from pimflow.decomposition.report import DecompositionReport
from pimflow.hardware import System
from pimflow.placement import Searched
from pimflow.placement.solvers.evaluate import savings_pj
from pimflow.placement.solvers.plan_memory import PlanMemory

if TYPE_CHECKING:
    from pimflow.compiler.verification import Verification

from pimflow.api.conventions import convention_systems
from pimflow.api.layer_details import LayerSize, candidates_of, known_parts, programs_of, schedule_text
from pimflow.api.report import (
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
    searched: Searched,
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
    from pimflow.compiler.verification import JUDGED  # loads TVM, so only here

    system, baseline, evaluation = searched.system, searched.baseline, searched.evaluation
    costs, violations = searched.maker.costs, verification.timing_violations
    placed_bytes = sum(candidate.placed_bytes for candidate in searched.candidates)
    return Report(
        model=searched.graph.name,
        system=system.name,
        gpu=system.gpu.name,
        pim=system.pim.name,
        gpu_channels=searched.plan.gpu_channels,
        pim_channels=system.pim_channels,
        dtype=system.dtype,
        accounting=system.accounting,
        timing=costs.side.profiler.name,
        gpu_profiler=costs.profiling.gpu.name,
        gpu_known=gpu_known,
        scheduling=system.scheduling,
        copies=system.copies,
        padding=system.padding,
        splits=searched.maker.splitting,
        channel_sharing=system.channel_sharing,
        launches=system.launches,
        baseline=BASELINE,
        mixture_gpu_only=Baselines.of(searched).mixture,
        latency_gpu_only_ns=baseline.latency_ns,
        latency_ns=evaluation.latency_ns,
        estimate=Estimate.of(searched),
        speedup=searched.speedup,
        conventions=(),
        conventions_missing=tuple(convention_systems(system)),
        accounting_terms=(),
        energy_gpu_only_pj=baseline.energy_pj,
        energy_pj=evaluation.energy_pj,
        energies_gpu_only_pj=baseline.energies_pj,
        energies_pj=evaluation.energies_pj,
        savings_pj=savings_pj(evaluation, baseline),
        verified=verification.verified,
        max_relative_error=verification.max_relative_error,
        tolerance=verification.bound,
        reference_deviation=verification.worst.reference_deviation,
        outputs=verification.outputs,
        regions_verified=len(_verified(verification, searched)),
        timing_violations=violations,
        timing_violations_of=None if violations is None else JUDGED,
        violations_by_rule=verification.violations_by_rule,
        weight_load_ns=weight_load_ns(system, placed_bytes),
        weight_bytes=placed_bytes,
        peak_activation_bytes=PlanMemory(searched.graph, system.dtype).of(searched.candidates),
        regions=_regions(searched, changes.decomposition),
        gpu_part=gpu_part,
        memory=memory,
        **vars(changes),
        assumed=system.assumptions(),
        search_seconds=search_seconds,
        wall_seconds=wall_seconds,
    )


def _regions(searched: Searched, decomposition: DecompositionReport | None) -> tuple[RegionReport, ...]:
    before_ns = _gpu_only(searched, searched.baseline.region_ns, decomposition)
    before_pj = _gpu_only(searched, searched.baseline.region_pj, decomposition)
    programs = programs_of(searched)
    rows = []
    for region in searched.graph.regions:
        candidate = searched.doing[region.name]
        rows.append(
            RegionReport(
                name=region.name,
                covers=candidate.covers,
                mode=candidate.rewrite.mode,
                gpu_share=candidate.gpu_share,
                axis=candidate.rewrite.axis if candidate.rewrite.mode == "SPLIT" else "",
                latency_gpu_only_ns=before_ns[region.name],
                latency_ns=searched.evaluation.region_ns[region.name],
                known=known_parts(Cost.of(candidate)),
                schedule=schedule_text(candidate),
                primitive=candidate.rewrite.primitive,
                on_pim=region.name in candidate.pim_regions,
                pim_capable=region.name not in searched.table.refused,
                reason=searched.plan.choice(region.name).reason,
                size=LayerSize.of(region, searched.system.dtype),
                energy_gpu_only_pj=before_pj[region.name],
                energy_pj=searched.evaluation.region_pj[region.name],
                candidates=candidates_of(searched, region),
                programs=tuple(programs.get(region.name, ())),
            )
        )
    return tuple(rows)


def _gpu_only(
    searched: Searched, baseline: Mapping[str, float], decomposition: DecompositionReport | None
) -> dict[str, float]:
    """The baseline's cost of each region; of a decomposed layer, the cost stands at the chain's first."""
    given = dict(baseline)
    found = {region.name: given.pop(region.name, 0.0) for region in searched.graph.regions}
    for layer in decomposition.layers if decomposition else ():
        first = next((name for name in layer.chain if name in found), None)
        if first is not None:
            found[first] += given.pop(layer.name, 0.0)
    return found


def _verified(verification: Verification, searched: Searched) -> set[str]:
    """PIM regions whose parts all match; appends to a cache match with the attention that reads it."""
    wrong = {whole_name(r.region, searched.doing) for r in verification.regions if not r.matches}
    right = {whole_name(r.region, searched.doing) for r in verification.regions} - wrong
    return right | {
        name for each in searched.caches() for name in (each.keys, each.values) if each.region in right
    }


def weight_load_ns(system: System, placed_bytes: int) -> float:
    """Time to write weights into all PIM channels in parallel, each at the rate of its bus."""
    if not placed_bytes:
        return 0.0
    bytes_per_ns = system.pim.column_bytes / (system.pim.timing["nBL"] * system.pim.tCK_ns)
    return placed_bytes / (bytes_per_ns * system.pim_channels)
