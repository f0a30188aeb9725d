"""The fastest command stream of one channel, found by trying all of them, for tiny layers and devices.

A search over streams (A*, with states that another one dominates left out), with timing rules of its own:
those of the ``strict`` timing as docs/devices.md has them for `newton-gddr6`, written out command by
command. It shares nothing with the engine's constraint table, the lowering or the lower bound.

Left out are streams that another one is never slower than: commands whose effect nothing uses, rows that
are closed before a COMP used them. A chunk's products are complete before its buffer is written again.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from timing_programs import act, comp, program, read, write

from pimflow.core.commands import Node
from pimflow.core.program import PimProgram
from pimflow.hardware.pim import PimSpec

# Ready clocks: of what is one in a channel, then three for each gang and three for each buffer.
LAST, COMP, GWRITE, READRES, G_ACT, OLDER_G_ACT, REF, FIRST = range(8)
GANG_COMP, GANG_PRE, GANG_ACT = range(3)
BUFFER_COMP, BUFFER_READ, BUFFER_WRITE = range(3)


class TooManyStates(Exception):
    """The case is too large to try everything."""


class Buffer(NamedTuple):
    """A global buffer and its latch."""

    chunk: int = -1
    pixels: int = 0  # bit mask
    used: bool = True  # whether a COMP used what was written last
    unit: tuple[int, int] | None = None  # tile and pixel in the latch
    chunks: int = 0  # whose products the latch has, bit mask
    columns: int = 0  # of the chunk that is being computed


class State(NamedTuple):
    """What of the work is done, and what the channel holds."""

    done: int  # units, bit mask
    touched: int  # pixels written so far: those untouched are alike
    row: int  # open, or being opened
    gangs: int  # opened so far
    row_used: bool
    buffers: tuple[Buffer, ...]
    open: int = 0  # gangs whose banks have a row open, whichever, bit mask


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one channel is to do.

    Attributes
    ----------
    pixels, tiles, chunks, columns : int
        The layer; `columns` are those of a chunk.
    units : int
        Of the ``pixels * tiles``, how many are to be computed, whichever.
    slots : int
        Vectors that a buffer holds.
    rows : tuple of int
        Row of each chunk of each tile.
    gangs : int
        Over which a tile lies.
    """

    pixels: int
    tiles: int
    chunks: int
    columns: int
    units: int
    slots: int
    rows: tuple[int, ...]
    gangs: int


