"""Products of a tile on tensor cores: how a block of threads cuts them into fragments.

What writes the kernel and what prices it both ask here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import product

import numpy as np

from pimflow.fusion.channels import is_whole
from pimflow.fusion.layers import Layer

FRAGMENT = 16  # rows, columns and depth that a tensor core multiplies at once
WARPS = 8  # of a block
MOST_SUMS = 16  # fragments of sums that a warp keeps in its registers, half of them
STAGE_BYTES = 1024  # of shared memory for each warp: two fragments of an operand, or one of sums
SIDES = np.array(list(product((1, 2), (1, 2, 4)))).T  # of a warp's tile of registers, in fragments
STEP_PRODUCTS = 4096  # that threads would form by themselves while warps take a step (assumed)
STAGED_BYTES = (WARPS + 1) * STAGE_BYTES  # of a block, where they may begin anywhere
BESIDE = 8  # what a step takes besides multiplying, in multiplications of fragments (assumed)
# Fragments read or written in shared memory for one of the operand: gathered, put side by side, read.
GATHERED = 3


def is_product(layer: Layer) -> bool:
    """Whether each of its results needs all channels of its first operand: a dense convolution."""
    return layer.kind == "convolution" and layer.maps[0][3].extent > 1 and is_whole(layer.maps[0][3])


@dataclass(frozen=True, kw_only=True)
class ProductTile:
    """A layer's product in one tile, or in tiles of many sizes at once: then its fields are arrays.

    Attributes
    ----------
    rows, columns : int
        Fragments of pixels and of filters.
    steps : int
        Fragments along the sum: of each tap of the window, of the operand's channels.
    macs : int
        Multiply-accumulates, those with padding among them.
    """

    rows: int | np.ndarray
    columns: int
    steps: int
    macs: int | np.ndarray

    @classmethod
    def of(cls, layer: Layer, pixels: int | np.ndarray, channels: int, filters: int) -> ProductTile:
        """Of so many pixels, channels of the operand, and filters."""
        taps = layer.maps[0][1].window * layer.maps[0][2].window
        macs = pixels * filters * channels * taps
        return cls(rows=_up(pixels), columns=_up(filters), steps=taps * _up(channels), macs=macs)

    @functools.cached_property
    def side(self) -> tuple[np.ndarray, np.ndarray]:
        """Fragments of pixels and of filters that a warp multiplies in a step: its tile of registers."""
        down, across = SIDES.reshape(2, -1, *[1] * np.ndim(self.rows))
        units = -(-np.asarray(self.rows) // down) * -(-self.columns // across)
        best = (-(-units // WARPS) * (BESIDE + down * across)).argmin(axis=0)
        return SIDES[0][best], SIDES[1][best]

    @functools.cached_property
    def units(self) -> np.ndarray:
        """Tiles of registers."""
        return -(-self.rows // self.side[0]) * -(-self.columns // self.side[1])

    @property
    def turns(self) -> np.ndarray:
        """Units that a warp does one after the other."""
        return -(-self.units // WARPS)

    @property
    def sums(self) -> np.ndarray:
        """Fragments of sums of a warp, if it keeps those of all its units."""
        return self.turns * self.side[0] * self.side[1]

    @property
    def pays(self) -> np.ndarray:
        """Whether tensor cores are faster than threads by themselves: in tiles of more than few pixels."""
        return self.turns * self.steps * STEP_PRODUCTS <= self.macs

    @property
    def multiplied(self) -> np.ndarray:
        """Multiplications of fragments."""
        return self.units * self.side[0] * self.side[1] * self.steps

    @property
    def moved(self) -> np.ndarray:
        """Fragments that are read or written in shared memory or the L1."""
        return self.units * self.steps * (GATHERED * self.side[0] + self.side[1])


def _up(size: int | np.ndarray) -> int | np.ndarray:
    return -(-size // FRAGMENT)
