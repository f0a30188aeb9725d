"""Generate and price the candidates, search the best plan, evaluate it."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.channel_sets import channel_sets
from pimflow.core.frames import frame
from pimflow.core.json_form import Json, json_form
from pimflow.core.plan import Choice, Plan
from pimflow.core.program import PimProgram
from pimflow.core.region import RegionGraph
from pimflow.core.split import Split
from pimflow.core.stages import Pipeline
from pimflow.fusion import GroupTiling
from pimflow.hardware import System
from pimflow.host import garbage_collection
from pimflow.pim_backend.programs.cached_attention import CachedAttention
from pimflow.placement.candidates import cached, channel_modes, fused_groups, pipelines
from pimflow.placement.candidates.candidates import COST_MODEL, Candidates
from pimflow.placement.candidates.through_l2 import switch
from pimflow.placement.costs.costs import Costs, Profiling
from pimflow.placement.costs.pim_runs import check_rows
from pimflow.placement.gpu_alone import alone_search, gpu_alone, smallest_alone, unsearched
from pimflow.placement.reasons import reason
from pimflow.placement.solvers.capacity import row_bytes, rows_taken, uses_plain_memory
from pimflow.placement.solvers.evaluate import Evaluation, evaluate
from pimflow.placement.solvers.infeasible import infeasible_error
from pimflow.placement.solvers.objectives import Goal
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.placement.solvers.plan_search import PlanSearch
from pimflow.placement.solvers.solution import Solution
from pimflow.placement.solvers.steps import check_covers
from pimflow.primitives import PRIMITIVES, Primitive

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = [
    "Candidates",
    "Costs",
    "Evaluation",
    "Goal",
    "Profiling",
    "Searched",
    "profile",
    "search",
]


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The result of a search: a plan, with the network, costs and candidates that it rests on.

    Attributes
    ----------
    graph, system, table
        The network, the system and the cost table that were searched.
    maker : Candidates
        Generates further candidates of the same network on the same system.
    candidates : tuple of Candidate
        Those of the plan, in the order of their first regions.
    plan : Plan
    evaluation, gpu_only : Evaluation
        Timelines of the plan, and of the same regions on the GPU with all memory channels.
    goal : Goal
        The goal of the search; the default if a stored plan was applied.
    given : RegionGraph, optional
        The user's network, if `graph` was derived from it, for example by decomposing layers.
    baseline : Evaluation
        The user's network on the GPU with all memory channels: what speed-ups are relative to. Equals
        `gpu_only` if `given` is None.
    gap : float
        By what share of the objective another plan may be better, at most; 0 if the search ended.
    mixture : Evaluation, optional
        The changed network at its best on the GPU with all memory channels: with ``where=pays`` the best
        mixture of original and decomposed layers, else `gpu_only`. None if `given` is None.
    """

    graph: RegionGraph
    system: System
    maker: Candidates
    table: CostTable
    candidates: tuple[Candidate, ...]
    plan: Plan
    evaluation: Evaluation
    gpu_only: Evaluation
    goal: Goal
    given: RegionGraph | None
    baseline: Evaluation
    mixture: Evaluation | None
    gap: float = 0.0

    def __repr__(self) -> str:
        """One line: networks and cost tables are long."""
        alone_ms, ms = self.baseline.latency_ns / 1e6, self.evaluation.latency_ns / 1e6
        return f"Searched({self.graph.name} on {self.system.name}: {alone_ms:.4f} → {ms:.4f} ms)"

    def to_json(self) -> dict[str, Json]:
        """Latency and energy of the plan and of the GPU alone, and the plan as in its file."""
        return {
            "network": self.graph.name,
            "system": self.system.name,
            "latency_gpu_only_ns": self.baseline.latency_ns,
            "latency_ns": self.evaluation.latency_ns,
            "speedup": self.speedup,
            "energy_gpu_only_pj": self.baseline.energy_pj,
            "energy_pj": self.evaluation.energy_pj,
            "plan": json_form(self.plan),
        }

    def to_pandas(self) -> DataFrame:
        """One row for each choice of the plan; raises `UsageError` if pandas is not installed."""
        return frame(self.plan.choices)

    @property
    def speedup(self) -> float:
        """Latency of `baseline` over that of the plan."""
        return self.baseline.latency_ns / self.evaluation.latency_ns

    @functools.cached_property
    def doing(self) -> dict[str, Candidate]:
        """By region, the candidate that covers it."""
        return {name: candidate for candidate in self.candidates for name in candidate.covers}

    def programs(self) -> dict[str, PimProgram]:
        """PIM programs of all regions and pipeline parts. Each stores its weights in rows of its own."""
        return dict(self._programs)

    @functools.cached_property
    def _programs(self) -> dict[str, PimProgram]:
        programs, row_begin = {}, 0
        for candidate in self.candidates:
            if candidate.rewrite.mode == "PIPELINE":
                programs |= pipelines.placed(self.maker, candidate, row_begin)
                row_begin += candidate.placed_rows
            elif cached.is_cached(candidate):
                programs |= self._attention[candidate.covers[-1]].programs
                row_begin += candidate.placed_rows
            elif candidate.rewrite.mode != "GPU":
                region = self.graph.region(candidate.covers[0])
                programs[region.name] = self.maker.placed(region, candidate, row_begin)
                row_begin += candidate.placed_rows
        return programs

    def caches(self) -> tuple[cached.PlacedCache, ...]:
        """Attention layers whose caches lie in PIM, each with rows of its own."""
        found, row_begin = [], 0
        for candidate in self.candidates:
            if cached.is_cached(candidate):
                found.append(cached.placed(self.graph, candidate, row_begin))
            row_begin += candidate.placed_rows
        return tuple(found)

    def attention(self) -> dict[str, CachedAttention]:
        """By region, attention over a cache in PIM, with its programs."""
        return dict(self._attention)

    @functools.cached_property
    def _attention(self) -> dict[str, CachedAttention]:
        side = self.maker.costs.side
        return {
            placed.region: CachedAttention.of(
                placed.attention,
                placed.schedule,
                side.pim,
                side.dtype,
                channels=side.channels,
                region=placed.region,
                row_begin=placed.row_begin,
            )
            for placed in self.caches()
        }

    def splits(self) -> dict[str, Split]:
        """By split region, its split."""
        return {
            candidate.covers[0]: Split(candidate.rewrite.axis, candidate.rewrite.gpu_rows)
            for candidate in self.candidates
            if candidate.rewrite.mode == "SPLIT"
        }

    def tiled(self) -> dict[tuple[str, ...], GroupTiling]:
        """The tilings of the groups of regions that one GPU kernel does, by the group's regions."""
        together = (c for c in self.candidates if c.rewrite.mode == "GPU" and c.rewrite.schedule)
        return {candidate.covers: GroupTiling.parse(candidate.rewrite.schedule) for candidate in together}

    def channel_sets(self) -> dict[str, str]:
        """By region, the set of memory channels that its result lies in; empty if there is one set."""
        return channel_sets(self.candidates)

    def primitives(self) -> dict[str, Primitive]:
        """By region, the convolution primitive that replaces the operator on the GPU."""
        named = {c.covers[0]: c.rewrite.primitive for c in self.candidates}
        return {region: PRIMITIVES[name] for region, name in named.items() if name}

    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipelines of the plan."""
        staged = (c for c in self.candidates if c.rewrite.mode == "PIPELINE")
        return tuple(pipelines.pipeline_of(candidate) for candidate in staged)


def profile(graph: RegionGraph, maker: Candidates) -> CostTable:
    """The cost table: every candidate of every region."""
    maker.prepare()
    caches = maker.costs.together(lambda: cached.found(maker))
    runs = (pipelines.candidates(maker), fused_groups.candidates(maker), caches.candidates)
    several = {r.name: tuple(c for each in runs for c in each.get(r.name, ())) for r in graph.regions}

    def every() -> channel_modes.SharedCandidates:
        return channel_modes.shared(maker, {r.name: (*maker.all(r), *several[r.name]) for r in graph.regions})

    forms = maker.costs.together(every)
    candidates = forms.candidates
    refused = {r.name: maker.refusal(r) for r in graph.regions}
    capable = [r for r in graph.regions if not refused[r.name]]
    refused |= dict.fromkeys(caches.capable, "") | caches.refused
    table = CostTable(
        candidates=candidates,
        refused={name: reason for name, reason in refused.items() if reason},
        settle={r.name: maker.settle(r) for r in capable},
        absorb={r.name: maker.absorb(r) for r in capable},
        transforms=forms.transforms,
        switch=switch(maker),
        launched_ahead=maker.system.launched_ahead,
        digest=_digest(graph, maker),
    )
    check_covers(graph, table)
    return table


@garbage_collection.paused()
def search(
    graph: RegionGraph,
    system: System,
    costs: Costs | None = None,
    goal: Goal | None = None,
    given: RegionGraph | None = None,
) -> Searched:
    """Search the best plan: the best with PIM, or the whole network on the GPU with all memory channels.

    Parameters
    ----------
    costs
        See `Candidates`.
    goal : Goal, optional
        Objective, solver, bounds and modes: by default the latency, by the label search, in all modes.
    given : RegionGraph, optional
        See `Searched`.

    Raises
    ------
    InfeasibleError
        If no plan keeps to the bounds.
    """
    goal = goal or Goal()
    maker = Candidates(graph, system, costs, goal.modes, goal.primitives)
    table = profile(graph, maker)
    alone = gpu_alone(maker, goal)
    gpu_only = alone.evaluation
    if goal.objective == "memory":
        alone = smallest_alone(maker, goal)
    plans = PlanSearch(graph, table, system, goal)
    best = plans.best()
    mixed = best if best and any(c.rewrite.mode != "GPU" for c in best.solution.candidates) else None
    if mixed and plans.allows(alone) and goal.rank(alone) <= goal.rank(mixed):
        mixed = None
    if not mixed and not plans.allows(alone):
        raise infeasible_error([plans, alone_search(maker, goal)])
    solution = mixed.solution if mixed else alone.solution
    if best and not mixed:  # a mixed plan that was not searched may be better than the GPU alone
        value = goal.rank(alone)[-1]
        solution = replace(solution, value=value, bound=min(best.solution.bound, value))
    return as_searched(maker, table, solution, gpu_only, plans, given)


def as_searched(
    maker: Candidates,
    table: CostTable,
    solution: Solution,
    gpu_only: Evaluation,
    plans: PlanSearch,
    given: RegionGraph | None,
    bounded: bool = True,
) -> Searched:
    """Evaluate `solution` and make it a plan, with a reason for each region that stays on the GPU.

    The plan gets a lower bound of the latency only if `bounded`, since that takes a search; else 0.

    Raises
    ------
    InfeasibleError
        If its weights do not fit the PIM channels.
    """
    graph, system = maker.graph, maker.system
    bound_ns = min(plans.latency_bound_ns, gpu_only.latency_ns) if bounded else 0.0
    return Searched(
        graph=graph,
        system=system,
        maker=maker,
        table=table,
        candidates=solution.candidates,
        plan=_plan(maker, table, solution, gpu_only, given, bound_ns),
        evaluation=evaluate(graph, solution.candidates, table, system),
        gpu_only=gpu_only,
        goal=plans.goal,
        given=given,
        baseline=gpu_only if given is None else gpu_alone(maker.of(given), plans.goal).evaluation,
        mixture=None if given is None else gpu_only,
        gap=solution.gap if bounded else 0.0,
    )


def _plan(
    maker: Candidates,
    table: CostTable,
    solution: Solution,
    gpu_only: Evaluation,
    given: RegionGraph | None,
    bound_ns: float,
) -> Plan:
    """`solution` in the form of a plan file; `bound_ns` is a lower bound of the latency of all plans."""
    graph, system = maker.graph, maker.system
    mixed = any(c.rewrite.mode != "GPU" for c in solution.candidates)
    _check_capacity(maker, table, solution.candidates)
    evaluation = evaluate(graph, solution.candidates, table, system)
    which = "no mixed plan" if given is None else "no mixed plan of the changed network"
    placed_rows = sum(c.placed_rows for c in solution.candidates)
    rows_left = system.pim.rows_to_use - placed_rows
    choices = tuple(
        Choice(
            region=candidate.covers[0],
            mode=candidate.rewrite.mode,
            gpu_share=candidate.gpu_share,
            schedule=candidate.rewrite.schedule,
            axis=candidate.rewrite.axis,
            latency_ns=evaluation.region_ns[candidate.covers[0]],
            reason=reason(table, candidate, gpu_only, mixed, which, rows_left),
            covers=candidate.covers if len(candidate.covers) > 1 else (),
            stages=candidate.rewrite.stages,
            modes=candidate.rewrite.modes,
            schedules=candidate.rewrite.schedules,
            primitive=candidate.rewrite.primitive,
            finishes=candidate.rewrite.finishes,
            joins=candidate.rewrite.joins,
            channels=candidate.rewrite.channels,
        )
        for candidate in solution.candidates
    )
    return Plan(
        model=graph.digest,
        system=_digest(graph, maker),
        gpu_channels=(mixed and system.gpu_channels) or system.gpu.memory_channels,
        choices=choices,
        latency_ns=evaluation.latency_ns,
        lower_bound_ns=bound_ns,
    )


def tried(searched: Searched, candidates: tuple[Candidate, ...]) -> Searched:
    """`searched` with other candidates, which cover every region once, in order; `plan` is not updated."""
    evaluation = evaluate(searched.graph, candidates, searched.table, searched.system)
    return replace(searched, candidates=candidates, evaluation=evaluation)


def as_planned(found: Searched) -> Searched:
    """The result of `tried` with `plan` updated; raises `InfeasibleError` as `as_searched` does."""
    solution = unsearched(found.candidates, found.evaluation)
    plan = _plan(found.maker, found.table, solution, found.gpu_only, found.given, found.plan.lower_bound_ns)
    return replace(found, plan=plan)


def _check_capacity(maker: Candidates, table: CostTable, candidates: tuple[Candidate, ...]) -> None:
    system, what, levers = maker.system, "weights", ["a plan with fewer PIM regions (--plan)"]
    row_of_all_bytes = row_bytes(system) * system.pim_channels
    held = {maker.graph.region(c.covers[-1]): c.placed_rows for c in candidates if cached.is_cached(c)}
    if held:
        token_bytes = sum(rows * row_of_all_bytes / each.attends.keys for each, rows in held.items())
        what = f"weights and caches ({token_bytes:.0f} bytes a token)"
        levers += ["fewer tokens (--context)", "a smaller batch"]
    what += " on the PIM channels"
    if any(map(uses_plain_memory, candidates)):
        what += ", beside what they hold as plain memory,"
    rows = rows_taken(system, PlanMemory(maker.graph, system.dtype, table), candidates)
    check_rows(what, rows, system.pim, *levers)


def _digest(graph: RegionGraph, maker: Candidates) -> str:
    return hashlib.sha256(
        f"{graph.digest} {maker.system.identity} {maker.costs.profilers} {COST_MODEL}".encode()
    ).hexdigest()[:16]
