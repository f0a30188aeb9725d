"""The integer program of a selection: binaries for candidates, flows of tensors from layout to layout.

Flows stand for the products of the paper's equation 11. Between one layout that is given and one that is
taken they are whole by themselves, so that only the candidates are binaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import optimize, sparse

from pimflow.core.candidate import Candidate
from pimflow.placement.solvers import milp
from pimflow.primitive_selection.problem import Budgets, SelectionProblem, SelectionStep, Sums, aligned

INFEASIBLE = 2  # scipy's status
TIME_LIMIT_S = 60.0  # for one integer program; what is not proved by then shows in the gap
UNIT_BYTES = 1024.0  # of the program's rows: sizes are whole multiples of 64 B, exact in binary
SPAN = 1e4  # times are counted so that the slowest choice takes so many: tolerances are absolute
RELATIVE_GAP = 1e-7

Column = int
Entries = list[tuple[Column, float]]


@dataclass(frozen=True, kw_only=True)
class Selected:
    """A choice of candidates with its sums, and the proved gap to the best one.

    Attributes
    ----------
    choice : dict of str to Candidate
        By region.
    sums : Sums
    value : float
        Value of the objective, in ns or bytes.
    gap : float
        How much better, at most, another choice may be, as a share of the objective.
    """

    choice: dict[str, Candidate]
    sums: Sums
    value: float
    gap: float


class _Program:
    """Columns and rows of one problem under budgets."""

    def __init__(self, problem: SelectionProblem, objective: str, budgets: Budgets):
        self.problem, self.objective = problem, objective
        self.costs: list[float] = []
        self.upper: list[float] = []
        self.integral: list[int] = []
        self.rows: list[tuple[Entries, float, float]] = []
        self.counts_memory = objective == "memory" or budgets.memory_bytes < math.inf
        # Without memory in the program, the fastest candidate of each layout is all that matters.
        self.kept = {
            step.name: worthwhile(problem, step, budgets.workspace_bytes, self.counts_memory)
            for step in problem.steps
        }
        self.possible = all(self.kept.values())
        if not self.possible:
            return
        slowest = sum(max(map(problem.time_ns, candidates)) for candidates in self.kept.values())
        self.unit_ns = max(slowest, 1.0) / SPAN
        self.times: Entries = []
        self.does = {step.name: self._choice(step) for step in problem.steps}
        self.flows: dict[tuple[str, str], list[tuple[Column, int]]] = {}
        for step in problem.steps:
            for tensor in step.reads:
                self._flow(tensor, step)
        if self.counts_memory:
            self._memory(budgets.memory_bytes)
        if objective == "time":
            for column, factor in self.times:
                self.costs[column] += factor
        if budgets.time_ns < math.inf:
            self.rows.append((self.times, -np.inf, budgets.time_ns / self.unit_ns))

    def _column(self, upper: float = np.inf, integral: int = 0) -> Column:
        self.costs.append(0.0)
        self.upper.append(upper)
        self.integral.append(integral)
        return len(self.costs) - 1

    def _choice(self, step: SelectionStep) -> list[tuple[Column, Candidate]]:
        columns = [(self._column(1.0, 1), candidate) for candidate in self.kept[step.name]]
        self.rows.append(([(column, 1.0) for column, _ in columns], 1.0, 1.0))
        self.times += [(column, self.problem.time_ns(c) / self.unit_ns) for column, c in columns]
        return columns

    def _flow(self, tensor: str, step: SelectionStep) -> None:
        """Add the flows of `tensor` from each layout that it may have to each in which `step` may read it."""
        table, crossing = self.problem.table, []
        given = self._by_layout(tensor, lambda c: c.output.layout)
        taken = self._by_layout(step.name, lambda c: c.input.layout)
        into: dict[str, Entries] = {layout: [] for layout in taken}
        for source, producing in given.items():
            out: Entries = []
            for sink in taken:
                edge = table.transform(tensor, source, sink)
                column = self._column()
                out.append((column, 1.0))
                into[sink].append((column, 1.0))
                if source != sink and edge.task:
                    self.times.append((column, edge.latency_ns / self.unit_ns))
                    crossing.append((column, self.problem.copy_bytes(tensor, edge)))
            whole = 0.0 if producing else 1.0  # a graph input has one layout
            self.rows.append((out + [(column, -1.0) for column in producing], whole, whole))
        for sink, consuming in taken.items():
            self.rows.append((into[sink] + [(column, -1.0) for column in consuming], 0.0, 0.0))
        self.flows[tensor, step.name] = crossing

    def _by_layout(self, name: str, layout_of) -> dict[str, list[Column]]:
        if name not in self.does:
            return {layout: [] for layout in self.problem.layouts(name)}
        columns: dict[str, list[Column]] = {}
        for column, candidate in self.does[name]:
            columns.setdefault(layout_of(candidate), []).append(column)
        return columns

    def _memory(self, budget_bytes: float) -> None:
        peak = self._column(budget_bytes / UNIT_BYTES)
        if self.objective == "memory":
            self.costs[peak] = 1.0
        if self.problem.memory_model == "sum":
            entries: Entries = [(peak, -1.0)]
            for step in self.problem.steps:
                size = self.problem.footprint_bytes
                entries += [(column, size(step, c) / UNIT_BYTES) for column, c in self.does[step.name]]
            self.rows.append((entries, -np.inf, 0.0))
            return
        resident = self._column()
        filters = [
            (column, aligned(c.filter_bytes) / UNIT_BYTES)
            for columns in self.does.values()
            for column, c in columns
        ]
        weights = self.problem.weight_bytes / UNIT_BYTES
        self.rows.append(([(resident, -1.0), *filters], -weights, -weights))
        rows = list(self._live())
        # A moment that never needs as much as another one always does is no bound.
        floor = max(base for base, _, _ in rows)
        for base, entries, most in rows:
            if base + most >= floor:
                scaled = [(column, size / UNIT_BYTES) for column, size in entries if size]
                self.rows.append(([(peak, -1.0), (resident, 1.0), *scaled], -np.inf, -base / UNIT_BYTES))

    def _live(self) -> Iterator[tuple[int, Entries, float]]:
        """Bytes beside the filters at every moment: certain ones, those of columns, and the most of these."""
        problem = self.problem
        for number, step in enumerate(problem.steps):
            lives = problem.lifetimes.values()
            base = sum(life.size_bytes for life in lives if life.begin < number < life.end)
            base += sum(
                life.size_bytes
                for life in lives
                if life.begin == number < life.end and life.name.startswith("%")
            )
            copies: Entries = []
            copied = 0.0
            for tensor in step.reads:
                crossing = self.flows[tensor, step.name]
                if not crossing:
                    continue
                yield base, copies + crossing, copied + problem.tensor_bytes[tensor]
                # If no later step reads the tensor, its copy takes the bytes that it leaves.
                if problem.lifetimes[tensor].end > number + 1:
                    copies, copied = copies + crossing, copied + problem.tensor_bytes[tensor]
            spaces = [(column, aligned(c.workspace_bytes)) for column, c in self.does[step.name]]
            most = copied + max(size for _, size in spaces)
            yield base + problem.tensor_bytes.get(step.name, 0), copies + spaces, most

    def solve(self) -> Selected | None:
        """The best choice; None if none keeps to the budgets."""
        if not self.possible:
            return None
        numbers, columns, factors = [], [], []
        for number, (entries, _, _) in enumerate(self.rows):
            for column, factor in entries:
                numbers.append(number)
                columns.append(column)
                factors.append(factor)
        shape = (len(self.rows), len(self.costs))
        matrix = sparse.csr_matrix((factors, (numbers, columns)), shape=shape)
        low, high = ([row[side] for row in self.rows] for side in (1, 2))
        result = milp.solve(
            np.array(self.costs),
            integrality=np.array(self.integral),
            bounds=optimize.Bounds(0.0, np.array(self.upper)),
            constraints=optimize.LinearConstraint(matrix, low, high),
            options={"mip_rel_gap": RELATIVE_GAP, "time_limit": TIME_LIMIT_S},
        )
        if result.x is None:
            return None
        regions = {region.name for region in self.problem.graph.regions}
        choice = {
            name: max(options, key=lambda each: result.x[each[0]])[1]
            for name, options in self.does.items()
            if name in regions
        }
        value, bound = float(result.fun), float(result.mip_dual_bound)
        gap = max(0.0, (value - bound) / max(abs(value), 1e-12))
        unit = self.unit_ns if self.objective == "time" else UNIT_BYTES
        return Selected(choice=choice, sums=self.problem.evaluate(choice), value=value * unit, gap=gap)


def worthwhile(
    problem: SelectionProblem, step: SelectionStep, workspace_bytes: float, memory: bool
) -> list[Candidate]:
    """Candidates of `step` that some selection needs: none of the same layouts is better in everything.

    Parameters
    ----------
    workspace_bytes : float
        Largest footprint.
    memory : bool
        Whether memory counts, or time alone.
    """

    def price(c: Candidate) -> tuple[float, ...]:
        if not memory:
            return (problem.time_ns(c),)
        if problem.memory_model == "sum":
            return (problem.time_ns(c), problem.footprint_bytes(step, c))
        return (problem.time_ns(c), aligned(c.filter_bytes), aligned(c.workspace_bytes))

    kept: list[Candidate] = []
    allowed = [c for c in step.candidates if problem.footprint_bytes(step, c) <= workspace_bytes]
    by_price = sorted(allowed, key=lambda c: (*price(c), c.filter_bytes + c.workspace_bytes))
    for candidate in by_price:
        layouts = (candidate.input.layout, candidate.output.layout)
        others = [k for k in kept if (k.input.layout, k.output.layout) == layouts]
        if not any(all(a <= b for a, b in zip(price(k), price(candidate))) for k in others):
            kept.append(candidate)
    return kept


def solve(problem: SelectionProblem, objective: str, budgets: Budgets) -> Selected | None:
    """The choice of least time or memory within `budgets`; None if there is none."""
    return _Program(problem, objective, budgets).solve()
