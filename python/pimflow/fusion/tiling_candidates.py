"""Tilings that the search tries."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from pimflow.fusion.layers import LayerGraph
from pimflow.fusion.tiling import AxisParts, GroupTiling

Halo = Literal["recompute", "retain"]  # what is done with rows that tiles share
HALOS: tuple[Halo, ...] = get_args(Halo)
# Numbers of parts that an axis is cut into, up to its extent: all small numbers, then in ratios of about
# 7:6. There are more for rows than for columns: whole rows are contiguous in DRAM, and their halos are in
# one direction.
ROW_PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 19, 23, 28, 32, 37, 45, 56, 75, 112, 224)
COLUMN_PARTS = (1, 2, 4, 7, 8, 14, 28, 56)


@dataclass(frozen=True, kw_only=True)
class TilingCandidates:
    """All combinations of cuts along n, h and w."""

    axes: tuple[AxisParts, ...]

    @classmethod
    def from_graph(cls, graph: LayerGraph, halo: Halo) -> TilingCandidates:
        """Tilings to try for a network."""
        longest = [max(shape[axis] for shape in graph.shapes.values()) for axis in range(3)]
        images = sorted({1, longest[0]})
        rows = [parts for parts in ROW_PARTS if parts <= longest[1]]
        retain_rows = [parts for parts in rows if parts > 1] if halo == "retain" else []
        columns = [parts for parts in COLUMN_PARTS if parts <= longest[2]]
        cuts: list[tuple[list[int], list[int]]] = [(images, []), (rows, retain_rows), (columns, [])]
        return cls(
            axes=tuple(
                AxisParts(parts=np.array(a + b), retain=np.array([False] * len(a) + [True] * len(b)))
                for a, b in cuts
            )
        )

    def product(self, n: np.ndarray, h: np.ndarray, w: np.ndarray) -> np.ndarray:
        """By combination of cuts, the product of a value of each axis, which is by cut."""
        return (n[:, None, None] * h[None, :, None] * w[None, None, :]).ravel()

    @functools.cached_property
    def tiles(self) -> np.ndarray:
        """By combination of cuts, the number of tiles."""
        return self.product(*(axis.parts for axis in self.axes))

    def tiling(self, index: int) -> GroupTiling:
        """The tiling of a combination of cuts."""
        n, h, w = np.unravel_index(index, [len(axis.parts) for axis in self.axes])
        rows = self.axes[1]
        return GroupTiling(
            n=int(self.axes[0].parts[n]),
            h=int(rows.parts[h]),
            w=int(self.axes[2].parts[w]),
            retain=bool(rows.retain[h]),
        )

    def fits(self, extents: tuple[int, ...]) -> np.ndarray:
        """By combination of cuts, whether no axis has more parts than indices."""
        return self.product(*(axis.parts <= extent for axis, extent in zip(self.axes, extents)))
