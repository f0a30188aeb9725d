"""A stored or edited plan, applied to a network and a system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pimflow.core.candidate import Candidate, Cost, CostTable
from pimflow.core.plan import Choice, Plan
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import AttentionRewrite, FusedGroupRewrite, GroupRewrite, SubstitutionRewrite
from pimflow.core.tensor_placement import GPU_CHANNELS_ALONE
from pimflow.errors import PlanError, hint
from pimflow.fusion import GroupTiling
from pimflow.hardware import System
from pimflow.placement.best_plan import SearchedNetwork, SearchResult, profile, to_search_result
from pimflow.placement.candidates import channel_modes, rewrites
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.costs.costs import Costs
from pimflow.placement.gpu_baseline import gpu_only_plan
from pimflow.placement.solvers import plan_state
from pimflow.placement.solvers.evaluate import Evaluation, evaluate
from pimflow.placement.solvers.objectives import Goal
from pimflow.placement.solvers.plan_state import PlanState
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
        Of the baseline on the GPU alone: whether it may use convolution primitives, as it may if the plan
        does, and the bound on its memory, if it can meet it.
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
    candidates, table = plan_candidates(generator, table, plan)
    network = SearchedNetwork(
        generator=generator, table=table, gpu_only=gpu_only, goal=goal, original=original
    )
    return to_search_result(network, candidates)


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

    Only the baseline on the GPU alone is searched, and only the plan's candidates are timed. Raises
    `PlanError` if a choice of the plan is impossible with these sizes.
    """
    generator, table = _with_graph(search_result, graph, search_result.system, search_result.costs)
    searched, choices = search_result.graph, search_result.plan.choices
    unchanged_candidates = {
        choice: candidate
        for choice, candidate in zip(choices, search_result.candidates, strict=True)
        if all(graph.region(name) == searched.region(name) for name in choice.regions)
    }
    candidates, table = plan_candidates(generator, table, search_result.plan, unchanged_candidates)
    return Charges(
        graph=graph,
        evaluation=evaluate(graph, candidates, table, search_result.system),
        baseline=gpu_only_plan(generator, search_result.goal).evaluation,
    )


def _with_graph(
    search_result: SearchResult, graph: RegionGraph, system: System, costs: Costs
) -> tuple[CandidateGenerator, CostTable]:
    """A generator of `graph` on `system`, and the table of `search_result` with its deferred epilogues."""
    searched, table = search_result.generator, search_result.table
    generator = CandidateGenerator(graph, system, costs, searched.modes, searched.primitives)
    capable = [region for region in graph.regions if region.name in table.epilogue_cost]
    fused_epilogue_cost = {r.name: generator.fused_epilogue_cost(r) for r in capable}
    return generator, replace(
        table,
        epilogue_cost=table.epilogue_cost | {r.name: generator.epilogue_cost(r) for r in capable},
        fused_epilogue_cost=table.fused_epilogue_cost | fused_epilogue_cost,
    )


def reevaluate(search_result: SearchResult, system: System, costs: Costs) -> Evaluation:
    """Evaluate the plan of `search_result` on `system`, which has the same devices and another accounting.

    Nothing is searched, and only the plan's candidates are timed. All tensors lie in the GPU channels if
    only one of both accountings charges channel modes, or if a choice is impossible at its channels, such as
    a result that stays in the L2, but whose epilogue is now a kernel of its own.
    """
    plan = search_result.plan
    if system.charges("channel-modes") != search_result.system.charges("channel-modes"):
        plan = plan.with_gpu_channels()
    if not plan.uses_pim:
        return search_result.evaluation
    return _evaluation(*_with_graph(search_result, search_result.graph, system, costs), plan)


def plan_evaluation(search_result: SearchResult, plan: Plan) -> Evaluation | None:
    """Evaluate another plan of the network, the system and the costs of `search_result`; None if impossible.

    Its tensors lie in the GPU channels if a choice is impossible at its own.
    """
    try:
        return _evaluation(search_result.generator, search_result.table, plan)
    except PlanError:
        return None


