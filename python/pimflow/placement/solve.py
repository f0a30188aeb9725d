"""The choice of one candidate a region."""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.region import RegionGraph


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Chosen candidates in region order, and the sum of their latencies and transitions."""

    candidates: tuple[Candidate, ...]
    latency_ns: float


def solve_dp(graph: RegionGraph, table: CostTable) -> Solution:
    """The fastest exact cover when regions run one after the other.

    Dynamic programming over the regions in order (PIMFlow, "Execution Mode and Task Size Search"; with
    its two slips mended). The state is which live results still have something pending, so the
    transition costs of a graph with branches are exact; on a chain that is one bit, and the recurrence
    is the slides'.
    """
    consumers = graph.consumers
    states: dict[frozenset[str], tuple[float, tuple[Candidate, ...]]] = {frozenset(): (0.0, ())}
    for region in graph.regions:
        following: dict[frozenset[str], tuple[float, tuple[Candidate, ...]]] = {}
        for pending, (latency_ns, chosen) in states.items():
            read = pending & set(region.inputs)
            for candidate in table.candidates[region.name]:
                cost_ns = latency_ns + table.cost(region.name, candidate).latency_ns
                cost_ns += sum(table.transition(name, candidate).latency_ns for name in read)
                state = pending - read
                if candidate.output.pending and consumers[region.name]:
                    state |= {region.name}
                if state not in following or cost_ns < following[state][0]:
                    following[state] = (cost_ns, (*chosen, candidate))
        states = following
    latency_ns, chosen = min(states.values(), key=lambda found: found[0])
    return Solution(candidates=chosen, latency_ns=latency_ns)
