"""Shape transfer (Deep Fusion, Figure 3): which part of every tensor of a group each tile needs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pimflow.core.ranges import RangeMap
from pimflow.fusion.layers import LayerGraph

Span = tuple[int, int]
TILES = "tiles"  # what the text of a tiling begins with


@dataclass(frozen=True, kw_only=True, order=True)
class GroupTiling:
    """The number of parts that a group's results are cut into along each axis.

    Attributes
    ----------
    n, h, w : int
    chunk : int
        Channels at a time of what is between the first layer and the last; 0 for all of them.
    retain : bool
        Whether rows that the next tile needs too stay on chip instead of being loaded or computed again.
        Tiles run down the rows first.
    """

    n: int = 1
    h: int = 1
    w: int = 1
    chunk: int = 0
    retain: bool = False

    @property
    def tiles(self) -> int:
        return self.n * self.h * self.w

    def __str__(self) -> str:
        """The form in plans, which `parse` reads."""
        chunks = f" by {self.chunk} channels" if self.chunk else ""
        return f"{TILES} {self.n}x{self.h}x{self.w}" + chunks + (" retained" if self.retain else "")

    @classmethod
    def parse(cls, text: str) -> GroupTiling:
        """Read what `str` writes; raises `ValueError` for anything else."""
        number = r"([1-9]\d*)"
        form = rf"{TILES} {number}x{number}x{number}(?: by {number} channels)?( retained)?"
        match = re.fullmatch(form, text)
        if not match:
            raise ValueError(
                f"'{text}' is no tiling; write it as 'tiles 1x8x4' or 'tiles 1x8x4 by 16 channels'"
            )
        n, h, w, chunk = (int(each or 0) for each in match.groups()[:4])
        return cls(n=n, h=h, w=w, chunk=chunk, retain=bool(match[5]))

    def indices(self) -> Iterator[tuple[int, int, int]]:
        """Tiles in the order in which they run, as (n, h, w)."""
        for n, w, h in itertools.product(range(self.n), range(self.w), range(self.h)):
            yield n, h, w


@dataclass(frozen=True, kw_only=True)
class Spans:
    """One axis of one tensor: by tile, what has to be on chip and what of it is new.

    Attributes
    ----------
    held, fresh : tuple of (int, int)
        Half-open; they differ where halos are retained.
    """

    held: tuple[Span, ...]
    fresh: tuple[Span, ...]

    @property
    def longest(self) -> int:
        return max(end - begin for begin, end in self.held)

    @property
    def total(self) -> int:
        """Indices that are loaded or computed over all tiles."""
        return sum(end - begin for begin, end in self.fresh)

    @property
    def retained(self) -> bool:
        """Whether anything stays on chip from one tile to the next."""
        return self.held != self.fresh


def pieces(extent: int, parts: int) -> tuple[Span, ...]:
    """Cut an axis into nearly equal parts."""
    return tuple((part * extent // parts, (part + 1) * extent // parts) for part in range(parts))


def transfer(
    graph: LayerGraph, begin: int, end: int, axis: int, parts: int, retain: bool = False
) -> dict[str, Spans]:
    """Spans along `axis` of every tensor that the layers ``[begin, end)`` touch, cut into `parts`.

    What a tile needs of a tensor with several readers is the hull of what they need.
    """
    wanted: dict[str, list[Span]] = {}
    spans: dict[str, Spans] = {}
    for position in reversed(range(begin, end)):
        layer = graph.layers[position]
        if graph.stored(layer.name, range(begin, end)):
            _widen(wanted, layer.name, pieces(graph.shapes[layer.name][axis], parts))
        spans[layer.name] = _spans(wanted.pop(layer.name), retain)
        for name, maps in zip(layer.inputs, layer.maps):
            _widen(wanted, name, [_read(maps[axis], span) for span in spans[layer.name].fresh])
    return spans | {name: _spans(held, retain) for name, held in wanted.items()}


def _read(window: RangeMap, span: Span) -> Span:
    if span[1] <= span[0]:
        return (0, 0)
    part = window.inputs(*span)
    return (part.begin, part.end)


def _widen(wanted: dict[str, list[Span]], name: str, more: list[Span] | tuple[Span, ...]) -> None:
    if name not in wanted:
        wanted[name] = list(more)
        return
    for index, (begin, end) in enumerate(more):
        low, high = wanted[name][index]
        if low >= high:
            wanted[name][index] = (begin, end)
        elif begin < end:
            wanted[name][index] = (min(low, begin), max(high, end))


def _spans(wanted: list[Span], retain: bool) -> Spans:
    """Held and fresh spans of every tile. With `retain`, a span is kept while a later tile reads it."""
    if not retain:
        return Spans(held=tuple(wanted), fresh=tuple(wanted))
    later, lowest = [], math.inf
    for begin, end in reversed(wanted):
        lowest = min(lowest, begin) if begin < end else lowest
        later.append(lowest)
    held, fresh, done = [], [], 0
    for (begin, end), lowest in zip(wanted, reversed(later)):
        before, done = done, max(done, end) if begin < end else done
        held.append((min(lowest, done), done))
        fresh.append((min(max(lowest, before), done), done))
    return Spans(held=tuple(held), fresh=tuple(fresh))
