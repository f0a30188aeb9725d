"""Search the Pareto front of a network's plans."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pimflow.commands.compile.options import check_points
from pimflow.commands.shared import prepare
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.front import ParetoPoint, pareto_front
from pimflow.commands.shared.search import SearchRequest
from pimflow.commands.shared.search_arguments import SEARCH
from pimflow.compiler.plan_pools import PlanPools
from pimflow.core.frames import Rows
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.pim_backend.runtime import targets
from pimflow.placement import SearchResult
from pimflow.placement.front_plans import front_plans
from pimflow.placement.solvers.capacity import loaded_weight_bytes
from pimflow.placement.solvers.front import select_spread

if TYPE_CHECKING:
    from pimflow.frontend import Model

OBJECTIVES = ("latency", "energy", "memory")  # criteria of a front


@public(*SEARCH, without=("plan",))
def pareto(model: Model, system: System | None = None, points: int = 8, **keywords: Any) -> Rows[ParetoPoint]:
    """Search plans of which none is as good as another in latency, energy and memory.

    Parameters
    ----------
    model, system, **keywords
        As for `pimflow.search`, without a plan. The bounds hold for all plans.
    points : int
        Largest number of plans, 2 or more.

    Returns
    -------
    Rows of ParetoPoint
        The fastest plan first. `memory_bytes` is the size of the pool that is built for the target.

    Raises
    ------
    UsageError, PimflowError
        See `pimflow.search`.
    """
    check_points("points", points)
    request = SearchRequest.from_arguments(system, **keywords).validate()
    network = prepare.load(model, request.options)
    return Rows(search_front(request, lambda: network, *request.find_plan(network), points))


def search_front(
    request: SearchRequest,
    load_network: Callable[[], Network],
    network: Network,
    search_result: SearchResult,
    points: int,
) -> tuple[ParetoPoint, ...]:
    """Search the front of a request, whose result `search_result` has a plan of `network`.

    With ``where=pays`` each objective decomposes other layers: then there is a search for each of the three
    objectives, of the network that `load_network` loads.
    """
    candidates = list(_front(network, search_result, points, request.target))
    decomposition = request.options.decomposition_request
    if decomposition is not None and decomposition.where == "pays":
        original = load_network()
        for objective in OBJECTIVES:
            if objective != request.goal.objective:
                objective_request = replace(request, goal=replace(request.goal, objective=objective))
                candidates += _front(*objective_request.find_plan(original), points, request.target)
    front = pareto_front(candidates)
    return tuple(front[index] for index in select_spread([point.figures for point in front], points))


def _front(
    network: Network, search_result: SearchResult, points: int, target: str
) -> tuple[ParetoPoint, ...]:
    """The front of a searched network: plans whose pools for `target` are within the bound on memory."""
    pools = PlanPools(network=network, target=targets.target_by_name(target), system=search_result.system)
    bound = search_result.goal.max_memory_bytes
    goal = replace(
        search_result.goal,
        max_memory_bytes=bound and pools.search_bound(bound),
        kernel_device=pools.kernel_device,
    )

    def point(plan: SearchResult) -> ParetoPoint:
        return ParetoPoint(
            latency_ns=plan.evaluation.latency_ns,
            energy_pj=plan.evaluation.energy_pj,
            memory_bytes=pools.pool_bytes(plan),
            weight_bytes=sum(candidate.footprint.filter_bytes for candidate in plan.candidates)
            + loaded_weight_bytes(plan.system, plan.candidates),
            plan=replace(plan.plan, options=search_result.plan.options, ranks=search_result.plan.ranks),
        )

    front_points = [
        candidate
        for candidate in map(point, front_plans(replace(search_result, goal=goal), points))
        if candidate.memory_bytes <= (bound or math.inf)
    ]
    return pareto_front(front_points or [point(search_result)])
