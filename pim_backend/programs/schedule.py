"""How a convolution in matrix-vector form is tiled, distributed to channels, and ordered.

The matrix is the filters ``[oc, K]``, the vector the im2col window of an output pixel. A *tile* is the
output channels of one G_ACT round (16, one a bank) times one row of reduction; the reduction of a tile
is cut into *chunks*, which fit a row and a buffer. A *unit* of work is one tile of output channels for one
pixel, with all chunks. Units are distributed to the channels in contiguous runs whose lengths differ by at
most one.

A *visit* is one open row with the pixels that the buffers hold. There are three orders of visits, named by
what stays in place:

``input``
    Fill the buffers with pixels, then pass rows over them, back and forth. Units are distributed pixel by
    pixel, within one group of tiles after the other: with fewer, larger groups, a pixel is written into fewer
    channels; with more and smaller ones, a row is opened for more pixels.
``weight``
    Open a row, then stream pixels past it. Units are distributed tile by tile.
``output``
    Accumulate the chunks of a pixel in its latch, back and forth over the rows, and read it once.
    Units are distributed tile by tile. This is the only order for reductions of several chunks. Where latches
    can be set, a chunk can instead be multiplied with all tiles: sums are read before they are complete, and
    resumed for the next chunk.

A grouped convolution has one matrix for several groups (`ConvGeometry.dense`), and a pixel has one vector for
each matrix. The tiles of all matrices are distributed in the same way, but a vector is multiplied with tiles
of one matrix only. So ``input`` would save nothing, and is left out.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace

from pimflow.core.kernel import ConvGeometry
from pimflow.core.loop_order import LoopOrder
from pimflow.core.program import PimProgram
from pimflow.errors import UnknownNameError
from pimflow.hardware import PimSpec
from pimflow.hardware.systems import SCHEDULINGS

TILE_GROUPS = (1, 2, 4, 8, 16)
PIXEL_GROUPS = (1, 2, 4, 8, 16, 32)
# Below so many output pixels, a layer may have fewer tiles than channels.
FEW_PIXELS = 4
# Beyond so many tiles between two GWRITEs of one buffer, staggering saves next to nothing.
MAX_STAGGERED_TILES = 64


@dataclass(frozen=True, kw_only=True)
class BankTiling:
    """How a reduction of K elements lies in rows and buffers.

    Attributes
    ----------
    chunks, columns : int
        Parts of a tile's reduction that fit a buffer, and columns of each (all have the same number).
    slots : int
        Pixels whose vectors lie side by side in one buffer, each over a copy of the weights.
    outputs : int
        Output channels of a tile.
    matrices : int
        Matrices to which the tiles belong, the same number to each.
    """

    chunks: int
    columns: int
    chunks_per_row: int
    elements_per_column: int
    slots: int
    outputs: int
    tiles: int
    matrices: int = 1

    @classmethod
    def from_geometry(
        cls, geometry: ConvGeometry, pim: PimSpec, dtype: str, gangs: int = 0, together: int = 1
    ) -> BankTiling:
        """The tiling on `pim`, with the output channels of a tile over `gangs` gangs; 0 for all.

        In a grouped convolution, `together` groups form a matrix.
        """
        outputs, elements = (gangs or pim.gangs) * pim.banks_per_gang, pim.elements_per_column(dtype)
        matrices, dense_geometry = geometry.groups // together, geometry.dense(together)
        return cls._from_device(dense_geometry, matrices, pim, elements, outputs)

    @classmethod
    def from_program(cls, program: PimProgram) -> BankTiling:
        """The tiling of `program`, from the organisation of its device that it carries."""
        matrices = program.matrices if program.geometry.groups > 1 else 1
        elements, outputs = program.elements_per_column, program.tile_banks
        return cls._from_device(program.vector_geometry, matrices, program, elements, outputs)

    @classmethod
    def _from_device(
        cls, geometry: ConvGeometry, matrices: int, device: PimSpec | PimProgram, elements: int, outputs: int
    ) -> BankTiling:
        """The tiling for the rows and buffers of `device`, with so many elements in a column."""
        buffer = device.buffer_columns
        columns = -(-geometry.reduction // elements)
        chunks = -(-columns // buffer)
        columns = -(-columns // chunks)
        return cls(
            chunks=chunks,
            columns=columns,
            chunks_per_row=device.columns_per_row // buffer,
            elements_per_column=elements,
            slots=buffer // columns if chunks == 1 else 1,
            outputs=outputs,
            tiles=-(-geometry.oc // outputs) * matrices,
            matrices=matrices,
        )

    @property
    def tiles_of_matrix(self) -> int:
        """Tiles of one matrix."""
        return self.tiles // self.matrices

    def matrix(self, tile: int) -> int:
        """The matrix to which a tile belongs."""
        return tile // self.tiles_of_matrix if self.matrices > 1 else 0

    def rows(self, tiles: range) -> range:
        """Rows that hold `tiles`, counted from the first row of tile 0."""
        if not tiles:
            return range(0)
        begin, end = tiles.start * self.chunks, tiles.stop * self.chunks
        return range(begin // self.chunks_per_row, -(-end // self.chunks_per_row))

    def place(self, tile: int, chunk: int) -> tuple[int, int]:
        """Row of a chunk, counted from the first row of tile 0, and its buffer-sized part of that row."""
        return divmod(tile * self.chunks + chunk, self.chunks_per_row)


def schedules(
    geometry: ConvGeometry, pim: PimSpec, dtype: str, level: str = SCHEDULINGS[-1]
) -> list[LoopOrder]:
    """The loop orders to try for `geometry` on `pim`, at a level of `SCHEDULINGS`.

    They are limited by the device's instructions: where a COMP starts at the beginning of its row, the bus
    works only between rows and a buffer holds one vector; where one host issues the instructions, channels
    are in lockstep.
    """
    if level not in SCHEDULINGS:
        raise UnknownNameError("scheduling level", level, SCHEDULINGS)
    return list(_schedules(geometry, pim, dtype, level))


# Cached: it is called for each program that is lowered.
@functools.lru_cache(maxsize=1 << 10)
def _schedules(geometry: ConvGeometry, pim: PimSpec, dtype: str, level: str) -> list[LoopOrder]:
    if geometry.groups > 1:
        return _group_schedules(geometry, pim, dtype, level)
    orders = _loop_orders(geometry, pim, dtype, level)
    if pim.comp_starts_at_row:
        orders = [replace(order, pixels=1, overlap=False) for order in orders if not order.staggered]
        if pim.global_buffers == 1 and level == SCHEDULINGS[-1]:
            tiling = BankTiling.from_geometry(geometry, pim, dtype)
            counts = itertools.takewhile(
                lambda count: count < 2 * tiling.tiles, _powers_of_two(pim.accumulators)
            )
            orders += [
                replace(order, accumulators=count)
                for count in counts
                for order in orders
                if order.stationary != "weight" and order.tile_groups == 1
            ]
            if pim.can_write_latches and tiling.chunks > 1:
                max_accumulators = max(order.accumulators for order in orders)
                orders += [
                    replace(order, resumed=True)
                    for order in orders
                    if order.accumulators == max_accumulators < tiling.tiles
                ]
    if pim.has_single_host:
        orders = [
            replace(order, pixel_groups=groups)
            for order in orders
            if order.tile_groups == 1 and not order.staggered
            for groups in (PIXEL_GROUPS if level != "newton+" else PIXEL_GROUPS[:1])
            if groups <= geometry.pixels
        ]
    return list(dict.fromkeys(orders)) if pim.comp_starts_at_row or pim.has_single_host else orders


def _group_schedules(geometry: ConvGeometry, pim: PimSpec, dtype: str, level: str) -> list[LoopOrder]:
    """The loop orders of a grouped convolution; none at the levels of the papers' compilers."""
    if level != SCHEDULINGS[-1]:
        return []
    return [
        replace(order, together=together)
        for together in groups_per_matrix(geometry, pim, dtype)
        # With the pixels of one matrix: a vector is multiplied with tiles of one matrix only.
        for order in schedules(replace(geometry.dense(together), n=geometry.n), pim, dtype, level)
        if order.stationary != "input" and order.accumulators == 1 and not order.resumed
    ]


