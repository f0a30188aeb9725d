"""TIR for one tile of a fused group: its loads, computation and stores, written into the open builder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from pimflow.fusion import Group, Layer, Placement
from pimflow.fusion.kernels.formula import At, Computation, Formula, Reduction
from pimflow.fusion.kernels.parameters import FULL, STORED, Target, columns, streams

LANES = 16  # channels whose sums are formed side by side on a CPU
Box = tuple[tuple[tirx.Expr, tirx.Expr], ...]


class Emitter:
    """Writes the steps of a tile whose bounds are known.

    Attributes
    ----------
    spans : dict
        By tensor, kind and axis, where the tile's part of it begins and ends.
    pool, dram, table, counters : Buffer
        What the function is given, or allocates.
    sums : list of Buffer
        Registers, one for each reduction of a formula.
    channel : Expr, optional
        The current channel, for tensors that are on chip a channel at a time.
    """

    def __init__(
        self, group: Group, placement: Placement, computations: Mapping[str, Computation], target: Target
    ) -> None:
        self.group, self.graph, self.target, self.computations = group, group.graph, target, computations
        self.stored_type, self.element_bytes = STORED[target.dtype], target.element_bytes
        self.at = {name: offset // self.element_bytes for name, offset in placement.offsets_bytes.items()}
        self.pool_elements = max(1, placement.on_chip_bytes // self.element_bytes)
        self.streams = streams(group)
        self.columns = {column: index for index, column in enumerate(columns(group))}
        cut = group.tiling
        self.parts = (cut.n, cut.h, cut.w)
        self.first = {name: step for step in reversed(range(len(group.layers)))
                      for name in group.layers[step].inputs}  # fmt: skip
        self.channel: tirx.Expr | None = None  # of tensors that are on chip a channel at a time

    def box(self, name: str, which: str) -> Box:
        channels = (0, self.graph.shapes[name][3])
        if name in self.group.by_channel:
            channels = (self.channel, self.channel + 1)
        return (*(self.spans[name, which, axis] for axis in range(3)), channels)

    def load(self, layer: Layer, wanted: Callable[[str], bool]) -> None:
        """Load the new parts of operands from outside that this step reads."""
        for name in dict.fromkeys(layer.inputs):
            if name in self.group.loaded and wanted(name):
                with self.each(self.box(name, "fresh")) as at:
                    self.copy("load", name, self.place(name, at), self._index(name, at))

    def store(self, layer: Layer) -> None:
        """Store the piece of a result."""
        with self.each(self.box(layer.name, "stored")) as at:
            self.copy("store", layer.name, self.place(layer.name, at), self._index(layer.name, at))

    def load_weights(self, layer: Layer, begin: tirx.Expr, size: int) -> None:
        """Load consecutive weights to the place of the layer's weights in the pool."""
        with self.each(((0, size),)) as (index,):
            self.copy("weights", layer.name, self.at[f"{layer.name}.weights"] + index, (begin + index,))

    def copy(self, what: str, name: str, place: tirx.Expr, index: At) -> None:
        """Move one element between DRAM and the pool, and count it."""
        dram = self.dram[what, name]
        if what == "store":
            T.buffer_store(dram, _cast(self.pool[place], dram.dtype), list(index))
        else:
            T.buffer_store(self.pool, _cast(dram[index], self.pool.dtype), [place])
        if self.target.counted:
            slot = self.thread * len(self.streams) + self.streams.index((what, name))
            T.buffer_store(
                self.counters, self.counters[slot] + tirx.const(self.element_bytes, "int64"), [slot]
            )

    def lanes(self, formula: Formula) -> int:
        """Channels that are formed side by side."""
        if self.target.threads:
            return 1
        run = math.gcd(formula.alike, formula.channels[0]) if formula.channels[0] else formula.alike
        return max(d for d in range(1, LANES + 1) if run % d == 0)

    def compute(self, layer: Layer, formula: Formula, channel: tirx.Expr | None = None) -> None:
        """Results of the formula's channels, or of one, at all pixels that are new."""
        lanes = self.lanes(formula) if channel is None else 1
        begin, end = formula.channels
        blocks = (0, 1) if channel is not None else (begin // lanes, end // lanes)
        read, weight = self.reader(layer), self._weights(layer)
        with self.each((*self.box(layer.name, "fresh")[:3], blocks)) as (*pixel, block):
            first = channel if channel is not None else block * lanes
            for position, reduction in enumerate(formula.reductions):
                self.reduce(reduction, position, lanes, (*pixel, first), read, weight)
            with T.vectorized(0, lanes) as lane:
                at = (*pixel, first + lane)
                value = formula.result(read, weight, at, [each[lane] for each in self.sums])
                self.put(value, self.place(layer.name, at))

    def reduce(
        self, reduction: Reduction, position: int, lanes: int, first: At, read, weight, onto: str = ""
    ) -> None:  # fmt: skip
        """Fill a register of each lane with a sum; or with what `onto` has and what the channel adds."""
        sums, extents = self.sums[position], reduction.taps[:-1] if onto else reduction.taps
        with T.vectorized(0, lanes) as lane:
            initial = tirx.const(reduction.initial, "float32")
            if onto:
                initial = self.element(self.place(onto, (*first[:3], first[3] + lane)))
            T.buffer_store(sums, initial, [lane])
        with contextlib.ExitStack() as stack:
            taps = tuple(stack.enter_context(T.serial(0, extent)) for extent in extents)
            taps += (self.channel,) if onto else ()
            valid = reduction.valid(first, taps)
            if valid is not None:
                stack.enter_context(T.If(valid))
                stack.enter_context(T.Then())
            lane = stack.enter_context(T.vectorized(0, lanes))
            at = (*first[:3], first[3] + lane)
            done = [each[lane] for each in self.sums[:position]]
            term = reduction.term(read, weight, at, taps, done)
            T.buffer_store(sums, reduction.combine(sums[lane], term), [lane])

    def reader(self, layer: Layer):
        """A function of an operand's number and an index, which gives the element there."""
        return lambda operand, at: self.element(self.place(layer.inputs[operand], at))

    def element(self, place: tirx.Expr) -> tirx.Expr:
        """An element of the pool, cast for arithmetic."""
        return _cast(self.pool[place], FULL)

    def put(self, value: tirx.Expr, place: tirx.Expr) -> None:
        """Store a result in the pool."""
        T.buffer_store(self.pool, _cast(value, self.pool.dtype), [place])

    def _weights(self, layer: Layer):
        """A function of `k` and `f`, which gives weight `k` of filter `f`; see `weight_layout`."""
        if self.target.network:
            buffer, filters = self.filters.get(layer.name), self.computations[layer.name].weights.shape[1]
            return lambda k, f: _cast(buffer[k * filters + f], FULL)
        if not layer.weight_elements:
            return None
        begin, filters = self.at[f"{layer.name}.weights"], self.computations[layer.name].weights.shape[1]
        if layer.name not in self.group.resident and layer.filters > 1:
            return lambda k, f: self.element(begin + k)
        return lambda k, f: self.element(begin + k * filters + f)

    def place(self, name: str, at: At) -> tirx.Expr:
        """Address of an element in the pool; rows wrap around where some are retained."""
        size = self.group.tile(name)
        n, h, w = (i - self.spans[name, "held", axis][0] for axis, i in enumerate(at[:3]))
        if self.group.spans[1][name].retained:
            h = tirx.floormod(at[1], size[1]) if size[1] > 1 else 0
        channel = 0 if name in self.group.by_channel else at[3]
        return self.at[name] + ((n * size[1] + h) * size[2] + w) * size[3] + channel

    def _index(self, name: str, at: At) -> At:
        """Index of an element in DRAM."""
        if self.target.network:
            return at
        shape = self.graph.shapes[name]
        return (((at[0] * shape[1] + at[1]) * shape[2] + at[2]) * shape[3] + at[3],)

    @contextlib.contextmanager
    def each(self, box: Box) -> Iterator[At]:
        """Loops over the indices of a box; dealt to the threads where there are some."""
        with contextlib.ExitStack() as stack:
            if not self.target.threads:
                yield tuple(stack.enter_context(T.serial(begin, end)) for begin, end in box)
                return
            threads = self.target.threads
            extents = [end - begin for begin, end in box]
            total = T.bind(tirx.const(1, "int32") * math.prod(extents))
            turn = stack.enter_context(T.serial(0, tirx.floordiv(total + threads - 1, threads)))
            left = T.bind(turn * threads + self.thread)
            stack.enter_context(T.If(left < total))
            stack.enter_context(T.Then())
            indices = []
            for (begin, _), extent in zip(reversed(box[1:]), reversed(extents[1:])):
                indices.append(begin + tirx.floormod(left, extent))
                left = tirx.floordiv(left, extent)
            yield (box[0][0] + left, *reversed(indices))

    def sync(self) -> None:
        if self.target.threads:
            T.evaluate(T.tvm_storage_sync("shared"))


def _cast(value: tirx.Expr, dtype: str) -> tirx.Expr:
    """`value` as `dtype`; itself if it is of that type."""
    return value if str(value.ty.dtype) == str(dtype) else tirx.Cast(str(dtype), value)
