"""Products of a tile on tensor cores: how a block of threads cuts them into fragments.

What writes the kernel and what prices it both ask here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from pimflow.fusion.channels import is_whole
from pimflow.fusion.layers import Layer

FRAGMENT = 16  # rows, columns and depth that a tensor core multiplies at once
WARPS = 8  # of a block
MOST_SUMS = 16  # fragments of sums that a warp keeps in its registers, half of them
STAGE_BYTES = 1024  # of shared memory for each warp: two fragments of an operand, or one of sums
BESIDE = 8  # what a step takes besides multiplying, in multiplications of fragments (assumed)
# Fragments read or written in shared memory for one of the operand: gathered, put side by side, read.
GATHERED = 3


def is_product(layer: Layer) -> bool:
    """Whether each of its results needs all channels of its first operand: a dense convolution."""
    return layer.kind == "convolution" and layer.maps[0][3].extent > 1 and is_whole(layer.maps[0][3])


@dataclass(frozen=True, kw_only=True)
class ProductTile:
    """A layer's product in one tile.

    Attributes
    ----------
    rows, columns : int
        Fragments of pixels and of filters.
    steps : int
        Fragments along the sum: of each tap of the window, of the operand's channels.
    """

    rows: int
    columns: int
    steps: int

    @classmethod
    def of(cls, layer: Layer, pixels: int, channels: int, filters: int) -> ProductTile:
        """Of so many pixels, channels of the operand, and filters."""
        taps = layer.maps[0][1].window * layer.maps[0][2].window
        return cls(rows=_up(pixels), columns=_up(filters), steps=taps * _up(channels))

    @property
    def side(self) -> tuple[int, int]:
        """Fragments of pixels and of filters that a warp multiplies in a step: its tile of registers."""

        def cost(side: tuple[int, int]) -> int:
            units = -(-self.rows // side[0]) * -(-self.columns // side[1])
            return -(-units // WARPS) * (BESIDE + side[0] * side[1])

        return min(product((1, 2), (1, 2, 4)), key=cost)

    @property
    def units(self) -> int:
        """Tiles of registers."""
        return -(-self.rows // self.side[0]) * -(-self.columns // self.side[1])

    @property
    def turns(self) -> int:
        """Units that a warp does one after the other."""
        return -(-self.units // WARPS)

    @property
    def sums(self) -> int:
        """Fragments of sums of a warp, if it keeps those of all its units."""
        return self.turns * self.side[0] * self.side[1]

    @property
    def multiplied(self) -> int:
        """Multiplications of fragments."""
        return self.units * self.side[0] * self.side[1] * self.steps

    @property
    def moved(self) -> int:
        """Fragments that are read or written in shared memory or the L1."""
        return self.units * self.steps * (GATHERED * self.side[0] + self.side[1])


def _up(size: int) -> int:
    return -(-size // FRAGMENT)
