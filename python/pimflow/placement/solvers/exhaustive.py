"""Reference for the label search: every cover of a small network, timed by the evaluator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.region_graph import RegionGraph
from pimflow.errors import UsageError
from pimflow.placement.solvers.evaluate import advance
from pimflow.placement.solvers.plan_state import PlanState, initial_state, is_feasible

MAX_REGIONS = 8
TIMED_COVERS = 50  # a tenth of a second
Cover = tuple[Candidate, ...]
TimedCover = tuple[Cover, float, float]


def all_covers(graph: RegionGraph, table: CostTable) -> Iterator[TimedCover]:
    """All covers, each region done once, with their latencies in ns and the energies in pJ of their tasks."""

    def rest(cover: Cover, position: int, state: PlanState, energy_pj: float) -> Iterator[TimedCover]:
        """All completions of the partial cover `cover` from position `position` on."""
        if position == len(graph.regions):
            yield cover, max(state.ready_ns.values()), energy_pj
            return
        for candidate in table.candidates[graph.regions[position].name]:
            if is_feasible(graph, table, candidate, state):
                next_state, started_tasks = advance(graph, table, candidate, state)
                total_pj = energy_pj + sum(task.energy_pj for task, _ in started_tasks)
                yield from rest((*cover, candidate), position + len(candidate.covers), next_state, total_pj)

    return rest((), 0, initial_state(table), 0.0)


def _cover_count(graph: RegionGraph, table: CostTable) -> int:
    """An upper bound of the number of covers: as if every candidate could follow every other."""
    counts = [0] * len(graph.regions) + [1]  # from each position to the end
    for position in reversed(range(len(graph.regions))):
        candidates = table.candidates[graph.regions[position].name]
        counts[position] = sum(counts[position + len(candidate.covers)] for candidate in candidates)
    return counts[0]


def affordable_covers(
    graph: RegionGraph, table: CostTable, seconds: float, progress: Callable[[str], None]
) -> Iterator[Cover]:
    """All covers of a small network, which are evaluated one by one while this iterates.

    Parameters
    ----------
    seconds : float
        Upper bound on the CPU time, which is estimated from that of the first `TIMED_COVERS` covers and an
        upper bound of how many there are.
    progress : callable
        Called with that estimate before all other covers are evaluated.

    Raises
    ------
    UsageError
        If the network has more than `MAX_REGIONS` regions, or all covers may take more than `seconds`.
    """
    if len(graph.regions) > MAX_REGIONS:
        raise UsageError(
            f"solver 'exhaustive' takes networks of at most {MAX_REGIONS} regions, '{graph.name}' has "
            f"{len(graph.regions)}; use 'label'"
        )
    begin_s = time.process_time()
    for number, (cover, *_) in enumerate(all_covers(graph, table)):
        if number == TIMED_COVERS:
            covers = _cover_count(graph, table)
            needed_s = covers * (time.process_time() - begin_s) / TIMED_COVERS
            question = f"up to {covers} plans of '{graph.name}' take up to {needed_s:.3g} s"
            if needed_s > seconds:
                raise UsageError(
                    f"solver 'exhaustive': {question}, more than --search-seconds {seconds:g}; give "
                    f"--search-seconds {math.ceil(1.1 * needed_s)}, or use 'label'"
                )
            progress(f"evaluating {question}")
        yield cover
