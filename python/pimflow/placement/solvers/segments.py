"""A network cut into parts where it narrows: tasks of different parts never overlap in time."""

from __future__ import annotations

import itertools
from collections import defaultdict

from pimflow.core.candidate import CostTable
from pimflow.core.region import RegionGraph
from pimflow.placement.solvers.steps import late_operands

Segment = tuple[int, int]  # first region, and the one behind the last, by position
MOST_LAYOUTS = 100  # ways in which what is read behind a cut may lie, each a state of its own to end in
MOST_IN_TURN = 4096  # ways that are gone through one by one at a region of a network without branches
MOST_BEHIND = 4  # regions behind the last branches that are done with them


def ancestors(graph: RegionGraph) -> list[int]:
    """By region, the regions that it depends on, itself included, as a bit set over positions."""
    order = {region.name: position for position, region in enumerate(graph.regions)}
    needed_by: list[int] = []
    for position, region in enumerate(graph.regions):
        needed = 1 << position
        for name in region.inputs:
            if name in order:
                needed |= needed_by[order[name]]
        needed_by.append(needed)
    return needed_by


def waits(graph: RegionGraph) -> list[int]:
    """By region, the regions that have ended when it begins, as a bit set like that of `ancestors`."""
    needs = ancestors(graph)
    order = {region.name: position for position, region in enumerate(graph.regions)}
    ended = []
    for region in graph.regions:
        needed = 0
        for name in set(region.inputs) - (set(late_operands(region)) - {region.inputs[0]}):
            needed |= needs[order[name]] if name in order else 0
        ended.append(needed)
    return ended


def narrow(graph: RegionGraph) -> list[Segment]:
    """Runs of regions, each but the last ending with a region that all before lead to and all after need.

    All before such a region has ended when it has, and nothing behind it begins before: the latencies of the
    runs add up, on whatever devices their tasks are.
    """
    needs, begins, count = ancestors(graph), waits(graph), len(graph.regions)
    needed_by_all = [False] * count
    common = -1
    for position in reversed(range(count)):
        needed_by_all[position] = bool(common >> position & 1)
        common &= begins[position]
    segments, begin = [], 0
    for position in range(count):
        leads_here = needs[position] == (1 << position + 1) - 1
        if position == count - 1 or (leads_here and needed_by_all[position]):
            segments.append((begin, position + 1))
            begin = position + 1
    return segments


def is_serial(graph: RegionGraph) -> bool:
    """Whether regions can only run one after the other."""
    return len(narrow(graph)) == len(graph.regions)


def has_few_ways(graph: RegionGraph, table: CostTable) -> bool:
    """Whether results may lie in few ways everywhere, so that dynamic programming can go through all.

    Where every layer reads all before it, as in a dense block, each of these multiplies them.
    """
    return max(_ways_to_lie(graph, table)) <= MOST_IN_TURN


def parts(graph: RegionGraph, table: CostTable) -> list[Segment]:
    """Runs of regions, all of which wait for all before the run: their latencies add up too.

    Those of `narrow` are cut behind the region that joins branches; these before it too, unless several of
    the branches may leave it something pending, each of which doubles the states to end in. Neither is cut
    where what is read behind may lie in more than `MOST_LAYOUTS` ways, nor, if it may lie in several, in the
    last `MOST_BEHIND` regions behind branches: all states at the end of the network are as good.
    """
    order = {region.name: position for position, region in enumerate(graph.regions)}
    pending = {c.covers[-1] for of_region in table.candidates.values() for c in of_region if c.output.pending}
    left = [(order[name], order[graph.consumers[name][0]]) for name in pending]
    begins, common = waits(graph), -1
    cuts = {end for _, end in narrow(graph)} | {0}
    for position in reversed(range(1, len(begins))):
        common &= begins[position]
        before = (1 << position) - 1
        if common & before == before and sum(made < position <= reader for made, reader in left) < 2:
            cuts.add(position)
    ways = _ways_to_lie(graph, table)
    few = sorted(cut for cut in cuts if ways[cut] <= MOST_LAYOUTS)
    branching = max((end for begin, end in itertools.pairwise(few) if end - begin > 1), default=0)
    near = len(begins) - branching <= MOST_BEHIND
    return list(itertools.pairwise(cut for cut in few if not (near and cut >= branching and ways[cut] > 1)))


def _ways_to_lie(graph: RegionGraph, table: CostTable) -> list[int]:
    """By position, in how many ways the results before it may lie that it, or what is behind, reads."""
    order = {region.name: position for position, region in enumerate(graph.regions)}
    layouts: dict[str, set[str]] = defaultdict(set)
    for of_region in table.candidates.values():
        for candidate in of_region:
            layouts[candidate.covers[-1]].add(candidate.output.layout)
    ways = [1] * (len(graph.regions) + 1)
    for name, reader in graph.last_readers.items():
        if name in layouts:
            for position in range(order[name] + 1, order[reader] + 1):
                ways[position] *= len(layouts[name])
    return ways


def merged(graph: RegionGraph, table: CostTable) -> list[Segment]:
    """`parts`, with those joined that a candidate straddles, but where it does each of them in full."""
    segments = parts(graph, table)
    order = {region.name: position for position, region in enumerate(graph.regions)}
    spans = {
        (order[c.covers[0]], order[c.covers[-1]])
        for candidates in table.candidates.values()
        for c in candidates
        if len(c.covers) > 1
    }
    joined = True
    while joined:
        joined = False
        for first, last in sorted(spans):
            touched = [s for s in segments if s[0] <= last and first < s[1]]
            if len(touched) > 1 and (touched[0][0], touched[-1][1]) != (first, last + 1):
                at = segments.index(touched[0])
                segments[at : at + len(touched)] = [(touched[0][0], touched[-1][1])]
                joined = True
    return segments
