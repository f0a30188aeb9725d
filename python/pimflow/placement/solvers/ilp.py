"""The exact choice where branches run on both devices at once: an integer program a segment.

The evaluator's recurrence is linear in the choice once the order of tasks on each resource is given, and
that is the order of the regions: one binary a variant, and the time at which a result is there and at
which each resource is free after each region.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, sparse

from pimflow.core.candidate import RESOURCES, Candidate, CostTable
from pimflow.core.region import RegionGraph
from pimflow.errors import UsageError
from pimflow.placement.solvers import milp, steps
from pimflow.placement.solvers.dynamic_programming import (
    LATENCY,
    Partial,
    Solution,
    Ways,
    Weights,
    best,
    done,
    offer,
    one_by_one,
)
from pimflow.placement.solvers.segments import merged
from pimflow.placement.solvers.steps import State
from pimflow.placement.solvers.variants import END, START, SegmentProblem, Variant

RELATIVE_GAP = 1e-6
INFEASIBLE = 2  # scipy's status
UNITS = 100.0  # Times are counted so that the horizon is so many: tolerances are absolute.
TIME_LIMIT_S = 20.0  # for one integer program; what is not proved by then shows in the bound


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A row over the whole plan: a weighted sum of latency and of candidates, and its upper bound."""

    at_most: float
    per_ns: float = 0.0
    of: Callable[[Candidate], float] = lambda _: 0.0
    per_pj: float = 0.0


class _Rows:
    """An integer program under construction: named columns, sparse rows."""

    def __init__(self) -> None:
        self.columns: dict[tuple, int] = {}
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def column(self, *name: object) -> int:
        return self.columns.setdefault(name, len(self.columns))

    def row(self, entries: Sequence[tuple[int, float]], low: float, high: float = np.inf) -> None:
        number = len(self.low)
        self.entries += [(number, column, factor) for column, factor in entries]
        self.low.append(low)
        self.high.append(high)

    def constraint(self) -> optimize.LinearConstraint:
        rows, columns, factors = zip(*self.entries)
        shape = (len(self.low), len(self.columns))
        return optimize.LinearConstraint(
            sparse.csr_matrix((factors, (rows, columns)), shape=shape), self.low, self.high
        )


