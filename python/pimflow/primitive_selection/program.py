"""The integer program of a selection: Wen et al., *TASO*, sections 4.4 and 4.5.

Columns are: a binary variable for every candidate of every step; for every tensor and reader, a share for
each pair of the layouts in which it is written and read, which is 0 or 1 if the binaries are; and the peak of
live bytes. Steps run one after the other, so that time is a sum.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pimflow.core.candidate import Candidate
from pimflow.core.integer_program import Column, Entries, IntegerProgram, Outcome
from pimflow.core.liveness import Liveness, align_up
from pimflow.core.tensor_placement import TensorPlacement
from pimflow.primitive_selection.problem import Budgets, SelectionProblem, SelectionResult, SelectionStep

# The solver's tolerance is absolute, 1e-6. With these units, two sizes differ by at least a thousand times as
# much, and a time budget is met as exactly as `Sums.is_within` requires.
UNIT_BYTES = 1000 * 64.0
TIME_UNITS = 1000.0  # units of a time budget


@dataclass(frozen=True, kw_only=True)
class LayoutCopy:
    """A column that is 1 if a tensor is copied from one layout into another for a reader."""

    column: Column
    tensor: str
    time_ns: float


class SelectionProgram:
    """The integer program that minimises ``time`` or ``memory`` (`objective`) within budgets."""

    def __init__(self, problem: SelectionProblem, objective: str, budgets: Budgets):
        self.problem, self.program = problem, IntegerProgram()
        self.columns: dict[str, list[tuple[Column, Candidate]]] = {}
        for step in problem.steps:
            small = [
                candidate
                for candidate in _pareto_candidates(problem, step)
                if problem.footprint_bytes(step, candidate) <= budgets.workspace_bytes
            ]
            self.columns[step.name] = [(self.program.add_binary(), candidate) for candidate in small]
            self.program.add_exactly_one(column for column, _ in self.columns[step.name])
        self.copies = {step.name: list(self._copies(step)) for step in problem.steps}
        if objective == "time":
            self.program.add_costs(self._time(1.0))
        if budgets.time_ns < math.inf:
            unit_ns = max(budgets.time_ns, 1.0) / TIME_UNITS
            self.program.add_row(self._time(unit_ns), high=budgets.time_ns / unit_ns)
        if objective == "memory" or budgets.memory_bytes < math.inf:
            if problem.memory_model == "sum":  # of the footprints of all layers: equation 7 of the paper
                memory = self._entries(problem.footprint_bytes, UNIT_BYTES)
            else:
                memory = self._liveness()
            self.program.add_row(memory, high=budgets.memory_bytes / UNIT_BYTES)
            if objective == "memory":
                self.program.add_costs(memory)

    def solve(self) -> tuple[Outcome, dict[str, Candidate]]:
        """The outcome within the time limit, and the chosen candidate of every region."""
        outcome = self.program.solve()
        choice = {
            name: candidate
            for name in self.problem.table.candidates
            for column, candidate in self.columns[name]
            if outcome.is_chosen(column)
        }
        return outcome, choice

    def _copies(self, step: SelectionStep) -> Iterator[LayoutCopy]:
        """Add columns and rows for tensors of `step` that may need a transform; yields copies in order."""
        sinks = _group_by_placement((c.input, column) for column, c in self.columns[step.name])
        for tensor in step.reads:
            sources = _group_by_placement((c.output, column) for column, c in self.columns.get(tensor, ()))
            placements = sources or self.problem.placements(tensor)  # an input has one, and no columns
            pairs = [(source, sink) for source in placements for sink in sinks]
            edges = {pair: self.problem.table.transform(tensor, *pair) for pair in pairs}
            priced = {pair: edge for pair, edge in edges.items() if pair[0] != pair[1] and edge.task}
            if not priced:
                continue
            shares = {pair: self.program.add_column(upper=1.0) for pair in pairs}
            for end, by_placement in enumerate((sources, sinks)):
                for placement, columns in by_placement.items():
                    used = [(share, 1.0) for pair, share in shares.items() if pair[end] == placement]
                    self.program.add_row(used + [(column, -1.0) for column in columns], low=0.0, high=0.0)
            for pair, edge in priced.items():
                yield LayoutCopy(column=shares[pair], tensor=tensor, time_ns=edge.latency_ns)

    def _entries(self, amount: Callable[[SelectionStep, Candidate], float], unit: float) -> Entries:
        return [
            (column, amount(step, candidate) / unit)
            for step in self.problem.steps
            for column, candidate in self.columns[step.name]
        ]

    def _time(self, unit_ns: float) -> Entries:
        copies = [(copy.column, copy.time_ns / unit_ns) for step in self.copies.values() for copy in step]
        return self._entries(lambda _, candidate: self.problem.time_ns(candidate), unit_ns) + copies

    def _liveness(self) -> Entries:
        """The peak of live bytes, weights included, plus all filters."""
        peak, weight_bytes = self.program.add_column(), self.problem.weight_bytes
        for position in range(len(self.problem.steps)):
            for tensor_bytes, entries in self._moments(position):
                scaled = [(column, size / UNIT_BYTES) for column, size in entries]
                self.program.add_row(
                    [*scaled, (peak, -1.0)], high=-(tensor_bytes + weight_bytes) / UNIT_BYTES
                )
        return [(peak, 1.0), *self._entries(lambda _, c: align_up(c.footprint.filter_bytes), UNIT_BYTES)]

    def _moments(self, position: int) -> Iterator[tuple[int, Entries]]:
        """Bytes of tensors at each moment of a step, and bytes of copies and workspaces by column.

        Tensors that the step reads in another layout are copied before it, one by one. A tensor that is not
        read later is replaced by its copy.
        """
        step, copies = self.problem.steps[position], list[tuple[Column, float]]()
        live = [life for life in self._tensors.lifetimes if life.begin <= position < life.end]
        live_after = {life.name for life in live if life.end > position + 1}
        for tensor in step.reads:
            size = float(self.problem.tensor_bytes[tensor])
            entries = [(copy.column, size) for copy in self.copies[step.name] if copy.tensor == tensor]
            if entries:
                yield sum(life.size_bytes for life in live if life.name != step.name), copies + entries
            copies += entries if tensor in live_after else []
        workspaces = [
            (column, float(align_up(c.footprint.workspace_bytes))) for column, c in self.columns[step.name]
        ]
        yield sum(life.size_bytes for life in live), copies + workspaces

    @functools.cached_property
    def _tensors(self) -> Liveness:
        """Lifetimes of tensors over the problem's steps."""
        sizes = self.problem.tensor_bytes
        steps = [(step.reads, [step.name] if step.name in sizes else []) for step in self.problem.steps]
        inputs = [name for name in sizes if name.startswith("%")]
        return Liveness.from_steps(steps, sizes, inputs=inputs, outputs=self.problem.graph.outputs)


