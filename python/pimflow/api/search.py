"""The search of a whole network: prepared, and placed."""

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
    """What a search is asked; `in_c` says that the target is ``c``, for which `target` stands in."""

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
        """With the goal that it comes to; refused before the work, not after it."""
        goal = goal_with_primitives(self.goal, self.select)
        require_effect(goal, plan=self.plan, options=self.options)
        self.profiling.require(self.system, planned_modes(goal, self.plan))
        return replace(self, goal=goal)

    @functools.cached_property
    def costs(self) -> Costs:
        return Costs(self.system, self.profiling)

    def applying(self, plan: Plan) -> Question:
        """The same with a plan that is applied; what is timed already is not timed again."""
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
        """The network that is searched; see `api.prepare.prepare`."""
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
        """A prepared network, searched or with a plan applied, and how its pool was made to keep to the goal.

        A plan that is applied is `bounded` as `apply` has it.

        Raises
        ------
        InfeasibleError
            If it does not keep to the goal's bounds; that on memory holds for the pool that is built.
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
        """The network that is searched, and its plan."""
        prepared = self.prepared(network)
        return prepared.network, self.placed(prepared)[0]


@public(PlanKeywords)
def search(model: Model, target_system: System | None = None, **question: Unpack[PlanKeywords]) -> Searched:
    """The best plan for a network on a system, with the candidates it was chosen from.

    Parameters
    ----------
    model : str, path, ModelProto, IRModule or ExportedProgram
        See `frontend.load`.
    target_system : System, optional
        `pimflow.system()` by default.
    target : str
        What the network is compiled for, as `compile` has it: `reorder` and `optimize_skips` are judged by
        the pool of that. ``llvm+pim`` by default.
    plan : Plan, Searched or path, optional
        Applied instead of searching.
    options : NetworkOptions, optional
        What the network becomes before it is searched.
    goal : Goal, optional
        What is minimised, by which solver, within which bounds.
    select : SelectionOptions, or mapping of str to its fields, optional
        As `compile` has it; what is chosen for a CPU is none of the plan's.
    profiling : Profiling, optional
        How times are found: the analytic GPU model, and the PIM engines with the system's timing, by
        default, and nothing kept on disk.
    **question
        Besides these, fields of `options` and `goal`, in place of what these say: ``shapes``, ``batch``,
        ``context``, ``states``,
        ``decompose``, ``optimize_skips``, ``fuse_activations``, ``fuse``, ``reorder``; ``objective``,
        ``solver``, ``search_seconds``, ``max_latency_ns``, ``max_energy_pj``, ``max_memory_bytes``,
        ``max_error``, ``modes``, ``primitives``.

    Raises
    ------
    UsageError
        For an unknown keyword, a value of another type, or an option that would have no effect.
    PimflowError
        Of other kinds, each as its class says.
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
    """`search` for a network that was loaded, and the network that the plan is of: decomposed, in order.

    Its shapes are known; the other arguments are those of `search`.
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
    """Searched, or with `plan` applied; raises `InfeasibleError` if it does not keep to the goal's bounds.

    `given` is the network as the user gave it, if it was changed: what plans are compared with. A plan that
    is applied is held to the bound on memory if `pools` say what it takes; `bounded` as `apply` has it.
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
    """The same searched, or `plan` applied, with operators in place of the GPU's primitives."""
    if plan is not None:
        plan = replace(plan, choices=tuple(replace(choice, primitive="") for choice in plan.choices))
    goal = replace(searched.goal, primitives=False)
    return place(searched.graph, searched.system, plan, searched.maker.costs, goal, searched.given)


def order_report(order: LayerOrder, searched: Searched, plan: Plan | None, costs: Costs) -> OrderReport:
    """What the report says of the layers' order, and how long the network takes in the given one."""
    given = searched
    if order.changed:
        fuse_activations, fuse = bool(searched.graph.runs), bool(searched.graph.fusible)
        graph = prepare.regions(order.given, searched.system, fuse_activations=fuse_activations, fuse=fuse)
        carried = plan and plan.carried_to(graph, computes)
        # In the given order it may take more.
        goal = replace(searched.goal, max_memory_bytes=None)
        given = place(graph, searched.system, carried, costs, goal, bounded=False)
    return OrderReport(
        **vars(order.summary()),
        latency_given_ns=given.evaluation.latency_ns,
        latency_ns=searched.evaluation.latency_ns,
    )