@dataclass
class Search:
    """The fastest stream for `work` on a channel of `spec`, and how long it takes."""

    spec: PimSpec
    work: Work
    readres_bursts: int
    window: int = 1
    refreshes: bool = False
    seen: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.n = self.spec.timing
        self.first_buffer = FIRST + 3 * self.work.gangs
        self.row_change = self._row_change()

    def fastest(self, most_states: int = 10**6) -> tuple[int, tuple[Node, ...]]:
        """Cycles and stream; `TooManyStates` if it takes more than `most_states` states to find."""
        n, order = self.n, itertools.count()
        size = self.first_buffer + 3 * self.spec.global_buffers
        start = State(0, 0, -1, 0, True, (Buffer(),) * self.spec.global_buffers)
        clocks = (0,) * (LAST + 1) + (1,) * (size - 1)
        due = (1 + self.spec.refreshes_ahead) * n["nREFI"]
        queue = [(0, 0, next(order), start, clocks, due, None)]
        for _ in range(most_states):
            *_, state, clocks, due, stream = heapq.heappop(queue)
            if state.done.bit_count() == self.work.units:
                return clocks[LAST] + n["nCL"] + n["nBL"] * self.readres_bursts, self._stream_nodes(stream)
            if stream is not None and not self._is_best(state, clocks, due):
                continue
            for node, after in self._moves(state):
                later, opened, until = self._issue(state.open, list(clocks), due, node)
                after = after._replace(open=opened)
                later = tuple(max(clock, later[LAST] + (i > LAST)) for i, clock in enumerate(later))
                if self._add(after, later, until):
                    rank = (self._lower_bound(after, later), later[LAST], next(order))
                    heapq.heappush(queue, (*rank, after, later, until, (stream, node)))
        raise TooManyStates

    def _row_change(self) -> int:
        """Cycles from a COMP on a row that was opened long ago to the next on another one, by the rules."""
        opened, long_ago = (1 << self.work.gangs) - 1, 0
        clocks = [long_ago] * (self.first_buffer + 3 * self.spec.global_buffers)
        never = 1 << 60
        clocks, opened, _ = self._issue(opened, clocks, never, comp(1))
        first = clocks[LAST]
        for gang in range(self.work.gangs):
            clocks, opened, _ = self._issue(opened, clocks, never, act(gang))
        clocks, _, _ = self._issue(opened, clocks, never, comp(1))
        return max(clocks[LAST] - first, self.n["nCCDS"])

    @staticmethod
    def _stream_nodes(stream: tuple | None) -> tuple[Node, ...]:
        nodes = []
        while stream:
            stream, node = stream
            nodes.append(node)
        return tuple(reversed(nodes))

    def _lower_bound(self, state: State, clocks: tuple[int, ...]) -> int:
        """No stream from here on has its last READRES before this clock."""
        w = self.work
        remaining = (w.units - state.done.bit_count()) * w.chunks * w.columns
        for b in state.buffers:
            if b.unit is not None:
                remaining -= b.chunks.bit_count() * w.columns + b.columns
        reads = w.units - state.done.bit_count()
        read = clocks[READRES] + (reads - 1) * self.n["nBL"] * self.readres_bursts if reads else 0
        if remaining <= 0:
            return max(read, clocks[LAST])
        begun, rows = self._unit_mask(state), set()
        if w.units == w.pixels * w.tiles:
            for tile in range(w.tiles):
                if any(not begun >> (tile * w.pixels + p) & 1 for p in range(w.pixels)):
                    rows.update(w.rows[tile * w.chunks : (tile + 1) * w.chunks])

        changes = len(rows - {state.row}) * (self.row_change - self.n["nCCDS"])
        return max(read, clocks[COMP] + (remaining - 1) * self.n["nCCDS"] + changes + self.n["nTREE"])

    def _add(self, state: State, clocks: tuple[int, ...], due: int) -> bool:
        """Whether nothing that was found is as far and nowhere later."""
        key = (self._canonical(state, clocks), due if self.refreshes else 0)
        state, clocks = key[0]
        earlier_clocks = self.seen.setdefault((state, clocks if self.refreshes else 0, due), [])
        if self.refreshes:
            if earlier_clocks:
                return False
            earlier_clocks.append(clocks)
            return True
        if any(all(a <= b for a, b in zip(earlier, clocks)) for earlier in earlier_clocks):
            return False
        earlier_clocks[:] = [e for e in earlier_clocks if not all(a >= b for a, b in zip(e, clocks))]
        earlier_clocks.append(clocks)
        return True

    def _is_best(self, state: State, clocks: tuple[int, ...], due: int) -> bool:
        """Whether nothing better was found since this was added."""
        state, clocks = self._canonical(state, clocks)
        return clocks in self.seen[state, clocks if self.refreshes else 0, due]

    def _canonical(self, state: State, clocks: tuple[int, ...]) -> tuple[State, tuple[int, ...]]:
        """With the buffers, which are alike, in a fixed order."""
        first = self.first_buffer
        buffer_clocks = [(b, clocks[first + 3 * i : first + 3 * i + 3]) for i, b in enumerate(state.buffers)]
        buffer_clocks.sort(key=repr)
        ordered = tuple(clock for _, three in buffer_clocks for clock in three)
        return state._replace(buffers=tuple(b for b, _ in buffer_clocks)), clocks[:first] + ordered

    # What may come next.

    def _moves(self, state: State) -> Iterator[tuple[Node, State]]:
        for index, buffer in enumerate(state.buffers):
            yield from self._comp_moves(state, index, buffer)
            yield from self._gwrite_moves(state, index, buffer)
            if self._is_complete(buffer):
                tile, pixel = buffer.unit
                emptied = buffer._replace(unit=None, chunks=0)
                done = state.done | 1 << (tile * self.work.pixels + pixel)
                yield read(index), self._with_buffer(state, index, emptied, done=done)
        yield from self._act_moves(state)

    @staticmethod
    def _with_buffer(state: State, index: int, buffer: Buffer, **changes: object) -> State:
        buffers = (*state.buffers[:index], buffer, *state.buffers[index + 1 :])
        return state._replace(buffers=buffers, **changes)

    def _is_complete(self, buffer: Buffer) -> bool:
        return buffer.chunks == (1 << self.work.chunks) - 1

    def _unit_mask(self, state: State) -> int:
        """Units done or in a latch, bit mask."""
        begun = state.done
        for b in state.buffers:
            if b.unit is not None:
                begun |= 1 << (b.unit[0] * self.work.pixels + b.unit[1])
        return begun

    def _comp_moves(self, state: State, index: int, buffer: Buffer) -> Iterator[tuple[Node, State]]:
        w = self.work
        if state.gangs < w.gangs or buffer.chunk < 0 or self._is_complete(buffer):
            return
        begun = self._unit_mask(state)
        for tile in range(w.tiles):
            place = tile * w.chunks + buffer.chunk
            if w.rows[place] != state.row or buffer.chunks >> buffer.chunk & 1:
                continue
            if buffer.unit is None:
                pixels = [p for p in range(w.pixels) if buffer.pixels >> p & 1]
                units = [(tile, p) for p in pixels if not begun >> (tile * w.pixels + p) & 1]
            else:
                units = (
                    [buffer.unit] if buffer.unit[0] == tile and buffer.pixels >> buffer.unit[1] & 1 else []
                )
            for unit in units:
                columns = buffer.columns + 1
                after = buffer._replace(unit=unit, columns=columns, used=True)
                if columns == w.columns:
                    after = after._replace(columns=0, chunks=buffer.chunks | 1 << buffer.chunk)
                node = comp(1, index, state.row, 0)
                yield node, self._with_buffer(state, index, after, row_used=True)

    def _gwrite_moves(self, state: State, index: int, buffer: Buffer) -> Iterator[tuple[Node, State]]:
        w = self.work
        if not buffer.used or buffer.columns:
            return
        begun = self._unit_mask(state)
        pixel_pool = [
            p for p in range(w.pixels) if any(not begun >> (t * w.pixels + p) & 1 for t in range(w.tiles))
        ]
        chunks = range(w.chunks)
        if buffer.unit is not None and not self._is_complete(buffer):
            pixel_pool = [buffer.unit[1]]
            chunks = [c for c in chunks if not buffer.chunks >> c & 1]
        for count in range(1, w.slots + 1):
            for pixel_set in itertools.combinations(pixel_pool, count):
                pixels = sum(1 << p for p in pixel_set)
                fresh = pixels & ~state.touched
                first = ~state.touched & -(~state.touched)
                if fresh != first * ((1 << fresh.bit_count()) - 1):
                    continue  # pixels are alike until one is written, and are taken in order
                for chunk in chunks:
                    if (chunk, pixels) != (buffer.chunk, buffer.pixels):
                        after = buffer._replace(chunk=chunk, pixels=pixels, used=False)
                        touched = state.touched | pixels
                        node = write(index, count * w.columns)
                        yield node, self._with_buffer(state, index, after, touched=touched)

    def _act_moves(self, state: State) -> Iterator[tuple[Node, State]]:
        w = self.work
        if 0 < state.gangs < w.gangs:
            yield act(state.gangs, state.row), state._replace(gangs=state.gangs + 1)
            return
        if not state.row_used:
            return
        for row in dict.fromkeys(w.rows):
            tiles = [place // w.chunks for place, chunk_row in enumerate(w.rows) if chunk_row == row]
            units = (tile * w.pixels + pixel for tile in tiles for pixel in range(w.pixels))
            if row != state.row and any(not state.done >> unit & 1 for unit in units):
                yield act(0, row), state._replace(row=row, gangs=1, row_used=False)

    # When it issues.

    def _issue(self, opened: int, c: list[int], due: int, node: Node) -> tuple[list[int], int, int]:
        """Ready clocks, open gangs and the next due clock after `node` and what the controller adds."""
        kind, all_gangs = type(node).__name__, (1 << self.work.gangs) - 1
        while True:
            if kind == "Comp" and opened != all_gangs:  # a refresh closed them
                gang = (~opened & -~opened).bit_length() - 1
                t = self._ready_to_open(c, gang)
                if t < due:
                    self._activate(c, gang, t)
                    opened |= 1 << gang
                    continue
            elif kind == "GAct" and opened >> node.gang & 1:
                t = max(c[LAST] + 1, c[FIRST + 3 * node.gang + GANG_PRE])
                if t < due:
                    self._precharge(c, node.gang, t)
                    opened &= ~(1 << node.gang)
                    continue
            else:
                t = self._ready(c, kind, node)
                if t < due:
                    break
            self._refresh(c, due, opened)
            opened, due = 0, due + self.n["nREFI"]
        self._put(c, kind, node, t)
        return c, opened | (1 << node.gang if kind == "GAct" else 0), due

    def _ready(self, c: list[int], kind: str, node: Node) -> int:
        t = c[LAST] + 1
        if kind == "GAct":
            return max(t, self._ready_to_open(c, node.gang))
        buffer_base = self.first_buffer + 3 * node.buffer
        if kind == "Comp":
            gangs = (c[FIRST + 3 * g + GANG_COMP] for g in range(self.work.gangs))
            return max(t, c[COMP], c[buffer_base + BUFFER_COMP], *gangs)
        if kind == "Gwrite":
            return max(t, c[GWRITE], c[buffer_base + BUFFER_WRITE])
        return max(t, c[READRES], c[buffer_base + BUFFER_READ])

    def _ready_to_open(self, c: list[int], gang: int) -> int:
        return max(c[LAST] + 1, c[G_ACT], c[FIRST + 3 * gang + GANG_ACT])

    def _put(self, c: list[int], kind: str, node: Node, t: int) -> None:
        n = self.n
        if kind == "GAct":
            self._activate(c, node.gang, t)
            return
        buffer_base = self.first_buffer + 3 * node.buffer
        c[LAST] = t

        def delay(clock: int, cycles: int) -> None:
            c[clock] = max(c[clock], t + cycles)

        if kind == "Comp":
            delay(COMP, n["nCCDS"])
            delay(buffer_base + BUFFER_READ, n["nTREE"])
            delay(buffer_base + BUFFER_WRITE, n["nCCDS"])
            for gang in range(self.work.gangs):
                delay(FIRST + 3 * gang + GANG_PRE, n["nRTP"])
        elif kind == "Gwrite":
            delay(GWRITE, n["nBL"] * node.bursts)
            delay(buffer_base + BUFFER_COMP, n["nBL"] * node.bursts)
            delay(READRES, n["nBL"] * (node.bursts - 1) + n["nTURN"])
        else:
            delay(READRES, n["nBL"] * self.readres_bursts)
            delay(GWRITE, n["nBL"] * (self.readres_bursts - 1) + n["nTURN"])
            c[buffer_base + BUFFER_READ] = 0  # until the next COMP

    def _activate(self, c: list[int], gang: int, t: int) -> None:
        n, gang_base = self.n, FIRST + 3 * gang
        c[LAST] = t
        c[gang_base + GANG_COMP] = max(c[gang_base + GANG_COMP], t + n["nRCDR"])
        c[gang_base + GANG_PRE] = max(c[gang_base + GANG_PRE], t + n["nRAS"])
        c[gang_base + GANG_ACT] = max(c[gang_base + GANG_ACT], t + n["nRC"])
        # Four activations in nFAW: as many gangs as the window has, the older one of two remembered.
        older = t if self.window == 1 else c[OLDER_G_ACT] - n["nFAW"]
        c[G_ACT] = max(c[G_ACT], t + n["nRRD"], older + n["nFAW"])
        c[OLDER_G_ACT] = t + n["nFAW"] if self.window > 1 else 0

    def _precharge(self, c: list[int], gang: int, t: int) -> None:
        c[LAST] = t
        gang_base = FIRST + 3 * gang
        c[gang_base + GANG_ACT] = max(c[gang_base + GANG_ACT], t + self.n["nRP"])
        if self.refreshes:
            c[REF] = max(c[REF], t + self.n["nRP"])

    def _refresh(self, c: list[int], due: int, open_gangs: int) -> None:
        for gang in range(self.work.gangs):
            if open_gangs >> gang & 1:
                t = max(c[LAST] + 1, c[FIRST + 3 * gang + GANG_PRE], due)
                self._precharge(c, gang, t)
        t = max(c[LAST] + 1, c[REF], due)
        c[:] = [max(clock, t + self.n["nRFC"]) if i != OLDER_G_ACT else clock for i, clock in enumerate(c)]
        c[LAST] = t


def as_program(spec: PimSpec, work: Work, stream: tuple[Node, ...], readres_bursts: int) -> PimProgram:
    """The stream, for the engine."""
    source = program(stream, readres_bursts=readres_bursts)
    return replace(
        source,
        banks=spec.banks,
        gangs=spec.gangs,
        buffers=spec.global_buffers,
        columns_per_row=spec.columns_per_row,
        buffer_columns=spec.buffer_columns,
        tile_gangs=work.gangs,
    )
