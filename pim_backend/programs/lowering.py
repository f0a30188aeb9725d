"""Lowering of a convolution in matrix-vector form to a PIM program; `schedule` explains the terms."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pimflow.core.commands import Af, Affine, Comp, GAct, Gwrite, Loop, Node, Readres, Wrbias, leaves
from pimflow.core.program import PimProgram, table_row
from pimflow.core.region import ConvGeometry
from pimflow.errors import UnsupportedOpError
from pimflow.hardware import PimSpec
from pimflow.hardware.systems import SCHEDULINGS
from pimflow.pim_backend.programs.rolling import roll, shifted
from pimflow.pim_backend.programs.schedule import (
    BankTiling,
    Schedule,
    blocks_of_units,
    lockstep_phases,
    schedules,
    touched_tiles,
    units_of_channels,
)
from pimflow.pim_backend.programs.visits import Nest, Visit


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
    only_busiest: bool = False,
    to_time: bool = False,
    initial: str = "",
    added_channels: int = 0,
    activation: str = "",
) -> PimProgram:
    """The program that computes output pixels ``[pixel_begin, pixel_end)`` of `geometry`.

    Parameters
    ----------
    geometry : ConvGeometry
        Convolution or FC.
    region : str
        Name that the program carries.
    channels : int
        PIM channels to spread over.
    row_begin : int
        First row of every bank that the region may use.
    only_busiest : bool
        Lower one channel, of those with most to do: enough to compare loop orders by their time.
    to_time : bool
        Leave out what does not tell the time: channels that take the same time have the same commands, and
        blocks of one channel the same pixels and output channels. Such a program cannot be run.
    initial : str
        What the latches start from (`PimProgram.initial`).
    added_channels : int
        How many channels of `geometry` are those of a tensor that is added (`PimProgram.added_channels`).
    activation : str
        What becomes of each sum (`PimProgram.activation`); its table lies before `row_begin`.

    Raises
    ------
    UnsupportedOpError
        If `schedule` does not fit `geometry` or the device, or the latches of the device cannot be set, or it
        applies no activation.
    """
    if initial and not pim.writes_latches:
        raise UnsupportedOpError(f"region '{region}': the latches of {pim.name} always start from zero")
    if activation and not pim.activates:
        raise UnsupportedOpError(f"region '{region}': {pim.name} has no AF, which would apply '{activation}'")
    # A part of a layer may have fewer pixels than groups: there are then as many groups as pixels.
    order = replace(schedule, pixel_groups=min(1, schedule.pixel_groups))
    if not any(order in schedules(geometry, pim, dtype, level) for level in SCHEDULINGS[::-1]):
        raise UnsupportedOpError(f"region '{region}': schedule '{schedule}' does not fit {pim.name}")
    tiling = BankTiling.of(geometry, pim, dtype, schedule.gangs, schedule.together)
    end = geometry.pixels if pixel_end is None else pixel_end
    deal = _lockstep if schedule.pixel_groups else _runs
    dealt, rows = deal(end - pixel_begin, tiling, channels, schedule)
    # In lockstep, what the others do and which vectors the host writes to all at once tell the time.
    to_time, only_busiest = (each and not schedule.pixel_groups for each in (to_time, only_busiest))
    if only_busiest:
        dealt = [max(dealt, key=lambda blocks: (sum(len(p) * len(t) for p, t, _ in blocks), len(blocks)))]
    apart = geometry.pixels if tiling.matrices > 1 else 0
    stream = _Stream(pim, tiling, schedule, initial, apart, activation)
    streams: dict[object, tuple[Node, ...]] = {}
    kinds: list[object] = []
    one_pixel = end - pixel_begin == 1  # blocks may share its vector
    shared = one_pixel and schedule.accumulators > 1 and not schedule.resumed and schedule.pixel_groups > 0
    for channel, blocks in enumerate(dealt):
        if shared and len(dealt[0]) > 1:  # and accumulators
            kinds.append(channel)
            streams[channel] = stream.of_one_pixel(blocks, pixel_begin, row_begin)
            continue
        placed = [stream.placed(*block, pixel_begin, row_begin + first_row) for *block, first_row in blocks]
        if to_time:
            first = placed[0].pixel if placed else 0
            placed = [p._replace(pixel=(p.pixel - first) * one_pixel, channel=0) for p in placed]
        kinds.append(tuple(placed) if to_time else channel)
        if kinds[-1] not in streams:
            parts = map(stream.block, placed)
            streams[kinds[-1]] = _of_one_pixel(parts) if one_pixel else tuple(itertools.chain(*parts))
    return PimProgram(
        region=region,
        pim=pim.name,
        pim_digest=pim.uncatalogued_digest,
        dtype=dtype,
        geometry=geometry,
        pixel_begin=pixel_begin,
        pixel_end=end,
        banks=pim.banks,
        gangs=pim.gangs,
        columns_per_row=pim.columns_per_row,
        elements_per_column=pim.elements_per_column(dtype),
        buffers=pim.global_buffers,
        buffer_columns=pim.buffer_columns,
        result_lanes=pim.result_lanes,
        tile_gangs=schedule.gangs,
        readres_bursts=pim.readres_bursts(dtype),
        row_begin=row_begin,
        rows=rows,
        accumulators=schedule.accumulators,
        initial=initial,
        matrices=tiling.matrices,
        added_channels=added_channels,
        activation=activation,
        channels=tuple(streams[kind] for kind in kinds),
        schedule=str(schedule),
    )


def _of_one_pixel(blocks: Iterable[Iterable[Node]]) -> tuple[Node, ...]:
    """Blocks one behind the other; a vector that stays in its buffer is written by the first alone."""
    joined: list[Node] = []
    held: Node | None = None
    for block in blocks:
        nodes = list(block)
        first = next(at for at, node in enumerate(nodes) if not isinstance(node, Wrbias))
        joined += [node for at, node in enumerate(nodes) if at != first or node != held]
        written = [node for node, _ in leaves(tuple(nodes), ()) if isinstance(node, Gwrite)]
        held = written[0] if len(written) == 1 else None
    return tuple(joined)


def _runs_of(tiles: Sequence[int], length: int) -> list[Sequence[int]]:
    return [tiles[begin : begin + length] for begin in range(0, len(tiles), length)]


# Pixels and tiles of a channel, and the row that tile 0 would lie in.
_Placed = tuple[range, range, int]


def _runs(
    pixels: int, tiling: BankTiling, channels: int, schedule: Schedule
) -> tuple[list[list[_Placed]], int]:
    """Runs of units, one a channel; and the most rows that one of them takes."""
    dealt, rows = [], 0
    for run in units_of_channels(pixels * tiling.tiles, channels):
        blocks = blocks_of_units(*run, pixels, tiling.tiles, schedule)
        held = tiling.rows(touched_tiles(blocks))
        dealt.append([(*block, -held.start) for block in blocks])
        rows = max(rows, len(held))
    return dealt, rows


def _lockstep(
    pixels: int, tiling: BankTiling, channels: int, schedule: Schedule
) -> tuple[list[list[_Placed]], int]:
    """What each channel does in the phases that it has a part in; and the rows of all phases."""
    dealt: list[list[_Placed]] = [[] for _ in range(channels)]
    rows = 0
    for phase in lockstep_phases(pixels, tiling.tiles, channels, schedule.pixel_groups):
        for channel in range(phase.channels):
            block = phase.block(channel)
            held = tiling.rows(block[1])
            dealt[channel].append((*block, rows - held.start))
        rows += len(held)
    return dealt, rows


class _Place(NamedTuple):
    """A block: pixels, tiles and the first of these; what rows, pixels and output channels count from."""

    size: tuple[int, int, int]
    row: int
    pixel: int
    channel: int


class _Stream:
    """Makes command streams of channels; pixels, rows and output channels count from a block's first.

    The vectors of a pixel for two matrices are `apart` pixels apart. Where an `activation` is applied, rows
    of a block count from `first_row` on, behind that of its table. That row is opened for the results of all
    latches at once, so the bus does not work beside COMPs.
    """

    def __init__(
        self,
        pim: PimSpec,
        tiling: BankTiling,
        schedule: Schedule,
        initial: str,
        apart: int,
        activation: str = "",
    ):
        self.pim, self.tiling, self.schedule, self.initial = pim, tiling, schedule, initial
        self.apart = apart
        self.gangs = schedule.gangs or pim.gangs
        self.table_row = table_row(activation)
        self.activates, self.first_row = bool(activation), self.table_row + 1
        self.overlap = schedule.overlap and not activation
        # Columns computed while the bus turns from reading to writing.
        self.turn_columns = -(-pim.timing.get("nTURN", 1) // max(1, pim.timing.get("nCCDS", 1)))
        self.nodes_of_block: dict[tuple[int, int, int], list[Node]] = {}
        self.nodes_in_rows: dict[tuple[object, int], list[Node]] = {}  # in the rows of a channel

    def placed(self, pixels: range, tiles: range, pixel_begin: int, first_row: int) -> _Place:
        """All units of `pixels` by `tiles`: blocks of the same size differ by where they are."""
        # A place within a row is the same for the same remainder.
        first = tiles.start % self.tiling.period
        before = tiles.start - first
        return _Place(
            size=(len(pixels), len(tiles), first),
            row=self.tiling.place(before, 0)[0] + first_row,
            pixel=pixels.start + pixel_begin + self.tiling.matrix(before) * self.apart,
            channel=0 if self.apart else before * self.tiling.outputs,
        )

    def block(self, place: _Place) -> Iterable[Node]:
        """Commands of a block."""
        pixels, tiles, first = place.size
        if place.size not in self.nodes_of_block:
            self.nodes_of_block[place.size] = self._nodes(pixels, range(first, first + tiles))
        lying = (place.size, place.row)
        if lying not in self.nodes_in_rows:
            # Channels whose weights lie alike share what opens and reads them.
            nodes, by = self.nodes_of_block[place.size], place.row - self.first_row
            self.nodes_in_rows[lying] = [shifted(n, 0, by, 0, self.first_row) for n in nodes] if by else nodes
        nodes = self.nodes_in_rows[lying]
        if not place.pixel and not place.channel:
            return nodes
        return [shifted(node, place.pixel, 0, place.channel) for node in nodes]

    def of_one_pixel(self, blocks: list[_Placed], pixel: int, first_row: int) -> tuple[Node, ...]:
        """Commands of one pixel in all phases: accumulators that a phase leaves take tiles of the next."""
        rows = {tile: row for _, tiles, row in blocks for tile in tiles}
        nodes: list[Node] = []
        for turn, held in enumerate(_runs_of(list(rows), self.schedule.accumulators)):
            nodes += self._pixel(held, rows, turn, 0)
        by = first_row - self.first_row
        return tuple(shifted(node, pixel, by, 0, self.first_row) for node in nodes)

    def _nodes(self, pixels: int, tiles: range) -> list[Node]:
        if self.schedule.resumed:
            return roll(functools.partial(self._resumed, tiles), pixels)
        if self.schedule.accumulators == 1:
            return Nest(self.schedule, self.tiling, pixels, tiles, self.apart).rolled(self.visit)
        groups = _runs_of(tiles, self.schedule.accumulators)
        period = self._period_of_groups * (2 if pixels == 1 else 1)

        def group(turn: int) -> list[Node]:
            emit = functools.partial(self._pixel, groups[turn], {}, turn if pixels == 1 else 0)
            return roll(emit, pixels, period=2)

        return roll(group, len(groups), period=period)

    @property
    def _period_of_groups(self) -> int:
        """Groups of as many tiles as there are accumulators after which places in rows begin again."""
        return self.tiling.period // math.gcd(self.tiling.period, self.schedule.accumulators)

    def _pixel(self, held: Sequence[int], rows: dict[int, int], turn: int, pixel: int) -> Iterator[Node]:
        """All products of a pixel with the tiles that the accumulators hold, then the results.

        Every other pixel goes back over the rows, and so begins on the one that is open; every other `turn`
        of one pixel over its chunks, and so begins with the one that the buffer holds. `rows` has the row in
        which tile 0 would lie, by tile, where it is not the first.
        """
        chunks = range(self.tiling.chunks)
        # Tiles of a turn keep their order: a channel that lacks the last one waits for the others.
        steps = list(itertools.product(reversed(chunks) if turn % 2 else chunks, held))
        if pixel % 2:
            steps.reverse()
        visits = [Visit(tile, chunk, ((pixel, 1),), complete=True) for chunk, tile in steps]
        # With several pixels, `rows` is empty.
        opened = self._place(visits[0])[0] if pixel and not self.activates else -1
        written = visits[0].chunk if turn else -1
        for latch, tile in enumerate(held if self.initial else ()):
            begin = Visit(tile, 0, ((pixel, 1),), complete=True)
            yield replace(self._start(begin, 0, 0), buffer=latch)
        for visit in visits:
            if visit.chunk != written:
                yield self._write(visit, 0)
                written = visit.chunk
            row, column = self._place(visit)
            row += rows.get(visit.tile, 0)
            if row != opened:
                yield from self._opens(row)
                opened = row
            yield self._comp(held.index(visit.tile), 0, Affine(row), column)
        yield from self._activated(range(len(held)))
        for latch, tile in enumerate(held):
            visit = Visit(tile, 0, ((pixel, 1),), complete=True)
            yield replace(self._read(visit, 0, 0), buffer=latch)

    def _resumed(self, tiles: range, pixel: int) -> list[Node]:
        """All products of a pixel: each chunk with all tiles, as many at a time as there are accumulators.

        Every other chunk goes back over the tiles, and so begins with the sums that the latches hold.
        """
        held = _runs_of(tiles, self.schedule.accumulators)
        nodes: list[Node] = []
        for chunk in range(self.tiling.chunks):
            emit = functools.partial(self._resumed_part, held, chunk, pixel)
            nodes += roll(emit, len(held), head=2, tail=2, period=self._period_of_groups)
            held = held[::-1]
        return nodes

    def _resumed_part(
        self, held: Sequence[Sequence[int]], chunk: int, pixel: int, turn: int
    ) -> Iterator[Node]:
        """Products of a chunk with the tiles of one `turn`: sums are resumed before, and read behind."""
        part, last = held[turn], chunk == self.tiling.chunks - 1
        begins, ends = turn == 0, turn == len(held) - 1
        visits = [Visit(tile, chunk, ((pixel, 1),), complete=True) for tile in part]
        if begins:
            yield self._write(visits[0], 0)
        if (chunk and not begins) or (self.initial and not chunk):
            for latch, visit in enumerate(visits):
                yield replace(self._start(visit, 0, 0), resumed=int(chunk > 0), buffer=latch)
        opened = -1
        if not begins and not (last and self.activates):
            opened = self._place(Visit(held[turn - 1][-1], chunk, ((pixel, 1),), complete=True))[0]
        elif begins and chunk:  # with the tiles that the chunk before ended with
            opened = self._place(Visit(part[-1], chunk - 1, ((pixel, 1),), complete=True))[0]
        for latch, visit in enumerate(visits):
            row, column = self._place(visit)
            if row != opened:
                yield from self._opens(row)
                opened = row
            yield self._comp(latch, 0, Affine(row), column)
        if last:
            yield from self._activated(range(len(part)))
        if last or not ends:
            for latch, visit in enumerate(visits):
                yield replace(self._read(visit, 0, 0), buffer=latch)

    def visit(self, before: Visit | None, visit: Visit, after: Visit | None) -> Iterator[Node]:
        """Commands of one visit, the READRESs of the one before, and the GWRITEs for the next.

        A buffer is written for the next visit as soon as its last product is formed, so that the bus
        works while the other buffers compute; the last buffer waits for the READRESs in between, and
        comes into the next visit. What the bus does is woven into the first products.
        """
        row, column = self._place(visit)
        late = self._late(before, visit)
        bus: list[Node] = [*self._reads(before), *self._starts(before, visit)]
        if not self.overlap:
            yield from bus
            yield from (self._write(visit, b) for b in late)
            bus, late = [], []
        if before is None or self._place(before)[0] != row or (before.complete and self.activates):
            opens = self._opens(row)
            if late:
                yield from self._opened(opens, late, visit)
            elif visit.written_after(before):
                yield from opens
            else:
                yield opens[0]
                yield from bus
                yield from opens[1:]
                bus = []
        bus += [self._write(visit, b) for b in late]
        bus += [self._write(after, b) for b in self._early(visit, after)]
        yield from self._products(visit, after, Affine(row), column, bus)
        if after is None:
            yield from self._reads(visit)

    def _opens(self, row: int) -> list[GAct]:
        return [GAct(gang=gang, row=Affine(row)) for gang in range(self.gangs)]

    def _activated(self, latches: Iterable[int]) -> list[Node]:
        """AFs of `latches`, whose sums are complete, in the row of the table; none if nothing is applied."""
        if not self.activates:
            return []
        return [*self._opens(self.table_row), *(Af(buffer=b, row=Affine(self.table_row)) for b in latches)]

    def _opened(self, opens: list[GAct], late: list[int], visit: Visit) -> Iterator[Node]:
        """Open a row while the bus writes as many of the `late` buffers as it can meanwhile."""
        n = self.pim.timing
        gap = max(n.get("nFAW", 1), n.get("nRRD", 1))
        clock, free = n.get("nRP", 1), 0
        for command in (*opens, None):
            end = clock if command else clock - gap + n.get("nRCDR", 1)
            while late and free <= end:
                write = self._take(late, visit, 1)[0]
                free += write.bursts * n.get("nBL", 1)
                yield write
            if command:
                yield command
                clock += gap

    def _early(self, visit: Visit, after: Visit | None) -> list[int]:
        """Buffers without a part in this visit that can be written while it reads no results."""
        if after is None or not self.overlap or any(held and held[1] > 1 for held in visit.contents):
            return []
        idle = [b for b in after.written_after(visit) if b not in visit.active]
        if not idle:
            return []
        pixels = after.contents[idle[0]][1]
        return idle[: max(1, len(visit.active) // pixels)]

    def _products(
        self, visit: Visit, after: Visit | None, row: Affine, column: int, bus: list[Node]
    ) -> Iterator[Node]:
        """COMPs of a visit with READRESs between slots; `bus` is still to be done."""
        counts = {b: visit.contents[b][1] for b in visit.active}
        writes = after.written_after(visit) if after and self.overlap else []
        slot = 0
        while slot < max(counts.values()):
            active = [b for b, count in counts.items() if count > slot]
            ending = [b for b in active if counts[b] == slot + 1 and b in writes]
            run = min(counts[b] for b in active) - 1 - slot
            if slot and run > 0:
                yield Loop(extent=run, body=tuple(self._turn(visit, active, slot, row, column)))
                slot += run
                continue
            if slot and ending:
                bus = [node for b in active for node in self._next(visit, b, slot)]
            if slot and self.activates:
                yield from self._all_next(visit, active, slot, row)
            for b in active:
                if slot and not ending and not self.activates:
                    yield from self._next(visit, b, slot)
                comp = self._comp(b, slot, row, column)
                if bus:
                    yield from self._flushed(b, bus)
                    yield from self._woven(comp, bus)
                else:
                    yield comp
                if b in ending and (b != visit.active[-1] or not visit.complete):
                    yield from bus
                    bus = [self._write(after, b)]
            slot += 1
            yield from bus
            bus = []

    @staticmethod
    def _flushed(buffer: int, bus: list[Node]) -> Iterator[Node]:
        """The commands of `bus` that must precede a COMP of `buffer`, and a GWRITE right after them."""
        count = 1 + max([index for index, node in enumerate(bus) if node.buffer == buffer], default=-1)
        if count and isinstance(bus[count - 1], Gwrite):
            count += 1
        yield from bus[:count]
        del bus[:count]

    def _woven(self, comp: Comp, bus: list[Node]) -> Iterator[Node]:
        """A run of COMPs with commands for the bus in between, as soon as it is free for each."""
        done, last = 0, None
        while bus:
            step = 1
            if isinstance(bus[0], Gwrite) and last is not None:
                step = last.bursts if isinstance(last, Gwrite) else self.turn_columns
            if done + step > comp.count:
                break
            yield self._part(comp, done, step)
            last = bus.pop(0)
            yield last
            done += step
        if done < comp.count:
            yield self._part(comp, done, comp.count - done)

    @staticmethod
    def _part(comp: Comp, begin: int, count: int) -> Comp:
        if count == comp.count:
            return comp
        column = Affine(comp.column.base + begin, comp.column.coefficients)
        return Comp(buffer=comp.buffer, row=comp.row, column=column, count=count)

    def _place(self, visit: Visit) -> tuple[int, int]:
        """Row and first column of the weights of `visit`."""
        row, position = self.tiling.place(visit.tile, visit.chunk)
        return self.first_row + row, position * self.pim.buffer_columns

    def _late(self, before: Visit | None, visit: Visit) -> list[int]:
        """Buffers of `visit` that the visit before left unwritten."""
        writes = visit.written_after(before)
        if before is None or not self.overlap:
            return writes
        written = before.active[:-1] if before.complete else before.active
        return [b for b in writes if b not in written and b not in self._early(before, visit)]

    def _take(self, late: list[int], visit: Visit, count: int) -> list[Node]:
        taken, late[:] = late[:count], late[count:]
        return [self._write(visit, b) for b in taken]

    def _write(self, visit: Visit, buffer: int) -> Gwrite:
        first, pixels = visit.contents[buffer]
        k = Affine(visit.chunk * self.tiling.columns * self.tiling.elements_per_column)
        return Gwrite(buffer=buffer, pixel=Affine(first), pixels=pixels, k=k, columns=self.tiling.columns)

    def _comp(self, buffer: int, slot: int, row: Affine, column: int, *step: int) -> Comp:
        columns = self.tiling.columns
        first = Affine(column + slot * columns, tuple([s * columns for s in step]))
        return Comp(buffer=buffer, row=row, column=first, count=columns)

    def _read(self, visit: Visit, buffer: int, slot: int, *step: int) -> Readres:
        pixel = Affine(visit.contents[buffer][0] + slot, step)
        return Readres(buffer=buffer, pixel=pixel, channel=Affine(self.tiling.channel(visit.tile)))

    def _start(self, visit: Visit, buffer: int, slot: int, *step: int) -> Wrbias:
        read = self._read(visit, buffer, slot, *step)
        return Wrbias(buffer=buffer, pixel=read.pixel, channel=read.channel)

    def _next(self, visit: Visit, buffer: int, slot: int, *step: int) -> Iterator[Node]:
        """Between two slots of a buffer: read the latch, and set it for the next."""
        yield self._read(visit, buffer, slot - 1, *step)
        if self.initial:
            yield self._start(visit, buffer, slot, *step)

    def _all_next(
        self, visit: Visit, buffers: list[int], slot: int, row: Affine, *step: int
    ) -> Iterator[Node]:
        """Between two slots of all buffers: activate, read and set latches, and open the row again."""
        yield from self._activated(buffers)
        for b in buffers:
            yield from self._next(visit, b, slot, *step)
        yield from self._opens(row.base)

    def _turn(self, visit: Visit, buffers: list[int], slot: int, row: Affine, column: int) -> Iterator[Node]:
        """One turn of the loop over slots from `slot` on: read the slot before, compute this one."""
        if self.activates:
            yield from self._all_next(visit, buffers, slot, row, 1)
        for b in buffers:
            if not self.activates:
                yield from self._next(visit, b, slot, 1)
            yield self._comp(b, slot, row, column, 1)

    def _starts(self, before: Visit | None, visit: Visit) -> Iterator[Node]:
        """WRBIASs of the sums that begin with a visit."""
        if self.initial and (before is None or before.complete):
            for b in visit.active:
                yield self._start(visit, b, 0)

    def _reads(self, visit: Visit | None) -> Iterator[Node]:
        """READRESs of the results that a visit leaves in its latches: the last slot of each buffer."""
        if visit is not None and visit.complete:
            yield from self._activated(visit.active)
            for b in visit.active:
                yield self._read(visit, b, visit.contents[b][1] - 1)