class _Program:
    """The integer program of one `SegmentProblem`.

    Parameters
    ----------
    problem : SegmentProblem
    until : State or None
        The state to end in; any if None.
    horizon_ns : float
        No plan that matters takes longer.
    bounds : sequence of Bound
    """

    def __init__(
        self, problem: SegmentProblem, until: State | None, horizon_ns: float, bounds: Sequence[Bound] = ()
    ):
        self.problem, self.unit_ns = problem, max(horizon_ns, 1.0) / UNITS
        self.variants = problem.variants
        self.rows = _Rows()
        self.y = [self.rows.column("does", number) for number in range(len(self.variants))]
        self.total = self.rows.column("total")
        self._index()
        self._exact_cover()
        self._states(until)
        for position in range(*problem.segment):
            self._resources(position)
            self._results(position)
        self._total()
        for bound in bounds:
            amounts = [bound.of(v.candidate) + bound.per_pj * v.energy_pj for v in self.variants]
            # Tolerances are absolute: the row is brought to the size of the others.
            size = max(abs(bound.at_most), 1e-300) / UNITS
            entries = [(column, amount / size) for column, amount in zip(self.y, amounts)]
            entries.append((self.total, bound.per_ns * self.unit_ns / size))
            self.rows.row(entries, -np.inf, UNITS)

    def _index(self) -> None:
        """Variants with their columns: by where they begin and end, what they do, and what they take over."""
        self.beginning, self.ending, self.doing, self.last = (defaultdict(list) for _ in range(4))
        self.taking: dict[str, list[tuple[int, Variant]]] = defaultdict(list)
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

    def _exact_cover(self) -> None:
        for position in range(*self.problem.segment):
            self.rows.row([(column, 1.0) for column, _ in self.doing[position]], 1.0, 1.0)

    def _states(self, until: State | None) -> None:
        """Add rows: candidates take over what is pending, and the segment ends in the requested state."""
        problem, (_, end) = self.problem, self.problem.segment
        order = problem.order
        for name in sorted(problem.may_pend):
            left = [(c, 1.0) for c, v in self._leaving(order[name], "pending")]
            if problem.first_reader(name) < end:
                taken = [(c, -1.0) for c, _ in self.taking[name]]
                self.rows.row(left + taken, 0.0, 0.0)
            elif until is not None:
                wanted = float(name in until.pending)
                self.rows.row(left, wanted, wanted)
        for position in range(problem.segment[0] + 1, end):
            goes_on = [(c, v) for c, v in self.beginning[position] if v.goes_on is True]
            alone = [(c, v) for c, v in self.beginning[position] if v.goes_on is False]
            if goes_on:
                before = [(c, -1.0) for c, _ in self._leaving(position - 1, "on pim")]
                self.rows.row([(c, 1.0) for c, _ in goes_on] + before, -np.inf, 0.0)
                self.rows.row([(c, 1.0) for c, _ in alone] + [(c, -f) for c, f in before], -np.inf, 1.0)
        for position in range(problem.segment[0] + 1, end + (until is not None)):
            self._open(position, until)
        if until is not None:
            wanted = float(until.on_pim == problem.graph.regions[end - 1].name)
            on_pim = [(c, 1.0) for c, _ in self._leaving(end - 1, "on pim")]
            self.rows.row(on_pim, wanted, wanted) if on_pim else None

    def _open(self, position: int, until: State | None) -> None:
        """Add rows: what is open before `position` is gone on with there, or is what the segment ends in."""
        at_end = until is not None and position == self.problem.segment[1]
        left = {v.candidate.leaves_open for _, v in self.last[position - 1]}
        taken = {until.open} if at_end else {v.candidate.goes_on_with for _, v in self.beginning[position]}
        for form in sorted((left | taken) - {""}):
            entries = [(c, 1.0) for c, v in self.last[position - 1] if v.candidate.leaves_open == form]
            if at_end:
                wanted = float(until.open == form)
                self.rows.row(entries, wanted, wanted)
                continue
            entries += [(c, -1.0) for c, v in self.beginning[position] if v.candidate.goes_on_with == form]
            self.rows.row(entries, 0.0, 0.0)

    def _leaving(self, position: int, what: str) -> list[tuple[int, Variant]]:
        return [(c, v) for c, v in self.last[position] if v.leaves == what]

    def _free(self, resource: str, position: int) -> int | None:
        """The column of the time when `resource` is free after `position`; None if that is the beginning."""
        begin, _ = self.problem.segment
        return self.rows.column("free", resource, position) if position >= begin else None

    def _ready(self, name: str) -> int | None:
        """The column of the time when a result is ready; None if it is ready at the beginning."""
        position = self.problem.order.get(name, -1)
        return self.rows.column("ready", position) if position >= self.problem.segment[0] else None

    def _wait(
        self,
        sink: int,
        source: int | None,
        delayed: list[tuple[int, float]],
        always: bool,
    ) -> None:
        """`sink` is not before `source` and the delay of what is chosen.

        What is not `delayed` does not wait at all, unless `always`: then it waits, without a delay.
        """
        if source is None:
            delays = [(column, -ns / self.unit_ns) for column, ns in delayed]
            self.rows.row([(sink, 1.0), *delays], 0.0)
            return
        slack = 0.0 if always else UNITS
        delays = [(column, -(ns / self.unit_ns + slack)) for column, ns in delayed]
        self.rows.row([(sink, 1.0), (source, -1.0), *delays], -slack)

    def _resources(self, position: int) -> None:
        starting = self.beginning[position]
        inputs = sorted({name for _, v in starting for name in v.reads})
        for sink in RESOURCES:
            left = self._free(sink, position)
            for source in RESOURCES:
                delayed = _delayed(starting, source, sink)
                before = self._free(source, position - 1)
                if source == sink or (delayed and before is not None):
                    self._wait(left, before, delayed, always=source == sink)
            for name in inputs:
                delayed = _delayed([(c, v) for c, v in starting if name in v.reads], START, sink)
                if delayed:
                    self._wait(left, self._ready(name), delayed, always=False)

    def _results(self, position: int) -> None:
        ending = self.ending[position]
        ready = self._ready(self.problem.graph.regions[position].name)
        self._wait(ready, None, _delayed(ending, START, END), always=True)
        for name in sorted({name for _, v in ending for name in (*v.reads, *v.late)}):
            source = self._ready(name)
            if source is not None:
                # Whatever is chosen, a result is there no sooner than what it was made of.
                reading = [(c, v) for c, v in ending if name in v.reads]
                self._wait(ready, source, _delayed(reading, START, END), always=True)
        for begin in sorted({v.begin for _, v in ending}):
            for source in RESOURCES:
                delayed = _delayed([(c, v) for c, v in ending if v.begin == begin], source, END)
                before = self._free(source, begin - 1)
                if delayed and before is not None:
                    self._wait(ready, before, delayed, always=False)

    def _total(self) -> None:
        begin, end = self.problem.segment
        for position in range(begin, end):
            ready = self._ready(self.problem.graph.regions[position].name)
            self._wait(self.total, ready, [], always=True)
        for resource in RESOURCES:
            self._wait(self.total, self._free(resource, end - 1), [], always=True)

    def solve(self) -> tuple[Partial | None, bool]:
        """The best cover found within the time limit, if any, and whether there may be one."""
        weights, count = self.problem.weights, len(self.rows.columns)
        costs, integral = np.zeros(count), np.zeros(count)
        costs[self.y] = [_untimed(weights, v) for v in self.variants]
        costs[self.total] = weights.per_ns * self.unit_ns
        integral[self.y] = 1
        upper = np.full(count, UNITS)
        upper[self.y] = 1.0
        scale = 1.0 / max(float(np.abs(costs).max()), 1e-300)
        result = milp.solve(
            costs * scale,
            integrality=integral,
            bounds=optimize.Bounds(0.0, upper),
            constraints=self.rows.constraint(),
            options={"mip_rel_gap": RELATIVE_GAP, "time_limit": TIME_LIMIT_S, "presolve": False},
        )
        if result.x is None:
            return None, result.status != INFEASIBLE
        chosen = sorted(
            (v for column, v in zip(self.y, self.variants) if result.x[column] > 0.5), key=lambda v: v.begin
        )
        latency_ns = self._latency_ns(chosen)
        value = weights.per_ns * latency_ns + sum(_untimed(weights, v) for v in chosen)
        partial = Partial(
            value=value,
            bound=min(value, float(result.mip_dual_bound) / scale),
            latency_ns=latency_ns,
            chosen=tuple(v.candidate for v in chosen),
        )
        return partial, True

    def _latency_ns(self, chosen: Sequence[Variant]) -> float:
        """The latency of a cover, without the solver's tolerances."""
        free_ns = dict.fromkeys(RESOURCES, 0.0)
        ready_ns: dict[str, float] = {}
        for v in chosen:
            begin_ns = max((ready_ns.get(name, 0.0) for name in v.reads), default=0.0)
            before = {START: begin_ns, **free_ns}
            leaves = dict.fromkeys((*RESOURCES, END), 0.0)
            for (source, sink), ns in v.delays_ns.items():
                leaves[sink] = max(leaves[sink], before[source] + ns)
            late_ns = (ready_ns.get(name, 0.0) for name in v.late)
            ready_ns |= dict.fromkeys(v.candidate.covers, max(leaves.pop(END), *late_ns, 0.0))
            free_ns = leaves
        return max(ready_ns.values())


