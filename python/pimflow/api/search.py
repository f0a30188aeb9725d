"""Search the plan of a whole network: prepare it, and place its regions."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pimflow.api import prepare
from pimflow.api.arguments import public
from pimflow.api.options import (
    AnyPlan,
    NetworkOptions,
    PlanKeywords,
    QuestionKeywords,
    as_plan,
    as_profiling,
    as_system,
    asked,
    planned_modes,
    require_effect,
)
from pimflow.api.prepare import Prepared
from pimflow.api.report import OrderReport
from pimflow.compiler.layer_order import LayerOrder
from pimflow.compiler.plan_pools import PlanPools, PoolChoice, keeping
from pimflow.core.plan import Plan
from pimflow.core.region import RegionGraph
from pimflow.decomposition.calibration import Calibration
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Costs, Goal, Profiling, Searched, apply
from pimflow.placement import search as search_graph
from pimflow.primitive_selection.options import goal_with_primitives, selection_options
from pimflow.primitives.launches import computes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pimflow.api.options import SearchKeywords
    from pimflow.frontend import Model
    from pimflow.primitive_selection.options import SelectionKeywords, SelectionOptions


@dataclass(frozen=True, kw_only=True)
class Question:
    """The request of a search; with `in_c` the requested target is ``c``, and `target` its stand-in."""

    system: System
    target: str
    in_c: bool
    plan: Plan | None
    options: NetworkOptions
    goal: Goal
    select: SelectionOptions | None
    profiling: Profiling

    @classmethod
    def of(
        cls,
        target_system: System | None,
        *,
        target: str = "llvm+pim",
        plan: AnyPlan | None = None,
        options: NetworkOptions | None = None,
        goal: Goal | None = None,
        select: SelectionOptions | SelectionKeywords | None = None,
        profiling: Profiling | None = None,
        **keywords: Unpack[SearchKeywords],
    ) -> Question:
        """From the arguments of `search`."""
        options, goal = asked(keywords, options, goal)
        return cls(
            system=as_system(target_system),
            target=targets.executed(target),
            in_c=target == targets.C,
            plan=as_plan(plan),
            options=options,
            goal=goal,
            select=None if select is None else selection_options(select),
            profiling=as_profiling(profiling),
        )

    def checked(self) -> Question:
        """Check the request before any work, and return it with its final goal."""
        goal = goal_with_primitives(self.goal, self.select)
        require_effect(goal, plan=self.plan, options=self.options)
        self.profiling.require(self.system, planned_modes(goal, self.plan))
        return replace(self, goal=goal)

    @functools.cached_property
    def costs(self) -> Costs:
        """The costs of tasks on the system."""
        return Costs(self.system, self.profiling)

    def applying(self, plan: Plan) -> Question:
        """Return a copy that applies a plan; it shares the costs, so that no task is timed twice."""
        question = replace(self, plan=plan)
        question.__dict__["costs"] = self.costs  # where `functools.cached_property` keeps it
        return question

    def prepared(
        self,
        network: Network,
        inspect: prepare.Inspect | None = None,
        progress: prepare.Progress = prepare.silent,
        samples: Calibration | None = None,
    ) -> Prepared:
        """Prepare a network for the search; see `api.prepare.prepare`."""
        return prepare.prepare(
            network,
            self.options,
            self.system,
            target=self.target,
            plan=self.plan,
            costs=self.costs,
            goal=self.goal,
            samples=samples,
            inspect=inspect,
            progress=progress,
        )

    def placed(self, prepared: Prepared, bounded: bool = True) -> tuple[Searched, PoolChoice | None]:
        """Search a prepared network, or apply the plan; returns the result, and how its pool was chosen.

        For `bounded` see `apply`.

        Raises
        ------
        InfeasibleError
            If no plan is within the goal's bounds; that on memory applies to the pool that is built.
        """
        graph, given, choice = prepared.regions, prepared.given_for(self.system), None
        lowered_for = targets.named_target(self.target)
        pools = PlanPools(network=prepared.network, target=lowered_for, system=self.system)
        if self.plan is None and self.goal.saves_memory:
            searched, choice = keeping(graph, self.system, self.costs, self.goal, pools, given)
        else:
            searched = place(graph, self.system, self.plan, self.costs, self.goal, given, pools, bounded)
        plan = replace(searched.plan, options=prepared.switched_on, ranks=prepared.ranks)
        return replace(searched, plan=plan, mixture=prepared.mixture or searched.mixture), choice

    def answered(self, network: Network) -> tuple[Network, Searched]:
        """Prepare and search a network; returns the prepared network and the result."""
        prepared = self.prepared(network)
        return prepared.network, self.placed(prepared)[0]


@public(PlanKeywords)
def search(model: Model, target_system: System | None = None, **question: Unpack[PlanKeywords]) -> Searched:
    """Search the best plan for a network on a system; the result has the candidates too.

    Parameters
    ----------
    model : str, path, ModelProto, IRModule or ExportedProgram
        See `frontend.load`.
    target_system : System, optional
        `pimflow.system()` by default.
    target : str
        Target of the compilation, as for `compile`; `reorder` and `optimize_skips` are decided by its pool.
        ``llvm+pim`` by default.
    plan : Plan, Searched or path, optional
        A plan to apply in place of a search.
    options : NetworkOptions, optional
        Rewrites of the network before the search.
    goal : Goal, optional
        Objective, solver and bounds of the search.
    select : SelectionOptions, or mapping of str to its fields, optional
        As for `compile`; primitives of a CPU are not part of the plan.
    profiling : Profiling, optional
        Sources of times: by default the analytic GPU model, and the PIM engines with the system's timing,
        without a cache on disk.
    **question
        Fields that replace those of `options` and `goal`: ``shapes``, ``batch``, ``context``, ``states``,
        ``decompose``, ``optimize_skips``, ``fuse_activations``, ``fuse``, ``reorder``; ``objective``,
        ``solver``, ``search_seconds``, ``max_latency_ns``, ``max_energy_pj``, ``max_memory_bytes``,
        ``max_error``, ``modes``, ``primitives``.

    Raises
    ------
    UsageError
        For an unknown keyword, a value of another type, or an option without effect.
    PimflowError
        Other subclasses, as their classes say.
    """
    asked_for = Question.of(target_system, **question).checked()
    return asked_for.answered(prepare.load(model, asked_for.options))[1]


@public(QuestionKeywords)
def search_network(
    network: Network,
    target_system: System | None = None,
    plan: AnyPlan | None = None,
    **question: Unpack[QuestionKeywords],
) -> tuple[Network, Searched]:
    """Search a loaded network; returns the network that was searched, after rewrites, and the result.

    The arguments are those of `search`; shapes are those of the loaded network.
    """
    return Question.of(target_system, plan=plan, **question).checked().answered(network)


def place(
    graph: RegionGraph,
    target_system: System,
    plan: Plan | None,
    costs: Costs,
    goal: Goal,
    given: RegionGraph | None = None,
    pools: PlanPools | None = None,
    bounded: bool = True,
) -> Searched:
    """Search regions, or apply `plan`; raises `InfeasibleError` if the plan is not within the goal's bounds.

    `given` is the original network that plans are compared with, if rewrites changed it. The bound on memory
    applies to a given plan only with `pools`, which tell its size. For `bounded` see `apply`.
    """
    if plan is None:
        return search_graph(graph, target_system, costs, goal, given)
    applied = apply(
        graph,
        target_system,
        plan,
        costs,
        given=given,
        primitives=goal.primitives,
        max_memory_bytes=goal.max_memory_bytes,
        bounded=bounded,
    )
    memory_bytes = pools.of(applied) if pools and goal.max_memory_bytes else 0
    goal.require(graph.name, applied.evaluation, memory_bytes)
    bounds: dict[str, Any] = {**goal.bounds}
    return replace(applied, goal=replace(applied.goal, **bounds))


def by_operators(searched: Searched, plan: Plan | None) -> Searched:
    """Search again, or apply `plan`, with operators in place of the GPU's primitives."""
    if plan is not None:
        plan = replace(plan, choices=tuple(replace(choice, primitive="") for choice in plan.choices))
    goal = replace(searched.goal, primitives=False)
    return place(searched.graph, searched.system, plan, searched.maker.costs, goal, searched.given)


def order_report(order: LayerOrder, searched: Searched, plan: Plan | None, costs: Costs) -> OrderReport:
    """The report of the layers' order, with the latency in the original order."""
    given = searched
    if order.changed:
        fuse_activations, fuse = bool(searched.graph.runs), bool(searched.graph.fusible)
        graph = prepare.regions(order.given, searched.system, fuse_activations=fuse_activations, fuse=fuse)
        carried = plan and plan.carried_to(graph, computes)
        # The original order may need more memory.
        goal = replace(searched.goal, max_memory_bytes=None)
        given = place(graph, searched.system, carried, costs, goal, bounded=False)
    return OrderReport(
        **vars(order.summary()),
        latency_given_ns=given.evaluation.latency_ns,
        latency_ns=searched.evaluation.latency_ns,
    )
