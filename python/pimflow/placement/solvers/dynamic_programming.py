"""Dynamic programming over the regions in order: the best exact cover when they run one after the other."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from pimflow.core.candidate import Candidate, CostTable, Task, makespan_ns
from pimflow.core.region import RegionGraph
from pimflow.placement.solvers import steps
from pimflow.placement.solvers.dominance import Dominance
from pimflow.placement.solvers.launches import Behind, Running
from pimflow.placement.solvers.plan_memory import MemoryLimit, fits
from pimflow.placement.solvers.segments import Segment
from pimflow.placement.solvers.steps import Joint, Made, State
from pimflow.placement.solvers.ways import LATENCY, Partial, Solution, Ways, Weights, best, offer


def one_by_one(
    graph: RegionGraph,
    table: CostTable,
    weights: Weights,
    segment: Segment,
    begun: Ways,
    limit: MemoryLimit | None = None,
) -> Ways:
    """The best covers of a run of regions when they run one after the other, by the state they end in.

    They go on with those that are `begun`, by the state that these end in.

    Dynamic programming over the regions in order (PIMFlow, "Execution Mode and Task Size Search"; with
    its two slips mended). The state is which live results still have something pending, and whether a
    PIM submission may go on, so transition costs are exact on graphs with branches too; on a chain the
    recurrence is the slides'.
    """
    moves = Moves(graph, table, weights, limit, moving=limit is None)
    return some_one_by_one(moves, segment, begun, math.inf)[0]


def some_one_by_one(moves: Moves, segment: Segment, begun: Ways, most: float) -> tuple[Ways, bool]:
    """`one_by_one` that goes on with at most so many ways at each region, and whether there were no more.

    Those that take least; and of those in which most results lie canonically, where all can be read, one.
    """
    begin, end = segment
    ways: list[Ways] = [{} for _ in range(end - begin + 1)]
    ways[0] = begun
    all_of_them = True
    for position in range(begin, end):
        going_on = moves.dominance.worth_going_on(ways[position - begin], position)
        if len(going_on) > most:
            all_of_them = False
            going_on = _best_ways(going_on, int(most))
        for before, partial in going_on.items():
            for behind, after, step in moves.of(position, before):
                if behind <= end:
                    offer(ways[behind - begin], after, partial.then(step))
    return moves.dominance.worth_going_on(ways[-1], end), all_of_them


def _best_ways(ways: Ways, count: int) -> Ways:
    plainest = min(ways.items(), key=lambda way: (len(way[0].layouts), way[1].value))
    return dict([*sorted(ways.items(), key=lambda way: way[1].value)[:count], plainest])


class Moves:
    """What candidates lead to, and take alone: found once for all states that are alike for them.

    Those after which nothing can be better than after another that does the same regions are left out;
    for `moving`, see `Dominance`.
    """

    def __init__(
        self,
        graph: RegionGraph,
        table: CostTable,
        weights: Weights,
        limit: MemoryLimit | None,
        *,
        moving: bool,
    ):
        self.graph, self.table, self.weights, self.limit = graph, table, weights, limit
        self.dominance = Dominance(graph, table, weights, moving)
        self._beginning: dict[int, dict[tuple[str, ...], list[Alike]]] = {}
        self._found: dict[tuple[tuple[str, ...], State], Ways] = {}

    def of(self, position: int, state: State) -> Iterator[tuple[int, State, Partial]]:
        """From `state` with candidates that begin at `position`: where they lead, and what they take."""
        if position not in self._beginning:
            self._beginning[position] = self._all_alike(position)
        for covers, candidates in self._beginning[position].items():
            met, kept = steps.parted(self.graph, covers, state)
            if self.limit:  # what is pending elsewhere takes memory
                met = replace(met, pending=state.pending)
            if (covers, met) not in self._found:
                self._found[covers, met] = self._ways(candidates, met, position + len(covers))
            for after, step in self._found[covers, met].items():
                yield position + len(covers), after.beside(kept), step

    def _all_alike(self, position: int) -> dict[tuple[str, ...], list[Alike]]:
        found: dict[tuple[str, ...], dict[Hashable, list[Candidate]]] = {}
        for candidate in self.table.candidates[self.graph.regions[position].name]:
            # Each takes memory of its own.
            key = candidate.name if self.limit else steps.alike(candidate)
            found.setdefault(candidate.covers, {}).setdefault(key, []).append(candidate)
        return {
            covers: [Alike(self.table, self.weights, each) for each in of_covers.values()]
            for covers, of_covers in found.items()
        }

    def _ways(self, candidates: Iterable[Alike], state: State, behind: int) -> Ways:
        graph, table = self.graph, self.table
        ways: Ways = {}
        for alike in candidates:
            if fits(graph, table, alike.one, state, self.limit):
                moved = steps.transforms(graph, table, alike.one, state).values()
                before = _taken(self.weights, sum(task.duration_ns for task in moved), moved)
                left = steps.after(graph, alike.one, state)
                for running, best in alike.behind(steps.Joint.of(graph, alike.one, state), state.running):
                    offer(ways, replace(left, running=running), before.then(best))
        return self.dominance.worth_going_on(ways, behind)


class Alike:
    """Candidates that do the same regions and meet any state alike (`steps.alike`)."""

    def __init__(self, table: CostTable, weights: Weights, candidates: Sequence[Candidate]):
        self.table, self.weights, self.candidates = table, weights, candidates
        self._leaving: dict[Joint, list[Leaving]] = {}

    @property
    def one(self) -> Candidate:
        """Any of them."""
        return self.candidates[0]

    def behind(self, joint: Joint, running: Running | None) -> Iterator[tuple[Running | None, Partial]]:
        """Joined so to what is `running`: what may run behind them, and the best that leave that."""
        if joint not in self._leaving:
            self._leaving[joint] = self._all_leaving(joint)
        for leaving in self._leaving[joint]:
            yield leaving.one.then(running), leaving.best(running)

    def _all_leaving(self, joint: Joint) -> list[Leaving]:
        found: dict[Behind | None, list[tuple[Candidate, Made]]] = {}
        for candidate in self.candidates:
            made = Made.of(self.table, candidate, joint)
            found.setdefault(made.behind, []).append((candidate, made))
        return [Leaving(self.weights, each) for each in found.values()]


class Leaving:
    """Such candidates that leave the same running."""

    def __init__(self, weights: Weights, made: Sequence[tuple[Candidate, Made]]):
        self.weights, self.made = weights, made
        self._best: dict[tuple[float, ...], Partial] = {}
        tasks = (each.launching.tasks[number] for _, each in made for number, _ in each.launching.first)
        self._launched = sorted({task.resource for task in tasks})

    @property
    def one(self) -> Made:
        """Any of them."""
        return self.made[0][1]

    def best(self, running: Running | None) -> Partial:
        """The best of them behind what is `running`."""
        hides_ns = self.one.hides_ns(running)
        hidden_ns = tuple(map(hides_ns, self._launched))
        if hidden_ns not in self._best:
            taken = (self._taken(candidate, made.launching.left(hides_ns)) for candidate, made in self.made)
            self._best[hidden_ns] = min(taken, key=lambda partial: partial.value)
        return self._best[hidden_ns]

    def _taken(self, candidate: Candidate, tasks: tuple[Task, ...]) -> Partial:
        return _taken(self.weights, makespan_ns(tasks), tasks, candidate)


def _taken(weights: Weights, latency_ns: float, tasks: Collection[Task], *chosen: Candidate) -> Partial:
    value = weights.of(latency_ns, sum(task.energy_pj for task in tasks), chosen)
    return Partial(value=value, bound=value, latency_ns=latency_ns, chosen=chosen)


def solve_dp(
    graph: RegionGraph, table: CostTable, weights: Weights = LATENCY, limit: MemoryLimit | None = None
) -> Solution | None:
    """The best exact cover when regions run one after the other; see `one_by_one`. None without any."""
    whole = (0, len(graph.regions))
    found = best(one_by_one(graph, table, weights, whole, {steps.begin(table): Partial()}, limit))
    return found and found.solution()
