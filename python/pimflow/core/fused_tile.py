"""The tiles in which blocks of a GPU's threads compute a run of layers that is one kernel.

Shared by the rule that schedules such kernels and by who prices them, so that what is priced is what runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

LANES = (16, 8, 4)  # places that a CPU's vectors hold side by side; maps of runs are as wide on a GPU
SIDE = 8  # rows and columns of a run's result that a block computes, at most
CHUNK = 32  # channels of the last operand that are there at once, at most
# What every block may have without asking for more (CUDA programming guide, compute capabilities).
BLOCK_BYTES = 48 * 1024
SHARED_BYTES = BLOCK_BYTES - 8 * 1024  # of a run: the rest for what else the compiler puts there


def divisors(number: int, most: int) -> list[int]:
    """Of `number`, those up to `most`."""
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def wide_width(width: int) -> int:
    """The cheapest width, `width` or more, that vectors fill; `width` itself if it is too small for any."""
    if width < min(LANES) - 1:
        return width
    lanes = min(LANES, key=lambda n: (-(-width // n) * n * (1 + 2 / n), n))
    return -(-width // lanes) * lanes


@dataclass(frozen=True)
class Reach:
    """What of one axis of its operand a reduction reads: every `stride`-th place, `window` from there on."""

    stride: int
    window: int

    def extent(self, outputs: int) -> int:
        """Places that so many neighbouring results read."""
        return (outputs - 1) * self.stride + self.window


@dataclass(frozen=True, kw_only=True)
class Step:
    """A convolution or pooling of a run.

    Attributes
    ----------
    rows, columns : Reach
    channels : int
        Of its operand.
    dense : bool
        Whether each result needs all of them.
    element_bytes : int
        Of its operand on chip.
    """

    rows: Reach
    columns: Reach
    channels: int
    dense: bool
    element_bytes: int


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the result that are computed at once, and channels of the last operand."""

    rows: int
    columns: int
    chunk: int


def gpu_tile(height: int, width: int, steps: Sequence[Step]) -> Tile | None:
    """The largest tile of a run whose operands fit in shared memory; None if none does.

    Parameters
    ----------
    height, width : int
        Of its result, widened.
    steps : sequence of Step
        In execution order.
    """
    shapes = itertools.product(divisors(height, SIDE), divisors(width, SIDE))
    for rows, columns in sorted(shapes, key=math.prod, reverse=True):
        for chunk in reversed(divisors(steps[-1].channels, CHUNK)):
            if _shared_bytes(steps, rows, columns, chunk) <= SHARED_BYTES:
                return Tile(rows, columns, chunk)
    return None


def _shared_bytes(steps: Sequence[Step], rows: int, columns: int, chunk: int) -> int:
    """Of the tensors between the steps, and of the first operand."""
    total, channels = 0, chunk
    for step in reversed(steps):
        rows, columns = step.rows.extent(rows), step.columns.extent(columns)
        if step is not steps[-1] and step.dense:
            channels = step.channels
        total += rows * columns * channels * step.element_bytes
    return total
