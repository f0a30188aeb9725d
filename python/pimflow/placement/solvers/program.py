"""The one integer program of every choice: exact cover, tasks on resources, layouts, memory.

Columns: a binary for each `Variant`; where a tensor may have several layouts, a flow from each that it may
have to each in which it may be read; the time at which every result is there and every resource is free. The
evaluator's recurrence is linear in the choice once the order of tasks on each resource is given, and that is
the order of the regions. On one resource nothing overlaps: the time is a sum, and needs no columns.
docs/search.md has the formulation on a page.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pimflow.core.candidate import AS_MEMORY, AS_PIM, Candidate, EdgeCost
from pimflow.core.integer_program import Column, Entries, IntegerProgram, Outcome, Row, summed
from pimflow.placement.solvers import steps
from pimflow.placement.solvers.launch_rows import LaunchRows, Taken
from pimflow.placement.solvers.memory_rows import MemoryRows
from pimflow.placement.solvers.region_rows import RegionRows
from pimflow.placement.solvers.steps import State
from pimflow.placement.solvers.time_bounds import TimeBounds
from pimflow.placement.solvers.variants import END, START, SegmentProblem, Variant

SAME_TIME = 1e-5  # of them
NEAR = 1e-4  # of the objective: where much is alike on several resources, the proof of less takes hours
UNITS = 100.0  # Times are counted so that the horizon is so many: tolerances are absolute.


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A row over the whole plan: a weighted sum of latency and of candidates, and its upper bound."""

    at_most: float
    per_ns: float = 0.0
    per_pj: float = 0.0
    of: Callable[[Candidate], float] = lambda _: 0.0


@dataclass(frozen=True, kw_only=True)
class Flow:
    """A tensor handed to a candidate that begins at a position, from one layout to another."""

    column: Column
    tensor: str
    given: str
    edge: EdgeCost


