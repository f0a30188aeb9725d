"""Profile the candidates, solve for the best plan, evaluate it."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass

from pimflow.core.candidate import Candidate, Cost, CostTable
from pimflow.core.plan import Choice, Plan
from pimflow.core.program import PimProgram
from pimflow.core.region import RegionGraph
from pimflow.core.split import Split
from pimflow.errors import PlanError, UnknownNameError
from pimflow.hardware import System
from pimflow.placement.candidates import COST_MODEL, Candidates
from pimflow.placement.costs import Costs, Profiling
from pimflow.placement.evaluate import Evaluation, evaluate
from pimflow.placement.pim_runs import check_rows
from pimflow.placement.solve import Solution, solve_dp

__all__ = [
    "Candidates",
    "Costs",
    "Evaluation",
    "Profiling",
    "Searched",
    "apply",
    "check_options",
    "profile",
    "search",
]

OBJECTIVES = ("latency",)
SOLVERS = {"dp": solve_dp}


@dataclass(frozen=True, kw_only=True)
class Searched:
    """A plan with everything it rests on.

    Attributes
    ----------
    graph, system, table
        What was searched.
    maker : Candidates
        Makes further candidates of the same network and system.
    candidates : tuple of Candidate
        Chosen, in region order.
    plan : Plan
    evaluation, gpu_only : Evaluation
        Of the plan, and of the whole network on the GPU with all memory channels.
    """

    graph: RegionGraph
    system: System
    maker: Candidates
    table: CostTable
    candidates: tuple[Candidate, ...]
    plan: Plan
    evaluation: Evaluation
    gpu_only: Evaluation

    def programs(self) -> dict[str, PimProgram]:
        """The program of every region on PIM, weights at rows of their own."""
        programs, row_begin = {}, 0
        for region, candidate in zip(self.graph.regions, self.candidates):
            if candidate.rewrite.mode != "GPU":
                programs[region.name] = self.maker.placed(region, candidate, row_begin)
                row_begin += candidate.placed_rows
        return programs

    def splits(self) -> dict[str, Split]:
        """How every split region is split."""
        return {
            region.name: Split(candidate.rewrite.axis, candidate.rewrite.gpu_rows)
            for region, candidate in zip(self.graph.regions, self.candidates)
            if candidate.rewrite.mode == "SPLIT"
        }


def profile(graph: RegionGraph, maker: Candidates) -> CostTable:
    """Every candidate of every region with its cost."""
    maker.prepare()
    candidates = {region.name: tuple(maker.all(region)) for region in graph.regions}
    refused = {r.name: maker.refusal(r) for r in graph.regions}
    capable = [r for r in graph.regions if not refused[r.name]]
    return CostTable(
        candidates=candidates,
        costs={(name, c.name): Cost.of(c) for name, found in candidates.items() for c in found},
        refused={name: reason for name, reason in refused.items() if reason},
        settle={r.name: maker.settle(r) for r in capable},
        absorb={r.name: maker.absorb(r) for r in capable},
        digest=_digest(graph, maker),
    )


def search(
    graph: RegionGraph,
    system: System,
    costs: Costs | None = None,
    *,
    objective: str = "latency",
    solver: str = "dp",
) -> Searched:
    """The best plan: the best mixed one, or the whole network on the GPU with all channels.

    Parameters
    ----------
    costs
        See `Candidates`.

    Raises
    ------
    UnknownNameError
        If `objective` or `solver` is none of `OBJECTIVES`, `SOLVERS`.
    InfeasibleError
        If its weights do not fit the PIM channels.
    """
    check_options(objective, solver)
    maker = Candidates(graph, system, costs)
    table = profile(graph, maker)
    mixed = SOLVERS[solver](graph, table)
    whole = _gpu_only(graph, maker)
    gpu_only = evaluate(graph, whole, table, system)
    use_mixed = mixed.latency_ns < gpu_only.latency_ns and any(
        c.rewrite.mode != "GPU" for c in mixed.candidates
    )
    solution = mixed if use_mixed else Solution(candidates=whole, latency_ns=gpu_only.latency_ns)
    return _searched(graph, system, maker, table, solution, gpu_only, mixed.latency_ns)


def check_options(objective: str, solver: str) -> None:
    """Raise `UnknownNameError` if there is no such objective or solver."""
    if objective not in OBJECTIVES:
        raise UnknownNameError("objective", objective, OBJECTIVES)
    if solver not in SOLVERS:
        raise UnknownNameError("solver", solver, SOLVERS)


def apply(
    graph: RegionGraph,
    system: System,
    plan: Plan,
    costs: Costs | None = None,
) -> Searched:
    """An edited or stored plan on `system`.

    Raises
    ------
    PlanError
        If it was made for another network, or does something with a region that cannot be done.
    InfeasibleError
        If its weights do not fit the PIM channels.
    """
    if plan.model != graph.digest:
        raise PlanError(f"the plan was made for another network than '{graph.name}'; search again")
    named = [choice.region for choice in plan.choices]
    wanted = [region.name for region in graph.regions]
    if named != wanted:
        odd = sorted(set(named) ^ set(wanted)) or ["their order"]
        raise PlanError(f"the plan does not cover the regions of '{graph.name}' one by one: {odd[0]}")
    maker = Candidates(graph, system, costs)
    table = profile(graph, maker)
    whole = _gpu_only(graph, maker)
    gpu_only = evaluate(graph, whole, table, system)
    if all(choice.mode == "GPU" for choice in plan.choices):
        candidates = whole
    else:
        candidates = tuple(
            _chosen(maker, region, choice) for region, choice in zip(graph.regions, plan.choices)
        )
    latency_ns = evaluate(graph, candidates, table, system).latency_ns
    solution = Solution(candidates=candidates, latency_ns=latency_ns)
    return _searched(graph, system, maker, table, solution, gpu_only, solve_dp(graph, table).latency_ns)


def _chosen(maker: Candidates, region, choice: Choice) -> Candidate:
    expected = {"GPU": 1.0, "PIM": 0.0}.get(choice.mode, choice.gpu_share)
    if choice.gpu_share != expected:
        raise PlanError(
            f"region '{region.name}': mode {choice.mode} has gpu_share {expected:g}, not {choice.gpu_share:g}"
        )
    gpu = Split.of(region.geometry, choice.axis, choice.gpu_share).gpu if region.geometry else 0
    return maker.make(region, choice.mode, gpu, choice.schedule, axis=choice.axis)


def _gpu_only(graph: RegionGraph, maker: Candidates) -> tuple[Candidate, ...]:
    channels = maker.system.gpu.memory_channels
    return tuple(maker.make(region, "GPU", gpu_channels=channels) for region in graph.regions)


def _searched(
    graph: RegionGraph,
    system: System,
    maker: Candidates,
    table: CostTable,
    solution: Solution,
    gpu_only: Evaluation,
    best_mixed_ns: float,
) -> Searched:
    mixed = any(c.rewrite.mode != "GPU" for c in solution.candidates)
    _check_capacity(system, solution.candidates)
    evaluation = evaluate(graph, solution.candidates, table, system)
    choices = tuple(
        Choice(
            region=region.name,
            mode=candidate.rewrite.mode,
            gpu_share=candidate.gpu_share,
            schedule=candidate.rewrite.schedule,
            axis=candidate.rewrite.axis,
            latency_ns=evaluation.region_ns[region.name],
            reason=_reason(table, region.name, candidate, gpu_only, mixed),
        )
        for region, candidate in zip(graph.regions, solution.candidates)
    )
    plan = Plan(
        model=graph.digest,
        system=_digest(graph, maker),
        gpu_channels=system.gpu_channels if mixed else system.gpu.memory_channels,
        choices=choices,
        latency_ns=solution.latency_ns,
        lower_bound_ns=min(best_mixed_ns, gpu_only.latency_ns),
    )
    return Searched(
        graph=graph,
        system=system,
        maker=maker,
        table=table,
        candidates=solution.candidates,
        plan=plan,
        evaluation=evaluation,
        gpu_only=gpu_only,
    )


def _reason(table: CostTable, name: str, chosen: Candidate, gpu_only: Evaluation, mixed: bool) -> str:
    """Why a region stayed on the GPU; empty if it did not."""
    if chosen.rewrite.mode != "GPU":
        return ""
    if name in table.refused:
        return table.refused[name]
    if not mixed:
        return f"no mixed plan beats the GPU with all channels ({gpu_only.latency_ns / 1e3:.1f} us)"
    others = [c for c in table.candidates[name] if c.rewrite.mode != "GPU"]
    best = min(others, key=lambda c: table.cost(name, c).latency_ns)
    here, there = table.cost(name, chosen).latency_ns, table.cost(name, best).latency_ns
    reason = f"{best.name} takes {there / 1e3:.1f} us, the GPU {here / 1e3:.1f} us"
    return reason if there >= here else f"{reason}, but transitions around it cost more than that saves"


def _check_capacity(system: System, candidates: tuple[Candidate, ...]) -> None:
    rows = sum(c.placed_rows for c in candidates)
    lever = "a plan with fewer PIM regions (--plan)"
    check_rows("weights on the PIM channels", rows, system.pim, lever)


def _digest(graph: RegionGraph, maker: Candidates) -> str:
    plain = dataclasses.replace(maker.system, sources={})
    return hashlib.sha256(
        f"{graph.digest} {plain!r} {maker.costs.profilers} {COST_MODEL}".encode()
    ).hexdigest()[:16]
