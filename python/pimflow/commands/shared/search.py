"""Search the plan of a whole network: prepare it, and place its regions."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pimflow.commands.shared import prepare
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.options import NetworkOptions
from pimflow.commands.shared.prepare import PreparedNetwork
from pimflow.commands.shared.report import OrderReport
from pimflow.commands.shared.search_arguments import (
    SEARCH,
    SearchArguments,
    as_system,
    plan_modes,
    require_effect,
)
from pimflow.compiler.layer_order import LayerOrder
from pimflow.compiler.plan_pools import PlanPools, PoolChoice, plan_within_bound
from pimflow.core.json_form import report_from
from pimflow.core.plan import Plan
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import OPERATOR_KERNELS
from pimflow.decomposition.calibration import Calibration
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Costs, Goal, Profiling, SearchResult, apply
from pimflow.placement import search as search_graph
from pimflow.placement.best_plan import with_lower_bound
from pimflow.placement.solvers.objectives import EvaluatedPlan
from pimflow.primitive_selection.options import goal_with_primitives
from pimflow.primitives.launches import can_compute

if TYPE_CHECKING:
    from typing_extensions import Self

    from pimflow.frontend import Model
    from pimflow.primitive_selection.options import SelectionOptions


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
    def from_arguments(cls, target_system: System | None, **keywords: Any) -> SearchRequest:
        """From the system and the other arguments of `search`."""
        arguments = SearchArguments.from_keywords(keywords)
        return report_from(
            cls,
            arguments,
            system=as_system(target_system),
            target=targets.execution_target(arguments.target),
            in_c=arguments.target == targets.C_TARGET,
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

    def with_changes(self, **changes: Any) -> Self:
        """Return a copy with other fields, not system or profiling; it shares the costs, which take long."""
        request = replace(self, **changes)
        request.__dict__["costs"] = self.costs  # where `functools.cached_property` keeps it
        return request

    def prepare_network(
        self,
        network: Network,
        inspect: prepare.Inspect = prepare.ignore,
        progress: prepare.Progress = prepare.silent,
        samples: Calibration | None = None,
    ) -> PreparedNetwork:
        """Prepare a network for the search; see `commands.shared.prepare.prepare`."""
        request = prepare.PreparationRequest(
            target=self.target,
            plan=self.plan,
            costs=self.costs,
            goal=self.goal,
            samples=samples,
            inspect=inspect,
            progress=progress,
        )
        return prepare.prepare(network, self.options, self.system, request)

    def place_network(
        self, prepared: PreparedNetwork, bounded: bool = True, progress: prepare.Progress = prepare.silent
    ) -> tuple[SearchResult, PoolChoice | None]:
        """Search a prepared network, or apply the plan; returns the result, and how its pool was chosen.

        For `bounded` and `progress` see `place_regions`.

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
            search_result = self.place_regions(graph, original, pools, bounded, progress)
        plan = replace(search_result.plan, options=prepared.switched_on, ranks=prepared.ranks)
        return replace(search_result, plan=plan, mixture=prepared.mixture or search_result.mixture), choice

    def place_regions(
        self,
        graph: RegionGraph,
        original: RegionGraph | None = None,
        pools: PlanPools | None = None,
        bounded: bool = True,
        progress: prepare.Progress = prepare.silent,
    ) -> SearchResult:
        """Search regions, or apply the plan.

        Parameters
        ----------
        original : RegionGraph, optional
            The original network that plans are compared with, if rewrites changed it.
        pools : PlanPools, optional
            They tell the size of a plan that is given; without them the bound on memory does not apply to it.
        bounded : bool
            Whether a given plan gets a lower bound of the latency of all plans, which takes a search.
        progress : callable
            Called with how long a search of all plans takes, before it starts.

        Raises
        ------
        InfeasibleError
            If the plan is not within the goal's bounds.
        """
        if self.plan is None:
            return search_graph(graph, self.system, self.costs, self.goal, original, progress)
        search_result = apply(graph, self.system, self.plan, self.costs, self.goal, original)
        if bounded:
            search_result = with_lower_bound(search_result)
        memory_bytes = pools.pool_bytes(search_result) if pools and self.goal.max_memory_bytes else 0
        given_plan = EvaluatedPlan(
            candidates=search_result.candidates,
            evaluation=search_result.evaluation,
            memory_bytes=memory_bytes,
        )
        self.goal.require(graph.name, given_plan)
        bounds: dict[str, Any] = {**self.goal.bounds}
        return replace(search_result, goal=replace(search_result.goal, **bounds))

    def find_plan(self, network: Network) -> tuple[Network, SearchResult]:
        """Prepare and search a network; returns the prepared network and the result."""
        prepared = self.prepare_network(network)
        return prepared.network, self.place_network(prepared)[0]


@public(*SEARCH)
def search(model: Model, system: System | None = None, **keywords: Any) -> SearchResult:
    """Search the best plan for a network on a system; the result has the candidates too.

    Parameters
    ----------
    model : str, path, ModelProto, IRModule or ExportedProgram
        See `frontend.load`.
    system : System, optional
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
        Fields that replace those of `options` (`NetworkOptions`) and `goal` (`Goal`).

    Raises
    ------
    UsageError
        For an unknown keyword, a value of another type, or an option without effect.
    PimflowError
        Other subclasses, as their classes say.
    """
    request = SearchRequest.from_arguments(system, **keywords).validate()
    return request.find_plan(prepare.load(model, request.options))[1]


@public(*SEARCH)
def search_network(
    network: Network,
    system: System | None = None,
    plan: Plan | SearchResult | str | os.PathLike[str] | None = None,
    **keywords: Any,
) -> tuple[Network, SearchResult]:
    """Search a loaded network; returns the network that was searched, after rewrites, and the result.

    The arguments are those of `search`; shapes are those of the loaded network.
    """
    request = SearchRequest.from_arguments(system, plan=plan, **keywords)
    return request.validate().find_plan(network)


def replace_primitives(search_result: SearchResult, request: SearchRequest) -> SearchResult:
    """Repeat a search, or apply its plan, with operators in place of the GPU's primitives."""
    plan = request.plan
    if plan is not None:
        plan = replace(
            plan,
            choices=tuple(
                replace(choice, rewrite=OPERATOR_KERNELS) if choice.primitive else choice
                for choice in plan.choices
            ),
        )
    request = request.with_changes(plan=plan, goal=replace(search_result.goal, primitives=False))
    return request.place_regions(search_result.graph, search_result.original)


def order_report(order: LayerOrder, search_result: SearchResult, request: SearchRequest) -> OrderReport:
    """The report of the layers' order, with the latency in the original order."""
    original_result = search_result
    if order.changed:
        fuse_activations, fuse = bool(search_result.graph.runs), bool(search_result.graph.fusible)
        graph = prepare.regions(
            order.original, search_result.system, fuse_activations=fuse_activations, fuse=fuse
        )
        carried_plan = request.plan and request.plan.to_graph(graph, can_compute)
        # The original order may need more memory.
        goal = replace(search_result.goal, max_memory_bytes=None)
        original_result = request.with_changes(plan=carried_plan, goal=goal).place_regions(
            graph, bounded=False
        )
    return OrderReport(
        **vars(order.summary()),
        latency_given_ns=original_result.evaluation.latency_ns,
        latency_ns=search_result.evaluation.latency_ns,
    )
