"""What every run of layers costs as one group, under its best tiling.

For one last layer, groups grow towards the front: nothing that is already in the group changes but what the
layers before it supply, so each further layer takes a fixed number of operations on all tilings at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pimflow.deep_fusion.accelerator import Accelerator
from pimflow.deep_fusion.candidates import Candidates, Hull, hull, read
from pimflow.deep_fusion.group import Group, overlappable
from pimflow.deep_fusion.layers import Layer, LayerGraph
from pimflow.deep_fusion.overlap import row_lead

# Longest group that is tried.
MAX_LAYERS = 64


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A tensor's part on chip, for every candidate.

    Attributes
    ----------
    sizes : tuple of ndarray
        Longest extents along n, h and w.
    elements, touched : ndarray
        On chip at once; over all tiles.
    retained : ndarray
        Whether anything stays from tile to tile.
    """

    sizes: tuple[np.ndarray, np.ndarray, np.ndarray]
    elements: np.ndarray
    touched: np.ndarray
    retained: np.ndarray


class Growing:
    """Groups that end before layer `end`, from the last layer towards the front."""

    def __init__(self, graph: LayerGraph, end: int, candidates: Candidates, reuse: str) -> None:
        self.graph, self.end, self.candidates, self.reuse = graph, end, candidates, reuse
        self.begin = end
        count = len(candidates.tiles)
        self.wanted: dict[str, tuple[Hull, Hull, Hull]] = {}
        self.tiles: dict[str, Tile] = {}
        self.outside: dict[str, np.ndarray] = {}
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.allowed = np.ones(count, bool)
        # by step from the last: tiles alive, what deep reuse saves, and of that what needs whole weights
        self.live = np.zeros((MAX_LAYERS, count), np.int64)
        self.saved = np.zeros((MAX_LAYERS, count), np.int64)
        self.saved_by_weights = np.zeros((MAX_LAYERS, count), np.int64)
        self.filters = np.zeros((MAX_LAYERS, 1), np.int64)
        self.always = np.zeros(count, np.int64)  # elements that live over all steps
        self.moved = np.zeros(count, np.int64)  # by results and kept ones; what is loaded is in `outside`
        self.operations = np.zeros(count)
        self.weights: list[tuple[int, str]] = []

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.graph.layers[self.begin : self.end]

    def grow(self) -> None:
        """Take the layer before the group into it."""
        self.begin -= 1
        layer, shape = self.graph.layers[self.begin], self.graph.shapes[self.graph.layers[self.begin].name]
        name, step = layer.name, self.begin
        wanted = self.wanted.pop(name, (None, None, None))
        if self.graph.stored(name, self.end):
            pieces = [axis.pieces(extent) for axis, extent in zip(self.candidates.axes, shape)]
            wanted = tuple(hull(have, piece) for have, piece in zip(wanted, pieces))
            self.allowed &= self.candidates.fits(shape)
            self.moved += math.prod(shape)
        self.moved += layer.kept_elements
        tile, fresh = self._tile(wanted, shape[3])
        self._live(name, tile, step, self.last.setdefault(name, step))
        self.outside.pop(name, None)
        self.operations += layer.operations * (tile.touched / math.prod(shape))
        if layer.weight_elements:
            self.weights.append((layer.weight_elements, name))
            self.weights.sort(reverse=True)
            self.filters[self.end - 1 - step] = layer.filter_elements
        for source, maps in zip(layer.inputs, layer.maps):
            self._need(source, [read(m, *part) for m, part in zip(maps, fresh)], step)
        if self.reuse == "deep":
            self._save(layer, tile, step)

    def _tile(self, wanted: tuple[Hull, Hull, Hull], channels: int) -> tuple[Tile, list[Hull]]:
        sizes, totals, fresh, kept = [], [], [], []
        for axis, (begin, end) in zip(self.candidates.axes, wanted):
            held, new = axis.kept(begin, end)
            sizes.append(axis.longest(*held))
            totals.append(axis.total(*new))
            fresh.append(new)
            kept.append(np.logical_or.reduceat(new[0] > held[0], axis.starts))
        product = self.candidates.product
        ones = [np.ones(len(axis.parts), bool) for axis in self.candidates.axes]
        tile = Tile(
            sizes=tuple(sizes),
            elements=product(*sizes) * channels,
            touched=product(*totals) * channels,
            retained=product(ones[0], kept[1], ones[2]) if kept[1].any() else np.zeros(1, bool),
        )
        return tile, fresh

    def _need(self, source: str, parts: list[Hull], step: int) -> None:
        """Widen a tensor that is, so far, made outside."""
        have = self.wanted.get(source, (None, None, None))
        self.wanted[source] = tuple(hull(a, b) for a, b in zip(have, parts))
        tile, _ = self._tile(self.wanted[source], self.graph.shapes[source][3])
        self.last.setdefault(source, step)
        self._live(source, tile, step, self.last[source])
        self.outside[source] = tile.touched

    def _live(self, name: str, tile: Tile, first: int, last: int) -> None:
        """Let a tensor live in steps `first` to `last`, in place of what it had before."""
        old = self.tiles.get(name)
        if old is not None:
            self._add(old, self.first[name], last, -1)
        self._add(tile, first, last, 1)
        self.tiles[name], self.first[name] = tile, first

    def _add(self, tile: Tile, first: int, last: int, sign: int) -> None:
        always = tile.elements * (True if self.reuse == "none" else tile.retained)
        self.always += sign * always
        if self.reuse != "none":
            rows = slice(self.end - 1 - last, self.end - first)
            self.live[rows] += sign * (tile.elements - always)

    def _save(self, layer: Layer, tile: Tile, step: int) -> None:
        """What the result saves by lying over an operand that dies with it; as `Group.joins`."""
        if len(set(layer.inputs)) < len(layer.inputs):
            return
        dying = [name for name in layer.inputs if self.last[name] == step]
        row = self.end - 1 - step
        if not dying:
            return
        # a candidate may retain the first that dies and not the next; that is left unused
        operand = self.tiles[dying[0]]
        free = ~operand.retained & ~tile.retained
        if layer.in_place:
            self.saved[row] = tile.elements * (free & (operand.elements == tile.elements))
        elif overlappable(layer):
            n, h, w = operand.sizes
            _, oh, ow = tile.sizes
            grid = lambda a, axis: np.expand_dims(a, [x for x in range(3) if x != axis])  # noqa: E731
            channels, filters = self.graph.shapes[dying[0]][3], self.graph.shapes[layer.name][3]
            lead = row_lead(
                layer.maps[0][1],
                grid(h, 1),
                grid(w, 2),
                channels,
                grid(oh, 1),
                grid(ow, 2),
                filters,
                grid(n, 0),
            ).ravel()
            both = np.maximum(lead + operand.elements, tile.elements)
            saving = np.maximum(0, operand.elements + tile.elements - both) * free
            (self.saved_by_weights if layer.weight_elements else self.saved)[row] = saving

    def tile_elements(self) -> np.ndarray:
        """Elements on chip where weights are not placed there: a lower bound of what a placement takes."""
        if self.reuse == "none":
            return self.always
        rows = slice(0, self.end - self.begin)
        return (self.live[rows] - self.saved[rows]).max(axis=0) + self.always

    def memory(self) -> tuple[np.ndarray, np.ndarray]:
        """Elements on chip with all weights there all the time, and with those of one filter at a time.

        Lower bounds of what a placement takes.
        """
        rows = slice(0, self.end - self.begin)
        weights = sum(size for size, _ in self.weights)
        if self.reuse == "none":
            return (self.always + weights,) * 2
        alive = self.live[rows] - self.saved[rows]
        resident = (alive - self.saved_by_weights[rows]).max(axis=0) + self.always + weights
        streamed = (alive + self.filters[rows]).max(axis=0) + self.always
        return resident, streamed


