"""Tilings that the search tries."""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
BAND_TILES = (2, 3, 4, 7, 14, 28)  # numbers of tiles that a block of GPU threads does one after the other


@dataclass(frozen=True, kw_only=True)
class TilingCandidates:
    """All combinations of cuts along n, h and w."""

    axes: tuple[AxisParts, ...]

    @classmethod
    def from_graph(cls, graph: LayerGraph, halo: Halo) -> TilingCandidates:
        """Tilings to try for a network."""
        rows = [parts for parts in ROW_PARTS if 1 < parts <= _longest(graph, 1)]
        return cls._with_retained_rows(graph, [(parts, 1) for parts in rows] if halo == "retain" else [])

    @classmethod
    def for_blocks(cls, graph: LayerGraph) -> TilingCandidates:
        """Tilings to try for kernels of a GPU, whose blocks of threads do a tile each, or a band of tiles."""
        bands = [
            (bands * tiles, bands)
            for bands in ROW_PARTS
            for tiles in BAND_TILES
            if bands * tiles <= _longest(graph, 1)
        ]
        return cls._with_retained_rows(graph, bands)

    @classmethod
    def _with_retained_rows(cls, graph: LayerGraph, retained: Sequence[tuple[int, int]]) -> TilingCandidates:
        """All tilings without retained rows, and those with these numbers of parts and of bands."""
        images = sorted({1, _longest(graph, 0)})
        rows = [parts for parts in ROW_PARTS if parts <= _longest(graph, 1)]
        columns = [parts for parts in COLUMN_PARTS if parts <= _longest(graph, 2)]
        none: Sequence[tuple[int, int]] = ()
        return cls(
            axes=tuple(
                AxisParts(
                    parts=np.array([*whole, *(parts for parts, _ in banded)]),
                    retain=np.array([False] * len(whole) + [True] * len(banded)),
                    bands=np.array([1] * len(whole) + [bands for _, bands in banded]),
                )
                for whole, banded in ((images, none), (rows, retained), (columns, none))
            )
        )

    def product(self, n: np.ndarray, h: np.ndarray, w: np.ndarray) -> np.ndarray:
        """By combination of cuts, the product of a value of each axis, which is by cut."""
        return (n[:, None, None] * h[None, :, None] * w[None, None, :]).ravel()

    @functools.cached_property
    def tiles(self) -> np.ndarray:
        """By combination of cuts, the number of tiles."""
        return self.product(*(axis.parts for axis in self.axes))

    @functools.cached_property
    def tiles_per_block(self) -> np.ndarray:
        """By combination of cuts, `GroupTiling.tiles_per_block`."""
        images, rows, columns = self.axes
        tiles = np.where(rows.retain, rows.parts // rows.bands, 1)
        return self.product(np.ones_like(images.parts), tiles, np.ones_like(columns.parts))

    def tiling(self, index: int) -> GroupTiling:
        """The tiling of a combination of cuts."""
        n, h, w = np.unravel_index(index, [len(axis.parts) for axis in self.axes])
        rows = self.axes[1]
        return GroupTiling(
            n=int(self.axes[0].parts[n]),
            h=int(rows.parts[h]),
            w=int(self.axes[2].parts[w]),
            retain=bool(rows.retain[h]),
            bands=int(rows.bands[h]),
        )

    def fits(self, extents: tuple[int, ...]) -> np.ndarray:
        """By combination of cuts, whether no axis has more parts than indices."""
        return self.product(*(axis.parts <= extent for axis, extent in zip(self.axes, extents)))


def _longest(graph: LayerGraph, axis: int) -> int:
    """The largest extent of a tensor along an axis."""
    return max(shape[axis] for shape in graph.shapes.values())