def solve(problem: SelectionProblem, objective: str, budgets: Budgets) -> SelectionResult | None:
    """The choice of minimal time or memory within `budgets`; None if there is none."""
    outcome, choice = SelectionProgram(problem, objective, budgets).solve()
    if outcome.values is None:
        return None
    unit = UNIT_BYTES if objective == "memory" else 1.0
    return SelectionResult(
        choice=choice, sums=problem.evaluate(choice), value=outcome.value * unit, gap=outcome.gap
    )


def _pareto_candidates(problem: SelectionProblem, step: SelectionStep) -> list[Candidate]:
    """Candidates that are not dominated by another one of the same layouts; of equal ones the first."""

    def amounts(candidate: Candidate) -> tuple[float, ...]:
        """Time, workspace and filters of a candidate."""
        sizes = (candidate.footprint.workspace_bytes, candidate.footprint.filter_bytes)
        return (problem.time_ns(candidate), *map(align_up, sizes))

    candidates: list[Candidate] = []
    for candidate in sorted(step.candidates, key=amounts):  # what dominates another comes before it
        placements = candidate.input, candidate.output
        rivals = [rival for rival in candidates if (rival.input, rival.output) == placements]
        if not any(all(a <= b for a, b in zip(amounts(rival), amounts(candidate))) for rival in rivals):
            candidates.append(candidate)
    return candidates


def _group_by_placement(
    columns: Iterable[tuple[TensorPlacement, Column]],
) -> dict[TensorPlacement, list[Column]]:
    by_placement = defaultdict(list)
    for placement, column in columns:
        by_placement[placement].append(column)
    return by_placement