@dataclass(frozen=True, kw_only=True)
class Costed:
    """The best group found for a run of layers.

    Attributes
    ----------
    group : Group
    objective : float
        What the search minimises, in its unit.
    bound_elements : int
        Its tiles take no less on chip.
    """

    group: Group
    objective: float
    bound_elements: int = 0


class Objective:
    """What the search minimises: ``traffic`` in bytes or ``time`` in ns, overlapped."""

    def __init__(self, accelerator: Accelerator, kind: str) -> None:
        self.accelerator, self.kind = accelerator, kind

    def of(self, traffic_elements: np.ndarray, operations: np.ndarray) -> np.ndarray:
        traffic_bytes = traffic_elements * self.accelerator.element_bytes
        return traffic_bytes if self.kind == "traffic" else self.time_ns(traffic_elements, operations)

    def time_ns(self, traffic_elements: np.ndarray, operations: np.ndarray) -> np.ndarray:
        moving = self.accelerator.memory_ns(traffic_elements * self.accelerator.element_bytes)
        return np.maximum(moving, self.accelerator.compute_ns(operations))


def best_groups(
    growing: Growing, objective: Objective, refused: Mapping[tuple[int, int], int]
) -> Iterator[Costed | None]:
    """Per run of layers, from one layer towards the front, its best group; None where none pays.

    A group pays if it is no slower than its layers by themselves.

    Parameters
    ----------
    refused : mapping of (int, int) to int
        By run, the least `Costed.bound_elements` that could not be placed: only what is below it is tried.
    """
    graph, capacity = (
        growing.graph,
        objective.accelerator.on_chip_bytes // objective.accelerator.element_bytes,
    )
    unfused_ns = 0.0
    while growing.begin > 0 and growing.end - growing.begin < MAX_LAYERS:
        growing.grow()
        layer = graph.layers[growing.begin]
        single = objective.of(graph.moved_elements(layer), layer.operations)
        unfused_ns += objective.time_ns(graph.moved_elements(layer), layer.operations)
        if growing.end - growing.begin == 1:
            group = Group(graph=graph, begin=growing.begin, end=growing.end, reuse=growing.reuse)
            yield Costed(group=group, objective=float(single))
            continue
        resident, streamed = growing.memory()
        bound = np.minimum(resident, streamed)
        possible = growing.allowed & (bound <= capacity)
        if not possible.any():
            return
        possible &= bound < refused.get((growing.begin, growing.end), capacity + 1)
        yield _best(growing, objective, possible, resident, capacity - streamed, unfused_ns)


