"""The error if no plan keeps to the bounds: what the nearest plans need, and by which option to allow it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pimflow.core.rewrite import MODES
from pimflow.errors import InfeasibleError
from pimflow.placement.solvers.objectives import BOUNDS, EvaluatedPlan, Goal, round_up
from pimflow.placement.solvers.plan_search import PlanSearch
from pimflow.placement.solvers.solution import ERROR, LATENCY


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """A bound: its quantity, the plan of minimum need, how much a plan needs, and the option."""

    quantity: str
    unit: str
    min_plan: Callable[[PlanSearch], EvaluatedPlan | None]
    amount: Callable[[EvaluatedPlan], float]
    option: Callable[[float], str]


_BOUNDS = {
    "max_memory_bytes": _Bound(
        quantity="memory",
        unit="bytes",
        min_plan=lambda search: search.smallest(),
        amount=lambda plan: plan.memory_bytes,
        option=lambda amount: f"--memory-budget {amount:.0f}B",
    ),
    "max_latency_ns": _Bound(
        quantity="latency",
        unit="ns",
        min_plan=lambda search: search.minimum(LATENCY),
        amount=lambda plan: plan.evaluation.latency_ns,
        option=lambda amount: f"--max-latency {round_up(amount, 'us', 1e3)}",
    ),
    "max_energy_pj": _Bound(
        quantity="energy",
        unit="pJ",
        min_plan=lambda search: search.minimum(search.energy),
        amount=lambda plan: plan.evaluation.energy_pj,
        option=lambda amount: f"--max-energy {round_up(amount, 'uJ', 1e6)}",
    ),
    "max_error": _Bound(
        quantity="error",
        unit="",
        min_plan=lambda search: search.minimum(ERROR),
        amount=lambda plan: plan.error,
        option=lambda amount: f"--max-error {round_up(amount, '', 1.0)}",
    ),
}


def infeasible_error(searches: Sequence[PlanSearch]) -> InfeasibleError:
    """The error for the goal of `searches`: of mixed plans, and of those of the GPU alone.

    It names the first bound that no plan can meet by itself, with the minimum that a plan needs. If each can
    be met by itself, it names for each the minimum within the others.
    """
    goal, name = searches[0].goal, searches[0].graph.name
    common_levers = ["more modes (--modes)"] if goal.modes != MODES else []
    without_bounds: dict[str, Any] = dict.fromkeys(BOUNDS)
    for field, limit in goal.bounds.items():
        bound, needed = _BOUNDS[field], _min_amount(searches, field, replace(goal, **without_bounds))
        if needed is not None and needed > limit:
            levers = (bound.option(needed), *common_levers)
            return InfeasibleError(f"{bound.quantity} of '{name}'", needed, limit, bound.unit, levers)
    others: dict[str, dict[str, Any]] = {field: {field: None} for field in goal.bounds}
    needs = {f: _min_amount(searches, f, replace(goal, **others[f])) for f in goal.bounds}
    reached = {field: needed for field, needed in needs.items() if needed is not None}
    levers = (*(_BOUNDS[field].option(needed) for field, needed in reached.items()), *common_levers)
    field = next(iter(reached), next(iter(goal.bounds)))
    subject = f"{_BOUNDS[field].quantity} of '{name}' within the other bounds"
    needed = reached.get(field, float("inf"))
    return InfeasibleError(subject, needed, goal.bounds[field], _BOUNDS[field].unit, levers)


def _min_amount(searches: Sequence[PlanSearch], field: str, goal: Goal) -> float | None:
    """The minimum of a bound's quantity over all plans within the bounds of `goal`; None without plans."""
    bound = _BOUNDS[field]
    plans = (bound.min_plan(search.with_goal(goal)) for search in searches)
    return min((bound.amount(plan) for plan in plans if plan), default=None)
