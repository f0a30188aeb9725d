"""A network cut into parts where it narrows: tasks of different parts never overlap in time."""

from __future__ import annotations

import functools
import operator

from pimflow.core.region_graph import RegionGraph


def narrow_parts(graph: RegionGraph) -> list[tuple[int, int]]:
    """The parts of a network as half-open ranges of region positions.

    Each part but the last ends with a region that all regions before it lead to and all regions after it
    need: when it ends, all before it have ended, and none after it has begun.
    """
    count = len(graph.regions)
    # By region, as bit sets over positions: the regions that it depends on, itself included, and those that
    # must have ended before it begins.
    ancestors: list[int] = []
    dependencies: list[int] = []
    by_name: dict[str, int] = {}
    for position, region in enumerate(graph.regions):
        needed = {name: by_name[name] for name in region.inputs if name in by_name}
        early = (bits for name, bits in needed.items() if name not in region.late_operands)
        by_name[region.name] = functools.reduce(operator.or_, needed.values(), 1 << position)
        ancestors.append(by_name[region.name])
        dependencies.append(functools.reduce(operator.or_, early, 0))
    needed_by_all = [False] * count
    common = -1
    for position in reversed(range(count)):
        needed_by_all[position] = bool(common >> position & 1)
        common &= dependencies[position]
    parts, begin = [], 0
    for position in range(count):
        leads_here = ancestors[position] == (1 << position + 1) - 1
        if position == count - 1 or (leads_here and needed_by_all[position]):
            parts.append((begin, position + 1))
            begin = position + 1
    return parts
