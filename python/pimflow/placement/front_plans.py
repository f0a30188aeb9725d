"""The plans of a Pareto front in latency, energy and memory, as results of searches."""

from __future__ import annotations

from pimflow.placement.best_plan import SearchResult, to_search_result
from pimflow.placement.gpu_baseline import gpu_only_search
from pimflow.placement.plan_application import plan_candidates
from pimflow.placement.solvers.front import front
from pimflow.placement.solvers.plan_search import PlanSearch


def front_plans(search_result: SearchResult, points: int | None) -> list[SearchResult]:
    """At most `points` plans of the front within the bounds of the search; the whole front if None.

    Whatever the objective of the search, the front has the best plans in latency, energy and memory. Plans
    without PIM have all memory channels.

    Raises
    ------
    UsageError
        For fewer points than one.
    """
    generator, table, goal = search_result.generator, search_result.table, search_result.goal
    plans = PlanSearch(search_result.graph, table, search_result.system, goal)
    gpu_only_front = front(gpu_only_search(generator, goal), points)
    search_results = []
    bound_ns = min(plans.latency_bound_ns, search_result.gpu_only.latency_ns)
    for front_plan in front(plans, points, gpu_only_front):
        plan = to_search_result(search_result, front_plan.candidates, lower_bound_ns=bound_ns)
        if front_plan not in gpu_only_front and not plan.plan.uses_pim:
            # Its candidates have the GPU channels of a mixed plan; a plan without PIM has all channels.
            candidates, _ = plan_candidates(generator, table, plan.plan)
            plan = to_search_result(search_result, candidates, lower_bound_ns=bound_ns)
        search_results.append(plan)
    return search_results
