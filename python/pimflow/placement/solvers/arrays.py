"""Columns of numbers that are handed to C++."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np


class Arrays:
    """Columns of numbers by name, filled number by number; a column of offsets begins with 0."""

    def __init__(self) -> None:
        self.integers: defaultdict[str, list[int]] = defaultdict(list)
        self.reals: defaultdict[str, list[float]] = defaultdict(list)
        self._columns: defaultdict[str, dict[str, list[float]]] = defaultdict(dict)

    def append(self, prefix: str, **numbers: float) -> None:
        """Append an integer, or a real number where the name ends in its unit, to each column."""
        columns = self._columns[prefix]
        for name, number in numbers.items():
            if name not in columns:
                real = name.rpartition("_")[2] in ("ns", "pj", "bytes", "error")
                columns[name] = (self.reals if real else self.integers)[f"{prefix}_{name}"]  # type: ignore[assignment]
            columns[name].append(number)

    def end_row(self, offsets: str, column: str) -> None:
        """Append to `offsets` where the next row of `column` begins."""
        begins = self.integers[offsets]
        if not begins:
            begins.append(0)
        begins.append(len(self.integers[column]))

    def tensors(self) -> dict[str, Any]:
        """The columns as tensors of tvm-ffi."""
        import tvm_ffi

        columns = {name: np.array(values, np.int64) for name, values in self.integers.items()}
        columns |= {name: np.array(values, np.float64) for name, values in self.reals.items()}
        return {name: tvm_ffi.from_dlpack(column) for name, column in columns.items()}
