"""Products of a tile on tensor cores: how a block of threads cuts them into fragments.

Both the generator of kernels and the cost model use this.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import product

import numpy as np

from pimflow.fusion.channels import is_whole
from pimflow.fusion.layers import Layer

FRAGMENT = 16  # rows, columns and depth of one multiplication on a tensor core
WARPS = 8  # in a block
MAX_SUMS = 16  # fragments of sums in the registers of a warp, which fill half of them
STAGE_BYTES = 1024  # shared memory of each warp: two fragments of an operand, or one of sums
REGISTER_TILES = np.array(
    list(product((1, 2), (1, 2, 4)))
).T  # shapes of a warp's register tile, in fragments
STEP_PRODUCTS = 4096  # products that threads form without tensor cores in the time of a step (assumed)
STAGING_BYTES = (WARPS + 1) * STAGE_BYTES  # shared memory of a block, with space for alignment
STEP_OVERHEAD = 8  # overhead of a step, in multiplications of fragments (assumed)
# Accesses to shared memory for a fragment of the operand, in fragments: gather, store, load.
GATHER_ACCESSES = 3


def is_product(layer: Layer) -> bool:
    """Whether each result needs all channels of the first operand: a dense convolution."""
    return layer.kind == "convolution" and layer.maps[0][3].extent > 1 and is_whole(layer.maps[0][3])


@dataclass(frozen=True, kw_only=True)
class ProductTile:
    """A layer's product in one tile; fields are arrays for tiles of many sizes.

    Attributes
    ----------
    rows, columns : int
        Fragments of pixels and of filters.
    steps : int
        Fragments along the sum: those of the operand's channels, for each tap of the window.
    macs : int
        Multiply-accumulates, including those with padding.
    """

    rows: int | np.ndarray
    columns: int
    steps: int
    macs: int | np.ndarray

    @classmethod
    def from_layer(cls, layer: Layer, pixels: int | np.ndarray, channels: int, filters: int) -> ProductTile:
        """Make the product of `layer` with these numbers of pixels, operand channels and filters."""
        taps = layer.maps[0][1].window * layer.maps[0][2].window
        macs = pixels * filters * channels * taps
        return cls(
            rows=-(-pixels // FRAGMENT),
            columns=_fragments(filters),
            steps=taps * _fragments(channels),
            macs=macs,
        )

    @functools.cached_property
    def register_tile(self) -> tuple[np.ndarray, np.ndarray]:
        """Register tile of a warp: fragments of pixels and of filters that it multiplies in a step."""
        down, across = REGISTER_TILES.reshape(2, -1, *[1] * np.ndim(self.rows))
        units = -(-np.asarray(self.rows) // down) * -(-self.columns // across)
        best = (-(-units // WARPS) * (STEP_OVERHEAD + down * across)).argmin(axis=0)
        return REGISTER_TILES[0][best], REGISTER_TILES[1][best]

    @functools.cached_property
    def units(self) -> np.ndarray:
        """Number of register tiles."""
        return -(-self.rows // self.register_tile[0]) * -(-self.columns // self.register_tile[1])

    @property
    def turns(self) -> np.ndarray:
        """Number of register tiles that a warp does one after the other."""
        return -(-self.units // WARPS)

    @property
    def sums(self) -> np.ndarray:
        """Fragments of sums of a warp, if it keeps those of all its register tiles."""
        return self.turns * self.register_tile[0] * self.register_tile[1]

    @property
    def is_profitable(self) -> np.ndarray:
        """Whether tensor cores are faster than threads without them; not so in tiles of few pixels."""
        return self.turns * self.steps * STEP_PRODUCTS <= self.macs

    @property
    def multiplications(self) -> np.ndarray:
        """Number of multiplications of fragments."""
        return self.units * self.register_tile[0] * self.register_tile[1] * self.steps

    @property
    def fragment_accesses(self) -> np.ndarray:
        """Number of accesses to fragments in shared memory or the L1."""
        return self.units * self.steps * (GATHER_ACCESSES * self.register_tile[0] + self.register_tile[1])


def _fragments(size: int) -> int:
    return -(-size // FRAGMENT)
