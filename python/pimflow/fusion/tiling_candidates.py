"""Tilings that the search tries, and shape transfer for all of them together."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from pimflow.core.ranges import RangeMap
from pimflow.fusion.layers import LayerGraph
from pimflow.fusion.tiling import GroupTiling

# Parts that an axis is cut into, as far as it has as many: fine where maps are small, then by about a
# seventh. Rows more than columns: whole rows lie together in DRAM, and halos are then in one direction.
ROW_PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 19, 23, 28, 32, 37, 45, 56, 75, 112, 224)
COLUMN_PARTS = (1, 2, 4, 7, 8, 14, 28, 56)

Hull = tuple[np.ndarray, np.ndarray]  # begins and ends, by tile


@dataclass(frozen=True, kw_only=True)
class AxisParts:
    """Every cut of one axis, the tiles of all cuts one after the other."""

    parts: np.ndarray
    retain: np.ndarray

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Where each cut's tiles begin."""
        return np.concatenate(([0], np.cumsum(self.parts)[:-1]))

    @functools.cached_property
    def of(self) -> np.ndarray:
        """The cut of each tile."""
        return np.repeat(np.arange(len(self.parts)), self.parts)

    @functools.cached_property
    def index(self) -> np.ndarray:
        """Each tile's place in its cut."""
        return np.arange(len(self.of)) - self.starts[self.of]

    def pieces(self, extent: int) -> tuple[np.ndarray, np.ndarray]:
        """Tiles of an axis that a group stores."""
        parts = self.parts[self.of]
        return self.index * extent // parts, (self.index + 1) * extent // parts

    def longest(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(end - begin, self.starts)

    def total(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        return np.add.reduceat(end - begin, self.starts)

    def kept(self, begin: np.ndarray, end: np.ndarray) -> tuple[Hull, Hull]:
        """What is held, and what of it is new, where tiles want ``[begin, end)``; as `tiling.transfer`."""
        if not self.retain.any():
            return (begin, end), (begin, end)
        far, some = int(end.max()) + 1, end > begin
        done = np.maximum.accumulate(np.where(some, end, 0) + self.of * far) - self.of * far
        last = self.of[-1] - self.of
        lowest = np.minimum.accumulate((np.where(some, begin, far - 1) - last * far)[::-1])[::-1] + last * far
        before = np.concatenate(([0], done[:-1]))
        before[self.starts] = 0
        retain = self.retain[self.of]
        ends = np.where(retain, done, end)
        held = np.where(retain, np.minimum(lowest, done), begin)
        fresh = np.where(retain, np.minimum(np.maximum(lowest, before), done), begin)
        return (held, ends), (fresh, ends)


@dataclass(frozen=True, kw_only=True)
class TilingCandidates:
    """Every combination of cuts along n, h and w."""

    axes: tuple[AxisParts, AxisParts, AxisParts]

    @classmethod
    def of(cls, graph: LayerGraph, halo: str) -> TilingCandidates:
        """The tilings to try for a network; `halo` is one of `search.HALOS`."""
        longest = [max(shape[axis] for shape in graph.shapes.values()) for axis in range(3)]
        images = sorted({1, longest[0]})
        rows = [parts for parts in ROW_PARTS if parts <= longest[1]]
        kept = [parts for parts in rows if parts > 1] if halo == "retain" else []
        columns = [parts for parts in COLUMN_PARTS if parts <= longest[2]]
        cuts = ((images, []), (rows, kept), (columns, []))
        return cls(
            axes=tuple(
                AxisParts(parts=np.array(a + b), retain=np.array([False] * len(a) + [True] * len(b)))
                for a, b in cuts
            )
        )

    def product(self, n: np.ndarray, h: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Products of a value per cut of each axis, one for each combination of cuts."""
        return (n[:, None, None] * h[None, :, None] * w[None, None, :]).ravel()

    @functools.cached_property
    def tiles(self) -> np.ndarray:
        return self.product(*(axis.parts for axis in self.axes))

    def tiling(self, index: int) -> GroupTiling:
        n, h, w = np.unravel_index(index, [len(axis.parts) for axis in self.axes])
        rows = self.axes[1]
        return GroupTiling(
            n=int(self.axes[0].parts[n]),
            h=int(rows.parts[h]),
            w=int(self.axes[2].parts[w]),
            retain=bool(rows.retain[h]),
        )

    def fits(self, extents: tuple[int, ...]) -> np.ndarray:
        """Which combinations cut no axis into more parts than it has indices."""
        return self.product(*(axis.parts <= extent for axis, extent in zip(self.axes, extents)))


def hull(one: Hull | None, other: Hull) -> Hull:
    """By tile, the hull of two spans; an empty span adds nothing."""
    if one is None:
        return other
    (b1, e1), (b2, e2) = one, other
    low, high = np.minimum(b1, b2), np.maximum(e1, e2)
    none1, none2 = e1 <= b1, e2 <= b2
    if none1.any() or none2.any():
        low, high = np.where(none1, b2, low), np.where(none1, e2, high)
        low, high = np.where(none2, b1, low), np.where(none2, e1, high)
    return low, high


def read(window: RangeMap, begin: np.ndarray, end: np.ndarray) -> Hull:
    """What tiles read through one axis of a layer."""
    if window == RangeMap.same(window.extent):
        return begin, end
    return window.spans(begin, end)
