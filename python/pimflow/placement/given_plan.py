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
from pimflow.placement.best_plan import Searched, as_searched, profile
from pimflow.placement.candidates import cached, channel_modes, fused_groups, pipelines
from pimflow.placement.candidates.candidates import Candidates
from pimflow.placement.costs.costs import Costs
from pimflow.placement.gpu_alone import alone_table, gpu_alone, unsearched
from pimflow.placement.solvers import steps
from pimflow.placement.solvers.evaluate import Evaluation, evaluate
from pimflow.placement.solvers.objectives import Goal
from pimflow.placement.solvers.plan_search import PlanSearch
from pimflow.placement.solvers.steps import State
from pimflow.primitives import PRIMITIVES


def apply(
    graph: RegionGraph,
    system: System,
    plan: Plan,
    costs: Costs | None = None,
    *,
    primitives: bool = False,
    max_memory_bytes: float | None = None,
    given: RegionGraph | None = None,
    bounded: bool = False,
) -> Searched:
    """Apply an edited or stored plan on `system`.

    Parameters
    ----------
    primitives : bool
        Whether the baseline on the GPU alone may use convolution primitives; it may if the plan does.
    max_memory_bytes : float, optional
        Bound on the memory of the baseline, if it can meet it.
    given : RegionGraph, optional
        See `Searched`.
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
    wanted = [region.name for region in graph.regions]
    if plan.model != graph.digest:
        if named != wanted and sorted(named) == sorted(wanted):
            raise PlanError(
                f"the plan has the layers of '{graph.name}' in another order: apply it with --reorder, "
                "or search again"
            )
        raise PlanError(f"the plan was made for another network than '{graph.name}'; search again")
    if named != wanted:
        odd = sorted(set(named) ^ set(wanted)) or ["their order"]
        raise PlanError(f"the plan does not do each region of '{graph.name}' once, in order: {odd[0]}")
    for choice in plan.choices:
        if choice.primitive and choice.primitive not in PRIMITIVES:
            near = hint(choice.primitive, [p.name for p in PRIMITIVES.values() if p.target == "cuda"])
            raise PlanError(f"region '{choice.region}': unknown primitive '{choice.primitive}'; {near}")
        if choice.primitive and (choice.mode != "GPU" or len(choice.regions) > 1):
            raise PlanError(
                f"region '{choice.region}': a primitive computes one region that is wholly on the GPU, not "
                f"{choice.mode} of {len(choice.regions)} regions"
            )
    named_too = any(choice.primitive for choice in plan.choices)
    goal = Goal(primitives=primitives or named_too, max_memory_bytes=max_memory_bytes)
    maker = Candidates(graph, system, costs, primitives=goal.primitives)
    table = profile(graph, maker)
    gpu_only = gpu_alone(maker, goal).evaluation
    if all(choice.mode == "GPU" for choice in plan.choices):
        candidates = tuple(_chosen_for_gpu(maker, table, choice) for choice in plan.choices)
    else:
        candidates, table = _mixed(graph, maker, table, plan)
        _require_readable(maker, table, candidates)
    solution = unsearched(candidates, evaluate(graph, candidates, table, system))
    plans = PlanSearch(graph, table, system, goal)
    return as_searched(maker, table, solution, gpu_only, plans, given, bounded)


@dataclass(frozen=True, kw_only=True)
class Charges:
    """Evaluations of a network by a plan and on the GPU alone; fields are those of `Searched`."""

    graph: RegionGraph
    evaluation: Evaluation
    baseline: Evaluation


def charged(searched: Searched, graph: RegionGraph) -> Charges:
    """Evaluate the plan of `searched` for `graph`, the same network with other sizes.

    Only the baseline on the GPU alone is searched, and only the plan's candidates are timed.

    Raises
    ------
    PlanError
        If a choice of the plan is impossible with these sizes.
    """
    maker = Candidates(
        graph, searched.system, searched.maker.costs, searched.maker.modes, searched.maker.primitives
    )
    alone = gpu_alone(maker, searched.goal).evaluation
    if all(choice.mode == "GPU" for choice in searched.plan.choices):
        table = alone_table(maker)
        candidates = tuple(_chosen_for_gpu(maker, table, choice) for choice in searched.plan.choices)
    else:
        table = replace(searched.table, **_transitions(searched, maker))
        candidates, table = _mixed(graph, maker, table, searched.plan)
    return Charges(
        graph=graph, evaluation=evaluate(graph, candidates, table, searched.system), baseline=alone
    )


def _transitions(searched: Searched, maker: Candidates) -> dict[str, dict[str, EdgeCost]]:
    """The costs of deferred epilogues of the regions of `maker`, as fields of a `CostTable`."""
    capable = [region for region in maker.graph.regions if region.name in searched.table.settle]
    return {
        "settle": searched.table.settle | {region.name: maker.settle(region) for region in capable},
        "absorb": searched.table.absorb | {region.name: maker.absorb(region) for region in capable},
    }


def recharged(searched: Searched, system: System, costs: Costs) -> Evaluation:
    """Evaluate the plan of `searched` on `system`, which has the same devices and another accounting.

    Nothing is searched, and only the plan's candidates are timed. All tensors lie in the GPU channels if
    only one of both accountings charges channel modes, or if a choice is impossible at its channels, such as
    a result that stays in the L2, but whose epilogue is now a kernel of its own.
    """
    plan, graph = searched.plan, searched.graph
    if system.charges("channel-modes") != searched.system.charges("channel-modes"):
        plan = plan.in_channels_left()
    if all(choice.mode == "GPU" for choice in plan.choices):
        return searched.evaluation
    maker = Candidates(graph, system, costs, searched.maker.modes, searched.maker.primitives)
    table = replace(searched.table, **_transitions(searched, maker))
    try:
        candidates, table = _mixed(graph, maker, table, plan)
    except PlanError:
        candidates, table = _mixed(graph, maker, table, plan.in_channels_left())
    return evaluate(graph, candidates, table, system)


def _mixed(
    graph: RegionGraph, maker: Candidates, table: CostTable, plan: Plan
) -> tuple[tuple[Candidate, ...], CostTable]:
    """The candidates of a plan with PIM, and `table` with the transforms between them."""
    chosen = (_chosen(graph, maker, table, choice) for choice in plan.choices)
    candidates = tuple(_in_form(maker, each, choice) for each, choice in zip(chosen, plan.choices))
    own = channel_modes.transforms(maker, candidates)  # a split may be missing in the table
    return candidates, replace(table, transforms=table.transforms | own)


def _chosen(graph: RegionGraph, maker: Candidates, table: CostTable, choice: Choice) -> Candidate:
    if choice.mode == "PIPELINE":
        return _chosen_pipeline(maker, choice)
    if len(choice.regions) > 1:
        return _chosen_run(maker, table, choice)
    region = graph.region(choice.region)
    _check_share(choice)
    gpu = Split.of(region.geometry, choice.axis, choice.gpu_share).gpu if region.geometry else 0
    return maker.make(
        region,
        choice.mode,
        gpu,
        choice.schedule,
        axis=choice.axis,
        primitive=choice.primitive,
        finishes=choice.finishes,
        joins=choice.joins,
    )


ANY_PLAN = "without 'channels' in any choice, all tensors lie where everything can read them"


def _in_form(maker: Candidates, candidate: Candidate, choice: Choice) -> Candidate:
    """The variant of `candidate` at the channels of `choice`; raises `PlanError` if there is none."""
    if choice.channels and not maker.system.time_shared:
        raise PlanError(
            f"region '{choice.region}': channels {choice.channels!r} are for a time-shared system: give "
            "--channel-sharing time-shared, or search again"
        )
    form = channel_modes.in_form(maker, candidate, choice.channels)
    if form is None:
        raise PlanError(
            f"region '{choice.region}' cannot be {choice.mode} at channels {choice.channels!r}; {ANY_PLAN}"
        )
    return form


def _require_readable(maker: Candidates, table: CostTable, candidates: Sequence[Candidate]) -> None:
    """Raise `PlanError` if a candidate is impossible after those before it (`steps.fits`)."""
    state = State()
    for candidate in candidates:
        if not steps.fits(maker.graph, table, candidate, state):
            raise PlanError(
                f"region '{candidate.covers[0]}' reads a tensor that lies in channels where it cannot be "
                f"read meanwhile: {_readable(maker, table, candidate, state)}"
                f"change 'channels' of what makes it; {ANY_PLAN}"
            )
        state = steps.after(maker.graph, candidate, state)


def _readable(maker: Candidates, table: CostTable, candidate: Candidate, state: State) -> str:
    """A text of the `channels` at which `candidate` is possible in `state`; empty if there are none."""
    forms = channel_modes.in_forms(maker, [channel_modes.at_channels_left(maker, candidate)])
    table = replace(table, transforms=table.transforms | channel_modes.transforms(maker, forms))
    fitting = [form for form in forms if steps.fits(maker.graph, table, form, state)]
    names = dict.fromkeys(repr(form.rewrite.channels) for form in fitting)
    return f"'channels' of it may be {', '.join(names)}; or " if names else ""


def _check_share(choice: Choice) -> None:
    expected = {"GPU": 1.0, "PIM": 0.0}.get(choice.mode, choice.gpu_share)
    if choice.gpu_share is None or choice.gpu_share != expected:
        given = "none" if choice.gpu_share is None else f"{choice.gpu_share:g}"
        wanted = "between 0 and 1" if expected is None else f"{expected:g}"
        raise PlanError(f"region '{choice.region}': mode {choice.mode} has gpu_share {wanted}, not {given}")


def _chosen_pipeline(maker: Candidates, choice: Choice) -> Candidate:
    if choice.gpu_share is not None:
        raise PlanError(
            f"region '{choice.region}': mode PIPELINE has gpu_share null, not {choice.gpu_share:g}"
        )
    pipeline = Pipeline(regions=choice.regions, modes=choice.modes, cuts=choice.stages)
    return pipelines.make(maker, pipeline, choice.schedules)


def _chosen_run(
    maker: Candidates, table: CostTable, choice: Choice, channels: int | None = None
) -> Candidate:
    """The candidate of several regions that `choice` describes; the fastest if several match."""
    if choice.mode == "GPU" and choice.schedule.startswith(TILES):
        return _chosen_tiles(maker, choice, channels)
    if choice.mode == "PIM" and choice.schedule:
        _check_share(choice)
        return cached.make(maker, choice.covers, choice.schedule)
    every = table.candidates[choice.region]
    runs = [c for c in every if c.covers == choice.covers and not c.rewrite.channels]
    fitting = [c for c in runs if c.rewrite.mode == choice.mode and c.gpu_share == choice.gpu_share]
    if choice.schedule:
        fitting = [c for c in fitting if c.rewrite.schedule == choice.schedule]
    if not fitting:
        known = ", ".join(c.name for c in runs) or "none, without the options that the plan was made with"
        raise PlanError(
            f"regions {', '.join(choice.covers)} cannot be {choice.mode} together so; candidates: {known}"
        )
    chosen = min(fitting, key=lambda c: Cost.of(c).latency_ns)
    if channels is None:
        return chosen
    return fused_groups.make(maker, chosen.covers, channels, GroupTiling.parse(chosen.rewrite.schedule))


def _chosen_tiles(maker: Candidates, choice: Choice, channels: int | None) -> Candidate:
    try:
        tiling = GroupTiling.parse(choice.schedule)
    except ValueError as error:
        raise PlanError(f"region '{choice.region}': schedule {error}") from None
    problem = maker.tilings.problem(choice.covers, tiling)
    if problem or choice.gpu_share != 1.0:
        why = problem or f"their gpu_share is 1, not {choice.gpu_share}"
        raise PlanError(f"regions {', '.join(choice.covers)} cannot be one kernel: {why}; search again")
    return fused_groups.make(maker, choice.covers, channels, tiling)


def _chosen_for_gpu(maker: Candidates, table: CostTable, choice: Choice) -> Candidate:
    """The candidate of a choice in a plan without PIM, with all memory channels."""
    channels = maker.system.gpu.memory_channels
    if len(choice.regions) > 1:
        return _chosen_run(maker, table, choice, channels)
    _check_share(choice)
    region = maker.graph.region(choice.region)
    return maker.make(region, "GPU", gpu_channels=channels, primitive=choice.primitive)
