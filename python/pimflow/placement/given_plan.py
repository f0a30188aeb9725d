"""A stored or edited plan, applied to a network and a system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pimflow.core.candidate import Candidate, Cost, CostTable, EdgeCost
from pimflow.core.plan import Choice, Plan
from pimflow.core.region import RegionGraph
from pimflow.core.split import Split
from pimflow.core.stages import Pipeline
from pimflow.errors import PlanError, hint
from pimflow.fusion import TILES, GroupTiling
from pimflow.hardware import System
from pimflow.placement.best_plan import SearchResult, profile, to_search_result
from pimflow.placement.candidates import cached, channel_modes, fused_groups, pipelines
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.costs.costs import Costs
from pimflow.placement.gpu_alone import gpu_only_plan, gpu_only_table, to_solution
from pimflow.placement.solvers import steps
from pimflow.placement.solvers.evaluate import Evaluation, evaluate
from pimflow.placement.solvers.objectives import Goal
from pimflow.placement.solvers.plan_search import PlanSearch
from pimflow.placement.solvers.steps import PlanState
from pimflow.primitives import PRIMITIVES


def apply(
    graph: RegionGraph,
    system: System,
    plan: Plan,
    costs: Costs | None = None,
    *,
    primitives: bool = False,
    max_memory_bytes: float | None = None,
    original: RegionGraph | None = None,
    bounded: bool = False,
) -> SearchResult:
    """Apply an edited or stored plan on `system`.

    Parameters
    ----------
    primitives : bool
        Whether the baseline on the GPU alone may use convolution primitives; it may if the plan does.
    max_memory_bytes : float, optional
        Bound on the memory of the baseline, if it can meet it.
    original : RegionGraph, optional
        See `SearchResult`.
    bounded : bool
        Whether to search for a lower bound of all plans; else the bound is 0.

    Raises
    ------
    PlanError
        If the plan was made for another network, or a choice is impossible.
    InfeasibleError
        If its weights do not fit the PIM channels.
    """
    named = [name for choice in plan.choices for name in choice.regions]
    expected = [region.name for region in graph.regions]
    if plan.model != graph.digest:
        if named != expected and sorted(named) == sorted(expected):
            raise PlanError(
                f"the plan has the layers of '{graph.name}' in another order: apply it with --reorder, "
                "or search again"
            )
        raise PlanError(f"the plan was made for another network than '{graph.name}'; search again")
    if named != expected:
        difference = sorted(set(named) ^ set(expected)) or ["their order"]
        raise PlanError(f"the plan does not do each region of '{graph.name}' once, in order: {difference[0]}")
    for choice in plan.choices:
        if choice.primitive and choice.primitive not in PRIMITIVES:
            suggestion = hint(
                choice.primitive,
                [primitive.name for primitive in PRIMITIVES.values() if primitive.target == "cuda"],
            )
            raise PlanError(f"region '{choice.region}': unknown primitive '{choice.primitive}'; {suggestion}")
        if choice.primitive and (choice.mode != "GPU" or len(choice.regions) > 1):
            raise PlanError(
                f"region '{choice.region}': a primitive computes one region that is wholly on the GPU, not "
                f"{choice.mode} of {len(choice.regions)} regions"
            )
    plan_names_primitive = any(choice.primitive for choice in plan.choices)
    goal = Goal(primitives=primitives or plan_names_primitive, max_memory_bytes=max_memory_bytes)
    generator = CandidateGenerator(graph, system, costs, primitives=goal.primitives)
    table = profile(graph, generator)
    gpu_only = gpu_only_plan(generator, goal).evaluation
    if all(choice.mode == "GPU" for choice in plan.choices):
        candidates = tuple(_gpu_only_candidate(generator, table, choice) for choice in plan.choices)
    else:
        candidates, table = _plan_candidates(graph, generator, table, plan)
        _require_readable(generator, table, candidates)
    solution = to_solution(candidates, evaluate(graph, candidates, table, system))
    plans = PlanSearch(graph, table, system, goal)
    return to_search_result(generator, table, solution, gpu_only, plans, original, bounded)


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
        search_result.generator.costs,
        search_result.generator.modes,
        search_result.generator.primitives,
    )
    baseline = gpu_only_plan(generator, search_result.goal).evaluation
    if all(choice.mode == "GPU" for choice in search_result.plan.choices):
        table = gpu_only_table(generator)
        candidates = tuple(
            _gpu_only_candidate(generator, table, choice) for choice in search_result.plan.choices
        )
    else:
        table = replace(search_result.table, **_transitions(search_result, generator))
        candidates, table = _plan_candidates(graph, generator, table, search_result.plan)
    return Charges(
        graph=graph, evaluation=evaluate(graph, candidates, table, search_result.system), baseline=baseline
    )


def _transitions(
    search_result: SearchResult, generator: CandidateGenerator
) -> dict[str, dict[str, EdgeCost]]:
    """The costs of deferred epilogues of the regions of `generator`, as fields of a `CostTable`."""
    capable = [
        region for region in generator.graph.regions if region.name in search_result.table.epilogue_cost
    ]
    return {
        "epilogue_cost": search_result.table.epilogue_cost
        | {region.name: generator.epilogue_cost(region) for region in capable},
        "fused_epilogue_cost": search_result.table.fused_epilogue_cost
        | {region.name: generator.fused_epilogue_cost(region) for region in capable},
    }


def reevaluate(search_result: SearchResult, system: System, costs: Costs) -> Evaluation:
    """Evaluate the plan of `search_result` on `system`, which has the same devices and another accounting.

    Nothing is searched, and only the plan's candidates are timed. All tensors lie in the GPU channels if
    only one of both accountings charges channel modes, or if a choice is impossible at its channels, such as
    a result that stays in the L2, but whose epilogue is now a kernel of its own.
    """
    plan, graph = search_result.plan, search_result.graph
    if system.charges("channel-modes") != search_result.system.charges("channel-modes"):
        plan = plan.with_gpu_channels()
    if all(choice.mode == "GPU" for choice in plan.choices):
        return search_result.evaluation
    generator = CandidateGenerator(
        graph, system, costs, search_result.generator.modes, search_result.generator.primitives
    )
    table = replace(search_result.table, **_transitions(search_result, generator))
    try:
        candidates, table = _plan_candidates(graph, generator, table, plan)
    except PlanError:
        candidates, table = _plan_candidates(graph, generator, table, plan.with_gpu_channels())
    return evaluate(graph, candidates, table, system)


def _plan_candidates(
    graph: RegionGraph, generator: CandidateGenerator, table: CostTable, plan: Plan
) -> tuple[tuple[Candidate, ...], CostTable]:
    """The candidates of a plan with PIM, and `table` with the transforms between them."""
    chosen_candidates = (_choice_candidate(graph, generator, table, choice) for choice in plan.choices)
    candidates = tuple(
        _with_choice_channels(generator, candidate, choice)
        for candidate, choice in zip(chosen_candidates, plan.choices)
    )
    plan_transforms = channel_modes.transforms(generator, candidates)  # a split may be missing in the table
    return candidates, replace(table, transforms=table.transforms | plan_transforms)


def _choice_candidate(
    graph: RegionGraph, generator: CandidateGenerator, table: CostTable, choice: Choice
) -> Candidate:
    if choice.mode == "PIPELINE":
        return _pipeline_candidate(generator, choice)
    if len(choice.regions) > 1:
        return _run_candidate(generator, table, choice)
    region = graph.region(choice.region)
    _check_share(choice)
    gpu_extent = (
        Split.from_gpu_share(region.geometry, choice.axis, choice.gpu_share).gpu if region.geometry else 0
    )
    return generator.make(
        region,
        choice.mode,
        gpu_extent,
        choice.schedule,
        axis=choice.axis,
        primitive=choice.primitive,
        finishes=choice.finishes,
        joins=choice.joins,
    )


ANY_PLAN = "without 'channels' in any choice, all tensors lie where everything can read them"


def _with_choice_channels(generator: CandidateGenerator, candidate: Candidate, choice: Choice) -> Candidate:
    """The variant of `candidate` at the channels of `choice`; raises `PlanError` if there is none."""
    if choice.channels and not generator.system.is_time_shared:
        raise PlanError(
            f"region '{choice.region}': channels {choice.channels!r} are for a time-shared system: give "
            "--channel-sharing time-shared, or search again"
        )
    variant = channel_modes.with_channels(generator, candidate, choice.channels)
    if variant is None:
        raise PlanError(
            f"region '{choice.region}' cannot be {choice.mode} at channels {choice.channels!r}; {ANY_PLAN}"
        )
    return variant


def _require_readable(
    generator: CandidateGenerator, table: CostTable, candidates: Sequence[Candidate]
) -> None:
    """Raise `PlanError` if a candidate is impossible after those before it (`steps.is_feasible`)."""
    state = PlanState()
    for candidate in candidates:
        if not steps.is_feasible(generator.graph, table, candidate, state):
            raise PlanError(
                f"region '{candidate.covers[0]}' reads a tensor that lies in channels where it cannot be "
                f"read meanwhile: {_readable_channels(generator, table, candidate, state)}"
                f"change 'channels' of what makes it; {ANY_PLAN}"
            )
        state = steps.next_state(generator.graph, candidate, state)


def _readable_channels(
    generator: CandidateGenerator, table: CostTable, candidate: Candidate, state: PlanState
) -> str:
    """A text of the `channels` at which `candidate` is possible in `state`; empty if there are none."""
    variants = channel_modes.channel_variants(
        generator, [channel_modes.with_gpu_channels(generator, candidate)]
    )
    table = replace(table, transforms=table.transforms | channel_modes.transforms(generator, variants))
    fitting = [variant for variant in variants if steps.is_feasible(generator.graph, table, variant, state)]
    names = dict.fromkeys(repr(variant.rewrite.channels) for variant in fitting)
    return f"'channels' of it may be {', '.join(names)}; or " if names else ""


def _check_share(choice: Choice) -> None:
    expected = {"GPU": 1.0, "PIM": 0.0}.get(choice.mode, choice.gpu_share)
    if choice.gpu_share is None or choice.gpu_share != expected:
        actual_text = "none" if choice.gpu_share is None else f"{choice.gpu_share:g}"
        expected_text = "between 0 and 1" if expected is None else f"{expected:g}"
        raise PlanError(
            f"region '{choice.region}': mode {choice.mode} has gpu_share {expected_text}, not {actual_text}"
        )


def _pipeline_candidate(generator: CandidateGenerator, choice: Choice) -> Candidate:
    if choice.gpu_share is not None:
        raise PlanError(
            f"region '{choice.region}': mode PIPELINE has gpu_share null, not {choice.gpu_share:g}"
        )
    pipeline = Pipeline(regions=choice.regions, modes=choice.modes, cuts=choice.stages)
    return pipelines.make(generator, pipeline, choice.schedules)


def _run_candidate(
    generator: CandidateGenerator, table: CostTable, choice: Choice, channels: int | None = None
) -> Candidate:
    """The candidate of several regions that `choice` describes; the fastest if several match."""
    if choice.mode == "GPU" and choice.schedule.startswith(TILES):
        return _tile_candidate(generator, choice, channels)
    if choice.mode == "PIM" and choice.schedule:
        _check_share(choice)
        return cached.make(generator, choice.covers, choice.schedule)
    region_candidates = table.candidates[choice.region]
    runs = [c for c in region_candidates if c.covers == choice.covers and not c.rewrite.channels]
    fitting = [c for c in runs if c.rewrite.mode == choice.mode and c.gpu_share == choice.gpu_share]
    if choice.schedule:
        fitting = [c for c in fitting if c.rewrite.schedule == choice.schedule]
    if not fitting:
        candidate_names = (
            ", ".join(c.name for c in runs) or "none, without the options that the plan was made with"
        )
        raise PlanError(
            f"regions {', '.join(choice.covers)} cannot be {choice.mode} together so; candidates: "
            f"{candidate_names}"
        )
    candidate = min(fitting, key=lambda c: Cost.from_candidate(c).latency_ns)
    if channels is None:
        return candidate
    return fused_groups.with_channel_count(generator, candidate, channels)


def _tile_candidate(generator: CandidateGenerator, choice: Choice, channels: int | None) -> Candidate:
    try:
        tiling = GroupTiling.parse(choice.schedule)
    except ValueError as error:
        raise PlanError(f"region '{choice.region}': schedule {error}") from None
    reason = generator.tilings.unsupported_reason(choice.covers, tiling)
    if reason or choice.gpu_share != 1.0:
        message = reason or f"their gpu_share is 1, not {choice.gpu_share}"
        raise PlanError(f"regions {', '.join(choice.covers)} cannot be one kernel: {message}; search again")
    return fused_groups.make(generator, choice.covers, channels, tiling)


def _gpu_only_candidate(generator: CandidateGenerator, table: CostTable, choice: Choice) -> Candidate:
    """The candidate of a choice in a plan without PIM, with all memory channels."""
    channels = generator.system.gpu.memory_channels
    if len(choice.regions) > 1:
        return _run_candidate(generator, table, choice, channels)
    _check_share(choice)
    region = generator.graph.region(choice.region)
    return generator.make(region, "GPU", gpu_channels=channels, primitive=choice.primitive)
