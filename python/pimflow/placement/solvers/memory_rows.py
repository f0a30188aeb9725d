"""Rows for memory, in `program.Program`: one for each moment at which more may be live than is allowed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from pimflow.core.integer_program import Column, Entries, IntegerProgram, summed
from pimflow.placement.solvers.launch_rows import Taken
from pimflow.placement.solvers.variants import SegmentProblem

UNIT_BYTES = 1024.0  # sizes are whole multiples of 64 B, exact in binary


class MemoryRows:
    """Of one `Program`, whose problem has a limit.

    Parameters
    ----------
    problem : SegmentProblem
    program : IntegerProgram
        Where they are added.
    taken : list
        All variants with their columns.
    doing, last : mapping
        By position, those that do it, and those that end there.
    copying : mapping
        By position, the tensors that are copied on the way there, each with the column that says so.

    Attributes
    ----------
    peak : int
        The column of the most that is live, in `UNIT_BYTES`.
    """

    def __init__(
        self,
        problem: SegmentProblem,
        program: IntegerProgram,
        taken: Taken,
        doing: Mapping[int, Taken],
        last: Mapping[int, Taken],
        copying: Mapping[int, Sequence[tuple[str, Column]]],
    ):
        self.problem, self.program, self.limit = problem, program, problem.limit
        self.taken, self.doing, self.last, self.copying = taken, doing, last, copying
        self.peak = program.column(upper=self.limit.at_most / UNIT_BYTES)

    def add(self, always: bool) -> None:
        """Add the rows; `always` those, too, that the limit leaves no chance to bind."""
        resident = self._resident()
        positions = range(*self.problem.segment)
        rows = [(0.0, 0.0, list[tuple[Column, float]]())]
        if self.limit.memory:
            rows = [row for position in positions for row in self._moments(position)]
        # A moment that never needs as much as another one always does is no bound.
        floor = max(base for base, _, _ in rows)
        always = always or bool(resident)
        for base, most, entries in rows:
            if most >= floor and (always or most > self.limit.at_most):
                scaled = [(column, size / UNIT_BYTES) for column, size in entries if size]
                self.program.row(summed([(self.peak, -1.0), *resident, *scaled]), high=-base / UNIT_BYTES)

    def _resident(self) -> Entries:
        """What is there throughout, a column, if anything is."""
        held = [(column, self.limit.resident(v.candidate)) for column, v in self.taken]
        if not self.limit.weight_bytes and not any(size for _, size in held):
            return []
        column, weights = self.program.column(), self.limit.weight_bytes / UNIT_BYTES
        entries = [(each, size / UNIT_BYTES) for each, size in held if size]
        self.program.row([(column, -1.0), *entries], low=-weights, high=-weights)
        return [(column, 1.0)]

    def _moments(self, position: int) -> list[tuple[float, float, Entries]]:
        """Bytes at every moment of a step: those that are certain, the most, and those of columns."""
        memory, doing = self.limit.memory, self.doing[position]
        rows: list[tuple[float, float, Entries]] = []
        copies: Entries = []
        by_tensor: dict[str, Entries] = defaultdict(list)
        for tensor, column in self.copying.get(position, ()):
            by_tensor[tensor].append((column, memory.size_bytes(tensor)))
        for tensor, crossing in by_tensor.items():
            at = [(c, float(memory.copying_bytes(v.candidate, v.running_bytes))) for c, v in doing]
            rows.append(_with_base([*at, *copies, *crossing], doing))
            copies = copies + crossing if memory.copy_bytes(tensor, position) else copies
        running = [(c, float(v.running_bytes)) for c, v in doing]
        pending = [
            (c, float(size))
            for name in sorted(self.problem.may_pend)
            if self.problem.order[name] < position < self.problem.first_reader(name)
            if (size := memory.kept_bytes(position, [name]))
            for c, v in self.last[self.problem.order[name]]
            if v.leaves == "pending"
        ]
        rows.append(_with_base([*running, *copies, *pending], doing))
        return rows


def _with_base(all_bytes: Entries, doing: Taken) -> tuple[float, float, Entries]:
    """Of a moment's bytes those that are there whatever is chosen, the most, and the rest by column."""
    sums = dict(summed(all_bytes))
    running = {column: sums.pop(column, 0.0) for column, _ in doing}
    base, more = min(running.values(), default=0.0), sum(sums.values())
    rest = [(column, size - base) for column, size in running.items()]
    entries = [(column, size) for column, size in (*rest, *sums.items()) if size]
    return base, max(running.values(), default=0.0) + more, entries