def groups_per_matrix(geometry: ConvGeometry, pim: PimSpec, dtype: str) -> list[int]:
    """Numbers of groups of a grouped convolution to try in one matrix, the largest first, at most a tile.

    A smaller number is tried where it takes fewer products for each group, or fewer chunks.
    """
    counts: list[int] = []
    min_comps = min_chunks = math.inf
    max_groups = max(1, pim.banks // (geometry.oc // geometry.groups))
    for together in range(min(max_groups, geometry.groups), 0, -1):
        if geometry.groups % together == 0:
            tiling = BankTiling.from_geometry(geometry, pim, dtype, together=together)
            comps = tiling.chunks * tiling.columns * tiling.tiles_of_matrix / together
            if comps < min_comps or tiling.chunks < min_chunks:
                counts.append(together)
            min_comps, min_chunks = min(min_comps, comps), min(min_chunks, tiling.chunks)
    return counts


def _powers_of_two(limit: int) -> list[int]:
    """2, 4, 8, … up to `limit`, and `limit` itself if it is more than 1."""
    below = [1 << n for n in range(1, limit.bit_length()) if 1 << n < limit]
    return below + [limit] * (limit > 1)


def _loop_orders(geometry: ConvGeometry, pim: PimSpec, dtype: str, level: str) -> list[LoopOrder]:
    """The loop orders of a device that accepts commands in any order."""
    tiling = BankTiling.from_geometry(geometry, pim, dtype)
    buffers = 1 if level == "newton+" else pim.global_buffers
    overlaps = {"newton+": (False,), "newton++": (True,), "pimflow": (True, False)}[level]
    gangs = [0]
    if level != "newton+" and geometry.pixels < FEW_PIXELS:
        gangs += [count for count in range(1, pim.gangs) if pim.gangs % count == 0]
    if tiling.chunks > 1:
        return [
            LoopOrder(stationary="output", buffers=buffers, gangs=count, overlap=overlap)
            for overlap in overlaps
            for count in gangs
        ]
    slots = tiling.slots
    streamed = sorted({1, 2, 8, slots} & set(range(slots + 1))) if level == "pimflow" else [slots]
    orders = [
        LoopOrder(stationary="weight", buffers=buffers, pixels=pixels, gangs=count, overlap=overlap)
        for overlap in overlaps
        for pixels in (streamed if overlap else [slots])
        for count in gangs
    ]
    for groups in itertools.takewhile(lambda groups: groups <= tiling.tiles, TILE_GROUPS):
        order = LoopOrder(stationary="input", buffers=buffers, pixels=slots, tile_groups=groups)
        orders += [replace(order, overlap=overlap) for overlap in overlaps]
        if level == "pimflow":
            half_filled = replace(order, pixels=-(-slots // 2))
            staggers = 1 < tiling.tiles // groups <= MAX_STAGGERED_TILES and buffers > 1
            orders += [half_filled] * (slots > 1)
            orders += [
                replace(candidate, staggered=True)
                for candidate in dict.fromkeys((order, half_filled))
                if staggers
            ]
    return orders


def channel_units(units: int, channels: int) -> list[tuple[int, int]]:
    """Contiguous runs of `units`, one a channel, whose lengths differ by at most one."""
    bounds = [units * channel // channels for channel in range(channels + 1)]
    return list(itertools.pairwise(bounds))


def channel_tiles(program: PimProgram, tiling: BankTiling, channel: int) -> list[range]:
    """Tiles whose weights `channel` of `program` holds, in the order of their rows."""
    pixels = program.pixel_end - program.pixel_begin
    channels = len(program.channels)
    schedule = program.schedule
    assert isinstance(schedule, LoopOrder), "weights lie as the loop order of a layer says"
    if schedule.pixel_groups:
        phases = lockstep_phases(pixels, tiling.tiles, channels, schedule.pixel_groups)
        return [phase.block(channel)[1] for phase in phases if channel < phase.channels]
    return [channel_runs(pixels, tiling.tiles, channels, schedule.pixel_major_groups)[channel][1]]


UnitBlock = tuple[range, range]  # pixels, tiles


# Cached: many loop orders of a layer share a distribution, and the fastest is lowered a second time.
@functools.lru_cache(maxsize=1 << 10)
def channel_runs(
    pixels: int, tiles: int, channels: int, groups: int
) -> tuple[tuple[list[UnitBlock], range], ...]:
    """For each channel, its units as blocks, and the range of tiles from their first to their last.

    Parameters
    ----------
    groups : int
        See `LoopOrder.pixel_major_groups`.
    """
    runs = []
    for begin, stop in channel_units(pixels * tiles, channels):
        blocks = _blocks_of_units(begin, stop, pixels, tiles, groups)
        touched = [tiles_of_block for _, tiles_of_block in blocks]
        first = min((tile_range.start for tile_range in touched), default=0)
        runs.append((blocks, range(first, max((tile_range.stop for tile_range in touched), default=0))))
    return tuple(runs)


def _blocks_of_units(begin: int, stop: int, pixels: int, tiles: int, groups: int) -> list[UnitBlock]:
    """Units ``[begin, stop)``, in the order of their distribution, as blocks."""
    if not groups:
        return [(inner, outer) for outer, inner in _rectangles(begin, stop, pixels)]
    blocks = []
    for group in range(groups):
        first = tiles * group // groups
        width = tiles * (group + 1) // groups - first
        low, high = max(begin, first * pixels), min(stop, (first + width) * pixels)
        for outer, inner in _rectangles(low - first * pixels, high - first * pixels, width):
            blocks.append((outer, range(first + inner.start, first + inner.stop)))
    return blocks


@dataclass(frozen=True, kw_only=True)
class LockstepPhase:
    """A rectangle of pixels and tiles that the first channels compute in equal parts, in lockstep.

    Attributes
    ----------
    groups : int
        Groups of channels, each with its own pixels; a divisor of the number of pixels.
    channels_per_group : int
        Channels of a group, each with its own tiles; a divisor of the number of tiles.
    """

    pixels: range
    tiles: range
    groups: int
    channels_per_group: int

    @property
    def channels(self) -> int:
        """Number of channels that take part, counted from channel 0."""
        return self.groups * self.channels_per_group

    def block(self, channel: int) -> UnitBlock:
        """The pixels and tiles of a channel that takes part."""
        group, member = divmod(channel, self.channels_per_group)
        count, width = len(self.pixels) // self.groups, len(self.tiles) // self.channels_per_group
        return self.pixels[group * count : (group + 1) * count], self.tiles[
            member * width : (member + 1) * width
        ]


def lockstep_phases(pixels: int, tiles: int, channels: int, groups: int) -> list[LockstepPhase]:
    """All units as phases, the widest first: a channel without a part in one has none in those after it.

    The first phase has `groups` groups of channels, or fewer if there are fewer pixels or channels.
    """
    phases = []
    remaining = [(range(pixels), range(tiles), groups)]
    while remaining:
        outer, inner, groups = remaining.pop()
        groups = min(groups, len(outer), channels)
        channels_per_group = min(len(inner), channels // groups)
        count, width = len(outer) // groups * groups, len(inner) // channels_per_group * channels_per_group
        phases.append(
            LockstepPhase(
                pixels=outer[:count],
                tiles=inner[:width],
                groups=groups,
                channels_per_group=channels_per_group,
            )
        )
        for rest in ((outer[:count], inner[width:]), (outer[count:], inner)):
            if rest[0] and rest[1]:
                remaining.append((*rest, max(1, channels // len(rest[1]))))
    return sorted(phases, key=lambda phase: -phase.channels)


def _rectangles(begin: int, stop: int, inner: int) -> list[tuple[range, range]]:
    """Cells ``[begin, stop)`` of a grid with rows of `inner`, as at most three (outer, inner) blocks."""
    blocks = []
    while begin < stop:
        outer, offset = divmod(begin, inner)
        full_rows = (stop - begin) // inner if offset == 0 else 0
        width = inner if full_rows else min(inner - offset, stop - begin)
        blocks.append((range(outer, outer + max(1, full_rows)), range(offset, offset + width)))
        begin += max(1, full_rows) * width
    return blocks
