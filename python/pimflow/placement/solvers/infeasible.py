"""The error if no plan keeps to the bounds: what the nearest plans need, and by which option to allow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pimflow.core.rewrite import MODES
from pimflow.errors import InfeasibleError
from pimflow.placement.solvers.objectives import BOUNDS, Goal
from pimflow.placement.solvers.plan_search import PlanSearch


def infeasible_error(searches: Sequence[PlanSearch]) -> InfeasibleError:
    """The error for the goal of `searches`: of mixed plans, and of those of the GPU alone.

    It names the first bound that no plan can meet by itself, with the minimum that a plan needs. If each can
    be met by itself, it names for each the minimum within the others.
    """
    goal, name = searches[0].goal, searches[0].graph.name
    common_levers = ["more modes (--modes)"] if goal.modes != MODES else []
    without_bounds: dict[str, Any] = dict.fromkeys(BOUNDS)
    for field, limit in goal.bounds.items():
        bound, needed = BOUNDS[field], _min_amount(searches, field, replace(goal, **without_bounds))
        if needed is not None and needed > limit:
            levers = (bound.lever(needed), *common_levers)
            return InfeasibleError(f"{bound.quantity} of '{name}'", needed, limit, bound.unit, levers)
    others: dict[str, dict[str, Any]] = {field: {field: None} for field in goal.bounds}
    needs = {f: _min_amount(searches, f, replace(goal, **others[f])) for f in goal.bounds}
    reached = {field: needed for field, needed in needs.items() if needed is not None}
    levers = (*(BOUNDS[field].lever(needed) for field, needed in reached.items()), *common_levers)
    field = next(iter(reached), next(iter(goal.bounds)))
    subject = f"{BOUNDS[field].quantity} of '{name}' within the other bounds"
    needed = reached.get(field, float("inf"))
    return InfeasibleError(subject, needed, goal.bounds[field], BOUNDS[field].unit, levers)


def _min_amount(searches: Sequence[PlanSearch], field: str, goal: Goal) -> float | None:
    """The minimum of a bound's quantity over all plans within the bounds of `goal`; None without plans."""
    plans = (search.with_goal(goal).minimum_need(field) for search in searches)
    return min((BOUNDS[field].amount(plan) for plan in plans if plan), default=None)
