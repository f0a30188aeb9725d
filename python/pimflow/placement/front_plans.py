"""The plans of a Pareto front in latency, energy and memory, as results of searches."""

from __future__ import annotations

from pimflow.placement.best_plan import SearchResult, to_search_result, with_lower_bound
from pimflow.placement.gpu_baseline import gpu_only_table
from pimflow.placement.plan_application import apply
from pimflow.placement.solvers.front import front
from pimflow.placement.solvers.objectives import Goal
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
    graph, system = search_result.graph, search_result.system
    plans = PlanSearch(graph, table, system, goal)
    gpu_only_search = PlanSearch(graph, gpu_only_table(generator), system, goal)
    gpu_only_plans = [plan.evaluate() for plan in front(gpu_only_search, points)]
    search_results = []
    bound_ns = min(plans.latency_bound_ns, search_result.gpu_only.latency_ns)
    for front_plan in front(plans, points, gpu_only_plans):
        evaluated_plan = front_plan.evaluate()
        solution = evaluated_plan.solution
        plan = to_search_result(search_result, solution, bound_ns)
        if evaluated_plan not in gpu_only_plans and not any(c.uses_pim for c in solution.candidates):
            # Its candidates have the GPU channels of a mixed plan; a plan without PIM has all channels.
            gpu_plan = apply(
                graph,
                system,
                plan.plan,
                generator.costs,
                Goal(primitives=goal.primitives),
                search_result.original,
            )
            plan = with_lower_bound(gpu_plan)
        search_results.append(plan)
    return search_results