def _untimed(weights: Weights, variant: Variant) -> float:
    """What a variant adds to the objective beside its time."""
    return weights.per_pj * variant.energy_pj + weights.per_error * variant.candidate.error


def _delayed(variants: list[tuple[int, Variant]], source: str, sink: str) -> list[tuple[int, float]]:
    delays = [(column, v.delays_ns.get((source, sink))) for column, v in variants]
    return [(column, ns) for column, ns in delays if ns is not None]


def at_once(problem: SegmentProblem) -> Ways:
    """The best covers of a segment when its branches overlap, by the state they end in."""
    ways: Ways = {}
    weights = problem.weights
    serial = one_by_one(problem.graph, problem.table, weights, problem.segment, problem.state)
    floor = weights.per_pj * _least_pj(problem)
    for until, known in serial.items():
        # Whatever is better than running one by one ends sooner than this.
        horizon_ns = (known.value - floor) / weights.per_ns if weights.per_ns else longest_ns(problem)
        best, _ = _Program(problem, until, horizon_ns).solve()
        late = Partial(value=known.value, bound=floor, latency_ns=known.latency_ns, chosen=known.chosen)
        offer(ways, until, best or late)
    return ways


def _least_pj(problem: SegmentProblem) -> float:
    """A lower bound of the energy of all covers of the segment."""
    regions = problem.graph.regions[slice(*problem.segment)]
    least = [float("inf")] * len(regions)
    for v in problem.variants:
        for position in range(v.begin, v.last + 1):
            share = v.energy_pj / (v.last - v.begin + 1)
            least[position - problem.segment[0]] = min(least[position - problem.segment[0]], share)
    return sum(least)


