"""Groups that grow by a layer at a time, evaluated under all tilings at once.

From its last layer a group grows towards the front. A new layer changes only the tensors that it supplies
to the group, so it takes a fixed number of array operations over all tilings.
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass

import numpy as np

from pimflow.fusion.channels import ChannelRun, channels_on_chip
from pimflow.fusion.group import overlappable
from pimflow.fusion.layers import Layer, LayerGraph
from pimflow.fusion.overlap import row_lead
from pimflow.fusion.tiling import Hull, hull, read_spans
from pimflow.fusion.tiling_candidates import TilingCandidates

# Upper bound on the layers of a group.
MAX_LAYERS = 64


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The part of a tensor that is on chip, for every tiling.

    Attributes
    ----------
    sizes : tuple of ndarray
        Longest extents along n, h and w.
    elements, touched : ndarray
        Elements on chip at once, and over all tiles.
    fresh_pixels : ndarray
        Largest number of pixels that one tile loads or computes.
    retained : ndarray
        Whether rows stay on chip from tile to tile.
    """

    sizes: tuple[np.ndarray, ...]
    elements: np.ndarray
    touched: np.ndarray
    fresh_pixels: np.ndarray
    retained: np.ndarray


def _grid(values: np.ndarray, axis: int) -> np.ndarray:
    """Values along one of three axes."""
    return np.expand_dims(values, [x for x in range(3) if x != axis])


