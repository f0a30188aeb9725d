"""Integer programs: named costs, sparse rows, and one way to solve them.

Which primitive computes a layer (`primitive_selection.program`), and which layers are one group
(`fusion.convex`), are chosen by such programs.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Column = int
Entries = list[tuple[Column, float]]
Row = tuple[Entries, float, float]  # what is summed, and the bounds of the sum

TIME_LIMIT_S = 60.0  # for one program; what is not proved by then shows in the bound
RELATIVE_GAP = 1e-7
LARGEST_COST = 100.0  # Costs are scaled to this: tolerances of the solver are absolute.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is known of a program after its time.

    Attributes
    ----------
    values : array of float, optional
        Of all columns, in the best solution that was found; None without one.
    value, bound : float
        Cost of that solution, and what no solution falls below.
    """

    values: np.ndarray | None
    value: float
    bound: float

    @property
    def gap(self) -> float:
        """How much better, at most, another solution may be, as a share of the value."""
        return max(0.0, (self.value - self.bound) / max(abs(self.value), 1e-12))

    def chosen(self, column: Column) -> bool:
        """Whether a binary column is taken in the solution."""
        return self.values is not None and bool(self.values[column] > 0.5)


class IntegerProgram:
    """Columns at or above zero, rows between two bounds, and the least sum of costs.

    Tolerances of the solver are absolute: rows should be of the size of some hundreds. Costs are scaled here.
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._upper: list[float] = []
        self._integral: list[bool] = []
        self._rows: list[Row] = []

    def column(self, cost: float = 0.0, *, upper: float = math.inf) -> Column:
        """Add a number from 0 to `upper`."""
        return self._add(cost, upper, False)

    def binary(self, cost: float = 0.0) -> Column:
        """Add a column that is 0 or 1."""
        return self._add(cost, 1.0, True)

    def _add(self, cost: float, upper: float, integral: bool) -> Column:
        self._costs.append(cost)
        self._upper.append(upper)
        self._integral.append(integral)
        return len(self._costs) - 1

    def charge(self, entries: Iterable[tuple[Column, float]]) -> None:
        """Add costs of columns to those that they have."""
        for column, cost in entries:
            self._costs[column] += cost

    def row(self, entries: Entries, *, low: float = -math.inf, high: float = math.inf) -> None:
        """Add ``low <= sum of factor * column <= high``."""
        self._rows.append((entries, low, high))

    def cover(self, columns: Iterable[Column]) -> None:
        """Exactly one of some binaries is taken."""
        self.row([(column, 1.0) for column in columns], low=1.0, high=1.0)

    def solve(self) -> Outcome:
        """The solution of the least cost that is found within `TIME_LIMIT_S`."""
        import numpy as np  # no command waits for these that solves nothing
        from scipy import optimize, sparse  # type: ignore[import-untyped]

        sizes = [len(entries) for entries, _, _ in self._rows]
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        columns = [column for entries, _, _ in self._rows for column, _ in entries]
        factors = [factor for entries, _, _ in self._rows for _, factor in entries]
        matrix = sparse.csr_array((factors, (numbers, columns)), shape=(len(sizes), len(self._costs)))
        bounds = ([low for _, low, _ in self._rows], [high for _, _, high in self._rows])
        costs = np.array(self._costs)
        scale = LARGEST_COST / max(float(np.abs(costs).max(initial=0.0)), 1e-300)
        with _without_remarks():
            result = optimize.milp(
                costs * scale,
                integrality=np.array(self._integral),
                bounds=optimize.Bounds(0.0, np.array(self._upper)),
                constraints=optimize.LinearConstraint(matrix, *bounds),
                options={"mip_rel_gap": RELATIVE_GAP, "time_limit": TIME_LIMIT_S},
            )
        if result.x is None:
            return Outcome(values=None, value=math.inf, bound=-math.inf)
        bound = -math.inf if result.mip_dual_bound is None else float(result.mip_dual_bound) / scale
        return Outcome(values=result.x, value=float(costs @ result.x), bound=bound)


@contextlib.contextmanager
def _without_remarks() -> Iterator[None]:
    """Drop what C code prints: HiGHS writes lines of its own to stdout, whatever its options say."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # C keeps lines for a pipe back until the process ends
        os.dup2(kept, 1)
        os.close(kept)
