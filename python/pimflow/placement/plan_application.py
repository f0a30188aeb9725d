"""A stored or edited plan, applied to a network and a system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pimflow.core.candidate import Candidate, Cost, CostTable
from pimflow.core.plan import Choice, Plan
from pimflow.core.region import RegionGraph
from pimflow.core.rewrite import (
    TILES,
    AttentionRewrite,
    FusedGroupRewrite,
    GpuRewrite,
    GroupRewrite,
    PimRewrite,
    PipelineRewrite,
    SplitRewrite,
    SubstitutionRewrite,
)
from pimflow.core.tensor_placement import GPU_CHANNELS_ALONE
from pimflow.errors import PlanError, hint
from pimflow.fusion import GroupTiling
from pimflow.hardware import System
from pimflow.placement.best_plan import SearchedNetwork, SearchResult, profile, to_search_result
from pimflow.placement.candidates import channel_modes, fused_groups, pim_attention, pipelines
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.costs.costs import Costs
from pimflow.placement.gpu_baseline import gpu_only_plan, gpu_only_table
from pimflow.placement.solvers import plan_state
from pimflow.placement.solvers.evaluate import Evaluation, evaluate
from pimflow.placement.solvers.objectives import Goal
from pimflow.placement.solvers.plan_state import PlanState
from pimflow.placement.solvers.solution import Solution
from pimflow.primitives import PRIMITIVES


def apply(
    graph: RegionGraph,
    system: System,
    plan: Plan,
    costs: Costs | None = None,
    goal: Goal | None = None,
    original: RegionGraph | None = None,
) -> SearchResult:
    """Apply an edited or stored plan on `system`; its lower bound is 0 (see `with_lower_bound`).

    Parameters
    ----------
    goal : Goal, optional
        Says whether the baseline on the GPU alone may use convolution primitives, as it may if the plan does,
        and the bound on the memory of the baseline, if it can meet it.
    original : RegionGraph, optional
        See `SearchResult`.

    Raises
    ------
    PlanError
        If the plan was made for another network, or a choice is impossible.
    InfeasibleError
        If its weights do not fit the PIM channels.
    """
    _require_regions(graph, plan)
    _require_primitives(plan)
    uses_primitives = any(choice.primitive for choice in plan.choices)
    goal = goal or Goal()
    goal = Goal(primitives=goal.primitives or uses_primitives, max_memory_bytes=goal.max_memory_bytes)
    generator = CandidateGenerator(graph, system, costs, primitives=goal.primitives)
    table = profile(graph, generator)
    gpu_only = gpu_only_plan(generator, goal).evaluation
    if not any(choice.uses_pim for choice in plan.choices):
        candidates = tuple(_gpu_only_candidate(generator, table, choice) for choice in plan.choices)
    else:
        candidates, table = _plan_candidates(graph, generator, table, plan)
        _require_readable(generator, table, candidates)
    network = SearchedNetwork(
        generator=generator, table=table, gpu_only=gpu_only, goal=goal, original=original
    )
    return to_search_result(network, Solution(candidates=candidates))


def _require_regions(graph: RegionGraph, plan: Plan) -> None:
    """Raise `PlanError` unless a plan was made for `graph` and covers each region once, in order."""
    names = [name for choice in plan.choices for name in choice.regions]
    expected = [region.name for region in graph.regions]
    if plan.model != graph.digest:
        if names != expected and sorted(names) == sorted(expected):
            raise PlanError(
                f"the plan has the layers of '{graph.name}' in another order: apply it with --reorder, "
                "or search again"
            )
        raise PlanError(f"the plan was made for another network than '{graph.name}'; search again")
    if names != expected:
        difference = sorted(set(names) ^ set(expected)) or ["their order"]
        raise PlanError(f"the plan does not do each region of '{graph.name}' once, in order: {difference[0]}")


def _require_primitives(plan: Plan) -> None:
    """Raise `PlanError` if a plan names an unknown convolution primitive."""
    for choice in plan.choices:
        if choice.primitive and choice.primitive not in PRIMITIVES:
            names = [primitive.name for primitive in PRIMITIVES.values() if primitive.target == "cuda"]
            suggestion = hint(choice.primitive, names)
            raise PlanError(f"region '{choice.region}': unknown primitive '{choice.primitive}'; {suggestion}")


@dataclass(frozen=True, kw_only=True)
class Charges:
    """Evaluations of a network by a plan and on the GPU alone; fields are those of `SearchResult`."""

    graph: RegionGraph
    evaluation: Evaluation
    baseline: Evaluation


def graph_charges(search_result: SearchResult, graph: RegionGraph) -> Charges:
    """Evaluate the plan of `search_result` for `graph`, the same network with other sizes.

    Only the baseline on the GPU alone is searched, and only the plan's candidates are timed.

    Raises
    ------
    PlanError
        If a choice of the plan is impossible with these sizes.
    """
    generator = CandidateGenerator(
        graph,
        search_result.system,
        search_result.costs,
        search_result.generator.modes,
        search_result.generator.primitives,
    )
    baseline = gpu_only_plan(generator, search_result.goal).evaluation
    if not any(choice.uses_pim for choice in search_result.plan.choices):
        table = gpu_only_table(generator)
        candidates = tuple(
            _gpu_only_candidate(generator, table, choice) for choice in search_result.plan.choices
        )
    else:
        table = _table_with_transitions(search_result, generator)
        candidates, table = _plan_candidates(
            graph, generator, table, search_result.plan, _unchanged_candidates(search_result, graph)
        )
    return Charges(
        graph=graph, evaluation=evaluate(graph, candidates, table, search_result.system), baseline=baseline
    )


def _unchanged_candidates(search_result: SearchResult, graph: RegionGraph) -> dict[Choice, Candidate]:
    """By choice, the candidates of `search_result` whose regions are the same in `graph`."""
    searched = search_result.graph
    return {
        choice: candidate
        for choice, candidate in zip(search_result.plan.choices, search_result.candidates, strict=True)
        if all(graph.region(name) == searched.region(name) for name in choice.regions)
    }


def _table_with_transitions(search_result: SearchResult, generator: CandidateGenerator) -> CostTable:
    """The table of `search_result` with the costs of deferred epilogues of the regions of `generator`."""
    table = search_result.table
    capable = [region for region in generator.graph.regions if region.name in table.epilogue_cost]
    return replace(
        table,
        epilogue_cost=table.epilogue_cost | {r.name: generator.epilogue_cost(r) for r in capable},
        fused_epilogue_cost=table.fused_epilogue_cost
        | {r.name: generator.fused_epilogue_cost(r) for r in capable},
    )


def reevaluate(search_result: SearchResult, system: System, costs: Costs) -> Evaluation:
    """Evaluate the plan of `search_result` on `system`, which has the same devices and another accounting.

    Nothing is searched, and only the plan's candidates are timed. All tensors lie in the GPU channels if
    only one of both accountings charges channel modes, or if a choice is impossible at its channels, such as
    a result that stays in the L2, but whose epilogue is now a kernel of its own.
    """
    plan, graph = search_result.plan, search_result.graph
    if system.charges("channel-modes") != search_result.system.charges("channel-modes"):
        plan = plan.with_gpu_channels()
    if not any(choice.uses_pim for choice in plan.choices):
        return search_result.evaluation
    generator = CandidateGenerator(
        graph, system, costs, search_result.generator.modes, search_result.generator.primitives
    )
    table = _table_with_transitions(search_result, generator)
    try:
        candidates, table = _plan_candidates(graph, generator, table, plan)
    except PlanError:
        candidates, table = _plan_candidates(graph, generator, table, plan.with_gpu_channels())
    return evaluate(graph, candidates, table, system)


def plan_evaluation(search_result: SearchResult, plan: Plan) -> Evaluation | None:
    """Evaluate another plan of the network, the system and the costs of `search_result`; None if impossible.

    Its tensors lie in the GPU channels if a choice is impossible at its own.
    """
    graph, generator, table = search_result.graph, search_result.generator, search_result.table
    for variant in (plan, plan.with_gpu_channels()):
        try:
            if any(choice.uses_pim for choice in variant.choices):
                candidates, table = _plan_candidates(graph, generator, table, variant)
                _require_readable(generator, table, candidates)
            else:
                candidates = tuple(_gpu_only_candidate(generator, table, c) for c in variant.choices)
        except PlanError:
            continue
        return evaluate(graph, candidates, table, search_result.system)
    return None


def _plan_candidates(
    graph: RegionGraph,
    generator: CandidateGenerator,
    table: CostTable,
    plan: Plan,
    known: Mapping[Choice, Candidate] | None = None,
) -> tuple[tuple[Candidate, ...], CostTable]:
    """The candidates of a plan with PIM, and `table` with the transforms between them.

    Choices in `known` have the candidates there.
    """
    known = known or {}
    candidates = tuple(
        known[choice]
        if choice in known
        else _with_choice_channels(generator, _choice_candidate(graph, generator, table, choice), choice)
        for choice in plan.choices
    )
    plan_transforms = channel_modes.transforms(generator, candidates)  # a split may be missing in the table
    return candidates, replace(table, transforms=table.transforms | plan_transforms)


def _choice_candidate(
    graph: RegionGraph, generator: CandidateGenerator, table: CostTable, choice: Choice
) -> Candidate:
    rewrite = choice.rewrite
    match rewrite:
        case PipelineRewrite():
            pipeline = pipelines.to_pipeline(choice.regions, rewrite)
            return pipelines.make(generator, pipeline, rewrite.schedules)
        case FusedGroupRewrite() | SubstitutionRewrite():
            return _group_candidate(generator, table, choice.regions, rewrite)
        case AttentionRewrite():
            if rewrite.schedule:
                return pim_attention.make(generator, choice.regions, rewrite.schedule)
            return _fastest_candidate(table, choice.regions, rewrite)
        case GpuRewrite() | PimRewrite() | SplitRewrite():
            return generator.make(graph.region(choice.region), rewrite)


ANY_PLAN = "without 'channels' in any choice, all tensors lie where everything can read them"


def _with_choice_channels(generator: CandidateGenerator, candidate: Candidate, choice: Choice) -> Candidate:
    """The variant of `candidate` at the channels of `choice`; raises `PlanError` if there is none."""
    if choice.channels != GPU_CHANNELS_ALONE and not generator.system.is_time_shared:
        raise PlanError(
            f"region '{choice.region}': channels '{choice.channels}' are for a time-shared system: give "
            "--channel-sharing time-shared, or search again"
        )
    variant = channel_modes.with_channels(generator, candidate, choice.channels)
    if variant is None:
        raise PlanError(
            f"region '{choice.region}' cannot be {choice.mode} at channels '{choice.channels}'; {ANY_PLAN}"
        )
    return variant


def _require_readable(
    generator: CandidateGenerator, table: CostTable, candidates: Sequence[Candidate]
) -> None:
    """Raise `PlanError` if a candidate is impossible after those before it (`plan_state.is_feasible`)."""
    state = PlanState()
    for candidate in candidates:
        if not plan_state.is_feasible(generator.graph, table, candidate, state):
            raise PlanError(
                f"region '{candidate.covers[0]}' reads a tensor that lies in channels where it cannot be "
                f"read meanwhile: {_readable_channels(generator, table, candidate, state)}"
                f"change 'channels' of what makes it; {ANY_PLAN}"
            )
        state = plan_state.next_state(generator.graph, candidate, state)


def _readable_channels(
    generator: CandidateGenerator, table: CostTable, candidate: Candidate, state: PlanState
) -> str:
    """A text of the `channels` at which `candidate` is possible in `state`; empty if there are none."""
    variants = channel_modes.channel_variants(
        generator, [channel_modes.with_gpu_channels(generator, candidate)]
    )
    table = replace(table, transforms=table.transforms | channel_modes.transforms(generator, variants))
    fitting = [
        variant for variant in variants if plan_state.is_feasible(generator.graph, table, variant, state)
    ]
    names = dict.fromkeys(repr(str(variant.channels)) for variant in fitting)
    return f"'channels' of it may be {', '.join(names)}; or " if names else ""


def _group_candidate(
    generator: CandidateGenerator,
    table: CostTable,
    covers: tuple[str, ...],
    rewrite: GroupRewrite,
    channels: int | None = None,
) -> Candidate:
    """The candidate of several regions on the GPU; the fastest of the table without a tiling."""
    if isinstance(rewrite, FusedGroupRewrite) and rewrite.tiling.startswith(TILES):
        return _tile_candidate(generator, covers, rewrite, channels)
    candidate = _fastest_candidate(table, covers, rewrite)
    return candidate if channels is None else fused_groups.with_channel_count(generator, candidate, channels)


def _fastest_candidate(
    table: CostTable, covers: tuple[str, ...], rewrite: GroupRewrite | AttentionRewrite
) -> Candidate:
    """The fastest candidate of the table that does several regions as `rewrite` does."""
    region_candidates = table.candidates[covers[0]]
    runs = [c for c in region_candidates if c.covers == covers and c.channels == GPU_CHANNELS_ALONE]
    any_rewrite = type(rewrite)()
    fitting = [
        c for c in runs if isinstance(c.rewrite, type(rewrite)) and rewrite in (c.rewrite, any_rewrite)
    ]
    if not fitting:
        candidate_names = (
            ", ".join(c.name for c in runs) or "none, without the options that the plan was made with"
        )
        raise PlanError(
            f"regions {', '.join(covers)} cannot be {rewrite.mode} together so; candidates: {candidate_names}"
        )
    return min(fitting, key=lambda c: Cost.from_candidate(c).latency_ns)


def _tile_candidate(
    generator: CandidateGenerator, covers: tuple[str, ...], rewrite: FusedGroupRewrite, channels: int | None
) -> Candidate:
    try:
        tiling = GroupTiling.parse(rewrite.tiling)
    except ValueError as error:
        raise PlanError(f"region '{covers[0]}': schedule {error}") from None
    if reason := generator.tilings.unsupported_reason(covers, tiling):
        raise PlanError(f"regions {', '.join(covers)} cannot be one kernel: {reason}; search again")
    return fused_groups.make(generator, covers, channels, tiling)


def _gpu_only_candidate(generator: CandidateGenerator, table: CostTable, choice: Choice) -> Candidate:
    """The candidate of a choice in a plan without PIM, with all memory channels."""
    channels, rewrite = generator.system.gpu.memory_channels, choice.rewrite
    if isinstance(rewrite, GroupRewrite):
        return _group_candidate(generator, table, choice.regions, rewrite, channels)
    assert isinstance(rewrite, GpuRewrite)
    return generator.make(generator.graph.region(choice.region), rewrite, channels)
