"""Search the Pareto front of a network's plans."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pimflow.api import prepare
from pimflow.api.arguments import public
from pimflow.api.front import FrontPoint, undominated
from pimflow.api.options import QuestionKeywords
from pimflow.api.search import Question
from pimflow.compiler.plan_pools import PlanPools
from pimflow.core.frames import Rows
from pimflow.errors import UsageError
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Searched
from pimflow.placement.front_plans import front_plans
from pimflow.placement.solvers.front import spread

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pimflow.frontend import Model

LEAST = 2  # points of a front
MOST = 1000
OBJECTIVES = ("latency", "energy", "memory")  # criteria of a front


@public(QuestionKeywords)
def pareto(
    model: Model,
    target_system: System | None = None,
    points: int = 8,
    **question: Unpack[QuestionKeywords],
) -> Rows[FrontPoint]:
    """Search plans of which none is as good as another in latency, energy and memory.

    Parameters
    ----------
    model, target_system, **question
        As for `api.search.search`, without a plan. The bounds hold for all plans.
    points : int
        Largest number of plans, 2 or more.

    Returns
    -------
    Rows of FrontPoint
        The fastest plan first. `memory_bytes` is the size of the pool that is built for the target.

    Raises
    ------
    UsageError, PimflowError
        See `api.search.search`.
    """
    require_points(points)
    asked_for = Question.of(target_system, **question).checked()
    given = prepare.load(model, asked_for.options)
    return Rows(front_of(asked_for, lambda: given, *asked_for.answered(given), points))


def require_points(points: object) -> None:
    """Raise `UsageError` for a number of points out of range."""
    if not isinstance(points, int) or isinstance(points, bool):
        raise UsageError(f"pareto is a number of points, not {points!r}")
    if points < LEAST:
        raise UsageError(f"--pareto {points}: a front has at least {LEAST} points")
    if points > MOST:
        raise UsageError(f"--pareto {points}: each point is a search; give at most {MOST}")


def front_of(
    question: Question, given: Callable[[], Network], network: Network, searched: Searched, points: int
) -> tuple[FrontPoint, ...]:
    """Search the front of a request, whose result `searched` has a plan of `network`.

    With ``where=pays`` each objective decomposes other layers: then there is a search for each of the three
    objectives, of the network that `given` loads.
    """
    found, request = list(_front(network, searched, points, question.target)), question.options.request
    if request is not None and request.where == "pays":
        before = given()
        for objective in OBJECTIVES:
            if objective != question.goal.objective:
                other = replace(question, goal=replace(question.goal, objective=objective))
                found += _front(*other.answered(before), points, question.target)
    best = undominated(found)
    return tuple(best[number] for number in spread([point.figures for point in best], points))


def _front(network: Network, searched: Searched, points: int, target: str) -> tuple[FrontPoint, ...]:
    """The front of one network's layers, with the pools of `target` within the bound on memory."""
    pools = PlanPools(network=network, target=targets.named_target(target), system=searched.system)
    most = searched.goal.max_memory_bytes or math.inf

    def point(plan: Searched) -> FrontPoint:
        return FrontPoint(
            latency_ns=plan.evaluation.latency_ns,
            energy_pj=plan.evaluation.energy_pj,
            memory_bytes=pools.of(plan),
            weight_bytes=sum(each.filter_bytes + each.placed_bytes for each in plan.candidates),
            plan=replace(plan.plan, options=searched.plan.options, ranks=searched.plan.ranks),
        )

    found = [each for each in map(point, front_plans(searched, points)) if each.memory_bytes <= most]
    return undominated(found or [point(searched)])
