"""The oracle: every cover of a small network, timed by the evaluator."""

from __future__ import annotations

from collections.abc import Iterator

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.region import RegionGraph
from pimflow.errors import UsageError
from pimflow.placement.evaluate import execute
from pimflow.placement.solve import LATENCY, Solution, Weights

MOST_REGIONS = 8


def every_cover(graph: RegionGraph, table: CostTable) -> Iterator[tuple[Candidate, ...]]:
    """All ways to do each region once."""
    chosen: list[Candidate] = []

    def rest(begin: int) -> Iterator[tuple[Candidate, ...]]:
        if begin == len(graph.regions):
            yield tuple(chosen)
            return
        for candidate in table.candidates[graph.regions[begin].name]:
            chosen.append(candidate)
            yield from rest(begin + len(candidate.covers))
            chosen.pop()

    return rest(0)


def solve_exhaustive(graph: RegionGraph, table: CostTable, weights: Weights = LATENCY) -> Solution:
    """The best of all covers.

    Raises
    ------
    UsageError
        If the network has more than `MOST_REGIONS` regions.
    """
    if len(graph.regions) > MOST_REGIONS:
        raise UsageError(
            f"solver 'exhaustive' takes networks of at most {MOST_REGIONS} regions, '{graph.name}' has "
            f"{len(graph.regions)}; use 'ilp'"
        )

    def value(chosen: tuple[Candidate, ...]) -> float:
        run = execute(graph, chosen, table)
        return weights.per_ns * run.latency_ns + weights.per_pj * sum(run.energies_pj.values())

    chosen = min(every_cover(graph, table), key=value)
    least = value(chosen)
    latency_ns = execute(graph, chosen, table).latency_ns
    return Solution(candidates=chosen, latency_ns=latency_ns, value=least, bound=least)
