"""Integer programs: named costs, sparse rows, and one way to solve them.

What is placed where, which primitive computes a layer, and which layers are one group, are chosen by such
programs; `placement.solvers.program` says which columns and rows they have.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from scipy import optimize  # type: ignore[import-untyped]

Column = int
Entries = list[tuple[Column, float]]
Row = tuple[Entries, float, float]  # what is summed, and the bounds of the sum

TIME_LIMIT_S = 60.0  # for one program; what is not proved by then shows in the bound
RELATIVE_GAP = 1e-7
MANY_NODES = 2000  # of the search tree: what is near enough by then is not pursued, if that will do
LARGEST_COST = 100.0  # Costs are scaled to this: tolerances of the solver are absolute.
OPTIMAL, INFEASIBLE = 0, 2  # scipy's status
MOST_REMEMBERED = 4096  # programs
# Outcomes of the last programs that this process solved, by digest: a network repeats its blocks.
_OUTCOMES: dict[bytes, Outcome] = {}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is known of a program after its time.

    Attributes
    ----------
    values : array of float, optional
        Of all columns, in the best solution that was found; None without one.
    value, bound : float
        Cost of that solution, and what no solution falls below.
    infeasible : bool
        Whether it is proved that there is no solution.
    """

    values: np.ndarray | None
    value: float
    bound: float
    infeasible: bool

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
        self._constraints: list[optimize.LinearConstraint] = []  # of all rows, once they were asked for

    @property
    def columns(self) -> int:
        """How many there are."""
        return len(self._costs)

    def column(self, cost: float = 0.0, *, upper: float = math.inf) -> Column:
        """Add a number from 0 to `upper`."""
        return self._add(cost, upper, False)

    def binary(self, cost: float = 0.0) -> Column:
        """Add a column that is 0 or 1."""
        return self._add(cost, 1.0, True)

    def _add(self, cost: float, upper: float, integral: bool) -> Column:
        self._constraints = []
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
        self._constraints = []
        self._rows.append((entries, low, high))

    def cover(self, columns: Iterable[Column]) -> None:
        """Exactly one of some binaries is taken."""
        self.row([(column, 1.0) for column in columns], low=1.0, high=1.0)

    def solve(self, also: Sequence[Row] = (), near: float = 0.0) -> Outcome:
        """The solution of the least cost that is found within `TIME_LIMIT_S`, under some rows more.

        A program of the same numbers is solved once. After `MANY_NODES`, a solution will do that is proved to
        be `near` the best, as a share of its cost: where much is alike, the proof may take hours.
        """
        self._constraints = self._constraints or [self._constraint(self._rows)]
        constraints = [*self._constraints, *([self._constraint(also)] if also else [])]
        digest = self._digest(constraints, near)
        if digest not in _OUTCOMES:
            if len(_OUTCOMES) == MOST_REMEMBERED:
                del _OUTCOMES[next(iter(_OUTCOMES))]
            _OUTCOMES[digest] = self._solved(constraints, near)
        return _OUTCOMES[digest]

    def _digest(self, constraints: Sequence[optimize.LinearConstraint], near: float) -> bytes:
        """Of all that an outcome depends on."""
        import numpy as np

        numbers = [self._costs, self._upper, self._integral, [TIME_LIMIT_S, near]]
        for each in constraints:
            numbers += [each.A.data, each.A.indices, each.A.indptr, each.lb, each.ub]
        found = hashlib.sha256()
        for each in map(np.asarray, numbers):
            found.update(np.int64(each.size).tobytes() + each.tobytes())
        return found.digest()

    def _solved(self, constraints: Sequence[optimize.LinearConstraint], near: float) -> Outcome:
        import numpy as np  # no command waits for these that solves nothing
        from scipy import optimize

        costs = np.array(self._costs)
        scale = LARGEST_COST / max(float(np.abs(costs).max(initial=0.0)), 1e-300)
        solve = functools.partial(
            optimize.milp,
            costs * scale if costs.any() else costs,
            integrality=np.array(self._integral),
            bounds=optimize.Bounds(0.0, np.array(self._upper)),
            constraints=constraints,
        )
        options = {"mip_rel_gap": RELATIVE_GAP, "time_limit": TIME_LIMIT_S}
        with _without_remarks():
            begin_s = time.monotonic()
            result = solve(options=options | ({"node_limit": MANY_NODES} if near else {}))
            spent_s = time.monotonic() - begin_s
            cut_short = near and result.status not in (OPTIMAL, INFEASIBLE) and spent_s < TIME_LIMIT_S
            if cut_short and (result.x is None or result.mip_gap > near):
                result = solve(options=options)
        if result.x is None:
            return Outcome(
                values=None, value=math.inf, bound=-math.inf, infeasible=result.status == INFEASIBLE
            )
        bound = -math.inf if result.mip_dual_bound is None else float(result.mip_dual_bound) / scale
        return Outcome(values=result.x, value=float(costs @ result.x), bound=bound, infeasible=False)

    def _constraint(self, rows: Sequence[Row]) -> optimize.LinearConstraint:
        import numpy as np
        from scipy import optimize, sparse

        sizes = [len(entries) for entries, _, _ in rows]
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        columns = [column for entries, _, _ in rows for column, _ in entries]
        factors = [factor for entries, _, _ in rows for _, factor in entries]
        shape = (len(sizes), len(self._costs))
        return optimize.LinearConstraint(
            sparse.csr_array((factors, (numbers, columns)), shape=shape),
            [low for _, low, _ in rows],
            [high for _, _, high in rows],
        )


def summed(entries: Entries) -> Entries:
    """`entries` with each column once."""
    sums: dict[Column, float] = {}
    for column, factor in entries:
        sums[column] = sums.get(column, 0.0) + factor
    return list(sums.items())


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
