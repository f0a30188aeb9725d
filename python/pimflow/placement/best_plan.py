"""Generate and price the candidates, search the best plan, evaluate it."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

from pimflow.core.candidate import Candidate, CostTable, EdgeCost, Transforms
from pimflow.core.channel_sets import channel_sets
from pimflow.core.frames import data_frame
from pimflow.core.json_form import Json, json_form
from pimflow.core.plan import Choice, Plan
from pimflow.core.program import PimProgram
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import (
    AttentionRewrite,
    FusedGroupRewrite,
    PimRewrite,
    PipelineRewrite,
    Rewrite,
    SplitRewrite,
    SubstitutionRewrite,
)
from pimflow.core.split import Split
from pimflow.core.stages import Pipeline
from pimflow.core.tensor_placement import ChannelSet
from pimflow.errors import PlanError
from pimflow.fusion import GroupTiling
from pimflow.hardware import System
from pimflow.host import garbage_collection
from pimflow.pim_backend.programs.cached_attention import CachedAttention
from pimflow.placement.candidates import channel_modes, fused_groups, pim_attention, pins, pipelines
from pimflow.placement.candidates.candidates import COST_MODEL, CandidateGenerator
from pimflow.placement.costs.costs import Costs
from pimflow.placement.costs.pim_runs import check_rows
from pimflow.placement.gpu_baseline import gpu_only_plan, gpu_only_search
from pimflow.placement.reasons import reason
from pimflow.placement.solvers.capacity import bank_rows, row_bytes, uses_plain_memory
from pimflow.placement.solvers.evaluate import Evaluation, evaluate
from pimflow.placement.solvers.infeasible import infeasible_error
from pimflow.placement.solvers.objectives import Goal
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.placement.solvers.plan_search import PlanSearch
from pimflow.placement.solvers.plan_state import check_covers
from pimflow.primitives import PRIMITIVES, Primitive

if TYPE_CHECKING:
    from pandas import DataFrame

RewriteKind = TypeVar("RewriteKind", bound=Rewrite)


@dataclass(frozen=True, kw_only=True)
class SearchedNetwork:
    """A network with the costs and candidates that plans of it rest on; see `SearchResult`."""

    generator: CandidateGenerator
    table: CostTable
    gpu_only: Evaluation
    goal: Goal
    original: RegionGraph | None

    @property
    def graph(self) -> RegionGraph:
        """The network that was searched."""
        return self.generator.graph

    @property
    def system(self) -> System:
        """The system that it was searched for."""
        return self.generator.system

    @property
    def costs(self) -> Costs:
        """Where the times of its candidates come from."""
        return self.generator.costs


@dataclass(frozen=True, kw_only=True)
class SearchResult(SearchedNetwork):
    """A plan, with the network, costs and candidates that it rests on.

    Attributes
    ----------
    candidates : tuple of Candidate
        Those of the plan, in the order of their first regions.
    evaluation, gpu_only : Evaluation
        Timelines of the plan, and of the same regions on the GPU with all memory channels.
    goal : Goal
        The goal of the search; the default if a stored plan was applied.
    original : RegionGraph, optional
        The user's network, if `graph` was derived from it, for example by decomposing layers.
    baseline : Evaluation
        The user's network on the GPU with all memory channels: what speed-ups are relative to. Equals
        `gpu_only` if `original` is None.
    gap : float
        By what share of the objective another plan may be better, at most; 0 if the search ended.
    mixture : Evaluation, optional
        The changed network at its best on the GPU with all memory channels: with ``where=pays`` the best
        mixture of original and decomposed layers, else `gpu_only`. None if `original` is None.
    """

    candidates: tuple[Candidate, ...]
    plan: Plan
    evaluation: Evaluation
    baseline: Evaluation
    mixture: Evaluation | None
    gap: float = 0.0

    def __repr__(self) -> str:
        """One line: networks and cost tables are long."""
        gpu_only_ms, ms = self.baseline.latency_ns / 1e6, self.evaluation.latency_ns / 1e6
        return f"SearchResult({self.graph.name} on {self.system.name}: {gpu_only_ms:.4f} → {ms:.4f} ms)"

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
        return data_frame(self.plan.choices)

    @property
    def speedup(self) -> float:
        """Latency of `baseline` over that of the plan."""
        return self.baseline.latency_ns / self.evaluation.latency_ns

    @functools.cached_property
    def candidate_by_region(self) -> dict[str, Candidate]:
        """By region, the candidate that covers it."""
        return {name: candidate for candidate in self.candidates for name in candidate.covers}

    def programs(self) -> dict[str, PimProgram]:
        """PIM programs of all regions and pipeline parts. Each stores its weights in rows of its own."""
        return dict(self._programs)

    @functools.cached_property
    def _programs(self) -> dict[str, PimProgram]:
        programs: dict[str, PimProgram] = {}
        for candidate, row_begin in zip(self.candidates, self._row_begins):
            covers, rewrite = candidate.covers, candidate.rewrite
            if isinstance(rewrite, PipelineRewrite):
                programs |= pipelines.pim_programs(self.generator, covers, rewrite, row_begin)
            elif isinstance(rewrite, AttentionRewrite):
                programs |= self._attention[covers[-1]].programs
            elif isinstance(rewrite, PimRewrite | SplitRewrite):
                region = self.graph.region(covers[0])
                programs[region.name] = self.generator.pim_program(region, rewrite, row_begin)
        return programs

    @property
    def _row_begins(self) -> Iterator[int]:
        """By candidate, the first of its rows of the banks."""
        return itertools.accumulate((c.footprint.bank_rows for c in self.candidates), initial=0)

    def attention(self) -> dict[str, CachedAttention]:
        """By region, attention over a cache in PIM, with its programs."""
        return dict(self._attention)

    @functools.cached_property
    def _attention(self) -> dict[str, CachedAttention]:
        return {
            candidate.covers[-1]: pim_attention.cached_attention(self.generator, candidate, row_begin)
            for candidate, row_begin in zip(self.candidates, self._row_begins)
            if pim_attention.is_cached(candidate)
        }

    def _rewrites(self, kind: type[RewriteKind]) -> Iterator[tuple[tuple[str, ...], RewriteKind]]:
        """The rewrites of one kind, each with its regions."""
        for candidate in self.candidates:
            if isinstance(candidate.rewrite, kind):
                yield candidate.covers, candidate.rewrite

    def splits(self) -> dict[str, Split]:
        """By split region, its split."""
        return {
            name: rewrite.split(self.graph.region(name).layer)
            for (name,), rewrite in self._rewrites(SplitRewrite)
        }

    def group_tilings(self) -> dict[tuple[str, ...], GroupTiling]:
        """The tilings of the groups of regions that one GPU kernel does, by the group's regions."""
        groups = self._rewrites(FusedGroupRewrite)
        return {covers: GroupTiling.parse(rewrite.tiling) for covers, rewrite in groups}

    def substitutions(self) -> dict[str, list[tuple[str, ...]]]:
        """By substitution, the groups of regions that the GPU does by it."""
        groups: dict[str, list[tuple[str, ...]]] = {}
        for covers, rewrite in self._rewrites(SubstitutionRewrite):
            groups.setdefault(rewrite.substitution, []).append(covers)
        return groups

    def channel_sets(self) -> dict[str, ChannelSet]:
        """By region, the set of memory channels that its result lies in; empty if there is one set."""
        return channel_sets(self.candidates)

    def primitives(self) -> dict[str, Primitive]:
        """By region, the convolution primitive that replaces the operator on the GPU."""
        return {c.covers[0]: PRIMITIVES[c.primitive] for c in self.candidates if c.primitive}

    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipelines of the plan."""
        return tuple(itertools.starmap(pipelines.to_pipeline, self._rewrites(PipelineRewrite)))


def profile(graph: RegionGraph, generator: CandidateGenerator) -> CostTable:
    """The cost table: every candidate of every region."""
    generator.prepare()
    caches, cache_reasons = generator.costs.batch_kernels(
        lambda: pim_attention.attention_candidates(generator)
    )
    channels = generator.task_builder.kernel_channels
    groups = generator.costs.batch_kernels(lambda: fused_groups.group_candidates(generator, channels))
    group_candidates = [*pipelines.candidates(generator), *groups, *caches]

    def generate() -> tuple[dict[str, tuple[Candidate, ...]], Transforms]:
        """All candidates that the pins leave, in every use of the channels."""
        candidates = {region.name: generator.candidates(region) for region in graph.regions}
        for candidate in group_candidates:
            candidates[candidate.covers[0]].append(candidate)
        return channel_modes.expand_candidates(generator, pins.pinned_candidates(generator, candidates))

    candidates, transforms = generator.costs.batch_kernels(generate)
    unsupported = {r.name: generator.unsupported_reason(r) for r in graph.regions}
    capable = [r for r in graph.regions if not unsupported[r.name]]
    unsupported |= cache_reasons
    table = CostTable(
        candidates=candidates,
        unsupported_reasons={name: reason for name, reason in unsupported.items() if reason},
        epilogue_cost={r.name: generator.epilogue_cost(r) for r in capable},
        fused_epilogue_cost={r.name: generator.fused_epilogue_cost(r) for r in capable},
        transforms=transforms,
        switch=EdgeCost(task=next(iter(generator.task_builder.switch_tasks), None)),
        overlaps_launches=generator.system.overlaps_launches,
        digest=_digest(graph, generator),
    )
    check_covers(graph, table)
    return table


@garbage_collection.pause()
def search(
    graph: RegionGraph,
    system: System,
    costs: Costs | None = None,
    goal: Goal | None = None,
    original: RegionGraph | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> SearchResult:
    """Search the best plan: the best with PIM, or the whole network on the GPU with all memory channels.

    Parameters
    ----------
    costs
        See `CandidateGenerator`.
    goal : Goal, optional
        Objective, solver, bounds and modes: by default the latency, by the label search, in all modes.
    original : RegionGraph, optional
        See `SearchResult`.
    progress : callable
        See `PlanSearch`.

    Raises
    ------
    InfeasibleError
        If no plan keeps to the bounds.
    PlanError, UnknownNameError
        If a layer cannot be done as it is pinned, or is none of the network.
    """
    goal = goal or Goal()
    how_by_layer = goal.how_by_layer
    generator = CandidateGenerator(graph, system, costs, goal.modes, goal.primitives, pins=how_by_layer)
    table = profile(graph, generator)
    baseline_plan = gpu_only_plan(generator, goal)
    gpu_only = baseline_plan.evaluation
    if goal.objective == "memory":
        baseline_plan = gpu_only_search(generator, goal).best() or baseline_plan
    plans = PlanSearch(graph, table, system, goal, progress)
    best_plan = plans.best()
    mixed_plan = best_plan if best_plan and best_plan.uses_pim else None
    may_leave_pim = {"gpu"}.issuperset(how_by_layer.values())
    allows_baseline = may_leave_pim and plans.allows(baseline_plan)
    if mixed_plan and allows_baseline and goal.rank(baseline_plan) <= goal.rank(mixed_plan):
        mixed_plan = None
    if not mixed_plan and not allows_baseline:
        if not goal.bounds:
            raise PlanError("no plan does all pinned layers as they are pinned; leave out one --pin")
        raise infeasible_error([plans, *([gpu_only_search(generator, goal)] if may_leave_pim else [])])
    plan = mixed_plan or baseline_plan
    if best_plan and not mixed_plan:  # a mixed plan that was not searched may be better than the GPU alone
        value = goal.rank(baseline_plan)[-1]
        plan = replace(plan, value=value, bound=min(best_plan.bound, value))
    network = SearchedNetwork(
        generator=generator, table=table, gpu_only=gpu_only, goal=goal, original=original
    )
    bound_ns = plans.latency_bound_ns
    if may_leave_pim:
        bound_ns = min(bound_ns, gpu_only.latency_ns)
    return to_search_result(network, plan.candidates, plan.gap, bound_ns)


def to_search_result(
    network: SearchedNetwork,
    candidates: tuple[Candidate, ...],
    gap: float = 0.0,
    lower_bound_ns: float = 0.0,
) -> SearchResult:
    """Evaluate `candidates` and make them a plan, with a reason for each region that stays on the GPU.

    `lower_bound_ns` is a lower bound of the latency of all plans; 0 if it was not searched. Raises
    `InfeasibleError` if weights do not fit the PIM channels.
    """
    gpu_only, original = network.gpu_only, network.original
    evaluation = evaluate(network.graph, candidates, network.table, network.system)
    return SearchResult(
        **{field.name: getattr(network, field.name) for field in fields(SearchedNetwork)},
        candidates=candidates,
        plan=_plan(network, candidates, evaluation, lower_bound_ns),
        evaluation=evaluation,
        baseline=gpu_only
        if original is None
        else gpu_only_plan(network.generator.with_graph(original), network.goal).evaluation,
        mixture=None if original is None else gpu_only,
        gap=gap,
    )


def with_lower_bound(search_result: SearchResult) -> SearchResult:
    """`search_result` with a lower bound of the latency of all plans, which takes a search."""
    plans = PlanSearch(search_result.graph, search_result.table, search_result.system, search_result.goal)
    bound_ns = min(plans.latency_bound_ns, search_result.gpu_only.latency_ns)
    return replace(search_result, plan=replace(search_result.plan, lower_bound_ns=bound_ns))


def _plan(
    network: SearchedNetwork,
    candidates: tuple[Candidate, ...],
    evaluation: Evaluation,
    lower_bound_ns: float,
) -> Plan:
    """`candidates` in the form of a plan file."""
    graph, system, table = network.graph, network.system, network.table
    is_mixed = any(candidate.uses_pim for candidate in candidates)
    _check_capacity(network.generator, table, candidates)
    subject = "no mixed plan" if network.original is None else "no mixed plan of the changed network"
    free_rows = system.pim.usable_rows - sum(c.footprint.bank_rows for c in candidates)
    choices = tuple(
        Choice(
            regions=candidate.covers,
            rewrite=candidate.rewrite,
            channels=candidate.channels,
            latency_ns=evaluation.region_times[candidate.covers[0]].latency_ns,
            reason="it is pinned to the GPU (--pin)"
            if network.generator.pins.get(candidate.covers[0]) == "gpu"
            else reason(table, candidate, network.gpu_only, is_mixed, subject, free_rows),
        )
        for candidate in candidates
    )
    return Plan(
        model=graph.digest,
        system=_digest(graph, network.generator),
        gpu_channels=(is_mixed and system.gpu_channels) or system.gpu.memory_channels,
        choices=choices,
        latency_ns=evaluation.latency_ns,
        lower_bound_ns=lower_bound_ns,
    )


def with_candidates(search_result: SearchResult, candidates: tuple[Candidate, ...]) -> SearchResult:
    """`search_result` with other candidates, which cover every region once, in order; `plan` stays."""
    evaluation = evaluate(search_result.graph, candidates, search_result.table, search_result.system)
    return replace(search_result, candidates=candidates, evaluation=evaluation)


def with_plan(search_result: SearchResult) -> SearchResult:
    """The result of `with_candidates` with `plan` updated; raises as `to_search_result`."""
    evaluation, bound_ns = search_result.evaluation, search_result.plan.lower_bound_ns
    return replace(search_result, plan=_plan(search_result, search_result.candidates, evaluation, bound_ns))


def _check_capacity(
    generator: CandidateGenerator, table: CostTable, candidates: tuple[Candidate, ...]
) -> None:
    system, subject, levers = generator.system, "weights", ["a plan with fewer PIM regions (--plan)"]
    device_row_bytes = row_bytes(system)
    cached_candidates = filter(pim_attention.is_cached, candidates)
    cache_rows = {generator.graph.region(c.covers[-1]): c.footprint.bank_rows for c in cached_candidates}
    if cache_rows:
        token_bytes = sum(
            rows * device_row_bytes / region.attention_layer.keys for region, rows in cache_rows.items()
        )
        subject = f"weights and caches ({token_bytes:.0f} bytes a token)"
        levers += ["fewer tokens (--context)", "a smaller batch"]
    subject += " on the PIM channels"
    pool_bytes = 0
    if any(map(uses_plain_memory, candidates)):
        subject += ", beside what they hold as plain memory,"
        pool_bytes = PlanMemory(generator.graph, system.dtype, table).pool_bytes(candidates)
    rows = bank_rows(system, candidates, pool_bytes)
    check_rows(subject, rows, system.pim, *levers)


def _digest(graph: RegionGraph, generator: CandidateGenerator) -> str:
    return hashlib.sha256(
        f"{graph.digest} {generator.system.identity} {generator.costs.profilers} {COST_MODEL}".encode()
    ).hexdigest()[:16]
