"""Tilings that the search tries."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from pimflow.fusion.layers import LayerGraph
from pimflow.fusion.tiling import AxisParts, GroupTiling

# Parts that an axis is cut into, as far as it has as many: fine where maps are small, then by about a
# seventh. Rows more than columns: whole rows lie together in DRAM, and halos are then in one direction.
ROW_PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 19, 23, 28, 32, 37, 45, 56, 75, 112, 224)
COLUMN_PARTS = (1, 2, 4, 7, 8, 14, 28, 56)


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
