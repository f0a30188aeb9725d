"""The best points of a stored sweep, within conditions."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pimflow.commands.sweep.sweep_rows import ROWS
from pimflow.core.table_files import read_json
from pimflow.errors import ArtifactError, InfeasibleError, UnknownNameError, UsageError

# By objective, the value of a row that is made small.
OBJECTIVES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "latency": lambda row: float(row["latency_ns"]),
    "energy": lambda row: float(row["energy_pj"]),
    "edp": lambda row: float(row["latency_ns"]) * float(row["energy_pj"]),
    "speedup": lambda row: -float(row["speedup"]),
}
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_CONDITION = re.compile(rf"\s*([\w.]+)\s*({'|'.join(_COMPARISONS)})\s*(.+?)\s*")


@dataclass(frozen=True, kw_only=True)
class ColumnBound:
    """A bound on a column of a sweep: a setting or a figure."""

    column: str
    comparison: str
    value: str

    @classmethod
    def parse(cls, text: str) -> ColumnBound:
        """Read ``pim_channels<=8``; raises `UsageError` for another form."""
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise UsageError(
                f"--within {text}: give a column, a comparison and a value, such as energy_pj<2e9"
            )
        return cls(column=match[1], comparison=match[2], value=match[3])

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether it holds for a row.

        Raises
        ------
        UnknownNameError
            If the sweep has no such column.
        UsageError
            If the column has texts, and these are compared by size.
        """
        if self.column not in row:
            raise UnknownNameError("column", self.column, row)
        compare, cell = _COMPARISONS[self.comparison], row[self.column]
        try:
            return compare(float(cell), float(self.value))
        except ValueError:
            if self.comparison in ("=", "!="):
                return compare(str(cell), self.value)
            raise UsageError(
                f"--within {self.column}: '{cell}' and '{self.value}' are not two numbers"
            ) from None


@dataclass(frozen=True, kw_only=True)
class BestPoints:
    """The best point of each network of a sweep.

    Attributes
    ----------
    points : int
        Points of the sweep that have a plan and are within the conditions.
    rows : tuple of dict
        A row of the sweep for each network that has such a point.
    """

    objective: str
    points: int
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return {"objective": self.objective, "points": self.points, "rows": list(self.rows)}

    def text(self) -> str:
        """A line for each network: its settings, and its figures."""
        lines = [f"best {self.objective} of {self.points} points"]
        for row in self.rows:
            names = list(row)
            settings = names[1 : names.index("latency_gpu_only_ns")]
            parts = [f"{name}={row[name]}" for name in settings]
            figures = (
                f"{row['latency_ns'] / 1e6:.4f} ms ({row['speedup']:.3f}x), {row['energy_pj'] / 1e9:.2f} mJ"
            )
            report = f"  {row['report']}" if row.get("report") else ""
            lines.append(f"{row['model']}  {' '.join(parts)}  {figures}{report}")
        return "\n".join(lines)


def best_points(
    directory: str | os.PathLike[str], within: Sequence[str] = (), objective: str = "latency"
) -> BestPoints:
    """The best point of each network of a sweep.

    Parameters
    ----------
    directory : path
        What ``pimflow sweep -o`` wrote.
    within : sequence of str
        Conditions on columns of ``sweep.csv``, such as ``pim_channels<=8``; all hold.
    objective : str
        One of `OBJECTIVES`.

    Raises
    ------
    ArtifactError
        If the directory is no sweep.
    UsageError, UnknownNameError
        For another objective, a condition of another form, or a column that is not there.
    InfeasibleError
        If no point is within the conditions.
    """
    if objective not in OBJECTIVES:
        raise UnknownNameError("objective", objective, OBJECTIVES)
    conditions = [ColumnBound.parse(text) for text in within]
    rows = read_rows(directory)
    fitting = [
        row for row in rows if not row["error"] and all(condition.holds(row) for condition in conditions)
    ]
    if not fitting:
        raise InfeasibleError(
            f"{directory}: points that have a plan and are within the conditions",
            1,
            0,
            "points",
            ["other bounds"],
        )
    best: dict[str, dict[str, Any]] = {}
    for row in fitting:
        model = row["model"]
        if model not in best or OBJECTIVES[objective](row) < OBJECTIVES[objective](best[model]):
            best[model] = row
    return BestPoints(objective=objective, points=len(fitting), rows=tuple(best.values()))


def read_rows(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a sweep; raises `ArtifactError` if the directory is none."""
    path = Path(directory) / ROWS
    if not path.is_file():
        raise ArtifactError(f"{directory}: is no sweep; 'pimflow sweep … -o DIR' writes one")
    rows: list[dict[str, Any]] = read_json(path, ArtifactError)
    is_table = isinstance(rows, list) and all(
        isinstance(row, dict)
        and {"model", "error", "latency_gpu_only_ns", "latency_ns", "speedup"} <= row.keys()
        for row in rows
    )
    if not is_table:
        raise ArtifactError(f"{path}: was not written by this version of pimflow; sweep again")
    return rows
