"""The plans of a front: of which none is at least as good as another in latency, energy and memory."""

from __future__ import annotations

from pimflow.placement.best_plan import Searched, as_searched
from pimflow.placement.given_plan import apply
from pimflow.placement.gpu_alone import alone_table
from pimflow.placement.solvers.front import front
from pimflow.placement.solvers.plan_search import PlanSearch


def front_plans(searched: Searched, points: int | None) -> list[Searched]:
    """At most so many plans for what was searched, within its goal's bounds; the whole front if None.

    What the search found is one of them where it is on the front: whatever its objective, a front has the
    best in latency, in energy and in memory. Plans on the GPU alone have all memory channels.

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
            # Its candidates are those beside PIM, on fewer channels than such a plan has.
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