def solve_ilp(graph: RegionGraph, table: CostTable, weights: Weights = LATENCY) -> Solution:
    """The best exact cover when branches overlap as the evaluator lets them.

    Where the network narrows to one result, latencies of what is before and behind add up: between such
    places dynamic programming chooses, and inside the parts that branch an integer program does, one for
    each state to begin and to end in. A candidate may do several such parts, each in full.
    """
    segments = merged(graph, table)
    ways: dict[int, Ways] = {0: {State(): Partial()}, **{end: {} for _, end in segments}}
    for begin, end in segments:
        for state, partial in ways[begin].items():
            if end - begin > 1:
                problem = SegmentProblem(
                    graph=graph, table=table, weights=weights, segment=(begin, end), state=state
                )
                for after, step in at_once(problem).items():
                    offer(ways[end], after, partial.then(step))
            for candidate in table.candidates[graph.regions[begin].name]:
                behind = begin + len(candidate.covers)
                if not steps.fits(candidate, state):
                    continue
                if behind > end or behind == end == begin + 1:  # what a segment has inside was chosen above
                    after = steps.after(graph, candidate, state)
                    offer(ways[behind], after, partial.then(done(graph, table, weights, candidate, state)))
    return best(ways[len(graph.regions)]).solution()


def solve_whole(
    graph: RegionGraph, table: CostTable, weights: Weights = LATENCY, bounds: Sequence[Bound] = ()
) -> Solution | None:
    """The same by one integer program, under rows that no part of the network can answer for by itself.

    None if no cover keeps to them.

    Raises
    ------
    UsageError
        If neither a cover nor a proof that there is none was found within `TIME_LIMIT_S`.
    """
    everything = (0, len(graph.regions))
    problem = SegmentProblem(
        graph=graph, table=table, weights=weights, segment=everything, state=State(), bounded=bool(bounds)
    )
    best, possible = _Program(problem, None, longest_ns(problem), bounds).solve()
    if best is None and possible:
        raise UsageError(
            f"no plan for '{graph.name}' within the bounds was found in {TIME_LIMIT_S:g} s; loosen "
            "--max-latency, --max-energy, --max-error or --memory-budget"
        )
    return best and best.solution()


def longest_ns(problem: SegmentProblem) -> float:
    """An upper bound of the time of all covers of the segment."""
    slowest = dict.fromkeys(range(*problem.segment), 0.0)
    for v in problem.variants:
        slowest[v.begin] = max(slowest[v.begin], *v.delays_ns.values())
    return sum(slowest.values())
