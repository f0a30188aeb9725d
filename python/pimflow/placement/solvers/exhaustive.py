"""Reference for the other solvers: every cover of a small network, timed by the evaluator."""

from __future__ import annotations

from collections.abc import Iterator

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.region import RegionGraph
from pimflow.errors import UsageError
from pimflow.placement.solvers.evaluate import Moment, advance, begin
from pimflow.placement.solvers.plan_memory import MemoryLimit, fits
from pimflow.placement.solvers.ways import LATENCY, Solution, Weights

MOST_REGIONS = 8


def every_cover(
    graph: RegionGraph, table: CostTable, limit: MemoryLimit | None = None
) -> Iterator[tuple[tuple[Candidate, ...], float, float]]:
    """All ways to do each region once, with their latencies in ns and the energies in pJ of their tasks."""

    def rest(
        chosen: tuple[Candidate, ...], at: int, moment: Moment, energy_pj: float
    ) -> Iterator[tuple[tuple[Candidate, ...], float, float]]:
        if at == len(graph.regions):
            yield chosen, max(moment.ready_ns.values()), energy_pj
            return
        for candidate in table.candidates[graph.regions[at].name]:
            if not fits(graph, table, candidate, moment.state, limit):
                continue
            after, placed = advance(graph, table, candidate, moment)
            more_pj = sum(task.energy_pj for task, _ in placed)
            yield from rest((*chosen, candidate), at + len(candidate.covers), after, energy_pj + more_pj)

    return rest((), 0, begin(table), 0.0)


def solve_exhaustive(
    graph: RegionGraph, table: CostTable, weights: Weights = LATENCY, limit: MemoryLimit | None = None
) -> Solution | None:
    """The best of all covers; None if there is none.

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
        return weights.of(cover[1], cover[2], cover[0])

    def allowed(cover: tuple[tuple[Candidate, ...], float, float]) -> bool:
        return not (limit and limit.memory) or limit.memory.of(cover[0]) <= limit.at_most

    best = min(filter(allowed, every_cover(graph, table, limit)), key=value, default=None)
    return best and Solution(candidates=best[0], latency_ns=best[1], value=value(best), bound=value(best))
