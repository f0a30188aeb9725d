"""The check of a PIM region against its reference, and error bounds of sums of rounded products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

# Types that operands are rounded to, by their names in programs.
STORAGE_TYPES: dict[str, type[np.floating[Any]]] = {"fp16": np.float16, "fp32": np.float32}
# By activation of a program (`PimProgram.activation`), the interval that results are clipped to.
RESULT_RANGES = {"": (-np.inf, np.inf), "relu": (0.0, np.inf), "relu6": (0.0, 6.0)}
_UNIT_ROUNDOFF = 2.0**-24  # fp32, in which products are summed
_HALF_ULP = {"fp16": 2.0**-11, "fp32": 0.0}  # of a result rounded to the storage type
_HALF_SUBNORMAL = {"fp16": 2.0**-25, "fp32": 0.0}


@dataclass(frozen=True, kw_only=True)
class RegionCheck:
    """Result of the check of one PIM region.

    Attributes
    ----------
    error_over_bound : float
        Largest quotient of an element's error and its bound; the region matches if it is at most 1.
    in_range : bool
        Whether inputs and reference are in the range of the storage type.
    """

    region: str
    error_over_bound: float
    in_range: bool = True

    @property
    def matches(self) -> bool:
        """Whether all elements are within their bounds."""
        return self.error_over_bound <= 1


@dataclass(frozen=True, kw_only=True)
class ReferenceSums:
    """The reference of results: sums of products of rounded operands, in double precision.

    Attributes
    ----------
    dtype : str
        Storage type of operands and results.
    magnitude : ndarray
        ``sum |x*w|`` of each result.
    products : int
        K, the number of products of a result.
    partial : ndarray, optional
        For results that are sums of several rounded sums: the sum of their magnitudes.
    roundings : int
        How often a result was rounded, if its sum was read and resumed; `partial` is of the rounded sums.
    """

    dtype: str
    expected: np.ndarray
    magnitude: np.ndarray
    products: int
    partial: np.ndarray | None = None
    roundings: int = 1

    def error_over_bound(self, y: np.ndarray) -> float:
        """The largest quotient of an element's error in `y` and its bound; infinity for NaN.

        The bound is gamma_K * sum |x*w| for K fp32 additions in any order, and half a unit in the last place
        of the storage type for each result that was rounded to it. Sums of integers have none.
        """
        if y.dtype == np.int32:  # sums of integers are exact
            return 0.0 if np.array_equal(y, self.expected) else math.inf
        half_ulp, half_subnormal = _HALF_ULP[self.dtype], _HALF_SUBNORMAL[self.dtype]
        roundoff = self.products * _UNIT_ROUNDOFF
        error = roundoff / (1 - roundoff) * self.magnitude
        rounded = np.abs(self.expected) if self.partial is None else self.partial
        rounding_error = half_ulp * (rounded + self.roundings * error) + self.roundings * half_subnormal
        # Each rounding also rounds the error of the one before.
        bound = error + rounding_error * (1 + half_ulp) ** (self.roundings - 1)
        difference = np.abs(y.astype(np.float64) - self.expected)
        ratio = np.where(difference == 0, 0.0, difference / np.maximum(bound, np.finfo(np.float64).tiny))
        max_ratio = float(ratio.max())
        return math.inf if math.isnan(max_ratio) else max_ratio
