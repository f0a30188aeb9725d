"""Several plans of a network, of which none is at least as good as another in everything."""

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
OBJECTIVES = ("latency", "energy", "memory")  # what a front is about


@public(QuestionKeywords)
def pareto(
    model: Model,
    target_system: System | None = None,
    points: int = 8,
    **question: Unpack[QuestionKeywords],
) -> Rows[FrontPoint]:
    """Plans of which none is at least as good as another in latency, energy and memory.

    Parameters
    ----------
    model, target_system, **question
        As `api.search.search` has them, without a plan. The bounds hold for all plans.
    points : int
        How many plans at most, from 2 on.

    Returns
    -------
    Rows of FrontPoint
        From the fastest plan on. `memory_bytes` is of the pool that is built for the target.

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
    """Raise `UsageError` for a number of points that no front has."""
    if not isinstance(points, int) or isinstance(points, bool):
        raise UsageError(f"pareto is a number of points, not {points!r}")
    if points < LEAST:
        raise UsageError(f"--pareto {points}: a front has at least {LEAST} points")
    if points > MOST:
        raise UsageError(f"--pareto {points}: each point is a search; give at most {MOST}")


def front_of(
    question: Question, given: Callable[[], Network], network: Network, searched: Searched, points: int
) -> tuple[FrontPoint, ...]:
    """The front of a question, which `searched` answers with a plan of `network`.

    With ``where=pays`` other layers stay decomposed for each objective: then the question is asked for all
    three, of the network that `given` loads.
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
    """The front of the layers that were searched, by the pools of `target`, which keep to their bound."""
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