def _best(
    growing: Growing,
    objective: Objective,
    possible: np.ndarray,
    resident: np.ndarray,
    room: np.ndarray,
    unfused_ns: float,
) -> Costed | None:
    """The best of the candidates that fit, with the weights that stay on chip."""
    at = np.flatnonzero(possible)
    capacity = objective.accelerator.on_chip_bytes // objective.accelerator.element_bytes
    tiles, room = growing.candidates.tiles[at], room[at]
    moved = (growing.moved + sum(growing.outside.values()))[at]
    moved = moved + sum(size for size, _ in growing.weights)
    operations = growing.operations[at]
    able = objective.time_ns(moved, operations) <= unfused_ns
    if not able.any():
        return None
    at, tiles, room, moved, operations = (x[able] for x in (at, tiles, room, moved, operations))
    initial_room = room
    whole = (resident[at] <= capacity) | (growing.reuse == "none")
    kept = []
    left = sum(size for size, _ in growing.weights)
    for size, _ in growing.weights:
        if (room >= left).all():  # all that follow fit beside one another
            break
        left -= size
        stays = whole | ((size <= room) & (tiles > 1))
        room = room - size * (stays & ~whole)
        moved = moved + size * (tiles - 1) * ~stays
        kept.append(stays)
    values = objective.of(moved, operations)
    values = np.where(objective.time_ns(moved, operations) <= unfused_ns, values, np.inf)
    best = np.lexsort((tiles, operations, values))[0]
    if not np.isfinite(values[best]):
        return None
    group = Group(
        graph=growing.graph,
        begin=growing.begin,
        end=growing.end,
        tiling=growing.candidates.tiling(at[best]),
        reuse=growing.reuse,
        resident=frozenset(
            name for index, (_, name) in enumerate(growing.weights) if index >= len(kept) or kept[index][best]
        ),
    )
    bound = min(int(resident[at[best]]), int(capacity - initial_room[best]))
    return Costed(group=group, objective=float(values[best]), bound_elements=bound)
