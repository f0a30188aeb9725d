"""Shape transfer (Deep Fusion, Figure 3): which part of every tensor of a group each tile reads.

For one cut (`transfer`), or for many at once (`AxisParts`, for `fusion.growing`).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pimflow.core.ranges import RangeMap
from pimflow.core.rewrite import TILES
from pimflow.fusion.layers import LayerGraph

Span = tuple[int, int]
Hull = tuple[np.ndarray, np.ndarray]  # begins and ends, by tile


@dataclass(frozen=True, kw_only=True, order=True)
class GroupTiling:
    """How many parts a group's results are cut into along each axis.

    Attributes
    ----------
    chunk : int
        Channels at a time of tensors between the first and the last layer; 0 for all channels.
    retain : bool
        Whether rows that the next tile also reads stay on chip; else they are loaded or computed again. Tiles
        run down the rows first.
    bands : int
        With `retain`, how many bands the rows are cut into. A block of GPU threads does the tiles of one band
        one after the other, and retains rows only from tile to tile of that band. It divides `h`.
    """

    n: int = 1
    h: int = 1
    w: int = 1
    chunk: int = 0
    retain: bool = False
    bands: int = 1

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.n * self.h * self.w

    @property
    def tiles_per_block(self) -> int:
        """Number of tiles that a block of GPU threads does one after the other."""
        return self.h // self.bands if self.retain else 1

    @property
    def blocks(self) -> int:
        """Number of blocks of GPU threads."""
        return self.tiles // self.tiles_per_block

    def __str__(self) -> str:
        """The text in plans, which `parse` reads."""
        chunks = f" by {self.chunk} channels" if self.chunk else ""
        bands = f" in {self.bands} bands" if self.bands > 1 else ""
        rows = f" retained{bands}" if self.retain else ""
        return f"{TILES} {self.n}x{self.h}x{self.w}" + chunks + rows

    @classmethod
    def parse(cls, text: str) -> GroupTiling:
        """Read the text of `str`; raises `ValueError` for any other text."""
        number = r"([1-9]\d*)"
        rows = rf"( retained(?: in {number} bands)?)?"
        pattern = rf"{TILES} {number}x{number}x{number}(?: by {number} channels)?{rows}"
        match = re.fullmatch(pattern, text)
        if not match:
            raise ValueError(
                f"'{text}' is no tiling; write it as 'tiles 1x8x4' or 'tiles 1x8x4 by 16 channels'"
            )
        n, h, w, chunk = (int(part or 0) for part in match.groups()[:4])
        bands = int(match[6] or 1)
        if h % bands:
            raise ValueError(f"'{text}' is no tiling: {h} parts of the rows are no {bands} equal bands")
        return cls(n=n, h=h, w=w, chunk=chunk, retain=bool(match[5]), bands=bands)

    def indices(self) -> Iterator[tuple[int, int, int]]:
        """Tiles in the order in which they run, as (n, h, w)."""
        for n, w, h in itertools.product(range(self.n), range(self.w), range(self.h)):
            yield n, h, w


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Ranges along one axis of one tensor, by tile: what is on chip, and what of it is new.

    Attributes
    ----------
    held, fresh : tuple of (int, int)
        Half-open ranges; they differ where halos are retained.
    """

    held: tuple[Span, ...]
    fresh: tuple[Span, ...]

    @classmethod
    def from_hulls(cls, held_hull: Hull, fresh_hull: Hull) -> Spans:
        """Make spans from begins and ends, by tile."""
        pairs = [tuple(zip(begins.tolist(), ends.tolist())) for begins, ends in (held_hull, fresh_hull)]
        return cls(held=pairs[0], fresh=pairs[1])

    @property
    def longest(self) -> int:
        """Largest extent on chip."""
        return max(end - begin for begin, end in self.held)

    @property
    def longest_fresh(self) -> int:
        """Largest extent that one tile loads or computes."""
        return max(end - begin for begin, end in self.fresh)

    @property
    def total(self) -> int:
        """Number of indices that are loaded or computed over all tiles."""
        return sum(end - begin for begin, end in self.fresh)

    @property
    def is_retained(self) -> bool:
        """Whether any index stays on chip from one tile to the next."""
        return self.held != self.fresh


