"""How a convolution in matrix-vector form is cut up, dealt to channels, and ordered.

The matrix is the filters ``[oc, K]``, the vector the im2col window of an output pixel. A *tile* is 16
output channels (one a bank) times one row of reduction; the reduction of a tile is cut into *chunks*
of at most a row. A *unit* of work is one tile of output channels for one pixel, all its chunks.
Units are dealt to the channels in contiguous runs whose lengths differ by at most one.

Three loop orders, named by what stays in place:

``input``
    Fill the buffers with pixels, then run rows over them. Units are dealt pixel by pixel, within one
    group of tiles after the other: fewer, larger groups write a pixel into fewer channels, more and
    smaller ones open a row for more pixels.
``weight``
    Open a row, then stream pixels past it, filling one half of the buffers while the other computes.
    Units are dealt tile by tile.
``output``
    Accumulate the chunks of a pixel in its latch, and read it once. Units are dealt tile by tile. The
    only order for reductions longer than a row.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from pimflow.core.program import PimProgram
from pimflow.core.region import ConvGeometry
from pimflow.hardware import PimSpec

STATIONARY = ("input", "weight", "output")
TILE_GROUPS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A loop order.

    Attributes
    ----------
    stationary : str
        One of `STATIONARY`.
    buffers : int
        Global buffers that it uses.
    tile_groups : int
        For ``input``, into how many groups the tiles are dealt.
    single : bool
        For ``weight``, one pixel a buffer where more would fit: short GWRITEs leave the bus to the
        READRESs of the other half sooner.
    """

    stationary: str
    buffers: int
    tile_groups: int = 1
    single: bool = False

    def __str__(self) -> str:
        groups = f", {self.tile_groups} tile groups" if self.tile_groups > 1 else ""
        single = ", one pixel each" if self.single else ""
        return f"{self.stationary}-stationary, {self.buffers} buffer{'s'[: self.buffers > 1]}{single}{groups}"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The inverse of ``str``; raises `ValueError` if `text` is none."""
        pattern = r"(\w+)-stationary, (\d+) buffers?(, one pixel each)?(?:, (\d+) tile groups)?"
        match = re.fullmatch(pattern, text)
        if not match or match[1] not in STATIONARY:
            raise ValueError(f"{text!r} is no schedule")
        return cls(
            stationary=match[1],
            buffers=int(match[2]),
            tile_groups=int(match[4] or 1),
            single=match[3] is not None,
        )


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a reduction of K elements lies in rows and buffers.

    Attributes
    ----------
    chunks, columns : int
        Rows that a tile's reduction takes, and columns of each (the same for all).
    slots : int
        Pixels whose vectors lie side by side in one buffer, each over a copy of the weights.
    tiles : int
        Tiles of output channels.
    """

    chunks: int
    columns: int
    elements_per_column: int
    slots: int
    tiles: int

    @classmethod
    def of(cls, geometry: ConvGeometry, pim: PimSpec, dtype: str) -> Tiling:
        columns = -(-geometry.reduction // pim.elements_per_column(dtype))
        chunks = -(-columns // pim.columns_per_row)
        columns = -(-columns // chunks)
        return cls(
            chunks=chunks,
            columns=columns,
            elements_per_column=pim.elements_per_column(dtype),
            slots=pim.columns_per_row // columns if chunks == 1 else 1,
            tiles=-(-geometry.oc // pim.banks),
        )


def schedules(geometry: ConvGeometry, pim: PimSpec, dtype: str) -> list[Schedule]:
    """Every loop order that computes `geometry` on `pim`, worth trying or not."""
    tiling = Tiling.of(geometry, pim, dtype)
    counts = sorted({1, max(1, pim.global_buffers // 2), pim.global_buffers})
    if tiling.chunks > 1:
        return [Schedule(stationary="output", buffers=count) for count in counts]
    groups = [g for g in TILE_GROUPS if g <= tiling.tiles]
    return [
        *(Schedule(stationary="input", buffers=count, tile_groups=g) for count in counts for g in groups),
        *(
            Schedule(stationary="weight", buffers=count, single=single)
            for count in counts
            for single in ((False, True) if tiling.slots > 1 else (False,))
        ),
    ]


def units_of_channels(units: int, channels: int) -> list[tuple[int, int]]:
    """Contiguous runs of `units`, one a channel, whose lengths differ by at most one."""
    bounds = [units * channel // channels for channel in range(channels + 1)]
    return list(itertools.pairwise(bounds))


def tiles_of_channel(program: PimProgram, tiling: Tiling, channel: int) -> range:
    """Tiles whose weights `channel` of `program` holds, in the order of its rows."""
    pixels = program.pixel_end - program.pixel_begin
    begin, stop = units_of_channels(pixels * tiling.tiles, len(program.channels))[channel]
    return touched_tiles(blocks_of_units(begin, stop, pixels, tiling.tiles, Schedule.parse(program.schedule)))


Block = tuple[range, range]  # pixels, tiles


def blocks_of_units(begin: int, stop: int, pixels: int, tiles: int, schedule: Schedule) -> list[Block]:
    """Units ``[begin, stop)`` in the order in which `schedule` deals them, as blocks."""
    if schedule.stationary != "input":
        return [(inner, outer) for outer, inner in _rectangles(begin, stop, pixels)]
    blocks = []
    for group in range(schedule.tile_groups):
        first = tiles * group // schedule.tile_groups
        width = tiles * (group + 1) // schedule.tile_groups - first
        low, high = max(begin, first * pixels), min(stop, (first + width) * pixels)
        for outer, inner in _rectangles(low - first * pixels, high - first * pixels, width):
            blocks.append((outer, range(first + inner.start, first + inner.stop)))
    return blocks


def touched_tiles(blocks: list[Block]) -> range:
    """The tiles that `blocks` touch, and what lies between."""
    if not blocks:
        return range(0)
    return range(min(tiles.start for _, tiles in blocks), max(tiles.stop for _, tiles in blocks))


def _rectangles(begin: int, stop: int, inner: int) -> list[tuple[range, range]]:
    """Cells ``[begin, stop)`` of a grid with rows of `inner`, as at most three (outer, inner) blocks."""
    blocks = []
    while begin < stop:
        outer, offset = divmod(begin, inner)
        whole = (stop - begin) // inner if offset == 0 else 0
        width = inner if whole else min(inner - offset, stop - begin)
        blocks.append((range(outer, outer + max(1, whole)), range(offset, offset + width)))
        begin += max(1, whole) * width
    return blocks
