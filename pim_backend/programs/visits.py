"""The order in which a channel opens rows, and what the buffers hold meanwhile.

A `Visit` is one open row. A `Nest` lists the visits of a block of work, one after the other, and how they
repeat; `lowering` turns visits into commands.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pimflow.core.commands import Node
from pimflow.pim_backend.programs.rolling import roll
from pimflow.pim_backend.programs.schedule import BankTiling, Schedule


@dataclass(frozen=True)
class Visit:
    """An open row and what the buffers hold meanwhile.

    Attributes
    ----------
    tile, chunk : int
        Whose weights the row holds.
    contents : tuple of (first, pixels) or None
        The pixels in each buffer; None for a buffer that has no part.
    complete : bool
        Whether the results are read afterwards.
    """

    tile: int
    chunk: int
    contents: tuple[tuple[int, int] | None, ...]
    complete: bool

    @functools.cached_property
    def active(self) -> tuple[int, ...]:
        """Buffers that take part."""
        return tuple([buffer for buffer, held in enumerate(self.contents) if held])

    def written_after(self, before: Visit | None) -> list[int]:
        """Buffers whose contents differ from those of the visit before."""
        if before is None:
            return list(self.active)
        moved = self.chunk != before.chunk
        return [b for b in self.active if moved or self.contents[b] != before.contents[b]]


Visited = Callable[[Visit | None, Visit, Visit | None], Iterable[Node]]


@dataclass(frozen=True)
class Nest:
    """The visits of a block of pixels and tiles.

    Attributes
    ----------
    pixels : int
        How many, cut into groups that fill the buffers, as even as can be.
    tiles : range
        Tiles that all of them meet.
    apart : int
        How much later the vectors of a pixel are for the next matrix; 0 where all tiles are of one.
    """

    schedule: Schedule
    tiling: BankTiling
    pixels: int
    tiles: range
    apart: int = 0

    @functools.cached_property
    def groups(self) -> int:
        return -(-self.pixels // (self.schedule.buffers * self.schedule.pixels))

    @functools.cached_property
    def per_buffer(self) -> int:
        """Pixels that a buffer holds, but for the last."""
        return -(-self.pixels // (self.groups * self.schedule.buffers))

    def held(self, group: int, buffer: int, first: int = 0) -> tuple[int, int] | None:
        """First pixel, from `first` on, and pixels of a buffer in a group."""
        if not 0 <= group < self.groups:
            return None
        begin = (group * self.schedule.buffers + buffer) * self.per_buffer
        count = min(self.per_buffer, self.pixels - begin)
        return (first + begin, count) if count > 0 else None

    @functools.cached_property
    def starts(self) -> list[int]:
        """Visits after which each buffer is filled for the first time."""
        buffers = self.schedule.buffers
        return [b * len(self.tiles) // buffers if self.schedule.staggered else 0 for b in range(buffers)]

    @functools.cached_property
    def shape(self) -> tuple[int, int, int]:
        """Extents of the nest, outermost first: tiles or 1, groups of pixels, visits of a group."""
        if self.schedule.stationary == "input":
            return 1, self.groups, len(self.tiles)
        return len(self.tiles), self.groups, self.tiling.chunks

    def __len__(self) -> int:
        return self._length

    @functools.cached_property
    def _length(self) -> int:
        outer, groups, inner = self.shape
        filled = (b for b in range(self.schedule.buffers) if self.held(groups - 1, b))
        short = (b for b in range(self.schedule.buffers) if self.held(groups - 2, b))
        last = max(self.starts[b] for b in filled)
        if self.schedule.staggered:
            last = max([last, *(self.starts[b] - inner for b in short)])
        return outer * groups * inner + last

    def __getitem__(self, index: int) -> Visit:
        _, groups, inner = self.shape
        rest, step = divmod(index, inner)
        turn, group = divmod(rest, groups)
        complete = self.tiling.chunks == 1 or step == inner - 1
        if self.schedule.staggered:
            contents = tuple(self.held((index - start) // inner, b) for b, start in enumerate(self.starts))
        else:
            # Each level goes back the way it came, and so begins with what is there; but a short group
            # leaves buffers idle, which are better written for a full one.
            if rest % 2:
                step = inner - 1 - step
            # Nothing is there for another matrix.
            whole = self.pixels % (self.schedule.buffers * self.per_buffer) == 0
            if turn % 2 and whole and not self.apart:
                group = groups - 1 - group
            first = self.apart * self.tiling.matrix(self.tiles.start + turn) if self.apart else 0
            contents = tuple(self.held(group, b, first) for b in range(self.schedule.buffers))
        tile, chunk = (step, 0) if self.schedule.stationary == "input" else (turn, step)
        return Visit(self.tiles.start + tile, chunk, contents, complete)

    def rolled(self, visited: Visited) -> list[Node]:
        """Commands of all visits, with loops; `visited` gives those of one between two others."""
        known: dict[int, Visit | None] = {-1: None, len(self): None}

        def at(index: int) -> Visit | None:
            if index not in known:
                known[index] = self[index]
            return known[index]

        def emit(index: int) -> Iterable[Node]:
            return visited(at(index - 1), at(index), at(index + 1))

        outer, groups, inner = self.shape
        period = self.tiling.chunks_per_row

        def sweep(number: int) -> list[Node]:
            nodes, bounds = [], [*self.starts, inner]
            for begin, end in itertools.pairwise(bounds):
                base = number * inner + begin
                count = min(end - begin, len(self) - base)
                nodes += roll(lambda step, base=base: emit(base + step), count, period=period)
            return nodes

        if self.schedule.staggered:
            return roll(sweep, -(-len(self) // inner), tail=3)

        def over_groups(turn: int) -> list[Node]:
            def over_visits(group: int) -> list[Node]:
                base = (turn * groups + group) * inner
                return roll(lambda step: emit(base + step), inner, period=period)

            return roll(over_visits, groups, head=2, tail=2, period=2 if inner > 1 else 1)

        return roll(over_groups, outer, period=2 * self.tiling.period)
