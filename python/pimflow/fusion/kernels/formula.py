"""Formulas of a layer's results, from which its kernel is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import tirx

Index = tuple[tirx.Expr, ...]  # indices along n, h, w and c
# Functions that give the element of operand `i` at (n, h, w, c), and weight `k` of filter `f`.
Read = Callable[[int, Index], tirx.Expr]
Weight = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]

LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, kw_only=True)
class TapReduction:
    """A sum or maximum over taps, in the order of the taps.

    Attributes
    ----------
    taps : tuple of int
        Extents of the loops.
    valid : callable
        Function of result index and taps: whether they are inside the operand; None if always.
    term : callable
        Function of `Read`, `Weight`, result index, taps and earlier reductions: the term to combine.
    """

    initial: float
    taps: tuple[int, ...]
    valid: Callable[[Index, Index], tirx.Expr | None]
    term: Callable[[Read, Weight, Index, Index, list[tirx.Expr]], tirx.Expr]
    combine: Callable[[tirx.Expr, tirx.Expr], tirx.Expr] = lambda total, term: total + term


@dataclass(frozen=True, kw_only=True)
class Formula:
    """Results of a range of channels.

    Attributes
    ----------
    channels : tuple of int
        Half-open range.
    result : callable
        Function of `Read`, `Weight`, result index and reductions: the result.
    same_taps : int
        Number of consecutive channels that have the same taps and can be formed together.
    """

    channels: tuple[int, int]
    result: Callable[[Read, Weight, Index, list[tirx.Expr]], tirx.Expr]
    reductions: tuple[TapReduction, ...] = ()
    same_taps: int = 1


@dataclass(frozen=True, kw_only=True)
class StoredForm:
    """The form in which a result lies in DRAM, if that is not NHWC.

    Attributes
    ----------
    shape : tuple of int
    place : callable
        Function of the index along n, h, w and c: the index in DRAM.
    """

    shape: tuple[int, ...]
    place: Callable[[Index], Index]


@dataclass(frozen=True, kw_only=True)
class Computation:
    """A layer's formulas, its weights in shape (weights of a filter, filters), and the form of its result."""

    formulas: tuple[Formula, ...]
    weights: np.ndarray
    stored: StoredForm | None = None

    @property
    def terms(self) -> int:
        """Number of terms that are combined for each result; at least 1."""
        return max(
            1, sum(math.prod(reduction.taps) for formula in self.formulas for reduction in formula.reductions)
        )

    def with_operand_order(self, order: Sequence[int]) -> Computation:
        """The same computation of operands in another order: operand `i` is at `order[i]`."""
        if list(order) == list(range(len(order))):
            return self

        def reorder(read: Read) -> Read:
            return lambda operand, index: read(order[operand], index)

        def wrap(function: Callable) -> Callable:
            return lambda read, *others: function(reorder(read), *others)

        formulas = tuple(
            replace(
                formula,
                result=wrap(formula.result),
                reductions=tuple(replace(r, term=wrap(r.term)) for r in formula.reductions),
            )
            for formula in self.formulas
        )
        return replace(self, formulas=formulas)


def no_weights() -> np.ndarray:
    """The empty weights of a layer that has none."""
    return np.zeros((0, 1), np.float32)
