"""Formulas that a layer's kernel is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import tirx

At = tuple[tirx.Expr, ...]  # indices along n, h, w and c
# Element of operand `i` at (n, h, w, c); weight `k` of filter `f`.
Read = Callable[[int, At], tirx.Expr]
Weight = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]

LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A sum or maximum over taps, in their order.

    Attributes
    ----------
    taps : tuple of int
        Extents of the loops.
    valid : callable
        From result index and taps to whether they read anything; None for always.
    term : callable
        From `Read`, `Weight`, result index, taps and the reductions done before to what is combined.
    """

    initial: float
    taps: tuple[int, ...]
    valid: Callable[[At, At], tirx.Expr | None]
    term: Callable[[Read, Weight, At, At, list[tirx.Expr]], tirx.Expr]
    combine: Callable[[tirx.Expr, tirx.Expr], tirx.Expr] = lambda done, term: done + term


@dataclass(frozen=True, kw_only=True)
class Formula:
    """Results of a run of channels.

    Attributes
    ----------
    channels : tuple of int
        Half-open.
    result : callable
        From `Read`, `Weight`, result index and reductions to the result.
    alike : int
        Runs of so many channels have the same taps, so that they can be formed side by side.
    """

    channels: tuple[int, int]
    result: Callable[[Read, Weight, At, list[tirx.Expr]], tirx.Expr]
    reductions: tuple[Reduction, ...] = ()
    alike: int = 1


@dataclass(frozen=True, kw_only=True)
class Computation:
    """A layer's formulas, and its weights as (weights of a filter, filters)."""

    formulas: tuple[Formula, ...]
    weights: np.ndarray

    @property
    def terms(self) -> int:
        """Terms that are combined for each result; at least 1."""
        return max(1, sum(math.prod(each.taps) for formula in self.formulas for each in formula.reductions))

    def reading(self, order: Sequence[int]) -> Computation:
        """The same of operands that stand in another order: the `i`-th at `order[i]`."""
        if list(order) == list(range(len(order))):
            return self

        def swapped(read: Read) -> Read:
            return lambda operand, at: read(order[operand], at)

        def reading(function: Callable) -> Callable:
            return lambda read, *others: function(swapped(read), *others)

        formulas = tuple(
            replace(
                each,
                result=reading(each.result),
                reductions=tuple(replace(r, term=reading(r.term)) for r in each.reductions),
            )
            for each in self.formulas
        )
        return replace(self, formulas=formulas)


def no_weights() -> np.ndarray:
    """The empty weights of a layer that has none."""
    return np.zeros((0, 1), np.float32)
