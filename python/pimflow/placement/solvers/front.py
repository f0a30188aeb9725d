"""Pareto fronts of plans in latency, energy and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pimflow.errors import UsageError
from pimflow.placement.solvers.label_search import LATENCY
from pimflow.placement.solvers.objectives import EvaluatedPlan
from pimflow.placement.solvers.plan_search import PlanSearch

# Without a bound on memory, the front has every plan that is better than the others by more than this share.
TOLERANCE = 1e-3
BUDGETS = 8  # memory budgets, from the minimum to the memory of the fastest plan
CORNERS = 3  # plans for each budget, beside the fastest and that of minimum energy


def front(
    search: PlanSearch, points: int | None, extra_plans: Iterable[EvaluatedPlan] = ()
) -> tuple[EvaluatedPlan, ...]:
    """At most `points` plans within the bounds of `search`, of which none dominates another.

    They are chosen from the front of latency and energy, within `TOLERANCE`, and for `BUDGETS` memory budgets
    from the fastest plan, that of minimum energy, and `CORNERS` of the convex hull between them. All budgets
    together take as long as one search.

    Parameters
    ----------
    search : PlanSearch
        Its objective is ignored.
    points : int or None
        At least 1; the whole front if None. The plans of minimum latency, energy and memory are among them,
        as far as `points` allows.
    extra_plans : iterable of EvaluatedPlan
        Further plans within the bounds, such as those of the GPU alone.

    Returns
    -------
    tuple of EvaluatedPlan
        The fastest first; empty if no plan keeps to the bounds.

    Raises
    ------
    UsageError
        For fewer points than one.
    """
    if points is not None and points < 1:
        raise UsageError(f"a front has at least 1 plan, not {points}")
    all_plans = [*extra_plans, *search.front(TOLERANCE)]
    seconds = search.goal.search_seconds / (BUDGETS * (2 + CORNERS))
    quick_search = search.with_goal(replace(search.goal, search_seconds=seconds))
    for budget in _budgets(search):
        all_plans += _corners(quick_search, budget)
    plans = pareto_plans(all_plans)
    if points is None:
        return tuple(plans)
    return tuple(plans[number] for number in select_spread([plan.figures for plan in plans], points))


def _budgets(search: PlanSearch) -> list[float]:
    """Memory budgets, the largest first: plans that keep to a smaller one are not searched again."""
    smallest, fastest = search.smallest(), search.minimum(LATENCY)
    if smallest is None or fastest is None:
        return []
    min_bytes, max_bytes = smallest.memory_bytes, fastest.memory_bytes
    return [
        min_bytes + (max_bytes - min_bytes) * step / BUDGETS
        for step in reversed(range(BUDGETS))
        if max_bytes > min_bytes
    ]


def _corners(search: PlanSearch, max_memory_bytes: float) -> list[EvaluatedPlan]:
    """The plans of minimum latency and energy in a memory budget, and corners of the hull between them."""
    fastest = search.minimum(LATENCY, max_memory_bytes)
    frugal = search.minimum(search.energy, max_memory_bytes)
    if fastest is None or frugal is None:
        return []
    plans, segments = [fastest, frugal], [(fastest, frugal)]
    while segments and len(plans) < 2 + CORNERS:
        first, second = segments.pop(0)
        a, b = first.evaluation, second.evaluation
        longer_ns, saved_pj = b.latency_ns - a.latency_ns, a.energy_pj - b.energy_pj
        if longer_ns <= TOLERANCE * a.latency_ns or saved_pj <= TOLERANCE * b.energy_pj:
            continue
        corner = search.minimum(search.energy_latency_sum(saved_pj / longer_ns), max_memory_bytes)
        if corner:
            plans.append(corner)
            segments += [(first, corner), (corner, second)]
    return plans


def pareto_plans(plans: Sequence[EvaluatedPlan]) -> list[EvaluatedPlan]:
    """The plans than which no other is as good in everything, the fastest first; one of equal plans."""
    front_plans: list[EvaluatedPlan] = []
    for plan in sorted(plans, key=lambda evaluated_plan: evaluated_plan.figures):
        if not any(front_plan.is_as_good(plan) for front_plan in front_plans):
            front_plans = [other for other in front_plans if not plan.is_as_good(other)] + [plan]
    return front_plans


def select_spread(figures: Sequence[tuple[float, ...]], points: int) -> list[int]:
    """Numbers of `points` plans: the best in each figure, then repeatedly the one farthest from these."""
    numbers = range(len(figures))
    if len(figures) <= points:
        return list(numbers)
    spans = [(min(axis), max(max(axis) - min(axis), 1e-12)) for axis in zip(*figures)]
    places = [
        [(figure - low) / span for figure, (low, span) in zip(plan_figures, spans)]
        for plan_figures in figures
    ]

    selection = list(dict.fromkeys(min(numbers, key=lambda i: places[i][axis]) for axis in range(len(spans))))
    selection = selection[:points]
    while len(selection) < points:
        remaining = [number for number in numbers if number not in selection]
        selection.append(
            max(
                remaining,
                key=lambda number: min(math.dist(places[number], places[other]) for other in selection),
            )
        )
    return sorted(selection)