class GrowingGroup:
    """A group that grows from its last layer towards the front."""

    def __init__(self, graph: LayerGraph, candidates: TilingCandidates, reuse: str) -> None:
        self.graph, self.candidates = graph, candidates
        self.shares_memory, self.overlays_results = reuse != "none", reuse == "deep"  # see `group.Reuse`
        self.positions: list[int] = []  # the last layer first
        count = len(candidates.tiles)
        self.required: dict[str, tuple[Hull, ...]] = {}
        self.tiles: dict[str, Tile] = {}
        self.load_elements: dict[str, np.ndarray] = {}
        self.first: dict[str, int] = {}  # steps are counted from the last layer
        self.last: dict[str, int] = {}
        self.allowed = np.ones(count, bool)
        # by step: elements of live tiles, savings of deep reuse, and savings that need resident weights
        self.live = np.zeros((MAX_LAYERS, count), np.int64)
        self.saved = np.zeros((MAX_LAYERS, count), np.int64)
        self.saved_by_weights = np.zeros((MAX_LAYERS, count), np.int64)
        self.filters = np.zeros((MAX_LAYERS, 1), np.int64)
        self.resident_elements = np.zeros(count, np.int64)  # elements that live over all steps
        # by results and extra outputs; loads are in `load_elements`
        self.store_elements = np.zeros(count, np.int64)
        self.operations = np.zeros(count)
        self.weights: list[tuple[int, str]] = []
        self.may_fit_untiled = True  # whether untiled maps may fit, channel by channel

    def copy(self) -> GrowingGroup:
        """A copy that grows independently."""
        duplicate = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray | dict | list):
                setattr(duplicate, name, value.copy())
        return duplicate

    def grow(self, position: int) -> None:
        """Add a layer in front of the group."""
        layer, step = self.graph.layers[position], len(self.positions)
        name, shape = layer.name, self.graph.shapes[layer.name]
        self.positions.append(position)
        required = self.required.pop(name, None)
        if self.graph.is_stored(name, self.positions):
            pieces = [axis.pieces(extent) for axis, extent in zip(self.candidates.axes, shape)]
            required = tuple(hull(have, piece) for have, piece in zip(required or (None,) * 3, pieces))
            self.allowed &= self.candidates.fits(shape)
            self.store_elements += math.prod(shape)
        self.store_elements += layer.extra_output_elements
        if layer.extra_output in self.required:  # tiles would read what other tiles have not stored yet
            self.allowed[:] = False
        assert required is not None, "a later layer reads what is not stored"
        tile, fresh = self._tile(required, shape[3])
        self._set_live(name, tile, step, self.last.setdefault(name, step))
        self.load_elements.pop(name, None)
        self.operations += layer.operations * (tile.touched / math.prod(shape))
        if layer.weight_elements:
            self.weights.append((layer.weight_elements, name))
            self.weights.sort(reverse=True)
            self.filters[step] = layer.filter_elements
        for source, maps in zip(layer.inputs, layer.maps):
            self._require(source, [read_spans(m, *part) for m, part in zip(maps, fresh)], step)
        if self.overlays_results:
            self._add_overlay_savings(layer, tile, step)

    def _tile(self, required: tuple[Hull, ...], channels: int) -> tuple[Tile, list[Hull]]:
        sizes, totals, longest_fresh, fresh = [], [], [], []
        for axis, (begin, end) in zip(self.candidates.axes, required):
            on_chip, new = axis.tile_extents(begin, end)
            sizes.append(axis.longest(*on_chip))
            totals.append(axis.total(*new))
            longest_fresh.append(axis.longest(*new))
            fresh.append(new)
            if axis is self.candidates.axes[1]:
                retains = np.logical_or.reduceat(new[0] > on_chip[0], axis.starts)
        product = self.candidates.product
        tile = Tile(
            sizes=tuple(sizes),
            elements=product(*sizes) * channels,
            touched=product(*totals) * channels,
            fresh_pixels=product(*longest_fresh),
            retained=self._expand_rows(retains) if retains.any() else np.zeros(1, bool),
        )
        return tile, fresh

    def _expand_rows(self, by_row_cut: np.ndarray) -> np.ndarray:
        """A value per cut of the rows, expanded to one per combination of cuts."""
        images, _, columns = (np.ones(len(axis.parts), bool) for axis in self.candidates.axes)
        return self.candidates.product(images, by_row_cut, columns)

    def _require(self, source: str, parts: list[Hull], step: int) -> None:
        """Widen the spans of a tensor that no layer of the group computes so far."""
        required = self.required.get(source, (None, None, None))
        self.required[source] = tuple(hull(a, b) for a, b in zip(required, parts))
        tile, _ = self._tile(self.required[source], self.graph.shapes[source][3])
        self.last.setdefault(source, step)
        self._set_live(source, tile, step, self.last[source])
        self.load_elements[source] = tile.touched

    def _set_live(self, name: str, tile: Tile, first: int, last: int) -> None:
        """Set a tensor live in steps `first` to `last`, in place of its earlier tile."""
        old_tile = self.tiles.get(name)
        if old_tile is not None:
            self._add_live(old_tile, self.first[name], last, -1)
        self._add_live(tile, first, last, 1)
        self.tiles[name], self.first[name] = tile, first

    def _add_live(self, tile: Tile, first: int, last: int, sign: int) -> None:
        resident = tile.elements * (tile.retained if self.shares_memory else True)
        self.resident_elements += sign * resident
        if self.shares_memory:
            rows = slice(last, first + 1)
            self.live[rows] += sign * (tile.elements - resident)

    def _add_overlay_savings(self, layer: Layer, tile: Tile, step: int) -> None:
        """Record savings if the result overwrites an operand that is not read later.

        See `Group.operand_overlays`.
        """
        if len(set(layer.inputs)) < len(layer.inputs):
            return
        dying = [name for name in layer.inputs if self.last[name] == step]
        if not dying:
            return
        # a tiling may retain the first such operand and not the next; that saving is not used
        operand = self.tiles[dying[0]]
        free = ~operand.retained & ~tile.retained
        if layer.is_in_place:
            self.saved[step] = tile.elements * (free & (operand.elements == tile.elements))
        elif overlappable(layer):
            n, h, w = operand.sizes
            _, oh, ow = tile.sizes
            channels, filters = (np.asarray(self.graph.shapes[x][3]) for x in (dying[0], layer.name))
            operand_sizes = _grid(h, 1), _grid(w, 2), channels
            result_sizes = _grid(oh, 1), _grid(ow, 2), filters
            lead = row_lead(layer.maps[0][1], operand_sizes, result_sizes, _grid(n, 0)).ravel()
            combined = np.maximum(lead + operand.elements, tile.elements)
            saving = np.maximum(0, operand.elements + tile.elements - combined) * free
            (self.saved_by_weights if layer.weight_elements else self.saved)[step] = saving

    @property
    def layers(self) -> list[Layer]:
        """The layers of the group, in the order of the graph."""
        return [self.graph.layers[position] for position in reversed(self.positions)]

    def tile_elements(self, run: ChannelRun | None = None, sum_elements: int = 1) -> np.ndarray:
        """Elements on chip if weights have no space there: a lower bound for placements.

        Parameters
        ----------
        run : ChannelRun, optional
            All layers of the group, a few channels at a time.
        sum_elements : int
            Size of a sum that waits for further channels, in elements.
        """
        if run is not None:  # all tensors live as long as the run
            layers = self.layers
            channel_counts, last = channels_on_chip(layers, (run,)), layers[-1].name if run.sums else ""
            channels = {name: self.graph.shapes[name][3] for name in self.tiles}
            elements = (
                tile.elements * channel_counts.get(name, channels[name]) // channels[name]
                * (sum_elements if name == last else 1)
                for name, tile in self.tiles.items()
            )  # fmt: skip
            return functools.reduce(np.add, elements)
        if not self.shares_memory:
            return self.resident_elements
        rows = slice(0, len(self.positions))
        return (self.live[rows] - self.saved[rows]).max(axis=0) + self.resident_elements

    def memory(self) -> tuple[np.ndarray, np.ndarray]:
        """Elements on chip with all weights resident, and with one filter at a time.

        Both are lower bounds for placements.
        """
        rows = slice(0, len(self.positions))
        weights = sum(size for size, _ in self.weights)
        if not self.shares_memory:
            return (self.resident_elements + weights,) * 2
        alive = self.live[rows] - self.saved[rows]
        resident = (alive - self.saved_by_weights[rows]).max(axis=0) + self.resident_elements + weights
        streamed = (alive + self.filters[rows]).max(axis=0) + self.resident_elements
        return resident, streamed
