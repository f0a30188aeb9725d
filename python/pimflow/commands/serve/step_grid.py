"""Costs of steps between those that were searched: a grid that is refined until held-out points agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

TOLERANCE = 0.03  # largest relative error at a held-out point


@dataclass
class StepGrid:
    """Costs over the size of a step and its length, bilinear between the points of a grid.

    Attributes
    ----------
    cost : callable
        Gives the costs of a step, [figures], from a size and a length.
    sizes, lengths : list of int
        Points of the grid on both axes, rising.
    held_out : dict of (int, int) to float
        By size and length of points that were searched and are not in the grid, the largest relative error.
    """

    cost: Callable[[int, int], np.ndarray]
    sizes: list[int]
    lengths: list[int]
    held_out: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def max_error(self) -> float:
        """The largest relative error at a held-out point; 0 if every point is in the grid."""
        return max(self.held_out.values(), default=0.0)

    @property
    def points(self) -> int:
        """Number of points of the grid."""
        return len(self.sizes) * len(self.lengths)

    def values(self, sizes: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Interpolated costs at pairs of size and tokens, [pairs, figures]; constant beyond the grid."""
        table = np.array([[self.cost(size, length) for length in self.lengths] for size in self.sizes])
        row, row_share = _positions(self.sizes, sizes)
        column, column_share = _positions(self.lengths, lengths)
        next_row = np.minimum(row + 1, len(self.sizes) - 1)
        next_column = np.minimum(column + 1, len(self.lengths) - 1)
        first = _between(table[row, column], table[row, next_column], column_share)
        return _between(
            first, _between(table[next_row, column], table[next_row, next_column], column_share), row_share
        )

    def refine(self, tolerance: float = TOLERANCE) -> None:
        """Add points until those halfway between neighbours are within the tolerance, or there are none."""
        ends = {self.sizes[0], self.sizes[-1]}
        self._refine_axis(self.lengths, lambda length: [(size, length) for size in sorted(ends)], tolerance)
        probes = sorted({self.lengths[0], self.lengths[len(self.lengths) // 2], self.lengths[-1]})
        self._refine_axis(self.sizes, lambda size: [(size, length) for length in probes], tolerance)
        self.held_out = {point: self.error(*point) for point in sorted(self.held_out)}

    def _refine_axis(
        self, axis: list[int], pairs: Callable[[int], list[tuple[int, int]]], tolerance: float
    ) -> None:
        gaps = list(itertools.pairwise(axis))
        while gaps:
            low, high = gaps.pop()
            if high - low < 2:
                continue
            middle = (low + high) // 2
            errors = {pair: self.error(*pair) for pair in pairs(middle)}
            if max(errors.values()) <= tolerance:
                self.held_out |= errors
                continue
            axis.append(middle)
            axis.sort()
            gaps += [(low, middle), (middle, high)]

    def error(self, size: int, length: int) -> float:
        """The largest relative error of the interpolated costs at a point."""
        exact = self.cost(size, length)
        return float(np.max(np.abs(self.values([size], [length])[0] / exact - 1)))


def _positions(axis: list[int], values: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The point of an axis below each value, and how much of the way to the next one the value lies."""
    places = np.interp(values, axis, np.arange(len(axis)))
    below = np.floor(places).astype(np.int64)
    return below, (places - below)[:, None]


def _between(low: np.ndarray, high: np.ndarray, share: np.ndarray) -> np.ndarray:
    result: np.ndarray = low + share * (high - low)
    return result
