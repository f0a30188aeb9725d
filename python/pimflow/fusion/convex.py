"""Groups over branches: the best exact cover of the layers by convex sets of the graph.

A set is convex if no path leaves it and comes back. Layers between two layers of a group in the order of
the file may then be outside the group. A cover can run if its groups do not depend on one another in a
cycle.
"""

from __future__ import annotations

import graphlib
import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from pimflow.core.integer_program import IntegerProgram
from pimflow.fusion.growing import MAX_LAYERS
from pimflow.fusion.layers import LayerGraph
from pimflow.fusion.run_costs import CostedGroup, RunCosts

# Upper bound on convex sets that are tried beside runs; in large graphs, sets of few links come first.
MAX_SETS = 4000
# Of covers that differ by less than this share of the unfused network, the one with fewer groups is chosen.
TIE = 1e-9

Links = tuple[tuple[int, ...], ...]


class ConvexCover:
    """Exact covers by runs of the layer order and by convex sets of links.

    A link is a layer with the in-place layers that follow it. Where a graph has no more than `MAX_SETS`
    convex sets of layers, each layer is a link, and all sets are tried.
    """

    def __init__(self, costs: RunCosts) -> None:
        self.costs = costs
        self.links: Links = tuple((position,) for position in range(len(costs)))
        self.sets, complete = convex_sets(costs.graph, self.links)
        if not complete:
            self.links = _links(costs.graph)
            self.sets, _ = convex_sets(costs.graph, self.links, connected_only=True)
        self._non_runs: list[CostedGroup] | None = None

    @property
    def has_non_runs(self) -> bool:
        """Whether any of the sets is not a run of the layer order."""
        return any(_has_gap(self._positions(links)) for links in self.sets)

    def best(self, costs: RunCosts) -> list[CostedGroup]:
        """The cover with the smallest objective, in an order in which its groups can run."""
        cut_objectives = _cut_objectives(costs)
        runs = [group for end in range(1, len(costs) + 1) for group in costs.runs_ending_at(end) if group]
        columns = [
            group
            for group in runs
            if len(group.positions) == 1
            or group.objective < cut_objectives[group.positions[0]][len(group.positions)]
        ]
        if self._non_runs is None:
            self._non_runs = [group for group in self._fitting_groups() if _has_gap(group.positions)]
        fresh = (
            costs.best_group(group.positions) if costs.is_excluded(group) else group
            for group in self._non_runs
        )
        self._non_runs = [
            group
            for group in fresh
            if group and group.objective < _objective_by_runs(group.positions, cut_objectives, costs)
        ]
        return _cover(columns + self._non_runs, costs)

    def _positions(self, links: Sequence[int]) -> tuple[int, ...]:
        return tuple(position for link in links for position in self.links[link])

    def _fitting_groups(self) -> Iterator[CostedGroup]:
        """Sets that fit and are as fast as their layers, each grown from the one without its first link."""
        larger = defaultdict(list)
        for link_set in self.sets:
            larger[link_set[1:]].append(link_set)
        empty = self.costs.empty_group()
        stack = [(link_set, empty) for link_set in larger[()]]
        while stack:
            links, growing = stack.pop()
            positions = self.links[links[0]]
            if len(growing.positions) + len(positions) > MAX_LAYERS:
                continue
            growing = growing.copy()
            fits, best = self.costs.grow(growing, reversed(positions))
            if best:
                yield best
            if fits:
                stack += [(link_set, growing) for link_set in larger[links]]


def convex_sets(
    graph: LayerGraph, links: Links, connected_only: bool = False
) -> tuple[list[tuple[int, ...]], bool]:
    """At most `MAX_SETS` convex sets of links, by size, and whether these are all sets.

    For each set, the set without its first link is among them, too.

    Parameters
    ----------
    connected_only : bool
        Only sets that grow from their last link by links which share a tensor with the set.
    """
    link_of = {position: index for index, link in enumerate(links) for position in link}
    readers, tensors = [0] * len(links), [0] * len(links)
    numbers = {name: 1 << number for number, name in enumerate(graph.shapes)}
    for index, link in enumerate(links):
        for position in link:
            layer = graph.layers[position]
            for name in (layer.name, *layer.inputs):
                tensors[index] |= numbers[name]
            for reader in (reader for name in layer.output_names for reader in graph.readers[name]):
                readers[index] |= 1 << link_of[reader]
        readers[index] &= ~(1 << index)
    reached = [0] * len(links)
    for index in reversed(range(len(links))):
        for later in _bit_positions(readers[index]):
            reached[index] |= reached[later] | 1 << later
    sets: list[tuple[int, ...]] = []
    level: list[tuple[tuple[int, ...], int, int]] = [
        ((index,), 1 << index, tensors[index]) for index in range(len(links))
    ]
    while level:
        sets += [entry[0] for entry in level]
        if len(sets) > MAX_SETS:
            return sets[:MAX_SETS], False
        level = [
            ((index, *link_set), mask | 1 << index, touched | tensors[index])
            for link_set, mask, touched in level
            for index in reversed(range(link_set[0]))
            if (not connected_only or tensors[index] & touched)
            and not any(reached[later] & mask for later in _bit_positions(readers[index] & ~mask))
        ]
    return sets, True


