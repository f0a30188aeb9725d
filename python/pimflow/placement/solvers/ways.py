"""Partial and whole covers of the regions, and what is minimised: types that all solvers share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pimflow.core.candidate import Candidate
from pimflow.placement.solvers.steps import State


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The objective: a weighted sum of latency in ns, energy of the tasks in pJ, and error."""

    per_ns: float = 1.0
    per_pj: float = 0.0
    per_error: float = 0.0

    def of(self, latency_ns: float, energy_pj: float, chosen: Iterable[Candidate]) -> float:
        """The objective of a cover."""
        error = sum(candidate.error for candidate in chosen)
        return self.per_ns * latency_ns + self.per_pj * energy_pj + self.per_error * error


LATENCY = Weights()


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Candidates in the order of their first regions, with the solver's estimates.

    Attributes
    ----------
    candidates : tuple of Candidate
    latency_ns : float
        The solver's own estimate.
    value, bound : float
        What was minimised, and what no cover can fall below if the solver's view of time is right.
    """

    candidates: tuple[Candidate, ...]
    latency_ns: float
    value: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class Partial:
    """The best partial cover that ends in a state. `value` is its own; `bound` holds for all of them."""

    value: float = 0.0
    bound: float = 0.0
    latency_ns: float = 0.0
    chosen: tuple[Candidate, ...] = ()

    def then(self, other: Partial) -> Partial:
        return Partial(
            value=self.value + other.value,
            bound=self.bound + other.bound,
            latency_ns=self.latency_ns + other.latency_ns,
            chosen=self.chosen + other.chosen,
        )

    def solution(self) -> Solution:
        return Solution(
            candidates=self.chosen, latency_ns=self.latency_ns, value=self.value, bound=self.bound
        )


Ways = dict[State, Partial]
Way = tuple[State, Partial]


def offer(ways: Ways, state: State, partial: Partial) -> None:
    """Keep the better of two partial covers that end in `state`, and a bound for both."""
    known = ways.get(state)
    if known is not None:
        better, other = (partial, known) if partial.value < known.value else (known, partial)
        partial = better if better.bound <= other.bound else replace(better, bound=other.bound)
    ways[state] = partial


def best(ways: Ways) -> Partial | None:
    """The best partial cover over all end states; its bound holds for all of them. None if there is none."""
    if not ways:
        return None
    least = min(ways.values(), key=lambda partial: partial.value)
    bound = min(partial.bound for partial in ways.values())
    return Partial(value=least.value, bound=bound, latency_ns=least.latency_ns, chosen=least.chosen)
