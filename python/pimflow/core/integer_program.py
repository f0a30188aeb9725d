"""Integer programs: columns with costs, sparse rows, and their solution by HiGHS.

They choose the primitive of each layer (`primitive_selection.program`) and the layers of fused groups
(`fusion.convex`).
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
Row = tuple[Entries, float, float]  # the terms of a sum, and its lower and upper bound

TIME_LIMIT_S = 60.0  # for one program; what is not proved until then shows in the bound
RELATIVE_GAP = 1e-7
LARGEST_COST = 100.0  # Costs are scaled to this: tolerances of the solver are absolute.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Best solution and bound of a program after its time limit.

    Attributes
    ----------
    values : array of float, optional
        Values of all columns in the best solution; None if no solution was found.
    value, bound : float
        Cost of that solution, and a lower bound on the cost of any solution.
    """

    values: np.ndarray | None
    value: float
    bound: float

    @property
    def gap(self) -> float:
        """Relative gap between the value and the bound."""
        return max(0.0, (self.value - self.bound) / max(abs(self.value), 1e-12))

    def is_chosen(self, column: Column) -> bool:
        """Whether a binary column is 1 in the solution."""
        return self.values is not None and bool(self.values[column] > 0.5)


class IntegerProgram:
    """A minimisation of costs over columns of zero or more, with rows between two bounds.

    Tolerances of the solver are absolute: sums of rows should be of the order of hundreds. Costs are scaled
    here.
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._upper: list[float] = []
        self._integral: list[bool] = []
        self._rows: list[Row] = []

    def add_column(self, cost: float = 0.0, *, upper: float = math.inf) -> Column:
        """Add a continuous column from 0 to `upper`."""
        return self._add(cost, upper, False)

    def add_binary(self, cost: float = 0.0) -> Column:
        """Add a column that is 0 or 1."""
        return self._add(cost, 1.0, True)

    def _add(self, cost: float, upper: float, integral: bool) -> Column:
        self._costs.append(cost)
        self._upper.append(upper)
        self._integral.append(integral)
        return len(self._costs) - 1

    def add_costs(self, entries: Iterable[tuple[Column, float]]) -> None:
        """Increase costs of columns."""
        for column, cost in entries:
            self._costs[column] += cost

    def add_row(self, entries: Entries, *, low: float = -math.inf, high: float = math.inf) -> None:
        """Add ``low <= sum of factor * column <= high``."""
        self._rows.append((entries, low, high))

    def add_exactly_one(self, columns: Iterable[Column]) -> None:
        """Require that exactly one of some binary columns is 1."""
        self.add_row([(column, 1.0) for column in columns], low=1.0, high=1.0)

    def solve(self) -> Outcome:
        """Minimise the cost; stops after `TIME_LIMIT_S` with the best solution so far."""
        import numpy as np  # imported here: commands that solve nothing need not wait for these
        from scipy import optimize, sparse

        sizes = [len(entries) for entries, _, _ in self._rows]
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        columns = [column for entries, _, _ in self._rows for column, _ in entries]
        factors = [factor for entries, _, _ in self._rows for _, factor in entries]
        matrix = sparse.csr_array((factors, (numbers, columns)), shape=(len(sizes), len(self._costs)))
        bounds = ([low for _, low, _ in self._rows], [high for _, _, high in self._rows])
        costs = np.array(self._costs)
        scale = LARGEST_COST / max(float(np.abs(costs).max(initial=0.0)), 1e-300)
        with _silence_stdout():
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
def _silence_stdout() -> Iterator[None]:
    """Drop what C code prints to stdout: HiGHS prints even where its options forbid it."""
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # C keeps lines for a pipe back until the process ends
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)