def pieces(extent: int, parts: int) -> tuple[Span, ...]:
    """Cut an axis into nearly equal parts."""
    return tuple((part * extent // parts, (part + 1) * extent // parts) for part in range(parts))


@dataclass(frozen=True, kw_only=True)
class AxisParts:
    """All cuts of one axis; arrays have the tiles of all cuts one after the other."""

    parts: np.ndarray
    retain: np.ndarray
    bands: np.ndarray

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """By cut, the index of its first tile."""
        return np.concatenate(([0], np.cumsum(self.parts)[:-1]))

    @functools.cached_property
    def cut_index(self) -> np.ndarray:
        """By tile, the index of its cut."""
        return np.repeat(np.arange(len(self.parts)), self.parts)

    @functools.cached_property
    def index(self) -> np.ndarray:
        """By tile, its number in its cut."""
        return np.arange(len(self.cut_index)) - self.starts[self.cut_index]

    @functools.cached_property
    def band_index(self) -> np.ndarray:
        """By tile, the number of its band among the bands of all cuts."""
        first = np.concatenate(([0], np.cumsum(self.bands)[:-1]))
        in_cut = self.index * self.bands[self.cut_index] // self.parts[self.cut_index]
        return first[self.cut_index] + in_cut

    def pieces(self, extent: int) -> tuple[np.ndarray, np.ndarray]:
        """Begins and ends of the tiles of a stored tensor with this extent."""
        parts = self.parts[self.cut_index]
        return self.index * extent // parts, (self.index + 1) * extent // parts

    def longest(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """By cut, the largest extent of a tile."""
        return np.maximum.reduceat(end - begin, self.starts)

    def total(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """By cut, the sum of the extents of all tiles."""
        return np.add.reduceat(end - begin, self.starts)

    def tile_extents(self, begin: np.ndarray, end: np.ndarray) -> tuple[Hull, Hull]:
        """Ranges on chip, and the new part of them, if tiles read ``[begin, end)``."""
        if not self.retain.any():
            return (begin, end), (begin, end)
        far, some, band = int(end.max()) + 1, end > begin, self.band_index
        running_end = np.maximum.accumulate(np.where(some, end, 0) + band * far) - band * far
        last = band[-1] - band
        lowest = np.minimum.accumulate((np.where(some, begin, far - 1) - last * far)[::-1])[::-1] + last * far
        previous_end = np.concatenate(([0], np.where(np.diff(band), 0, running_end[:-1])))
        retain = self.retain[self.cut_index]
        ends = np.where(retain, running_end, end)
        held_begins = np.where(retain, np.minimum(lowest, running_end), begin)
        fresh = np.where(retain, np.minimum(np.maximum(lowest, previous_end), running_end), begin)
        return (held_begins, ends), (fresh, ends)


def transfer(
    graph: LayerGraph, begin: int, end: int, axis: int, parts: int, bands: int = 0
) -> dict[str, Spans]:
    """Spans along `axis` of every tensor of the layers ``[begin, end)``, for a cut into `parts`.

    Tiles retain what the next tile of their band reads; nothing is retained if `bands` is 0.

    Of a tensor with several readers a tile reads the hull of what they read.
    """
    cut = AxisParts(parts=np.array([parts]), retain=np.array([bands > 0]), bands=np.array([max(1, bands)]))
    required: dict[str, Hull] = {}
    spans: dict[str, Spans] = {}
    for position in reversed(range(begin, end)):
        layer = graph.layers[position]
        if graph.is_stored(layer.name, range(begin, end)):
            stored = cut.pieces(graph.shapes[layer.name][axis])
            required[layer.name] = hull(required.get(layer.name), stored)
        on_chip, fresh = cut.tile_extents(*required.pop(layer.name))
        spans[layer.name] = Spans.from_hulls(on_chip, fresh)
        for name, maps in zip(layer.inputs, layer.maps):
            required[name] = hull(required.get(name), read_spans(maps[axis], *fresh))
    return spans | {
        name: Spans.from_hulls(*cut.tile_extents(*required_span)) for name, required_span in required.items()
    }


def hull(first: Hull | None, second: Hull) -> Hull:
    """By tile, the hull of two ranges; empty ranges are ignored."""
    if first is None:
        return second
    (b1, e1), (b2, e2) = first, second
    low, high = np.minimum(b1, b2), np.maximum(e1, e2)
    none1, none2 = e1 <= b1, e2 <= b2
    if none1.any() or none2.any():
        low, high = np.where(none1, b2, low), np.where(none1, e2, high)
        low, high = np.where(none2, b1, low), np.where(none2, e1, high)
    return low, high


def read_spans(window: RangeMap, begin: np.ndarray, end: np.ndarray) -> Hull:
    """Ranges of the operand that tiles of the result read along one axis."""
    if window == RangeMap.same(window.extent):
        return begin, end
    return window.spans(begin, end)
