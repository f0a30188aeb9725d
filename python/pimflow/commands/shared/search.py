"""Search the plan of a whole network: prepare it, and place its regions."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pimflow.commands.shared import prepare
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.options import (
    AnyPlan,
    NetworkOptions,
    PlanKeywords,
    RequestKeywords,
    as_plan,
    as_profiling,
    as_system,
    merge_keywords,
    plan_modes,
    require_effect,
)
from pimflow.commands.shared.prepare import PreparedNetwork
from pimflow.commands.shared.report import OrderReport
from pimflow.compiler.layer_order import LayerOrder
from pimflow.compiler.plan_pools import PlanPools, PoolChoice, plan_within_bound
from pimflow.core.plan import Plan
from pimflow.core.region import RegionGraph
from pimflow.core.rewrite import OPERATOR_KERNELS
from pimflow.decomposition.calibration import Calibration
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Costs, Goal, Profiling, SearchResult, apply
from pimflow.placement import search as search_graph
from pimflow.placement.best_plan import with_lower_bound
from pimflow.primitive_selection.options import goal_with_primitives, selection_options
from pimflow.primitives.launches import can_compute

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pimflow.commands.shared.options import SearchKeywords
    from pimflow.frontend import Model
    from pimflow.primitive_selection.options import SelectionKeywords, SelectionOptions


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
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
    def from_arguments(
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
    ) -> SearchRequest:
        """From the arguments of `search`."""
        options, goal = merge_keywords(keywords, options, goal)
        return cls(
            system=as_system(target_system),
            target=targets.execution_target(target),
            in_c=target == targets.C_TARGET,
            plan=as_plan(plan),
            options=options,
            goal=goal,
            select=None if select is None else selection_options(select),
            profiling=as_profiling(profiling),
        )

    def validate(self) -> SearchRequest:
        """Check the request before any work, and return it with its final goal."""
        goal = goal_with_primitives(self.goal, self.select)
        require_effect(goal, plan=self.plan, options=self.options)
        self.profiling.require(self.system, plan_modes(goal, self.plan))
        return replace(self, goal=goal)

    @functools.cached_property
    def costs(self) -> Costs:
        """The costs of tasks on the system."""
        return Costs(self.system, self.profiling)

    def with_plan(self, plan: Plan) -> SearchRequest:
        """Return a copy that applies a plan; it shares the costs, so that no task is timed twice."""
        request = replace(self, plan=plan)
        request.__dict__["costs"] = self.costs  # where `functools.cached_property` keeps it
        return request

    def prepare_network(
        self,
        network: Network,
        inspect: prepare.Inspect | None = None,
        progress: prepare.Progress = prepare.silent,
        samples: Calibration | None = None,
    ) -> PreparedNetwork:
        """Prepare a network for the search; see `commands.shared.prepare.prepare`."""
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

    def place_network(
        self, prepared: PreparedNetwork, bounded: bool = True
    ) -> tuple[SearchResult, PoolChoice | None]:
        """Search a prepared network, or apply the plan; returns the result, and how its pool was chosen.

        Only if `bounded`, a given plan gets a lower bound of all plans, which takes a search.

        Raises
        ------
        InfeasibleError
            If no plan is within the goal's bounds; that on memory applies to the pool that is built.
        """
        graph, original, choice = prepared.regions, prepared.original_regions_for(self.system), None
        lowered_for = targets.target_by_name(self.target)
        pools = PlanPools(network=prepared.network, target=lowered_for, system=self.system)
        if self.plan is None and self.goal.saves_memory:
            search_result, choice = plan_within_bound(
                graph, self.system, self.costs, self.goal, pools, original
            )
        else:
            search_result = place(
                graph, self.system, self.plan, self.costs, self.goal, original, pools, bounded
            )
        plan = replace(search_result.plan, options=prepared.switched_on, ranks=prepared.ranks)
        return replace(search_result, plan=plan, mixture=prepared.mixture or search_result.mixture), choice

    def find_plan(self, network: Network) -> tuple[Network, SearchResult]:
        """Prepare and search a network; returns the prepared network and the result."""
        prepared = self.prepare_network(network)
        return prepared.network, self.place_network(prepared)[0]


@public(PlanKeywords)
def search(
    model: Model, target_system: System | None = None, **keywords: Unpack[PlanKeywords]
) -> SearchResult:
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
    plan : Plan, SearchResult or path, optional
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
    **keywords
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
    request = SearchRequest.from_arguments(target_system, **keywords).validate()
    return request.find_plan(prepare.load(model, request.options))[1]


@public(RequestKeywords)
def search_network(
    network: Network,
    target_system: System | None = None,
    plan: AnyPlan | None = None,
    **keywords: Unpack[RequestKeywords],
) -> tuple[Network, SearchResult]:
    """Search a loaded network; returns the network that was searched, after rewrites, and the result.

    The arguments are those of `search`; shapes are those of the loaded network.
    """
    return SearchRequest.from_arguments(target_system, plan=plan, **keywords).validate().find_plan(network)


def place(
    graph: RegionGraph,
    target_system: System,
    plan: Plan | None,
    costs: Costs,
    goal: Goal,
    original: RegionGraph | None = None,
    pools: PlanPools | None = None,
    bounded: bool = True,
) -> SearchResult:
    """Search regions, or apply `plan`; raises `InfeasibleError` if the plan is not within the goal's bounds.

    `original` is the original network that plans are compared with, if rewrites changed it. The bound on
    memory applies to a given plan only with `pools`, which tell its size. Only if `bounded`, it
    gets a lower bound of the latency of all plans, which takes a search.
    """
    if plan is None:
        return search_graph(graph, target_system, costs, goal, original)
    search_result = apply(graph, target_system, plan, costs, goal, original)
    if bounded:
        search_result = with_lower_bound(search_result)
    memory_bytes = pools.pool_bytes(search_result) if pools and goal.max_memory_bytes else 0
    goal.require(graph.name, search_result.evaluation, memory_bytes)
    bounds: dict[str, Any] = {**goal.bounds}
    return replace(search_result, goal=replace(search_result.goal, **bounds))


def replace_primitives(search_result: SearchResult, plan: Plan | None) -> SearchResult:
    """Search again, or apply `plan`, with operators in place of the GPU's primitives."""
    if plan is not None:
        plan = replace(
            plan,
            choices=tuple(replace(c, rewrite=OPERATOR_KERNELS) if c.primitive else c for c in plan.choices),
        )
    goal = replace(search_result.goal, primitives=False)
    return place(
        search_result.graph,
        search_result.system,
        plan,
        search_result.costs,
        goal,
        search_result.original,
    )


def order_report(
    order: LayerOrder, search_result: SearchResult, plan: Plan | None, costs: Costs
) -> OrderReport:
    """The report of the layers' order, with the latency in the original order."""
    original_result = search_result
    if order.changed:
        fuse_activations, fuse = bool(search_result.graph.runs), bool(search_result.graph.fusible)
        graph = prepare.regions(
            order.original, search_result.system, fuse_activations=fuse_activations, fuse=fuse
        )
        carried_plan = plan and plan.to_graph(graph, can_compute)
        # The original order may need more memory.
        goal = replace(search_result.goal, max_memory_bytes=None)
        original_result = place(graph, search_result.system, carried_plan, costs, goal, bounded=False)
    return OrderReport(
        **vars(order.summary()),
        latency_given_ns=original_result.evaluation.latency_ns,
        latency_ns=search_result.evaluation.latency_ns,
    )
