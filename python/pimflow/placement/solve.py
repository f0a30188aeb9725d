"""The choice of candidates that do every region once."""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.core.candidate import Candidate, CostTable, makespan_ns
from pimflow.core.region import RegionGraph
from pimflow.placement import steps
from pimflow.placement.steps import State


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Candidates in the order of their first regions, and the sum of their latencies and transitions."""

    candidates: tuple[Candidate, ...]
    latency_ns: float


def solve_dp(graph: RegionGraph, table: CostTable) -> Solution:
    """The fastest exact cover when regions run one after the other.

    Dynamic programming over the regions in order (PIMFlow, "Execution Mode and Task Size Search"; with
    its two slips mended). The state is which live results still have something pending, and whether a
    PIM submission may go on, so transition costs are exact on graphs with branches too; on a chain the
    recurrence is the slides'.
    """
    count = len(graph.regions)
    states: list[dict[State, tuple[float, tuple[Candidate, ...]]]] = [{} for _ in range(count + 1)]
    states[0][State()] = (0.0, ())
    for position, region in enumerate(graph.regions):
        for state, (latency_ns, chosen) in states[position].items():
            for candidate in table.candidates[region.name]:
                cost_ns = latency_ns + makespan_ns(steps.tasks(graph, table, candidate, state))
                following = states[position + len(candidate.covers)]
                left = steps.after(graph, candidate, state)
                if left not in following or cost_ns < following[left][0]:
                    following[left] = (cost_ns, (*chosen, candidate))
    latency_ns, chosen = min(states[count].values(), key=lambda found: found[0])
    return Solution(candidates=chosen, latency_ns=latency_ns)
