"""Fronts: plans of which none is at least as good as another in latency, energy and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pimflow.errors import UsageError
from pimflow.placement.solvers.minimiser import Minimiser
from pimflow.placement.solvers.objectives import EvaluatedPlan
from pimflow.placement.solvers.ways import LATENCY

# Plans that differ by less than this share are the same: times are sums in another order.
SAME = 1e-9


@dataclass(frozen=True, kw_only=True)
class FrontPlan:
    """A plan of a front.

    Attributes
    ----------
    plan : EvaluatedPlan
    latency_ns, energy_pj : float
    memory_bytes : int
        Of the pool that is built (`plan_memory.PlanMemory`).
    weight_bytes : int
        Of the weights that the GPU reads, beside the pool.
    """

    plan: EvaluatedPlan
    latency_ns: float
    energy_pj: float
    memory_bytes: int
    weight_bytes: int

    @property
    def figures(self) -> tuple[float, float, int]:
        """What a front is about; less is better."""
        return self.latency_ns, self.energy_pj, self.memory_bytes

    def dominates(self, other: FrontPlan) -> bool:
        """Whether it is at least as good in everything, and not the same."""
        pairs = list(zip(self.figures, other.figures))
        return all(a <= b * (1 + SAME) for a, b in pairs) and any(a < b * (1 - SAME) for a, b in pairs)


def front(minimiser: Minimiser, points: int, others: Iterable[EvaluatedPlan] = ()) -> tuple[FrontPlan, ...]:
    """At most so many plans within the bounds of `minimiser`, of which none dominates another.

    For budgets of memory between the least and what the fastest and the most frugal plan take, plans of least
    weighted sums of latency and energy: the corners of their convex hull.

    Parameters
    ----------
    minimiser : Minimiser
        Its objective does not matter.
    points : int
        At least 1. The fastest, the most frugal and the smallest plan are among them where these have room.
    others : iterable of EvaluatedPlan
        Further plans, as that on the GPU alone.

    Returns
    -------
    tuple of FrontPlan
        From the fastest on; empty if no plan keeps to the bounds.

    Raises
    ------
    UsageError
        For fewer points than one.
    """
    if points < 1:
        raise UsageError(f"a front has at least 1 plan, not {points}")
    found = [_measured(each) for each in others if minimiser.allows(each)]
    for budget in (None, *_budgets(minimiser, points)):
        within = minimiser if budget is None else minimiser.in_memory(budget)
        found += [_measured(each) for each in _corners(within, points)]
    plans = undominated(found)
    return tuple(plans[number] for number in spread([plan.figures for plan in plans], points))


def undominated(plans: Sequence[FrontPlan]) -> list[FrontPlan]:
    """Those that no other dominates, each once, from the fastest on."""
    kept: list[FrontPlan] = []
    for plan in sorted(plans, key=lambda each: each.figures):
        if not any(other.dominates(plan) or _same(other, plan) for other in kept):
            kept = [other for other in kept if not plan.dominates(other)] + [plan]
    return kept


def _same(one: FrontPlan, other: FrontPlan) -> bool:
    return all(abs(a - b) <= SAME * abs(b) for a, b in zip(one.figures, other.figures))


def _measured(plan: EvaluatedPlan) -> FrontPlan:
    return FrontPlan(
        plan=plan,
        latency_ns=plan.evaluation.latency_ns,
        energy_pj=plan.evaluation.energy_pj,
        memory_bytes=plan.memory_bytes,
        weight_bytes=sum(candidate.filter_bytes for candidate in plan.solution.candidates),
    )


def _budgets(minimiser: Minimiser, points: int) -> list[int]:
    """Memory that plans may take: the least there is, and some between that and what the best need."""
    ends = [minimiser.within(weights) for weights in (LATENCY, minimiser.energy)]
    most = max((each.memory_bytes for each in ends if each), default=0)
    sizes = [size for size in minimiser.memory.sizes(minimiser.table) if size < most]
    if len(sizes) <= points:
        return sizes
    return [sizes[number * (len(sizes) - 1) // max(points - 1, 1)] for number in range(points)]


def _corners(minimiser: Minimiser, points: int) -> list[EvaluatedPlan]:
    """The fastest and the most frugal plan, and up to so many corners of the hull between these."""
    fastest, frugal = minimiser.within(LATENCY), minimiser.within(minimiser.energy)
    if fastest is None or frugal is None:
        return []
    found, between = [fastest, frugal], [(fastest, frugal)]
    while between and len(found) < points:
        left, right = between.pop(0)
        corner = minimiser.corner(left, right)
        if corner:
            middle, _ = corner
            found.append(middle)
            between += [(left, middle), (middle, right)]
    return found


def spread(figures: Sequence[tuple[float, ...]], points: int) -> list[int]:
    """Numbers of so many plans: the best in each figure, then always the one that is farthest from those."""
    every = range(len(figures))
    if len(figures) <= points:
        return list(every)
    spans = [(min(axis), max(max(axis) - min(axis), 1e-12)) for axis in zip(*figures)]
    places = [[(figure - low) / span for figure, (low, span) in zip(each, spans)] for each in figures]

    def apart(one: int, other: int) -> float:
        return sum((a - b) ** 2 for a, b in zip(places[one], places[other]))

    chosen = list(dict.fromkeys(min(every, key=lambda i: places[i][axis]) for axis in range(len(spans))))
    chosen = chosen[:points]
    while len(chosen) < points:
        left = [number for number in every if number not in chosen]
        chosen.append(max(left, key=lambda number: min(apart(number, other) for other in chosen)))
    return sorted(chosen)
