"""A network cut into parts where it narrows: tasks of different parts never overlap in time."""

from __future__ import annotations

from pimflow.core.region import RegionGraph
from pimflow.placement.solvers.plan_state import late_operands


def narrow_parts(graph: RegionGraph) -> list[tuple[int, int]]:
    """The parts of a network as half-open ranges of region positions.

    Each part but the last ends with a region that all regions before it lead to and all regions after it
    need: when it ends, all before it have ended, and none after it has begun.
    """
    ancestors, dependencies, count = _ancestors(graph), _start_dependencies(graph), len(graph.regions)
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


def _ancestors(graph: RegionGraph) -> list[int]:
    """By region, the regions that it depends on, itself included, as a bit set over positions."""
    order = {region.name: position for position, region in enumerate(graph.regions)}
    ancestors: list[int] = []
    for position, region in enumerate(graph.regions):
        needed = 1 << position
        for name in region.inputs:
            if name in order:
                needed |= ancestors[order[name]]
        ancestors.append(needed)
    return ancestors


def _start_dependencies(graph: RegionGraph) -> list[int]:
    """By region, the regions that must have ended before it begins, as a bit set over positions."""
    ancestors = _ancestors(graph)
    order = {region.name: position for position, region in enumerate(graph.regions)}
    dependencies = []
    for region in graph.regions:
        needed = 0
        for name in set(region.inputs) - (set(late_operands(region)) - {region.inputs[0]}):
            needed |= ancestors[order[name]] if name in order else 0
        dependencies.append(needed)
    return dependencies
