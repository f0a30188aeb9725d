"""Dense convolutions of a tile on tensor cores.

A warp has a register tile of up to 2 x 4 fragments. In a step it gathers fragments of 16 pixels and 16
channels, with zeros where a window is in padding, stores them contiguously in its own shared memory, and
multiplies them by fragments of filters, which it reads from global memory. Sums stay in registers over the
whole product, and over chunks of channels too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from pimflow.fusion import Layer
from pimflow.fusion.fragments import FRAGMENT, STAGE_BYTES, WARPS
from pimflow.fusion.kernels.emitter import TileEmitter
from pimflow.fusion.kernels.formula import Formula, Index

LANES = 32  # threads of a warp
VECTOR = 8  # fp16 elements that a thread copies at once
SHAPE = (FRAGMENT, FRAGMENT, FRAGMENT)
ELEMENTS = FRAGMENT * FRAGMENT


def pad_weights(weights: np.ndarray) -> np.ndarray:
    """Pad weights (taps, filters) to whole fragments of filters, and by at least one fragment of taps."""
    columns = weights.shape[1]
    padded_columns = -(-columns // FRAGMENT) * FRAGMENT
    extra_filters = 4 * FRAGMENT  # a register tile may have more fragments of filters than there are
    extra_taps = FRAGMENT + -(-extra_filters // padded_columns)
    return np.pad(weights, ((0, extra_taps), (0, padded_columns - columns)))


class TensorCoreProduct:
    """The products of one layer in the current tile, with sums in registers of the warps."""

    def __init__(
        self, emitter: TileEmitter, layer: Layer, formula: Formula, keeps_sums: bool = False
    ) -> None:
        self.emitter, self.layer, self.formula = emitter, layer, formula
        group = emitter.group
        self.operand = layer.inputs[0]
        self.all_channels = group.graph.shapes[self.operand][3]
        self.channels = group.channels_on_chip.get(self.operand, self.all_channels)
        self.filters = group.channels_on_chip.get(layer.name, formula.channels[1])
        self.tile, self.keeps_sums = group.product_tile(layer), keeps_sums
        self.register_tile, self.turns = tuple(map(int, self.tile.register_tile)), int(self.tile.turns)
        self.warp = tirx.floordiv(emitter.thread, LANES)
        self.lane = tirx.floormod(emitter.thread, LANES)
        rows, columns = self.register_tile
        turns = self.turns if keeps_sums else 1
        self.sums = T.alloc_buffer((turns * rows * columns * ELEMENTS,), "float32", scope="wmma.accumulator")
        self.left_fragments = T.alloc_buffer((rows * ELEMENTS,), "float16", scope="wmma.matrix_a")
        self.right_fragment = T.alloc_buffer((ELEMENTS,), "float16", scope="wmma.matrix_b")

    def compute(self) -> None:
        """Compute all units of all warps, one after the other; a unit is a register tile."""
        with T.serial(0, self.turns) as turn, self._unit(turn) as unit:
            self._fill(0)
            self._multiply(unit, 0)
            self._finish(unit, 0)

    def begin(self) -> None:
        """Set the sums of all units to their initial value."""
        for turn in range(self.turns):
            self._fill(turn)

    def load_slice(self) -> None:
        """Nothing to load: weights are read from global memory."""

    def add(self) -> None:
        """Add the products of the current channels to the sums of all units."""
        for turn in range(self.turns):
            with self._unit(turn) as unit:
                self._multiply(unit, turn)

    def end(self) -> None:
        """Store the results of all units."""
        for turn in range(self.turns):
            with self._unit(turn) as unit:
                self._finish(unit, turn)

    @contextlib.contextmanager
    def _unit(self, turn: tirx.Expr | int) -> Iterator[tuple[tirx.Expr, tirx.Expr]]:
        """Context of a unit of this warp, if it has one: its first fragments of pixels and of filters."""
        rows, columns = self.register_tile
        across = -(-self.tile.columns // columns)
        unit = T.bind(self.warp + turn * WARPS)
        with T.If(unit < int(self.tile.units)), T.Then():
            yield tirx.floordiv(unit, across) * rows, tirx.floormod(unit, across) * columns

    def _number(self, turn: int, row: int, column: int) -> int:
        rows, columns = self.register_tile
        return (turn * rows + row) * columns + column

    def _fill(self, turn: int) -> None:
        rows, columns = self.register_tile
        initial = tirx.const(self.formula.reductions[0].initial, "float32")
        for number in range(rows * columns):
            index = turn * rows * columns + number
            T.evaluate(T.tvm_fill_fragment(self.sums.data, *SHAPE, index, initial))

    def _pixel(self, fragment: tirx.Expr) -> tuple[Index, tirx.Expr]:
        """The pixel of this lane in a fragment, and whether it is in the tile; two lanes share a pixel."""
        (n0, n1), (h0, h1), (w0, w1) = self.emitter.box(self.layer.name, "fresh")[:3]
        number = T.bind(fragment * FRAGMENT + tirx.floordiv(self.lane, 2))
        across, down = w1 - w0, h1 - h0
        row_number = T.bind(tirx.floordiv(number, tirx.max(across, 1)))
        pixel = (
            T.bind(n0 + tirx.floordiv(row_number, tirx.max(down, 1))),
            T.bind(h0 + tirx.floormod(row_number, tirx.max(down, 1))),
            T.bind(w0 + tirx.floormod(number, tirx.max(across, 1))),
        )
        return pixel, T.bind(number < (n1 - n0) * down * across)

    def _multiply(self, unit: tuple[tirx.Expr, tirx.Expr], turn: int) -> None:
        emitter, (rows, columns), layer = self.emitter, self.register_tile, self.layer
        _, vertical, horizontal, _ = layer.maps[0]
        weights, filters = emitter.filters[layer.name], emitter.computations[layer.name].weights.shape[1]
        pixels = [self._pixel(unit[0] + row) for row in range(rows)]
        first_channel = emitter.channel if self.operand in emitter.group.channels_on_chip else 0
        first_filter = (emitter.channel if layer.name in emitter.group.channels_on_chip else 0) + unit[
            1
        ] * FRAGMENT
        stage = emitter.staging_offset + self.warp * (STAGE_BYTES // 2)
        steps = -(-self.channels // FRAGMENT)
        with contextlib.ExitStack() as stack:
            extents = (vertical.window, horizontal.window, steps)
            down, across, step = (stack.enter_context(T.serial(0, extent)) for extent in extents)
            for row, (pixel, inside) in enumerate(pixels):
                channel = step * FRAGMENT + tirx.floormod(self.lane, 2) * VECTOR
                valid = self.formula.reductions[0].valid((*pixel, 0), (down, across, 0))
                source = (
                    pixel[0],
                    pixel[1] * vertical.stride - vertical.pad_before + down * vertical.dilation,
                    pixel[2] * horizontal.stride - horizontal.pad_before + across * horizontal.dilation,
                    first_channel + channel,
                )
                self._gather(
                    source, channel, inside if valid is None else tirx.all(inside, valid), stage, row
                )
            _warp_sync()
            for row in range(rows):
                place = emitter.pool.access_ptr("r", offset=stage + row * ELEMENTS)
                load = T.tvm_load_matrix_sync(
                    self.left_fragments.data, *SHAPE, row, place, FRAGMENT, "row_major"
                )
                T.evaluate(load)
            begin = (down * horizontal.window + across) * self.all_channels + first_channel + step * FRAGMENT
            for column in range(columns):
                place = weights.access_ptr("r", offset=begin * filters + first_filter + column * FRAGMENT)
                load = T.tvm_load_matrix_sync(
                    self.right_fragment.data, *SHAPE, 0, place, filters, "row_major"
                )
                T.evaluate(load)
                for row in range(rows):
                    number = self._number(turn, row, column)
                    sums = (self.sums.data, number)
                    T.evaluate(
                        T.tvm_mma_sync(
                            *sums, self.left_fragments.data, row, self.right_fragment.data, 0, *sums
                        )
                    )
            _warp_sync()

    def _gather(
        self, source: Index, channel: tirx.Expr, inside: tirx.Expr, stage: tirx.Expr, row: int
    ) -> None:
        """Gather half of a pixel's channels of a fragment, with zeros outside the tile or the channels."""
        emitter, zero = self.emitter, tirx.const(0.0, "float16")
        place = stage + row * ELEMENTS + self.lane * VECTOR
        if self.channels % VECTOR == 0:  # all channels of a vector exist, or none
            with T.If(tirx.all(inside, channel < self.channels)):
                with T.Then(), T.vectorized(0, VECTOR) as lane:
                    T.buffer_store(
                        emitter.pool,
                        emitter.pool[emitter.address(self.operand, source) + lane],
                        [place + lane],
                    )
                with T.Else(), T.vectorized(0, VECTOR) as lane:
                    T.buffer_store(emitter.pool, zero, [place + lane])
            return
        with T.serial(0, VECTOR) as lane, T.If(tirx.all(inside, channel + lane < self.channels)):
            with T.Then():
                T.buffer_store(
                    emitter.pool, emitter.pool[emitter.address(self.operand, source) + lane], [place + lane]
                )
            with T.Else():
                T.buffer_store(emitter.pool, zero, [place + lane])

    def _finish(self, unit: tuple[tirx.Expr, tirx.Expr], turn: int) -> None:
        """Move sums to shared memory, apply elementwise operators, and store the results."""
        emitter, (rows, columns), layer = self.emitter, self.register_tile, self.layer
        stage = tirx.floordiv(emitter.staging_offset, 2) + self.warp * (STAGE_BYTES // 4)
        first = emitter.channel if layer.name in emitter.group.channels_on_chip else 0
        reads = emitter.reader(layer), emitter.weights(layer)
        for row in range(rows):
            pixel, inside = self._pixel(unit[0] + row)
            for column in range(columns):
                place = T.address_of(emitter.waiting[stage])
                number = self._number(turn, row, column)
                T.evaluate(
                    T.tvm_store_matrix_sync(self.sums.data, *SHAPE, number, place, FRAGMENT, "row_major")
                )
                _warp_sync()
                with T.serial(0, VECTOR) as lane:
                    column_offset = tirx.floormod(self.lane, 2) * VECTOR + lane
                    filter_ = (unit[1] + column) * FRAGMENT + column_offset
                    with T.If(tirx.all(inside, filter_ < self.filters)), T.Then():
                        index = (*pixel, first + filter_)
                        total = emitter.waiting[
                            stage + tirx.floordiv(self.lane, 2) * FRAGMENT + column_offset
                        ]
                        value = self.formula.result(*reads, index, [total])
                        if self.keeps_sums:
                            emitter.store_output(layer.name, value, index)
                        else:
                            emitter.put(value, emitter.address(layer.name, index))
                _warp_sync()


def _warp_sync() -> None:
    T.evaluate(T.call_extern("void", "__syncwarp"))  # TVM 0.27 has no intrinsic for it
