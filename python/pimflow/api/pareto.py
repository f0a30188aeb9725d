"""Several plans of a network, of which none is at least as good as another in everything."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pimflow.api import prepare
from pimflow.api.arguments import public
from pimflow.api.front import FrontPoint, undominated
from pimflow.api.options import QuestionKeywords
from pimflow.api.search import Question
from pimflow.compiler.plan_pools import PlanPools
from pimflow.errors import UsageError
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Searched
from pimflow.placement.front_plans import front_plans

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pimflow.frontend import Model

LEAST = 2  # points of a front


@public(QuestionKeywords)
def pareto(
    model: Model,
    target_system: System | None = None,
    points: int = 8,
    **question: Unpack[QuestionKeywords],
) -> tuple[FrontPoint, ...]:
    """Plans of which none is at least as good as another in latency, energy and memory.

    Parameters
    ----------
    model, target_system, **question
        As `api.search.search` has them, without a plan. The objective says which layers stay decomposed with
        ``where=pays``; the bounds hold for all plans.
    points : int
        How many plans at most, from 2 on.

    Returns
    -------
    tuple of FrontPoint
        From the fastest plan on. `memory_bytes` is of the pool that is built for the target.

    Raises
    ------
    UsageError, PimflowError
        See `api.search.search`.
    """
    require_points(points)
    asked_for = Question.of(target_system, **question).checked()
    network, searched = asked_for.answered(prepare.load(model, asked_for.options))
    return front_of(network, searched, points, asked_for.target)


def require_points(points: object) -> None:
    """Raise `UsageError` for a number of points that no front has."""
    if not isinstance(points, int) or isinstance(points, bool):
        raise UsageError(f"pareto is a number of points, not {points!r}")
    if points < LEAST:
        raise UsageError(f"--pareto {points}: a front has at least {LEAST} points")


def front_of(network: Network, searched: Searched, points: int, target: str) -> tuple[FrontPoint, ...]:
    """The front of what was searched, with the pools of `target`; those keep to the bound on memory, too."""
    pools = PlanPools(network=network, target=targets.named_target(target), system=searched.system)
    most = searched.goal.max_memory_bytes or math.inf

    def point(plan: Searched) -> FrontPoint:
        return FrontPoint(
            latency_ns=plan.evaluation.latency_ns,
            energy_pj=plan.evaluation.energy_pj,
            memory_bytes=pools.of(plan),
            weight_bytes=sum(each.filter_bytes + each.placed_bytes for each in plan.candidates),
            plan=replace(plan.plan, options=searched.plan.options),
        )

    found = [each for each in map(point, front_plans(searched, points)) if each.memory_bytes <= most]
    return undominated(found or [point(searched)])
