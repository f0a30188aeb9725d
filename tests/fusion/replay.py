"""Element-by-element execution of a placed group: checks that what is read is still there, counts traffic.

Shares no count with the search: memory is an array that says which element of which tensor each place holds.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pimflow.core.ranges import RangeMap
from pimflow.errors import VerificationError
from pimflow.fusion.channels import ChannelRun, slice_elements
from pimflow.fusion.group import Group, Placement
from pimflow.fusion.layers import Layer
from pimflow.fusion.tiling import Span, pieces

_WEIGHTS = -1  # tags of weights are negative, of nothing zero, of sums that wait beyond all
_PARTIAL = np.iinfo(np.int64).max
Box = tuple[Span, Span, Span, Span]


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """Counts of an execution, in elements.

    Attributes
    ----------
    loaded, stored : int
        Over the pins of the DRAM.
    computed : dict of str to int
        Results of each layer, over all tiles.
    """

    loaded: int
    stored: int
    computed: dict[str, int]


def replay(group: Group, placement: Placement, element_bytes: int) -> ReplayResult:
    """Run every tile of `group`, whose tensors lie as `placement` says.

    A pixel's channels are written while its window is still being read; layers whose weights come a filter
    at a time run through the whole tile for each.

    Raises
    ------
    VerificationError
        At the first element that is read where another was written, naming tensor, layer and tile.
    """
    return _Replay(group, placement, element_bytes).run()


class _Replay:
    def __init__(self, group: Group, placement: Placement, element_bytes: int) -> None:
        self.group, self.graph = group, group.graph
        self.offsets = {name: offset // element_bytes for name, offset in placement.offsets_bytes.items()}
        self.memory = np.zeros(placement.on_chip_bytes // element_bytes, np.int64)
        self.base, total = {}, 1
        for name in (*group.spans[0], *(f"{layer.name}.weights" for layer in group.layers)):
            self.base[name] = total
            total += self.graph.elements(name) if name in self.graph.shapes else 0
        self.joins = {
            group.layers[step].name
            for step, (operand, _) in group.operand_overlays(element_bytes).items()
            if self._shares(operand, group.layers[step].name, placement)
        }
        self.loaded = self.stored = 0
        self.computed: Counter[str] = Counter()
        self.where = ""

    @staticmethod
    def _shares(operand: str, result: str, placement: Placement) -> bool:
        lives = {life.name: life for life in placement.lifetimes}
        return bool(lives[operand].alias) and lives[operand].alias == lives[result].alias

    def run(self) -> ReplayResult:
        first = {name: step for step in reversed(range(len(self.group.layers)))
                 for name in self.group.layers[step].inputs}  # fmt: skip
        for number, tile in enumerate(self.group.tiling.indices()):
            self.resident_boxes = {name: self._box(name, tile, "held") for name in self.group.spans[0]}
            if number == 0:
                for layer in self.group.layers:
                    if layer.name in self.group.resident:
                        self._load_weights(layer, layer.weight_elements)
            for step, layer in enumerate(self.group.layers):
                run = self.group.channel_run(step)
                if run is None:
                    self._load(layer, tile, lambda name, step=step: first[name] == step)
                    self._compute(layer, tile)
                    self.stored += layer.extra_output_elements if number == 0 else 0
                    if layer.name in self.group.output_names:
                        self._store(layer.name, tile)
                elif step == run.begin:
                    self._run_channels(run, tile, first)
        return ReplayResult(loaded=self.loaded, stored=self.stored, computed=dict(self.computed))

    def _box(self, name: str, tile: tuple[int, int, int], which: str) -> Box:
        axes = [getattr(spans[name], which)[part] for spans, part in zip(self.group.spans, tile)]
        return (*axes, (0, self.graph.shapes[name][3]))

    def _places(self, name: str, box: Box) -> np.ndarray:
        """Addresses of the elements of a box; rows wrap around where some are retained."""
        size = self.group.tile(name)
        indices = []
        for axis, (begin, end) in enumerate(box):
            index = np.arange(begin, end)
            ring = axis == 1 and self.group.spans[1][name].is_retained
            indices.append(index % size[1] if ring else index - self.resident_boxes[name][axis][0])
        n, h, w, c = np.ix_(*indices)
        return self.offsets[name] + ((n * size[1] + h) * size[2] + w) * size[3] + c

    def _tags(self, name: str, box: Box) -> np.ndarray:
        shape = self.graph.shapes[name]
        n, h, w, c = np.ix_(*(np.arange(begin, end) for begin, end in box))
        return self.base[name] + ((n * shape[1] + h) * shape[2] + w) * shape[3] + c

    def _put(self, name: str, box: Box) -> None:
        self.memory[self._places(name, box)] = self._tags(name, box)

    def _check(self, name: str, box: Box) -> None:
        if not np.array_equal(self.memory[self._places(name, box)], self._tags(name, box)):
            raise VerificationError(f"{self.where}: '{name}' {box} was overwritten before it was read")

    def _load_weights(self, layer: Layer, elements: int) -> None:
        begin = self.offsets[f"{layer.name}.weights"]
        self.memory[begin : begin + elements] = _WEIGHTS - self.graph.index[layer.name]
        self.loaded += elements

    def _check_weights(self, layer: Layer, elements: int) -> None:
        begin = self.offsets[f"{layer.name}.weights"]
        if (self.memory[begin : begin + elements] != _WEIGHTS - self.graph.index[layer.name]).any():
            raise VerificationError(f"{self.where}: its weights were overwritten")

    def _load(self, layer: Layer, tile: tuple[int, int, int], is_required: Callable[[str], bool]) -> None:
        self.where = f"layer '{layer.name}' of tile {tile}"
        for name in dict.fromkeys(layer.inputs):
            if name in self.group.input_names and is_required(name):
                box = self._channel(name, self._box(name, tile, "fresh"))
                self._put(name, box)
                self.loaded += _volume(box)

    def _channel(self, name: str, box: Box) -> Box:
        """The part of a box that belongs to the current channel."""
        return (*box[:3], self.resident_boxes[name][3]) if name in self.group.channels_on_chip else box

    def _run_channels(self, run: ChannelRun, tile: tuple[int, int, int], first: dict[str, int]) -> None:
        """Each channel through all layers of the run, then the next; its weights come once in all."""
        layers, few = self.group.layers[run.begin : run.end], self.group.channels_on_chip
        names = dict.fromkeys(name for layer in layers for name in (*layer.inputs, layer.name))
        (channels,) = {self.graph.shapes[name][3] for name in names if name in few}
        for step, layer in enumerate(layers, run.begin):
            self._load(layer, tile, lambda name, step=step: name not in few and first[name] == step)
            self.computed[layer.name] += _volume(self._box(layer.name, tile, "fresh"))
        result = self._box(layers[-1].name, tile, "fresh")
        if run.sums:
            self.memory[self._places(layers[-1].name, result)] = _PARTIAL
        for channel in range(channels):
            for name in names:
                if name in few:
                    self.resident_boxes[name] = (*self.resident_boxes[name][:3], (channel, channel + 1))
            for step, layer in enumerate(layers, run.begin):
                self._load(layer, tile, lambda name, step=step: name in few and first[name] == step)
                sums = run.sums and layer is layers[-1]
                self._load_channel(layer, sums, channels, channel)
                box = self._box(layer.name, tile, "fresh")
                for pixel in itertools.product(*(range(*span) for span in box[:3])):
                    self._form(layer, pixel, sums)
                if layer.name in self.group.output_names and not sums:
                    self._store(layer.name, tile)
        if run.sums:
            self._put(layers[-1].name, result)
            if layers[-1].name in self.group.output_names:
                self._store(layers[-1].name, tile)

    def _load_channel(self, layer: Layer, sums: bool, channels: int, channel: int) -> None:
        """Its filter, its slice of all filters, or, before the first channel, what it has no slices of."""
        if sums:
            part = slice_elements(layer)
            part += 0 if channel else layer.weight_elements - part * channels
        elif layer.filters == channels:
            part = min(layer.filter_elements, layer.weight_elements - channel * layer.filter_elements)
        else:
            part = 0 if channel else layer.weight_elements
        if part > 0:
            self._load_weights(layer, part)

    def _form(self, layer: Layer, pixel: tuple[int, int, int], sums: bool) -> None:
        """Compute a pixel for the current channel, or add this channel's part to the sums of all channels."""
        channels = (0, self.graph.shapes[layer.name][3]) if sums else self.resident_boxes[layer.name][3]
        result = (*((i, i + 1) for i in pixel), channels)
        for name, maps in zip(layer.inputs, layer.maps):
            self._check(name, self._channel(name, tuple(_read(m, span) for m, span in zip(maps, result))))
        if layer.weight_elements:
            self._check_weights(layer, 1)
        if not sums:
            self._put(layer.name, result)
        elif (self.memory[self._places(layer.name, result)] != _PARTIAL).any():
            raise VerificationError(f"{self.where}: its sums were overwritten")

    def _compute(self, layer: Layer, tile: tuple[int, int, int]) -> None:
        box = self._box(layer.name, tile, "fresh")
        self.computed[layer.name] += _volume(box)
        remaining = 0 if layer.name in self.group.resident else layer.weight_elements
        while remaining > 0:  # a filter at a time; the last may be shorter
            part = min(remaining, layer.filter_elements)
            self._load_weights(layer, part)
            remaining -= part
        for pixel in itertools.product(*(range(*span) for span in box[:3])):
            self._pixel(layer, pixel, box[3][1])
        if layer.weight_elements and layer.name not in self.group.resident and not layer.is_in_place:
            for name in layer.inputs:  # the last filter reads all of it again
                self._check(name, self.resident_boxes[name])

    def _pixel(self, layer: Layer, pixel: tuple[int, int, int], channels: int) -> None:
        result = (*((i, i + 1) for i in pixel), (0, channels))
        windows = [
            (name, tuple(_read(m, span) for m, span in zip(maps, result)))
            for name, maps in zip(layer.inputs, layer.maps)
        ]
        for name, window in windows:
            self._check(name, window)
        needs_operand = layer.is_in_place and layer.name in self.joins  # every element needs its own alone
        self._put(layer.name, (*result[:3], (0, channels - (0 if needs_operand else 1))))
        if not needs_operand:
            for name, window in windows:
                self._check(name, window)
            self._put(layer.name, result)
        if layer.weight_elements:
            is_resident = layer.name in self.group.resident
            self._check_weights(layer, layer.weight_elements if is_resident else 1)

    def _store(self, name: str, tile: tuple[int, int, int]) -> None:
        shape, cut = self.graph.shapes[name], self.group.tiling
        parts = (cut.n, cut.h, cut.w)
        box = (*(pieces(shape[a], parts[a])[tile[a]] for a in range(3)), self.resident_boxes[name][3])
        self._check(name, box)
        self.stored += _volume(box)


def _volume(box: Box) -> int:
    return int(np.prod([end - begin for begin, end in box]))


def _read(window: RangeMap, span: Span) -> Span:
    part = window.inputs(*span)
    return (part.begin, part.end)
