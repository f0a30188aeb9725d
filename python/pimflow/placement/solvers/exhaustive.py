"""Reference for the other solvers: every cover of a small network, timed by the evaluator."""

from __future__ import annotations

from collections.abc import Iterator

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.region import RegionGraph
from pimflow.errors import UsageError
from pimflow.placement.solvers.dynamic_programming import LATENCY, Solution, Weights
from pimflow.placement.solvers.evaluate import START, Moment, advance

MOST_REGIONS = 8


def every_cover(graph: RegionGraph, table: CostTable) -> Iterator[tuple[tuple[Candidate, ...], float, float]]:
    """All ways to do each region once, with their latencies in ns and the energies in pJ of their tasks."""

    def rest(
        chosen: tuple[Candidate, ...], begin: int, moment: Moment, energy_pj: float
    ) -> Iterator[tuple[tuple[Candidate, ...], float, float]]:
        if begin == len(graph.regions):
            yield chosen, max(moment.ready_ns.values()), energy_pj
            return
        left_open = chosen[-1].leaves_open if chosen else ""
        for candidate in table.candidates[graph.regions[begin].name]:
            if candidate.goes_on_with != left_open:
                continue
            after, placed = advance(graph, table, candidate, moment)
            more_pj = sum(task.energy_pj for task, _ in placed)
            yield from rest((*chosen, candidate), begin + len(candidate.covers), after, energy_pj + more_pj)

    return rest((), 0, START, 0.0)


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

    def value(cover: tuple[tuple[Candidate, ...], float, float]) -> float:
        error = sum(candidate.error for candidate in cover[0])
        return weights.per_ns * cover[1] + weights.per_pj * cover[2] + weights.per_error * error

    best = min(every_cover(graph, table), key=value)
    return Solution(candidates=best[0], latency_ns=best[1], value=value(best), bound=value(best))
