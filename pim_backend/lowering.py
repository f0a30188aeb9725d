"""Lowering of a convolution in matrix-vector form to a PIM program; `schedule` explains the terms."""

from __future__ import annotations

from pimflow.core.commands import Affine, Comp, GAct, Gwrite, Loop, Node, Readres
from pimflow.core.program import PimProgram
from pimflow.core.region import ConvGeometry
from pimflow.errors import UnsupportedOpError
from pimflow.hardware import PimSpec
from pimflow.pim_backend.schedule import (
    Schedule,
    Tiling,
    blocks_of_units,
    schedules,
    touched_tiles,
    units_of_channels,
)


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
        blocks = blocks_of_units(begin, stop, pixels, self.t.tiles, self.schedule)
        tiles = touched_tiles(blocks)
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
