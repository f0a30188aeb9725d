"""Tiles of a run of layers that is one GPU kernel: each block of threads computes one tile.

The schedule of such kernels and their cost model both take the tile from here, so that the cost is that of
the kernel that runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

VECTOR_LANES = (16, 8, 4)  # elements of a CPU's vectors; maps of runs are widened to multiples, on GPUs too
MOST_SIDE = 8  # rows, and columns, of a run's result that a block computes, at most
MOST_CHUNK = 32  # channels of the last layer's operand that are in shared memory at once, at most
# Shared memory that every block may have without opting in to more (CUDA programming guide).
BLOCK_SHARED_BYTES = 48 * 1024
RUN_SHARED_BYTES = BLOCK_SHARED_BYTES - 8 * 1024  # for a run's operands; the compiler uses the rest


def divisors(number: int, most: int) -> list[int]:
    """Divisors of `number` up to `most`, ascending."""
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def wide_width(width: int) -> int:
    """`width`, widened to the multiple of a vector's lanes that costs least; too small a width is kept."""
    if width < min(VECTOR_LANES) - 1:
        return width
    lanes = min(VECTOR_LANES, key=lambda n: (-(-width // n) * n * (1 + 2 / n), n))
    return -(-width // lanes) * lanes


@dataclass(frozen=True)
class Reach:
    """The window of a layer along one axis of its operand: `window` places wide, moved by `stride`."""

    stride: int
    window: int

    def extent(self, outputs: int) -> int:
        """Places of the operand that `outputs` neighbouring results read."""
        return (outputs - 1) * self.stride + self.window


@dataclass(frozen=True, kw_only=True)
class TiledLayer:
    """A convolution or pooling of a run.

    Attributes
    ----------
    rows, columns : Reach
    channels : int
        Channels of its operand.
    dense : bool
        Whether each result needs all channels.
    element_bytes : int
        Bytes of an element of its operand in shared memory.
    """

    rows: Reach
    columns: Reach
    channels: int
    dense: bool
    element_bytes: int


@dataclass(frozen=True)
class RunTile:
    """Rows and columns of a result computed at once, and channels of the last operand at a time."""

    rows: int
    columns: int
    chunk: int


def gpu_tile(height: int, width: int, layers: Sequence[TiledLayer]) -> RunTile | None:
    """The largest tile of a run whose operands fit in shared memory; None if none does.

    Parameters
    ----------
    height, width : int
        Extents of its result; the width as `wide_width` gives it.
    layers : sequence of TiledLayer
        In execution order.
    """
    shapes = itertools.product(divisors(height, MOST_SIDE), divisors(width, MOST_SIDE))
    for rows, columns in sorted(shapes, key=math.prod, reverse=True):
        for chunk in reversed(divisors(layers[-1].channels, MOST_CHUNK)):
            if _shared_bytes(layers, rows, columns, chunk) <= RUN_SHARED_BYTES:
                return RunTile(rows, columns, chunk)
    return None


def _shared_bytes(layers: Sequence[TiledLayer], rows: int, columns: int, chunk: int) -> int:
    """Shared memory of the tensors between the layers and of the first operand, in bytes."""
    total, channels = 0, chunk
    for layer in reversed(layers):
        rows, columns = layer.rows.extent(rows), layer.columns.extent(columns)
        if layer is not layers[-1] and layer.dense:
            channels = layer.channels
        total += rows * columns * channels * layer.element_bytes
    return total
