"""Costs of steps between those that were searched: a grid that is refined until held-out points agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

TOLERANCE = 0.03  # largest relative error at a held-out point


@dataclass(frozen=True, kw_only=True)
class StepCostTable:
    """Costs over the size of a step and its length, bilinear between points.

    Attributes
    ----------
    sizes, lengths : tuple of int
        Points on both axes, rising.
    figures : tuple, [sizes][lengths][figures]
        Costs at the points: ns as planned and on the GPU alone, then pJ.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    figures: tuple[tuple[tuple[float, ...], ...], ...]

    def values(self, sizes: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Interpolated costs at pairs of size and length, [pairs, figures]; constant beyond the points."""
        table = np.array(self.figures)
        row, row_share = _positions(self.sizes, sizes)
        column, column_share = _positions(self.lengths, lengths)
        next_row = np.minimum(row + 1, len(self.sizes) - 1)
        next_column = np.minimum(column + 1, len(self.lengths) - 1)
        first = _between(table[row, column], table[row, next_column], column_share)
        return _between(
            first, _between(table[next_row, column], table[next_row, next_column], column_share), row_share
        )


@dataclass
class StepGrid:
    """Points of a `StepCostTable`, which are added where it is not within the tolerance.

    Attributes
    ----------
    cost : callable
        Gives the costs of a step, [figures], from a size and a length.
    sizes, lengths : list of int
        Points on both axes, rising.
    tile : int
        Costs may jump after multiples of this size, as of kernels that work by tiles; 0 if they do not.
    held_out : dict of (int, int) to float
        By size and length of points that were searched and are not in the grid, the largest relative error.
    """

    cost: Callable[[int, int], np.ndarray]
    sizes: list[int]
    lengths: list[int]
    tile: int = 0
    held_out: dict[tuple[int, int], float] = field(default_factory=dict)

    def table(self) -> StepCostTable:
        """The costs at all points."""
        return StepCostTable(
            sizes=tuple(self.sizes),
            lengths=tuple(self.lengths),
            figures=tuple(
                tuple(tuple(self.cost(size, length).tolist()) for length in self.lengths)
                for size in self.sizes
            ),
        )

    def refine(self, tolerance: float = TOLERANCE) -> None:
        """Add points until those between neighbours are within the tolerance, or there are none."""
        size_ends, length_ends = ({axis[0], axis[-1]} for axis in (self.sizes, self.lengths))
        self._refine_axis(
            self.lengths,
            lambda low, high: [(low + high) // 2],
            lambda length: [(size, length) for size in sorted(size_ends)],
            tolerance,
        )
        self._refine_axis(
            self.sizes,
            self._inner_sizes,
            lambda size: [(size, length) for length in sorted(length_ends)],
            tolerance,
        )
        self.judge()

    def hold_out(self, points: Iterable[tuple[int, int]], tolerance: float = TOLERANCE) -> None:
        """Judge the grid at further points; the size or the length of one that it misses becomes a point."""
        for size, length in points:
            error = self.error(size, length)
            if error <= tolerance:
                self.held_out[size, length] = error
                continue
            nearest = min(self.lengths, key=lambda known: abs(known - length))
            is_between_sizes = size not in self.sizes and self.error(size, nearest) > tolerance
            axis, value = (self.sizes, size) if is_between_sizes else (self.lengths, length)
            axis.append(value)
            axis.sort()
        self.judge()

    def judge(self) -> None:
        """Compute the errors at held-out points anew, and drop those that became points of the grid."""
        outside = [
            (size, length)
            for size, length in self.held_out
            if size not in self.sizes or length not in self.lengths
        ]
        self.held_out = {point: self.error(*point) for point in sorted(outside)}

    def _inner_sizes(self, low: int, high: int) -> list[int]:
        """Where to look between two sizes: on both sides of a jump, or else halfway."""
        middle = (low + high) // 2
        if self.tile:
            tiles = range(low // self.tile + 1, -(-(high - 1) // self.tile))
            if tiles:
                jump = min(tiles, key=lambda number: abs(number * self.tile - middle)) * self.tile
                return [jump, jump + 1]
        return [middle]

    def _refine_axis(
        self,
        axis: list[int],
        inner: Callable[[int, int], list[int]],
        pairs: Callable[[int], list[tuple[int, int]]],
        tolerance: float,
    ) -> None:
        gaps = list(itertools.pairwise(axis))
        while gaps:
            low, high = gaps.pop()
            if high - low < 2:
                continue
            points = inner(low, high)
            errors = {pair: self.error(*pair) for point in points for pair in pairs(point)}
            if max(errors.values()) <= tolerance:
                self.held_out |= errors
                continue
            axis += points
            axis.sort()
            gaps += itertools.pairwise([low, *points, high])

    def error(self, size: int, length: int) -> float:
        """The largest relative error of the interpolated costs at a point."""
        exact = self.cost(size, length)
        return float(np.max(np.abs(self.table().values([size], [length])[0] / exact - 1)))


def _positions(axis: Sequence[int], values: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The point of an axis below each value, and how much of the way to the next one the value lies."""
    places = np.interp(values, axis, np.arange(len(axis)))
    below = np.floor(places).astype(np.int64)
    return below, (places - below)[:, None]


def _between(low: np.ndarray, high: np.ndarray, share: np.ndarray) -> np.ndarray:
    result: np.ndarray = low + share * (high - low)
    return result
