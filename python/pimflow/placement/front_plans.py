"""The plans of a front: of which none is at least as good as another in latency, energy and memory."""

from __future__ import annotations

from pimflow.placement.best_plan import Searched, as_searched
from pimflow.placement.given_plan import apply
from pimflow.placement.gpu_alone import alone_table
from pimflow.placement.solvers.front import front
from pimflow.placement.solvers.minimiser import Minimiser


def front_plans(searched: Searched, points: int) -> list[Searched]:
    """At most so many plans for what was searched, within its goal's bounds.

    What the search found is one of them where it is on the front: whatever its objective, a front has the
    best in latency, in energy and in memory. Plans on the GPU alone have all memory channels.

    Raises
    ------
    UsageError
        For fewer points than one.
    """
    maker, table, goal = searched.maker, searched.table, searched.goal
    graph, system, cache = searched.graph, searched.system, maker.costs.profiling.cache
    minimiser = Minimiser(graph, table, system, goal, cache)
    alone = Minimiser(graph, alone_table(maker), system, goal, cache)
    on_gpu = [each.plan for each in front(alone, points)]
    found = []
    for each in front(minimiser, points, on_gpu):
        solution = each.plan.solution
        plan = as_searched(maker, table, solution, searched.gpu_only, minimiser, searched.given)
        if each.plan not in on_gpu and all(c.rewrite.mode == "GPU" for c in solution.candidates):
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
