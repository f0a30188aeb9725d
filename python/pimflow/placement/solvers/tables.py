"""Tables of numbers that are handed to C++."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pimflow.host import native

# By record (``placement/src/problem.h``), the tables whose rows it describes.
_TABLES = {
    "number": "longest_launch_ns reader task_after transition_after reading_transition inner_addend",
    "read_cost": "access input_cost",
    "task": "task transition",
    **{name: name for name in ("header", "candidate", "step", "layout", "region")},
    **{name: name for name in ("operand", "input_copy", "reading", "group")},
}
_RECORDS = {
    table: native.Record(f"pimflow.placement.{record}")
    for record, tables in _TABLES.items()
    for table in tables.split()
}


class Tables:
    """Tables by name, filled row by row."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[float]] = {name: [] for name in _RECORDS}
        self._fields: dict[str, tuple[str, ...]] = {}

    def append(self, table: str, **numbers: float) -> None:
        """Append a row; all rows of a table name the same fields in the same order."""
        if table not in self._fields:
            self._fields[table] = tuple(numbers)
        self._numbers[table] += numbers.values()

    def append_numbers(self, table: str, numbers: Iterable[float]) -> int:
        """Append a row for each number; returns the number of rows."""
        self._numbers[table] += numbers
        return len(self._numbers[table])

    def count(self, table: str) -> int:
        """The number of rows of a table."""
        return len(self._numbers[table]) // len(self._fields[table]) if table in self._fields else 0

    def tensors(self) -> dict[str, Any]:
        """The tables as tensors of tvm-ffi."""
        import tvm_ffi

        return {
            name: tvm_ffi.from_dlpack(record.table(self._fields.get(name, record.fields), numbers))
            for (name, record), numbers in zip(_RECORDS.items(), self._numbers.values(), strict=True)
        }
