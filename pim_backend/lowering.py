"""Lowering of a convolution in matrix-vector form to a PIM program.

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

from pimflow.core.commands import Affine, Comp, GAct, Gwrite, Loop, Node, Readres
from pimflow.core.program import PimProgram
from pimflow.core.region import ConvGeometry
from pimflow.errors import UnsupportedOpError
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


def lower(
    geometry: ConvGeometry,
    pim: PimSpec,
    *,
    region: str,
    dtype: str,
    channels: int,
    schedule: Schedule,
    pixel_begin: int = 0,
    pixel_end: int | None = None,
    row_begin: int = 0,
) -> PimProgram:
    """The program that computes output pixels ``[pixel_begin, pixel_end)`` of `geometry`.

    Parameters
    ----------
    geometry : ConvGeometry
        Ungrouped convolution or FC.
    region : str
        Name that the program carries.
    channels : int
        PIM channels to spread over.
    row_begin : int
        First row of every bank that the region may use.

    Raises
    ------
    UnsupportedOpError
        If `geometry` is grouped, or `schedule` does not fit it or the device.
    """
    if geometry.groups != 1:
        raise UnsupportedOpError(f"region '{region}': grouped convolutions have no matrix-vector form")
    tiling = Tiling.of(geometry, pim, dtype)
    if schedule not in schedules(geometry, pim, dtype):
        raise UnsupportedOpError(f"region '{region}': schedule '{schedule}' does not fit {pim.name}")
    end = geometry.pixels if pixel_end is None else pixel_end
    runs = units_of_channels((end - pixel_begin) * tiling.tiles, channels)
    streams, rows = [], 0
    for begin, stop in runs:
        stream = _Stream(pim, tiling, schedule, pixel_begin, row_begin)
        streams.append(stream.nodes(begin, stop, end - pixel_begin))
        rows = max(rows, stream.rows)
    return PimProgram(
        region=region,
        pim=pim.name,
        dtype=dtype,
        geometry=geometry,
        pixel_begin=pixel_begin,
        pixel_end=end,
        banks=pim.banks,
        gangs=pim.gangs,
        columns_per_row=pim.columns_per_row,
        elements_per_column=pim.elements_per_column(dtype),
        buffers=pim.global_buffers,
        readres_bursts=pim.readres_bursts(dtype),
        row_begin=row_begin,
        rows=rows,
        channels=tuple(streams),
        schedule=str(schedule),
    )


def units_of_channels(units: int, channels: int) -> list[tuple[int, int]]:
    """Contiguous runs of `units`, one a channel, whose lengths differ by at most one."""
    bounds = [units * channel // channels for channel in range(channels + 1)]
    return list(itertools.pairwise(bounds))


def tiles_of_channel(program: PimProgram, tiling: Tiling, channel: int) -> range:
    """Tiles whose weights `channel` of `program` holds, in the order of its rows."""
    pixels = program.pixel_end - program.pixel_begin
    begin, stop = units_of_channels(pixels * tiling.tiles, len(program.channels))[channel]
    return _tiles(_blocks(begin, stop, pixels, tiling.tiles, Schedule.parse(program.schedule)))


Block = tuple[range, range]  # pixels, tiles


def _blocks(begin: int, stop: int, pixels: int, tiles: int, schedule: Schedule) -> list[Block]:
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


def _tiles(blocks: list[Block]) -> range:
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


class _Stream:
    """Command stream of one channel.

    Affines carry one coefficient per enclosing loop, outermost first; `coefficients` arguments below
    are therefore also the number of loops around.
    """

    def __init__(self, pim: PimSpec, tiling: Tiling, schedule: Schedule, pixel_begin: int, row_begin: int):
        self.pim, self.t, self.schedule = pim, tiling, schedule
        self.pixel_begin, self.row_begin = pixel_begin, row_begin
        self.slots = 1 if schedule.single else tiling.slots
        self.rows = self.first_tile = 0

    def nodes(self, begin: int, stop: int, pixels: int) -> tuple[Node, ...]:
        blocks = _blocks(begin, stop, pixels, self.t.tiles, self.schedule)
        tiles = _tiles(blocks)
        self.first_tile, self.rows = tiles.start, len(tiles) * self.t.chunks
        emit = {"input": self._input, "weight": self._weight, "output": self._output}[
            self.schedule.stationary
        ]
        return tuple(node for block in blocks for node in emit(*block))

    def _row(self, tile: int, chunk: int, *coefficients: int) -> Affine:
        local = (tile - self.first_tile) * self.t.chunks + chunk
        return Affine(self.row_begin + local, coefficients)

    def _channel(self, tile: int, *coefficients: int) -> Affine:
        return Affine(tile * self.pim.banks, tuple(c * self.pim.banks for c in coefficients))

    def _open(self, row: Affine) -> list[Node]:
        return [GAct(gang=gang, row=row) for gang in range(self.pim.gangs)]

    def _fill(self, pixels: int, first: int, coefficients: tuple[int, ...], buffers: list[int]) -> list[Node]:
        """Write `pixels` pixels from `first` on into `buffers`, as many as a buffer has slots each."""
        return [
            Gwrite(
                buffer=buffer,
                pixel=Affine(self.pixel_begin + first + index * self.slots, coefficients),
                pixels=min(self.slots, pixels - index * self.slots),
                k=Affine(0),
                columns=self.t.columns,
            )
            for index, buffer in enumerate(buffers)
            if pixels > index * self.slots
        ]

    def _drain(
        self,
        pixels: int,
        first: int,
        coefficients: tuple[int, ...],
        buffers: list[int],
        row: Affine,
        channel: Affine,
    ) -> list[Node]:
        """COMPs and READRES of all that `_fill` wrote."""
        columns, zeros = self.t.columns, (0,) * len(coefficients)

        def pair(index: int, buffer: int) -> tuple[Comp, Readres]:
            pixel = Affine(self.pixel_begin + first + index * self.slots, (*coefficients, 1))
            column = Affine(0, (*zeros, columns))
            comp = Comp(buffer=buffer, row=row, column=column, count=columns)
            return comp, Readres(buffer=buffer, pixel=pixel, channel=channel)

        used = [(i, b) for i, b in enumerate(buffers) if pixels > i * self.slots]
        pairs = [pair(index, buffer) for index, buffer in used]
        if self.slots == 1:
            # All products first: a READRES waits for the bus, and would hold up the next buffer's.
            comps, reads = zip(*pairs)
            return [Loop(extent=1, body=(*comps, *reads))]
        return [
            Loop(extent=min(self.slots, pixels - index * self.slots), body=both)
            for (index, _), both in zip(used, pairs)
        ]

    def _input(self, pixels: range, tiles: range) -> list[Node]:
        buffers = list(range(self.schedule.buffers))
        block = self.slots * len(buffers)
        row, channel = self._row(tiles.start, 0, 0, 1), self._channel(tiles.start, 0, 1)

        def blocks(extent: int, first: int, count: int) -> Loop:
            fills = self._fill(count, first, (block,), buffers)
            drains = self._drain(count, first, (block, 0), buffers, row, channel)
            over_tiles = Loop(extent=len(tiles), body=(*self._open(row), *drains))
            return Loop(extent=extent, body=(*fills, over_tiles))

        whole, rest = divmod(len(pixels), block)
        nodes: list[Node] = []
        if whole:
            nodes.append(blocks(whole, pixels.start, block))
        if rest:
            nodes.append(blocks(1, pixels.start + whole * block, rest))
        return nodes

    def _weight(self, pixels: range, tiles: range) -> list[Node]:
        count = self.schedule.buffers
        half = max(1, count // 2)
        sides = [list(range(half)), list(range(half, 2 * half)) if count > 1 else [0]]
        block = half * self.slots
        row, channel = self._row(tiles.start, 0, 1), self._channel(tiles.start, 1)
        firsts = range(pixels.start, pixels.stop, block)

        def fill(index: int, step: tuple[int, ...] = ()) -> list[Node]:
            first = firsts[index]
            return self._fill(min(block, pixels.stop - first), first, (0, *step), sides[index % 2])

        def drain(index: int, step: tuple[int, ...] = ()) -> list[Node]:
            first = firsts[index]
            size = min(block, pixels.stop - first)
            return self._drain(size, first, (0, *step), sides[index % 2], row, channel)

        # Blocks alternate between the halves: each step fills the other half, then computes.
        body = self._open(row)
        looped = max(0, len(pixels) // block - 1) // 2 * 2
        if count > 1:
            body += fill(0)
        if looped:
            step = (2 * block,)
            if count > 1:
                steps = fill(1, step) + drain(0, step) + fill(2, step) + drain(1, step)
            else:
                steps = fill(0, step) + drain(0, step) + fill(1, step) + drain(1, step)
            body.append(Loop(extent=looped // 2, body=tuple(steps)))
        for index in range(looped, len(firsts)):
            ahead = index + 1 if count > 1 else index
            body += (fill(ahead) if ahead < len(firsts) else []) + drain(index)
        return [Loop(extent=len(tiles), body=tuple(body))]

    def _output(self, pixels: range, tiles: range) -> list[Node]:
        chunks, columns, buffers = self.t.chunks, self.t.columns, self.schedule.buffers
        elements = columns * self.t.elements_per_column

        def over_tiles(first: int, count: int, tile: int, extent: int, refill: bool) -> Loop:
            """`count` pixels, one a buffer; loops around: pixel blocks, tiles, chunks."""

            def comp(buffer: int, row: Affine) -> Comp:
                return Comp(buffer=buffer, row=row, column=Affine(0), count=columns)

            row, last = self._row(tile, 0, 0, chunks, 1), self._row(tile, chunks - 1, 0, chunks)
            inner, finish = self._open(row), self._open(last)
            for b in range(count):
                inner += [comp(b, row), fill(b, first, Affine(elements, (0, 0, elements)))]
                pixel = Affine(self.pixel_begin + first + b, (buffers,))
                finish += [comp(b, last), Readres(buffer=b, pixel=pixel, channel=self._channel(tile, 0, 1))]
                if refill:
                    finish.append(fill(b, first, Affine(0)))
            return Loop(extent=extent, body=(Loop(extent=chunks - 1, body=tuple(inner)), *finish))

        def fill(buffer: int, first: int, k: Affine) -> Gwrite:
            pixel = Affine(self.pixel_begin + first + buffer, (buffers,))
            return Gwrite(buffer=buffer, pixel=pixel, pixels=1, k=k, columns=columns)

        def blocks(extent: int, first: int, count: int) -> Loop:
            body: list[Node] = [fill(b, first, Affine(0)) for b in range(count)]
            if len(tiles) > 1:
                body.append(over_tiles(first, count, tiles.start, len(tiles) - 1, refill=True))
            body.append(over_tiles(first, count, tiles.stop - 1, 1, refill=False))
            return Loop(extent=extent, body=tuple(body))

        whole, rest = divmod(len(pixels), buffers)
        nodes: list[Node] = []
        if whole:
            nodes.append(blocks(whole, pixels.start, buffers))
        if rest:
            nodes.append(blocks(1, pixels.start + whole * buffers, rest))
        return nodes
