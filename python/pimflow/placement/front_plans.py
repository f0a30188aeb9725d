"""The plans of a Pareto front in latency, energy and memory, as results of searches."""

from __future__ import annotations

from pimflow.placement.best_plan import Searched, as_searched
from pimflow.placement.given_plan import apply
from pimflow.placement.gpu_alone import alone_table
from pimflow.placement.solvers.front import front
from pimflow.placement.solvers.plan_search import PlanSearch


def front_plans(searched: Searched, points: int | None) -> list[Searched]:
    """At most `points` plans of the front within the bounds of the search; the whole front if None.

    Whatever the objective of the search, the front has the best plans in latency, energy and memory. Plans
    without PIM have all memory channels.

    Raises
    ------
    UsageError
        For fewer points than one.
    """
    maker, table, goal = searched.maker, searched.table, searched.goal
    graph, system = searched.graph, searched.system
    plans = PlanSearch(graph, table, system, goal)
    alone = PlanSearch(graph, alone_table(maker), system, goal)
    on_gpu = [plan.evaluated() for plan in front(alone, points)]
    found = []
    for front_plan in front(plans, points, on_gpu):
        evaluated = front_plan.evaluated()
        solution = evaluated.solution
        plan = as_searched(maker, table, solution, searched.gpu_only, plans, searched.given)
        if evaluated not in on_gpu and all(c.rewrite.mode == "GPU" for c in solution.candidates):
            # Its candidates have the GPU channels of a mixed plan; a plan without PIM has all channels.
            plan = apply(
                graph,
                system,
                plan.plan,
                maker.costs,
                primitives=goal.primitives,
                given=searched.given,
                bounded=True,
            )
        found.append(plan)
    return found
