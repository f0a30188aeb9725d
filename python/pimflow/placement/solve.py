"""The choice of one candidate a region."""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.core.candidate import Candidate, CostTable, makespan_ns
from pimflow.core.region import RegionGraph


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Chosen candidates in region order, and the sum of their latencies and transitions."""

    candidates: tuple[Candidate, ...]
    latency_ns: float


# Regions whose results have something pending, and whether the last one stayed on PIM.
State = tuple[frozenset[str], bool]


def solve_dp(graph: RegionGraph, table: CostTable) -> Solution:
    """The fastest exact cover when regions run one after the other.

    Dynamic programming over the regions in order (PIMFlow, "Execution Mode and Task Size Search"; with
    its two slips mended). The state is which live results still have something pending, and whether a
    PIM submission may go on, so transition costs are exact on graphs with branches too; on a chain the
    recurrence is the slides'.
    """
    states: dict[State, tuple[float, tuple[Candidate, ...]]] = {(frozenset(), False): (0.0, ())}
    previous = ""
    for region in graph.regions:
        following: dict[State, tuple[float, tuple[Candidate, ...]]] = {}
        for (pending, on_pim), (latency_ns, chosen) in states.items():
            read = pending & set(region.inputs)
            goes_on = on_pim and region.inputs[0] == previous
            for candidate in table.candidates[region.name]:
                done = candidate.continued() if goes_on else candidate
                cost_ns = latency_ns + makespan_ns(done.tasks)
                cost_ns += sum(table.transition(name, candidate).latency_ns for name in read)
                left = pending - read
                if candidate.output.pending:
                    left |= {region.name}
                state = (left, candidate.stays_on_pim)
                if state not in following or cost_ns < following[state][0]:
                    following[state] = (cost_ns, (*chosen, candidate))
        states, previous = following, region.name
    latency_ns, chosen = min(states.values(), key=lambda found: found[0])
    return Solution(candidates=chosen, latency_ns=latency_ns)
