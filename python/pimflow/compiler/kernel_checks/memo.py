"""Results of functions, kept by the arrays that they were computed from."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import numpy as np

from pimflow.compiler.kernel_checks.operators import Array

Result = TypeVar("Result")

CAPACITY = 32  # results of a memo: iterations of the loops within a barrier interval, about
PATIENCE = 64  # results in a row that are not asked for again, after which a memo keeps none


class Memo(Generic[Result]):
    """Results of one function by its arguments, which are compared by identity and never change.

    A kernel computes the same indices in every iteration of its loops. A memo whose results are not asked
    for again gives up, so that it holds no memory.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, ...], tuple[tuple[object, ...], Result]] = {}
        self._misses = 0  # since the last hit

    def result(self, arguments: tuple[object, ...], compute: Callable[[], Result]) -> Result:
        """What `compute` returns for these arguments."""
        key = tuple(map(id, arguments))
        entry = self._entries.get(key)
        if entry is not None:
            self._misses = 0
            return entry[1]
        result = compute()
        if self._misses < PATIENCE:
            self._misses += 1
            if len(self._entries) == CAPACITY or self._misses == PATIENCE:
                self._entries.clear()
            self._entries[key] = (arguments, result)  # an argument that is kept has its `id` alone
        return result


class Integers:
    """One array for each integer, so that equal ones are identical."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, Hashable], Array] = {}

    def unique(self, value: Array) -> Array:
        """The array that stands for all equal to `value`, if that is a single integer."""
        if value.shape != (1, 1) or value.dtype.kind == "f":
            return value
        return self._arrays.setdefault((value.dtype.str, value.item()), value)

    def array(self, dtype: np.dtype, value: int) -> Array:
        """The array of an integer."""
        known = self._arrays.get((dtype.str, value))
        return self.unique(np.full((1, 1), value, dtype)) if known is None else known