class Program:
    """The integer program of one `SegmentProblem`.

    Parameters
    ----------
    problem : SegmentProblem
    horizon_ns : float
        No plan that matters takes longer. Does not matter on one resource.
    bounds : sequence of Bound
    least_memory : bool
        Whether the memory that `problem.limit` counts is minimised, not what its weights say.
    """

    def __init__(
        self,
        problem: SegmentProblem,
        horizon_ns: float = 1.0,
        bounds: Sequence[Bound] = (),
        least_memory: bool = False,
    ):
        self.problem, self.unit_ns = problem, max(horizon_ns, 1.0) / UNITS
        self.variants, self.resources = problem.variants, problem.resources
        self.program, self.named = IntegerProgram(), dict[tuple, Column]()
        self.as_memory: dict[int, Column] = {}
        self.between: dict[Column, tuple[float, float]] = {}
        self.least_memory = least_memory
        self.y = [self.program.binary() for _ in self.variants]
        self.begun = {state: self.program.binary() for state in problem.begins}
        self.program.cover(self.begun.values())
        self._index()
        for position in range(*problem.segment):
            self.program.cover(column for column, _ in self.doing[position])
        self.flows: dict[int, list[Flow]] = defaultdict(list)
        for position in range(*problem.segment):
            self._layouts(position)
        self._states()
        ahead = (problem, self.program, self.last, self.begun, self.unit_ns)
        self.ahead = LaunchRows(*ahead) if problem.running else None
        one_by_one = len(self.resources) == 1 and not self.ahead
        self.times = self._added_up() if one_by_one else self._timeline()
        self.near = 0.0 if one_by_one or least_memory else NEAR
        self.peak = self._memory() if problem.limit else None
        self._objective()
        for bound in bounds:
            self._bound(bound)

    def _index(self) -> None:
        """Variants with their columns: by where they begin and end, what they do, and what they take over."""
        self.beginning, self.ending, self.doing, self.last = (defaultdict[int, Taken](list) for _ in range(4))
        self.taking: dict[str, Taken] = defaultdict(list)
        for each in zip(self.y, self.variants):
            _, v = each
            self.beginning[v.begin].append(each)
            self.last[v.last].append(each)
            for position in v.ends_at:
                self.ending[position].append(each)
            for position in range(v.begin, v.last + 1):
                self.doing[position].append(each)
            for name in v.takes:
                self.taking[name].append(each)

    def _layouts(self, position: int) -> None:
        """Add flows of the tensors that candidates beginning at `position` read, where a layout costs."""
        problem = self.problem
        reading: dict[str, dict[str, list[Column]]] = defaultdict(lambda: defaultdict(list))
        for column, v in self.beginning[position]:
            for tensor in v.operands:
                reading[tensor][v.candidate.input.layout].append(column)
        for tensor, taken in reading.items():
            given = self._given(tensor)
            edges = {
                (source, sink): problem.table.transform(tensor, source, sink)
                for source in given
                for sink in taken
            }
            priced = [edge for (source, sink), edge in edges.items() if source != sink]
            if all(edge.possible and not edge.task for edge in priced):
                continue
            columns = {pair: self.program.column() for pair, edge in edges.items() if edge.possible}
            for sink, consuming in taken.items():
                into = [(columns[source, sink], 1.0) for source in given if (source, sink) in columns]
                self.program.row(into + [(column, -1.0) for column in consuming], low=0.0, high=0.0)
            for source, producing in given.items():
                out = [(columns[source, sink], 1.0) for sink in taken if (source, sink) in columns]
                self.program.row(out + [(column, -1.0) for column in producing], high=0.0)
            self.flows[position] += [
                Flow(column=columns[source, sink], tensor=tensor, given=source, edge=edge)
                for (source, sink), edge in edges.items()
                if source != sink and edge.task
            ]

    def _given(self, tensor: str) -> dict[str, list[Column]]:
        """By layout that `tensor` may have, the columns of which it takes one."""
        position = self.problem.order.get(tensor, -1)
        columns: dict[str, list[Column]] = defaultdict(list)
        if position < self.problem.segment[0]:
            for state, column in self.begun.items():
                columns[state.layout(self.problem.table, tensor)].append(column)
        else:
            for column, v in self.last[position]:
                columns[v.candidate.output.layout].append(column)
        return columns

    def _states(self) -> None:
        """Add rows: candidates take over what is pending, open, on PIM, and PIM's channels as they are."""
        problem, (begin, end) = self.problem, self.problem.segment
        for name in sorted(problem.may_pend):
            if problem.first_reader(name) < end:
                taken = [(c, -1.0) for c, _ in self.taking[name]]
                self.program.row(self._pending(name) + taken, low=0.0, high=0.0)
        for position in range(begin, end):
            goes_on = [(c, v) for c, v in self.beginning[position] if v.goes_on is True]
            alone = [(c, v) for c, v in self.beginning[position] if v.goes_on is False]
            if goes_on:
                before = [(c, -f) for c, f in self._on_pim(position - 1)]
                self.program.row([(c, 1.0) for c, _ in goes_on] + before, high=0.0)
                self.program.row([(c, 1.0) for c, _ in alone] + [(c, -f) for c, f in before], high=1.0)
            left, taken_on = self._open(position - 1), defaultdict[str, Entries](list)
            for column, v in self.beginning[position]:
                taken_on[v.candidate.goes_on_with].append((column, -1.0))
            for form in sorted((left.keys() | taken_on.keys()) - {""}):
                self.program.row([*left[form], *taken_on[form]], low=0.0, high=0.0)
        uses = {state.as_memory for state in problem.begins}
        if len(uses) > 1 or any(v.switched is not None for v in self.variants):
            self._uses_of_channels()

    def _pending(self, name: str) -> Entries:
        """The columns that leave something of a result pending."""
        before = [(c, 1.0) for state, c in self.begun.items() if name in state.pending]
        return before + [(c, 1.0) for c, _ in self._leaving(self.problem.order[name], "pending")]

    def _on_pim(self, position: int) -> Entries:
        """The columns behind which a submission to PIM may go on that ends with the region at `position`."""
        if position >= self.problem.segment[0]:
            return [(c, 1.0) for c, _ in self._leaving(position, "on pim")]
        name = self.problem.graph.regions[position].name if position >= 0 else ""
        return [(c, 1.0) for state, c in self.begun.items() if state.on_pim == name]

    def _open(self, position: int) -> dict[str, Entries]:
        """The columns that leave the form of a layer open behind the region at `position`, by the form."""
        left: dict[str, Entries] = defaultdict(list)
        if position < self.problem.segment[0]:
            for state, column in self.begun.items():
                left[state.open].append((column, 1.0))
        for column, v in self.last[position]:
            left[v.candidate.leaves_open].append((column, 1.0))
        return left

    def _ending(self, until: State) -> Iterator[Row]:
        """Rows: the segment ends in a state."""
        problem, last = self.problem, self.problem.segment[1] - 1
        for name in sorted(problem.may_pend):
            if problem.first_reader(name) > last:
                yield _equal(self._pending(name), name in until.pending)
        left = self._open(last)
        for form in sorted((left.keys() | {until.open}) - {""}):
            yield _equal(left[form], form == until.open)
        yield _equal(self._on_pim(last), until.on_pim == problem.graph.regions[last].name)
        if self.as_memory:
            yield _equal([(self.as_memory[last], 1.0)], until.as_memory)
        wanted = dict(until.layouts)  # of results that are read behind the segment; others lie canonically
        for region in problem.graph.regions[: last + 1]:
            reader = problem.graph.last_readers.get(region.name)
            if reader and problem.order[reader] > last:
                layout = wanted.get(region.name, steps.CANONICAL.layout)
                given = self._given(region.name).items()
                yield _equal([(c, 1.0) for other, cs in given if other != layout for c in cs], False)

    def _uses_of_channels(self) -> None:
        """Add rows: what a variant needs PIM's channels as, they are before it, or it is switched.

        A column for each position: 1 if they are plain memory behind it. What does not use them keeps that.
        """
        row, (begin, end) = self.program.row, self.problem.segment
        self.as_memory = {position: self.program.column(upper=1.0) for position in range(begin - 1, end)}
        begun = [(column, -1.0) for state, column in self.begun.items() if state.as_memory]
        row([(self.as_memory[begin - 1], 1.0), *begun], low=0.0, high=0.0)
        for position in range(begin, end):
            before, behind = self.as_memory[position - 1], self.as_memory[position]
            unswitched = [(c, v) for c, v in self.beginning[position] if v.switched is False]
            for use, factor in ((AS_PIM, 1.0), (AS_MEMORY, -1.0)):
                needing = [(c, 1.0) for c, v in unswitched if v.candidate.channels_as == use]
                if needing:
                    row([*needing, (before, factor)], high=1.0 if use == AS_PIM else 0.0)
                leaving = [(c, 1.0) for c, v in self.last[position] if v.candidate.leaves_channels_as == use]
                if leaving:
                    row([*leaving, (behind, factor)], high=1.0 if use == AS_PIM else 0.0)
            keeping: dict[int, Entries] = defaultdict(list)
            for column, v in self.last[position]:
                if not v.candidate.leaves_channels_as:
                    keeping[v.begin].append((column, 1.0))
            for start, entries in keeping.items():
                for factor in (1.0, -1.0):
                    row([*entries, (behind, factor), (self.as_memory[start - 1], -factor)], high=1.0)

    def _leaving(self, position: int, what: str) -> Taken:
        return [(c, v) for c, v in self.last[position] if v.leaves == what]

    def _added_up(self) -> Entries:
        """The latency in ns on one resource."""
        of_flows = [(flow.column, flow.edge.latency_ns) for flows in self.flows.values() for flow in flows]
        return [(column, v.alone_ns) for column, v in zip(self.y, self.variants)] + of_flows

    def _timeline(self) -> Entries:
        """The latency in ns on several resources: a column, with the rows that hold it up."""
        self.bounds = TimeBounds(self.problem)
        total = self.program.column()
        for position in range(*self.problem.segment):
            if self.flows[position]:
                self._transforms(position)
            for starting, hidden in self._with_launches(self.beginning[position]):
                self._resources(position, starting, hidden)
            for ending, hidden in self._with_launches(self.ending[position]):
                self._results(position, ending, hidden)
            if self.ahead:
                self.ahead.queues(position)
        begin, end = self.problem.segment
        for position in range(begin, end):
            self._wait(total, self._ready(self.problem.graph.regions[position].name), [], always=True)
        for resource in self.resources:
            self._wait(total, self._free(resource, end - 1), [], always=True)
        return [(total, self.unit_ns)]

    def _with_launches(self, variants: Taken) -> Iterator[tuple[Taken, Column | None]]:
        """`variants` with their delays, and with those less what is hidden of a launch (`LaunchRows`)."""
        yield variants, None
        if self.ahead:
            yield from self.ahead.launching(variants)

    def _time(self, *name: object, least_ns: float = 0.0, tail_ns: float = 0.0) -> Column:
        """The column of a time, made when it is first asked for: between two bounds (`TimeBounds`)."""
        if name not in self.named:
            low = max(least_ns / self.unit_ns - SAME_TIME, 0.0)
            high = max(UNITS - max(tail_ns / self.unit_ns - SAME_TIME, 0.0), 0.0)
            column = self.named[name] = self.program.column(upper=high)
            self.between[column] = low, high
        return self.named[name]

    def _free(self, resource: str, position: int) -> Column | None:
        """The column of the time when `resource` is free after `position`; None if that is the beginning."""
        if position < self.problem.segment[0]:
            return None
        at, bounds = (resource, position), self.bounds
        return self._time("free", *at, least_ns=bounds.free_ns[at], tail_ns=bounds.free_tail_ns[at])

    def _ready(self, name: str) -> Column | None:
        """The column of the time when a result is ready; None if it is ready at the beginning."""
        position = self.problem.order.get(name, -1)
        if position < self.problem.segment[0]:
            return None
        least_ns, tail_ns = self.bounds.ready_ns[position], self.bounds.ready_tail_ns[position]
        return self._time("ready", position, least_ns=least_ns, tail_ns=tail_ns)

    def _wait(
        self,
        sink: Column,
        source: Column | None,
        delayed: Sequence[tuple[Column, float]],
        always: bool,
        hidden: Column | None = None,
    ) -> None:
        """`sink` is not before `source` and the delay of what is chosen, less what is `hidden`.

        What is not `delayed` does not wait at all, unless `always`: then it waits, without a delay.
        """
        less = [(hidden, 1.0)] if hidden is not None else []
        if source is None:
            delays = [(column, -ns / self.unit_ns) for column, ns in delayed]
            self.program.row([(sink, 1.0), *less, *delays], low=0.0)
            return
        slack = 0.0 if always else max(self._between(source)[1] - self._between(sink)[0], 0.0)
        delays = [(column, -(ns / self.unit_ns + slack)) for column, ns in delayed]
        self.program.row([(sink, 1.0), (source, -1.0), *less, *delays], low=-slack)

    def _between(self, time: Column) -> tuple[float, float]:
        return self.between.get(time, (0.0, UNITS))

    def _transforms(self, position: int) -> None:
        """The time at which what begins at `position` has its operands in its layout.

        Transforms are done one after the other, on one resource, when all operands are there.
        """
        flows, begun = self.flows[position], self._time("begun", position)
        spent = [(flow.column, -flow.edge.latency_ns / self.unit_ns) for flow in flows]
        self.program.row([(begun, 1.0), *spent], low=0.0)
        starting = self.beginning[position]
        for name in sorted({name for _, v in starting for name in v.reads}):
            source = self._ready(name)
            if source is not None:
                reading = [(column, -UNITS) for column, v in starting if name in v.reads]
                self.program.row([(begun, 1.0), (source, -1.0), *spent, *reading], low=-UNITS)
        for flow in flows:
            resource = flow.edge.task.resource
            before, left = self._free(resource, position - 1), self._free(resource, position)
            if before is not None:
                entries = [(begun, 1.0), (before, -1.0), *spent, (flow.column, -UNITS)]
                self.program.row(summed(entries), low=-UNITS)
            self.program.row([(left, 1.0), (begun, -1.0), (flow.column, -UNITS)], low=-UNITS)

    def _beginnings(
        self, position: int, names: Sequence[str], variants: Taken
    ) -> list[tuple[Column | None, Taken]]:
        """What the inputs of `variants` are there by: a time, and the variants that wait for it."""
        if self.flows[position]:
            return [(self._time("begun", position), variants)]
        return [(self._ready(name), [(c, v) for c, v in variants if name in v.reads]) for name in names]

    def _resources(self, position: int, starting: Taken, hidden: Column | None) -> None:
        inputs = sorted({name for _, v in starting for name in v.reads})
        for sink in self.resources:
            left = self._free(sink, position)
            for source in self.resources:
                delayed = _delayed(starting, source, sink)
                before = self._free(source, position - 1)
                if source == sink or (delayed and before is not None):
                    self._wait(left, before, delayed, source == sink, hidden)
            for time, waiting in self._beginnings(position, inputs, starting):
                delayed = _delayed(waiting, START, sink)
                if delayed:
                    self._wait(left, time, delayed, False, hidden)

    def _results(self, position: int, ending: Taken, hidden: Column | None) -> None:
        ready = self._ready(self.problem.graph.regions[position].name)
        self._wait(ready, None, _delayed(ending, START, END), True, hidden)
        for name in sorted({name for _, v in ending for name in (*v.reads, *v.late)}):
            source = self._ready(name)
            if source is not None:
                # Whatever is chosen, a result is there no sooner than what it was made of.
                reading = [(c, v) for c, v in ending if name in v.reads]
                self._wait(ready, source, _delayed(reading, START, END), True, hidden)
        for begin in sorted({v.begin for _, v in ending}):
            begun_here = [(c, v) for c, v in ending if v.begin == begin]
            if self.flows[begin]:
                delayed = _delayed(begun_here, START, END)
                self._wait(ready, self._time("begun", begin), delayed, False, hidden)
            for source in self.resources:
                delayed = _delayed(begun_here, source, END)
                before = self._free(source, begin - 1)
                if delayed and before is not None:
                    self._wait(ready, before, delayed, False, hidden)

    # The end.

    def _memory(self) -> Column:
        copying = {
            position: [(flow.tensor, flow.column) for flow in flows if flow.edge.task.launched]
            for position, flows in self.flows.items()
        }
        taken = list(zip(self.y, self.variants))
        rows = MemoryRows(self.problem, self.program, taken, self.doing, self.last, copying)
        rows.add(always=self.least_memory)
        if self.problem.limit.apart:
            RegionRows(self.problem, self.program, self.beginning, self.doing).add(rows.peak)
        return rows.peak

    def _objective(self) -> None:
        if self.least_memory:
            self.program.charge([(self.peak, 1.0)])
            return
        problem, weights = self.problem, self.problem.weights
        self.program.charge((column, weights.per_ns * ns) for column, ns in self.times)
        self.program.charge((column, weights.per_pj * pj) for column, pj in self._energies())
        self.program.charge((column, problem.begins[state]) for state, column in self.begun.items())
        errors = ((column, v.candidate.error) for column, v in zip(self.y, self.variants))
        self.program.charge((column, weights.per_error * error) for column, error in errors)

    def _energies(self) -> Entries:
        of_flows = [
            (flow.column, flow.edge.task.energy_pj) for flows in self.flows.values() for flow in flows
        ]
        return [(column, v.energy_pj) for column, v in zip(self.y, self.variants)] + of_flows

    def _bound(self, bound: Bound) -> None:
        # Tolerances are absolute: the row is brought to the size of the others.
        size = max(abs(bound.at_most), 1e-300) / UNITS
        entries = [(column, bound.of(v.candidate) / size) for column, v in zip(self.y, self.variants)]
        entries += [(column, bound.per_pj * pj / size) for column, pj in self._energies()]
        entries += [(column, bound.per_ns * ns / size) for column, ns in self.times]
        self.program.row(summed(entries), high=UNITS)

    @property
    def size(self) -> int:
        """How many columns it has."""
        return self.program.columns

    def solve(
        self,
        until: State | None = None,
        within_ns: float = math.inf,
        hidden_ns: Mapping[str, float] | None = None,
    ) -> tuple[Outcome, list[Variant]]:
        """What is known within the time limit, and the variants of the best cover, in order.

        Parameters
        ----------
        until : State, optional
            The state to end in; any if None.
        within_ns : float
            How long it may take.
        hidden_ns : mapping of str to float, optional
            By device, how much of a launch that waits for the last region has to be hidden behind it.
        """
        also = list(self._ending(until)) if until else []
        if within_ns < math.inf:
            also.append(
                ([(c, ns / self.unit_ns) for c, ns in self.times], -math.inf, within_ns / self.unit_ns)
            )
        if hidden_ns and self.ahead:
            also += [self.ahead.requiring(device, ns) for device, ns in hidden_ns.items()]
        outcome = self.program.solve(also, self.near)
        chosen = [v for column, v in zip(self.y, self.variants) if outcome.chosen(column)]
        return outcome, sorted(chosen, key=lambda v: v.begin)

    def begun_in(self, outcome: Outcome) -> State:
        """The state in which the best cover begins."""
        return next(state for state, column in self.begun.items() if outcome.chosen(column))


def _equal(entries: Entries, holds: bool) -> Row:
    """Whether one of some binaries is taken, or none."""
    return entries, float(holds), float(holds)


def _delayed(variants: Taken, source: str, sink: str) -> list[tuple[Column, float]]:
    delays = [(column, v.delays_ns.get((source, sink))) for column, v in variants]
    return [(column, ns) for column, ns in delays if ns is not None]
