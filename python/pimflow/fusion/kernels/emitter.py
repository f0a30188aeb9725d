"""TIR for one tile of a fused group: loads, computation and stores, written into the open builder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm.tirx.script.builder.frame import ForFrame

from pimflow.fusion import Group, Layer, Placement
from pimflow.fusion.channels import SUM_BYTES
from pimflow.fusion.fragments import STAGE_BYTES
from pimflow.fusion.group import pad_channels
from pimflow.fusion.kernels.formula import Computation, Formula, Index, Read, TapReduction, Weight
from pimflow.fusion.kernels.parameters import ARITHMETIC_TYPE, STORAGE_TYPES, KernelTarget, columns, streams

LANES = 16  # channels whose sums are formed together on a CPU, if tiles are not padded
REGISTERS = 16  # vector registers of 128 bits of a CPU (x86-64, Armv8)
VECTOR = 4  # fp32 elements of such a register
MAX_PIXELS = 8  # upper bound on pixels whose sums are formed together
Box = tuple[tuple[tirx.Expr, tirx.Expr], ...]


@dataclass(frozen=True)
class RegisterTile:
    """Sums that are formed together: a vector of so many `lanes` from each of the indices `firsts` on."""

    lanes: int
    firsts: list[Index]


class TileEmitter:
    """Writes the steps of a tile with bound spans.

    Attributes
    ----------
    spans : dict
        By tensor, kind and axis, begin and end of the tile's part of the tensor.
    sums : list of Buffer
        Registers, one buffer for each reduction of a formula.
    channel : Expr, optional
        The first of the current channels, for tensors that are on chip a few channels at a time.
    """

    def __init__(
        self,
        group: Group,
        placement: Placement,
        computations: Mapping[str, Computation],
        target: KernelTarget,
    ) -> None:
        self.group, self.graph, self.target, self.computations = group, group.graph, target, computations
        self.stored_type, self.element_bytes = STORAGE_TYPES[target.dtype], target.element_bytes
        self.offsets = {
            name: offset // self.element_bytes for name, offset in placement.offsets_bytes.items()
        }
        # where warps stage operands, aligned to fragments
        unused_bytes = -placement.on_chip_bytes % STAGE_BYTES if group.staging_bytes else 0
        self.staging_offset = (placement.on_chip_bytes + unused_bytes) // self.element_bytes
        self.pool_elements = max(1, self.staging_offset + group.staging_bytes // self.element_bytes)
        self.streams = streams(group)
        self.columns = {column: index for index, column in enumerate(columns(group))}
        cut = group.tiling
        self.parts = (cut.n, cut.h, cut.w)
        self.first_step = {name: step for step in reversed(range(len(group.layers)))
                      for name in group.layers[step].inputs}  # fmt: skip
        self.channel: tirx.Expr | None = None
        self.base: tirx.Expr | int = 0  # offset of the pool of a task

    def box(self, name: str, which: str) -> Box:
        """Begin and end of the tile's part of a tensor along n, h, w and c; `which` is a kind of span."""
        channels = (0, self.graph.shapes[name][3])
        if name in self.group.channels_on_chip:
            channels = (self.channel, self.channel + self.group.channels_on_chip[name])
        return (*(self.spans[name, which, axis] for axis in range(3)), channels)

    def load(self, layer: Layer, is_needed: Callable[[str], bool]) -> None:
        """Load the new parts of operands that this step reads and the group does not compute."""
        for name in dict.fromkeys(layer.inputs):
            if name in self.group.input_names and is_needed(name):
                with self.loops(self.box(name, "fresh")) as index:
                    self.copy("load", name, self.address(name, index), self._dram_index(name, index))

    def store(self, layer: Layer) -> None:
        """Store the tile's part of a result."""
        with self.loops(self.box(layer.name, "stored")) as index:
            address = self.address(layer.name, index)
            self.copy("store", layer.name, address, self._stored_index(layer.name, index))

    def load_weights(self, layer: Layer, begin: tirx.Expr, size: int) -> None:
        """Load consecutive weights to the layer's weights in the pool."""
        with self.loops(((0, size),)) as (index,):
            self.copy("weights", layer.name, self.offsets[f"{layer.name}.weights"] + index, (begin + index,))

    def copy(self, kind: str, name: str, address: tirx.Expr, index: Index) -> None:
        """Move one element between DRAM and the pool, and count it."""
        dram = self.dram[kind, name]
        if kind == "store":
            T.buffer_store(dram, _cast(self.pool[address], dram.dtype), list(index))
        else:
            T.buffer_store(self.pool, _cast(dram[index], self.pool.dtype), [address])
        if self.target.counts_bytes:
            slot = self.thread * len(self.streams) + self.streams.index((kind, name))
            T.buffer_store(
                self.counters, self.counters[slot] + tirx.const(self.element_bytes, "int64"), [slot]
            )

    def index(self, value: tirx.Expr | int) -> tirx.Expr:
        """`value` in the type of indices: int64 on a CPU, int32 on a GPU."""
        kind = "int32" if self.target.threads else "int64"
        return tirx.const(value, kind) if isinstance(value, int) else _cast(value, kind)

    def serial(self, begin: tirx.Expr | int, end: tirx.Expr | int) -> ForFrame:
        """A loop, as a frame."""
        return T.serial(self.index(begin), self.index(end))

    def vector(self, lanes: int) -> ForFrame:
        """A loop over the elements of a vector, as a frame."""
        return T.vectorized(self.index(0), self.index(lanes)) if lanes > 1 else self.serial(0, 1)

    def lanes(self, formula: Formula, channels: int) -> tuple[int, int]:
        """Channels that are formed together as a vector, and the number of such vectors in `channels`."""
        if self.target.threads:
            return 1, channels
        wide = pad_channels(channels, self.group.lanes)
        widest = pad_channels(formula.same_taps, self.group.lanes)
        if self.group.lanes and formula.channels == (0, formula.same_taps) and wide in (channels, widest):
            run = math.gcd(wide, max(self.group.lanes))
            return run, wide // run
        run = math.gcd(formula.same_taps, formula.channels[0]) if formula.channels[0] else formula.same_taps
        run = math.gcd(run, channels)
        lanes = max(d for d in range(1, LANES + 1) if run % d == 0)
        return lanes, channels // lanes

    def pixels_at_once(self, layer: Layer, lanes: int) -> int:
        """Number of neighbouring pixels formed together, whose sums and operands fit in registers."""
        if self.target.threads or not self.group.lanes:
            return 1
        vectors = -(-lanes // VECTOR)
        max_pixels = max(1, min(MAX_PIXELS, (REGISTERS - 1 - vectors) // vectors))
        widths = [end - begin for begin, end in self.group.spans[2][layer.name].fresh]
        return min(
            range(1, max_pixels + 1),
            key=lambda n: sum(width // n * (n + 2) + width % n * 3 for width in widths),
        )

    def compute(
        self, layer: Layer, formula: Formula, sums: Weight | None = None, filter_: tirx.Expr | None = None
    ) -> None:
        """Compute the formula's channels of all new pixels.

        Parameters
        ----------
        sums : callable, optional
            Add the products of the current channels with these weights to the waiting sums.
        filter_ : Expr, optional
            The only channel to compute.
        """
        begin, count = formula.channels[0], formula.channels[1] - formula.channels[0]
        if layer.name in self.group.channels_on_chip:
            begin, count = self.channel, self.group.channels_on_chip[layer.name]
        if filter_ is not None:
            begin, count = filter_, 1
        lanes, blocks = self.lanes(formula, count)
        reads = self.reader(layer), sums or self.weights(layer)

        def tile(pixels: list[Index], block: tirx.Expr) -> None:
            """Compute the results of one register tile."""
            register_tile = RegisterTile(lanes, [(*pixel, begin + block * lanes) for pixel in pixels])
            for position, reduction in enumerate(formula.reductions):
                self.reduce(reduction, position, register_tile, reads, layer if sums else None)
            for number, first in enumerate(register_tile.firsts):
                with self.vector(lanes) as lane:
                    index = (*first[:3], first[3] + lane)
                    reduced = [buffer[number * lanes + lane] for buffer in self.sums]
                    if sums:
                        self.put_sum(reduced[0], self.address(layer.name, index))
                    else:
                        self.put(formula.result(*reads, index, reduced), self.address(layer.name, index))

        self.for_each_tile(layer, lanes, blocks, tile)

    def for_each_tile(
        self, layer: Layer, lanes: int, blocks: int, emit: Callable[[list[Index], tirx.Expr], None]
    ) -> None:
        """Loop over register tiles of a layer: `emit` gets pixels and the number of the channel vector."""
        *rows, (begin_column, end_column) = self.box(layer.name, "fresh")[:3]
        places = self.pixels_at_once(layer, lanes)
        if places == 1:
            with self.loops((*rows, (begin_column, end_column), (0, blocks))) as (*pixel, block):
                emit([tuple(pixel)], block)
            return
        full = (end_column - begin_column) // places
        with self.loops((*rows, (0, blocks))) as (n, h, block):
            rest = begin_column + full * places
            for begin, turns, count in ((begin_column, full, places), (rest, end_column - rest, 1)):
                if isinstance(turns, int) and turns == 0:
                    continue
                with self.serial(0, turns) as turn:
                    emit([(n, h, begin + turn * count + place) for place in range(count)], block)

    def reduce(
        self,
        reduction: TapReduction,
        position: int,
        register_tile: RegisterTile,
        reads: tuple[Read, Weight],
        summed: Layer | None = None,
    ) -> None:
        """Compute the sums of a register tile.

        For a layer `summed`, add the products of the current channels to the waiting sums of its result.
        """
        sums, lanes, firsts = self.sums[position], register_tile.lanes, register_tile.firsts
        for number, first in enumerate(firsts):
            with self.vector(lanes) as lane:
                initial = tirx.const(reduction.initial, "float32")
                if summed:
                    initial = self.sum(self.address(summed.name, (*first[:3], first[3] + lane)))
                T.buffer_store(sums, initial, [number * lanes + lane])
        extents = reduction.taps
        if summed:
            extents = (*extents[:-1], self.group.channels_on_chip.get(summed.inputs[0], 0))
        with contextlib.ExitStack() as stack:
            taps = tuple(stack.enter_context(self.serial(0, extent)) for extent in extents)
            if summed:
                taps = (*taps[:-1], self.channel + taps[-1])
            for number, first in enumerate(firsts):
                with contextlib.ExitStack() as inside:
                    valid = reduction.valid(first, taps)
                    if valid is not None:
                        inside.enter_context(T.If(valid))
                        inside.enter_context(T.Then())
                    lane = inside.enter_context(self.vector(lanes))
                    index, register = (*first[:3], first[3] + lane), number * lanes + lane
                    reduced = [buffer[register] for buffer in self.sums[:position]]
                    term = reduction.term(*reads, index, taps, reduced)
                    T.buffer_store(sums, reduction.combine(sums[register], term), [register])

    def reader(self, layer: Layer) -> Read:
        """A function of an operand's number and an index that gives the element."""
        return lambda operand, index: self.element(self.address(layer.inputs[operand], index))

    def element(self, address: tirx.Expr) -> tirx.Expr:
        """An element of the pool, in the type of arithmetic."""
        return _cast(self.pool[address], ARITHMETIC_TYPE)

    def put(self, value: tirx.Expr, address: tirx.Expr) -> None:
        """Store a result in the pool."""
        T.buffer_store(self.pool, _cast(value, self.pool.dtype), [address])

    def store_output(self, name: str, value: tirx.Expr, index: Index) -> None:
        """Store a result of the group in DRAM."""
        dram = self.dram["store", name]
        T.buffer_store(dram, _cast(value, dram.dtype), list(self._stored_index(name, index)))

    def sum(self, address: tirx.Expr) -> tirx.Expr:
        """A waiting sum in the pool, in fp32."""
        return self.waiting[address]

    def put_sum(self, value: tirx.Expr, address: tirx.Expr) -> None:
        """Store a waiting sum in the pool."""
        T.buffer_store(self.waiting, value, [address])

    def weights(self, layer: Layer) -> Weight | None:
        """A function of `k` and `f` that gives weight `k` of filter `f`; see `weight_layout`."""
        if self.target.in_network:
            buffer, filters = self.filters.get(layer.name), self.computations[layer.name].weights.shape[1]
            return lambda k, f: _cast(buffer[k * filters + f], ARITHMETIC_TYPE)
        if not layer.weight_elements:
            return None
        begin, filters = self.offsets[f"{layer.name}.weights"], self.computations[layer.name].weights.shape[1]
        if layer.name not in self.group.resident and layer.filters > 1:
            return lambda k, f: self.element(begin + k)
        return lambda k, f: self.element(begin + k * filters + f)

    def address(self, name: str, index: Index) -> tirx.Expr:
        """Address of an element in the pool; rows wrap around if some are retained."""
        size = self.group.tile(name)
        n, h, w = (i - self.spans[name, "held", axis][0] for axis, i in enumerate(index[:3]))
        if self.group.spans[1][name].is_retained:
            h = tirx.floormod(index[1], size[1]) if size[1] > 1 else 0
        channel = index[3] - self.channel if name in self.group.channels_on_chip else index[3]
        begin = self.offsets[name]
        if name in self.group.sum_tensors:
            begin = begin * self.element_bytes // SUM_BYTES
        return self.base + begin + ((n * size[1] + h) * size[2] + w) * size[3] + channel

    def _stored_index(self, name: str, index: Index) -> Index:
        """Index of an element of a result in DRAM."""
        stored = self.computations[name].stored
        return stored.place(index) if stored else self._dram_index(name, index)

    def _dram_index(self, name: str, index: Index) -> Index:
        """Index of an element in DRAM."""
        if self.target.in_network:
            return index
        shape = self.graph.shapes[name]
        return (((index[0] * shape[1] + index[1]) * shape[2] + index[2]) * shape[3] + index[3],)

    @contextlib.contextmanager
    def loops(self, box: Box) -> Iterator[Index]:
        """Loops over the indices of a box, which are distributed over the threads of a GPU block."""
        with contextlib.ExitStack() as stack:
            if not self.target.threads:
                yield tuple(stack.enter_context(self.serial(begin, end)) for begin, end in box)
                return
            threads = self.target.threads
            extents = [end - begin for begin, end in box]
            total = T.bind(tirx.const(1, "int32") * math.prod(extents))
            turn = stack.enter_context(T.serial(0, tirx.floordiv(total + threads - 1, threads)))
            position = T.bind(turn * threads + self.thread)
            stack.enter_context(T.If(position < total))
            stack.enter_context(T.Then())
            indices = []
            for (begin, _), extent in zip(reversed(box[1:]), reversed(extents[1:])):
                indices.append(T.bind(begin + tirx.truncmod(position, extent)))  # nothing is negative
                position = T.bind(tirx.truncdiv(position, extent))
            yield (box[0][0] + position, *reversed(indices))

    def sync(self) -> None:
        """Wait for all threads of the block."""
        if self.target.threads:
            T.evaluate(T.tvm_storage_sync("shared"))


def _cast(value: tirx.Expr, dtype: str) -> tirx.Expr:
    """`value` cast to `dtype`, if it has another type."""
    return value if str(value.ty.dtype) == str(dtype) else tirx.Cast(str(dtype), value)
