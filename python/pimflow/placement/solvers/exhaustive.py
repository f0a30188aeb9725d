"""Reference for the label search: every cover of a small network, timed by the evaluator."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.region import RegionGraph
from pimflow.errors import UsageError
from pimflow.placement.solvers.evaluate import Moment, advance, begin
from pimflow.placement.solvers.steps import fits

MAX_REGIONS = 8
Cover = tuple[Candidate, ...]
Rank = tuple[float, ...]


def every_cover(graph: RegionGraph, table: CostTable) -> Iterator[tuple[tuple[Candidate, ...], float, float]]:
    """All ways to do each region once, with their latencies in ns and the energies in pJ of their tasks."""

    def rest(
        chosen: tuple[Candidate, ...], at: int, moment: Moment, energy_pj: float
    ) -> Iterator[tuple[tuple[Candidate, ...], float, float]]:
        if at == len(graph.regions):
            yield chosen, max(moment.ready_ns.values()), energy_pj
            return
        for candidate in table.candidates[graph.regions[at].name]:
            if not fits(graph, table, candidate, moment.state):
                continue
            after, placed = advance(graph, table, candidate, moment)
            more_pj = sum(task.energy_pj for task, _ in placed)
            yield from rest((*chosen, candidate), at + len(candidate.covers), after, energy_pj + more_pj)

    return rest((), 0, begin(table), 0.0)


def solve_exhaustive(
    graph: RegionGraph, table: CostTable, rank: Callable[[Cover, float, float], Rank | None]
) -> Cover | None:
    """The best of all covers; None if there is none.

    Parameters
    ----------
    rank : callable
        The place of a cover among others, the better the less, by its latency in ns and the energy in pJ of
        its tasks; None if it is not allowed.

    Raises
    ------
    UsageError
        If the network has more than `MAX_REGIONS` regions.
    """
    if len(graph.regions) > MAX_REGIONS:
        raise UsageError(
            f"solver 'exhaustive' takes networks of at most {MAX_REGIONS} regions, '{graph.name}' has "
            f"{len(graph.regions)}; use 'label'"
        )
    best: tuple[Rank, Cover] | None = None
    for cover, latency_ns, energy_pj in every_cover(graph, table):
        place = rank(cover, latency_ns, energy_pj)
        if place is not None and (best is None or place < best[0]):
            best = (place, cover)
    return best and best[1]