def _bit_positions(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _links(graph: LayerGraph) -> Links:
    """Layers, each with the in-place layers after it that are the only readers of the layer before them."""
    links: list[list[int]] = []
    for position, layer in enumerate(graph.layers):
        before = graph.layers[position - 1].name
        follows = position and layer.is_in_place and set(layer.inputs) == {before}
        if follows and graph.readers[before] == (position,) and before not in graph.outputs:
            links[-1].append(position)
        else:
            links.append([position])
    return tuple(map(tuple, links))


def _has_gap(positions: Sequence[int]) -> bool:
    return positions[-1] - positions[0] >= len(positions)


def _cut_objectives(costs: RunCosts) -> np.ndarray:
    """By first layer and length, the smallest objective of a run cut into shorter ones, or of one layer."""
    count = len(costs)
    run_objectives = np.full((count + MAX_LAYERS, MAX_LAYERS + 1), np.inf)
    for end in range(1, count + 1):
        for length, run in enumerate(costs.runs_ending_at(end), 1):
            if run:
                run_objectives[end - length, length] = run.objective
    cut_objectives = np.full((count, MAX_LAYERS + 1), np.inf)
    cut_objectives[:, 1] = run_objectives[:count, 1]
    for begin in range(count):
        best = run_objectives[begin].copy()  # of layers [begin, begin + length), cut or not
        best[0] = np.inf
        for length in range(2, min(MAX_LAYERS, count - begin) + 1):
            first = np.arange(1, length)
            cut_objectives[begin, length] = (
                best[first] + run_objectives[begin + first, length - first]
            ).min()
            best[length] = min(best[length], cut_objectives[begin, length])
    return cut_objectives


def _objective_by_runs(positions: Sequence[int], cut_objectives: np.ndarray, costs: RunCosts) -> float:
    """Smallest objective of the layers in groups that are runs."""
    total, begin = 0.0, 0
    for index in range(1, len(positions) + 1):
        if index < len(positions) and positions[index] == positions[index - 1] + 1:
            continue
        first, length = positions[begin], index - begin
        run = costs.run(first, first + length)
        total += min(cut_objectives[first, length], run.objective if run else math.inf)
        begin = index
    return total


def _cover(columns: list[CostedGroup], costs: RunCosts) -> list[CostedGroup]:
    """The exact cover with the smallest objective whose groups can run."""
    program, total = IntegerProgram(), sum(item.objective for item in costs.single_layers)
    binaries = [program.add_binary(item.objective / total + TIE) for item in columns]
    binaries_by_position = defaultdict(list)
    for binary, item in zip(binaries, columns):
        for position in item.positions:
            binaries_by_position[position].append(binary)
    for position in range(len(costs)):
        program.add_exactly_one(binaries_by_position[position])
    while True:
        outcome = program.solve()
        assert outcome.values is not None, "single layers are a cover"
        chosen = [index for index, binary in enumerate(binaries) if outcome.is_chosen(binary)]
        order, circle = _order([columns[index] for index in chosen], costs.graph)
        if not circle:
            return order
        program.add_row([(binaries[chosen[item]], 1.0) for item in circle], high=len(circle) - 1.0)


def _order(groups: list[CostedGroup], graph: LayerGraph) -> tuple[list[CostedGroup], list[int]]:
    """The groups in an order in which they can run, early layers first; or the groups of a cycle."""
    group_of = {position: index for index, group in enumerate(groups) for position in group.positions}
    waits = {
        index: {group_of[source] for position in group.positions for source in graph.sources[position]}
        for index, group in enumerate(groups)
    }
    sorter = graphlib.TopologicalSorter({index: needed - {index} for index, needed in waits.items()})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return [], error.args[1][1:]  # the list begins with its last element
    order: list[CostedGroup] = []
    ready: list[tuple[int, int]] = []
    while sorter.is_active():
        for index in sorter.get_ready():
            heapq.heappush(ready, (groups[index].positions[0], index))
        index = heapq.heappop(ready)[1]
        order.append(groups[index])
        sorter.done(index)
    return order, []