def _evaluation(generator: CandidateGenerator, table: CostTable, plan: Plan) -> Evaluation:
    """Evaluate a plan, in the GPU channels if a choice is impossible at its own."""
    try:
        candidates, table = plan_candidates(generator, table, plan)
    except PlanError:
        candidates, table = plan_candidates(generator, table, plan.with_gpu_channels())
    return evaluate(generator.graph, candidates, table, generator.system)


def plan_candidates(
    generator: CandidateGenerator,
    table: CostTable,
    plan: Plan,
    known: Mapping[Choice, Candidate] | None = None,
) -> tuple[tuple[Candidate, ...], CostTable]:
    """The candidates of a plan, and `table` with the transforms between them.

    `table` has the candidates of several regions that the plan says no details of, `known` candidates of some
    of the choices. Raises `PlanError` if a choice is impossible, by itself or after those before it.
    """
    known = known or {}
    if not plan.uses_pim:
        channels = generator.system.gpu.memory_channels
        return tuple(_candidate(generator, table, choice, channels) for choice in plan.choices), table
    candidates = tuple(
        known.get(choice) or _with_choice_channels(generator, table, choice) for choice in plan.choices
    )
    plan_transforms = channel_modes.transforms(generator, candidates)  # a split may be missing in the table
    table = replace(table, transforms=table.transforms | plan_transforms)
    _require_readable(generator, table, candidates)
    return candidates, table


def _candidate(
    generator: CandidateGenerator, table: CostTable, choice: Choice, channels: int | None = None
) -> Candidate:
    """The candidate of a choice, with `channels` memory channels of the GPU; by default as a mixed plan."""
    rewrite, covers = choice.rewrite, choice.regions
    if isinstance(rewrite, SubstitutionRewrite) or (
        isinstance(rewrite, FusedGroupRewrite | AttentionRewrite) and rewrite == type(rewrite)()
    ):
        fastest = _fastest_candidate(table, covers, rewrite)
        if channels is None:
            return fastest
        rewrite = fastest.rewrite
    if isinstance(rewrite, FusedGroupRewrite):
        try:
            tiling = GroupTiling.parse(rewrite.tiling)
        except ValueError as error:
            raise PlanError(f"region '{covers[0]}': schedule {error}") from None
        if reason := generator.tilings.unsupported_reason(covers, tiling):
            raise PlanError(f"regions {', '.join(covers)} cannot be one kernel: {reason}; search again")
    return rewrites.make(generator, covers, rewrite, channels)


ANY_PLAN = "without 'channels' in any choice, all tensors lie where everything can read them"


def _with_choice_channels(generator: CandidateGenerator, table: CostTable, choice: Choice) -> Candidate:
    """The candidate of `choice` at its channels; raises `PlanError` if there is none."""
    candidate = _candidate(generator, table, choice)
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


def _fastest_candidate(
    table: CostTable, covers: tuple[str, ...], rewrite: GroupRewrite | AttentionRewrite
) -> Candidate:
    """The fastest candidate of the table with such a rewrite; with any of its kind if it says no more."""
    runs = [c for c in table.candidates[covers[0]] if c.covers == covers and c.channels == GPU_CHANNELS_ALONE]
    same_kind = {c.rewrite for c in runs if isinstance(c.rewrite, type(rewrite))}
    possible = same_kind if rewrite == type(rewrite)() else {rewrite}
    fitting = [c for c in runs if c.rewrite in possible]
    if not fitting:
        names = ", ".join(c.name for c in runs) or "none, without the options that the plan was made with"
        raise PlanError(
            f"regions {', '.join(covers)} cannot be {rewrite.mode} together so; candidates: {names}"
        )
    return min(fitting, key=lambda c: Cost.from_candidate(c).latency_ns)
