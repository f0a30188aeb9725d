"""Several plans of a network, of which none is at least as good as another in everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pimflow.api import prepare
from pimflow.api.front import FrontPoint, undominated
from pimflow.api.search import Question
from pimflow.compiler import build
from pimflow.compiler.smaller_pool import PoolPlanning
from pimflow.errors import UsageError
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Searched
from pimflow.placement.front_plans import front_plans

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pimflow.api.options import QuestionKeywords
    from pimflow.frontend import Model

LEAST = 2  # points of a front


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
    """The front of what was searched, with the pools of `target`."""
    lowered_for, pools = targets.named_target(target), PoolPlanning()
    found = []
    for plan, figures in front_plans(searched, points):
        module = build.planned(network.module, plan)
        found.append(
            FrontPoint(
                latency_ns=figures.latency_ns,
                energy_pj=figures.energy_pj,
                memory_bytes=pools.pool_bytes(module, lowered_for, searched.system),
                weight_bytes=figures.weight_bytes + sum(each.placed_bytes for each in plan.candidates),
                plan=plan.plan,
            )
        )
    return undominated(found)
