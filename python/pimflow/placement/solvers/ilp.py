"""The exact choice where branches run on both devices at once: an integer program a segment."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pimflow.core.candidate import CostTable
from pimflow.core.integer_program import TIME_LIMIT_S
from pimflow.core.region import RegionGraph
from pimflow.errors import UsageError
from pimflow.placement.solvers import steps
from pimflow.placement.solvers.dynamic_programming import Moves, some_one_by_one
from pimflow.placement.solvers.evaluate import Moment, advance, execute
from pimflow.placement.solvers.plan_memory import MemoryLimit
from pimflow.placement.solvers.program import Bound, Program
from pimflow.placement.solvers.segments import merged
from pimflow.placement.solvers.steps import State
from pimflow.placement.solvers.variants import SegmentProblem
from pimflow.placement.solvers.ways import LATENCY, Partial, Solution, Ways, Weights, best, offer

SAME = 1e-6  # of a segment: what is less is no other way to end it
MOST_WAYS = 500  # one by one at a region inside a segment: which tensors lie where multiplies them
MOST_ENDS = 8  # programs of a part whose end is one state of several
MANY_COLUMNS = 1800  # of a program that takes seconds: a larger part has none for single states to end in
MOST_ENDS_AHEAD = 4  # the same where launches are issued ahead: each has several programs
STEP = 2.0**-20  # ns, or the unit of the objective; differences are multiples of it (`counted`)


def solved(program: Program, begun: Ways, **ending: Any) -> tuple[Partial | None, State | None, bool]:
    """The best cover found within the time limit, if any, the state it ends in, whether there may be one.

    It goes on with what is `begun`, by the state that this ends in; `ending` as in `Program.solve`.
    """
    outcome, variants = program.solve(**ending)
    problem, chosen = program.problem, tuple(v.candidate for v in variants)
    if not variants:
        return None, None, not outcome.infeasible
    # By the evaluator, without the solver's tolerances.
    state = program.begun_in(outcome)
    moment, energy_pj = Moment(free_ns={}, ready_ns={}, state=state), 0.0
    for candidate in chosen:
        if not steps.fits(problem.graph, problem.table, candidate, moment.state):
            where = f"'{candidate.name}' of '{candidate.covers[0]}'"
            raise ValueError(f"{where} was chosen where it cannot be done")
        moment, placed = advance(problem.graph, problem.table, candidate, moment)
        energy_pj += sum(task.energy_pj for task, _ in placed)
    latency_ns = max(moment.ready_ns.values())
    value = problem.weights.of(latency_ns, energy_pj, chosen)
    own = Partial(value=value, bound=value, latency_ns=latency_ns, chosen=chosen)
    best = begun[state].then(own)
    unproved = max(way.value - way.bound for way in begun.values())
    bound = least(begun) + outcome.bound - unproved
    return replace(best, bound=min(best.bound, bound)), moment.state, True


def least(ways: Ways) -> float:
    """The value of the best of some covers."""
    return min(way.value for way in ways.values())


def counted(difference: float) -> float:
    """`difference` of two sums as a multiple of `STEP`, less than a step from it.

    Without what their rounding leaves, blocks that are alike have the same program, which is solved once.
    """
    return math.ceil(difference / STEP - 0.25) * STEP if difference < math.inf else difference


def rounded_up(number: float) -> float:
    """`number`, or up to a 32nd more: blocks that are alike have the same, though their proofs differ."""
    if not 0 < number < math.inf:
        return number
    step = 2.0 ** (math.floor(math.log2(number)) - 5)
    return math.ceil(number / step) * step


Move = tuple[tuple[int, State], Partial]  # where it leads, by position and state, and what it takes
Onward = Callable[[State], list[Move]]


class Reached:
    """How little the best known covers take to where steps from the ends of a segment lead.

    Parameters
    ----------
    ends : sequence of State
        The states that the segment may end in.
    onward : callable, optional
        All steps from such a state, if they add up with what is before: else it leads to itself.
    at_end : bool
        Whether nothing is behind the segment: then all states are as good.
    """

    def __init__(self, ends: Sequence[State], onward: Onward | None, at_end: bool):
        self.at_end = at_end
        onward = (lambda _: [((-1, State()), Partial())]) if at_end else onward
        self._steps: dict[State, list[Move]] = {
            until: onward(until) if onward else [((-1, until), Partial())] for until in ends
        }
        self._least: dict[tuple[int, State], float] = {}

    def by(self, until: State, value: float) -> None:
        """A cover of that value ends in `until`."""
        for place, step in self._steps.get(until, ()):
            self._least[place] = min(self._least.get(place, math.inf), value + step.value)

    def below(self, until: State) -> float:
        """What a cover that ends in `until` has to fall below to be of use."""
        more = (self._least.get(place, math.inf) - step.value for place, step in self._steps[until])
        return max(more, default=-math.inf)


def at_once(
    problem: SegmentProblem, begun: Ways, rivals: Mapping[State, float], onward: Onward | None
) -> tuple[Ways, float]:
    """The best covers up to the end of a segment when its branches overlap, by the state they end in.

    Beside them, what all others take at least; infinite if no others are of use.

    Parameters
    ----------
    begun : Ways
        The best covers of what is before, by the state that they end in: `problem.begins`.
    rivals : mapping of State to float
        By state, what a cover has to fall below to be of use: others end there.
    onward : callable, optional
        All steps from a state that the segment may end in, if they add up with what is before.
    """
    weights, table = problem.weights, problem.table
    most = MOST_WAYS if len(problem.resources) > 1 else math.inf
    moves = Moves(problem.graph, table, weights, problem.limit, moving=False)
    serial, every = some_one_by_one(moves, problem.segment, begun, most)
    least_pj = _least_pj(problem)
    nothing_fits = math.isinf(least_pj) or (every and not serial)
    if len(problem.resources) == 1 or nothing_fits:  # nothing overlaps
        return serial, math.inf
    found = {replace(state, running=None) for state in serial}
    ends = [*serial, *(() if every else sorted(_ends(problem) - found, key=repr))]
    floor = min(way.bound for way in begun.values()) + weights.per_pj * least_pj
    reached = Reached(ends, onward, problem.segment[1] == len(problem.graph.regions))
    for until, value in (*rivals.items(), *((until, known.value) for until, known in serial.items())):
        reached.by(until, value)

    def within_ns(value: float) -> float:
        """How long a cover may take that is to be better than `value`, or a little longer."""
        return rounded_up((value - floor) / weights.per_ns) if weights.per_ns else math.inf

    # No cover is of use that takes longer than the longest one by one, and than what that may hide more.
    hiding_ns = sum(table.longest_launch_ns.values()) if problem.running else 0.0
    least = min((known.value for known in serial.values()), default=math.inf)
    longest = within_ns(max(least, *map(reached.below, ends))) + hiding_ns
    horizon_ns = rounded_up(min(longest * (1 + SAME), longest_ns(problem)))
    part = Part(program=Program(problem, horizon_ns), begun=begun, within_ns=within_ns)
    if reached.at_end or not problem.running:
        return _however_it_ends(part, serial, ends, reached, floor)
    return _hiding_launches(part, serial, ends, floor)


def _ends(problem: SegmentProblem) -> set[State]:
    """All states that the segment may end in, whatever is read inside it, and perhaps others."""
    graph, (begin, end) = problem.graph, problem.segment
    behind = {name for name, reader in graph.last_readers.items() if problem.order[reader] >= end}

    def left(state: State) -> State:
        layouts = frozenset(each for each in state.layouts if each[0] in behind)
        return replace(state, pending=state.pending & behind, layouts=layouts, running=None)

    states: list[set[State]] = [set() for _ in range(begin, end + 1)]
    states[0] = set(map(left, problem.begins))
    for position in range(begin, end):
        for candidate in problem.table.candidates[graph.regions[position].name]:
            last = position + len(candidate.covers)
            for state in states[position - begin] if last <= end else ():
                if candidate.goes_on_with == state.open:
                    states[last - begin].add(left(steps.after(graph, candidate, state)))
    return states[-1]


@dataclass(frozen=True, kw_only=True)
class Part:
    """The program of a part of a network, and what is `begun` before; `within_ns` as in `at_once`."""

    program: Program
    begun: Ways
    within_ns: Callable[[float], float]

    def solved(self, **ending: Any) -> tuple[Partial | None, State | None, bool]:
        """See `solved`."""
        return solved(self.program, self.begun, **ending)


def _however_it_ends(
    part: Part, serial: Ways, ends: Sequence[State], reached: Reached, floor: float
) -> tuple[Ways, float]:
    """`at_once` where launches are not issued ahead, or nothing is behind.

    A cover is of use only if some step from where it ends leads somewhere for less than others lead there.
    What the segment takes at least, however it ends, tells so of most states without programs of their own,
    and those are left out. After `MOST_ENDS` programs, of large parts fewer, states that are reached later
    one by one keep that cover.
    """
    timed = part.program.problem.weights.per_ns > 0
    ways = {until: replace(known, bound=floor) for until, known in serial.items()}
    bounded, ended, others = floor, None, math.inf
    if len(ends) > 1 and (timed or reached.at_end):
        best, state, _ = part.solved()
        if best:
            bounded, ended = max(floor, best.bound), state
            known = min(best, serial.get(ended, best), key=lambda way: way.value)
            ways[ended] = replace(known, bound=bounded)
            if reached.at_end:
                return {until: replace(way, bound=bounded) for until, way in ways.items()}, math.inf
            reached.by(ended, known.value)
    most, programs = _most_ends(part.program, MOST_ENDS), 0
    for until in sorted(ends, key=lambda until: serial[until].value if until in serial else math.inf):
        if until == ended:
            continue
        value, known, bound = reached.below(until), serial.get(until), bounded
        if programs < most and (value > bounded or not timed):
            programs += 1
            best, _, possible = part.solved(until=until, within_ns=part.within_ns(value))
            bound = best.bound if best else bounded if possible else value
            if best and (not known or best.value < known.value):
                known = best
        if not known:
            others = min(others, bound) if bound < value else others
        elif bound < value or counted(known.value - value) <= 0:
            ways[until] = replace(known, bound=min(bound, known.value))
            reached.by(until, known.value)
        else:  # it is of no use, nor is any other that ends there
            ways.pop(until, None)
    return ways, others


def _most_ends(program: Program, most: int) -> int:
    """How many states to end in have programs: the time of each grows with the square of its columns."""
    return min(most, int((MANY_COLUMNS / program.size) ** 2))


def _hiding_launches(part: Part, serial: Ways, ends: Sequence[State], floor: float) -> tuple[Ways, float]:
    """`at_once` where launches are issued ahead: covers that hide more of the next ones are of use too.

    Of more than `MOST_ENDS_AHEAD` states to end in, of large parts of more than one, those that are reached
    last one by one keep that cover.
    """
    most = max(_most_ends(part.program, MOST_ENDS_AHEAD), 1)
    ways: Ways = {}
    others = math.inf
    alike: dict[State, list[Partial]] = {replace(until, running=None): [] for until in ends}
    for until, known in serial.items():
        offer(ways, until, replace(known, bound=floor))
        alike[replace(until, running=None)].append(known)
    # Whatever is better than running one by one ends sooner than these.
    values = {until: min((p.value for p in partials), default=math.inf) for until, partials in alike.items()}
    for number, (until, value) in enumerate(sorted(values.items(), key=lambda each: each[1])):
        partials = alike[until]
        found, possible = _leaving_most(part, until, value) if number < most else ([], True)
        if found:
            ways = {state: each for state, each in ways.items() if replace(state, running=None) != until}
            for state, each in found:
                offer(ways, state, each)
        elif possible and not partials:
            others = floor
    return ways, others


def _leaving_most(part: Part, until: State, value: float) -> tuple[list[tuple[State, Partial]], bool]:
    """Covers that end in `until` for less than `value`: the best, and those that hide more of a launch.

    One that is later than another by as much as it hides more of the longest launch on each device, added
    up, is of no use. Beside them, whether there may be one.
    """
    problem = part.program.problem
    longest_ns = problem.table.longest_launch_ns
    found: list[tuple[State, Partial]] = []
    possible = False
    asked: list[tuple[dict[str, float], float]] = [({}, part.within_ns(value))]
    while asked:
        least_ns, within_ns = asked.pop()
        best, state, answer = part.solved(until=until, within_ns=within_ns, hidden_ns=least_ns)
        possible |= answer
        if best is None:
            continue
        found.append((state, best))
        if not problem.weights.per_ns:
            continue
        hidden_ns = {device: state.running.hides_ns(device, True) for device in longest_ns}
        within_ns = part.within_ns(best.value) + sum(
            max(ns - hidden_ns[device], 0.0) for device, ns in longest_ns.items()
        )
        for device, ns in longest_ns.items():
            # Within its tolerances, the solver may find what hides less than asked: again that, if not more.
            short_ns = max(least_ns.get(device, 0.0) - hidden_ns[device], 0.0)
            more_ns = hidden_ns[device] + max(SAME * within_ns, 10 * short_ns)
            if more_ns < ns:
                asked.append(({**least_ns, device: more_ns}, within_ns))
    return found, possible


def _least_pj(problem: SegmentProblem) -> float:
    """A lower bound of the energy of all covers of the segment; infinite if there are none."""
    regions = problem.graph.regions[slice(*problem.segment)]
    least = [float("inf")] * len(regions)
    for v in problem.variants:
        for position in range(v.begin, v.last + 1):
            share = v.energy_pj / (v.last - v.begin + 1)
            least[position - problem.segment[0]] = min(least[position - problem.segment[0]], share)
    return sum(least)


def solve_ilp(
    graph: RegionGraph, table: CostTable, weights: Weights = LATENCY, limit: MemoryLimit | None = None
) -> Solution | None:
    """The best exact cover when branches overlap as the evaluator lets them; None within no limit.

    Where the network narrows to one result, latencies of what is before and behind add up: between such
    places dynamic programming chooses, and inside the parts that branch an integer program does, one for
    each state to begin and to end in. A candidate may do several such parts, each in full.
    """
    segments = merged(graph, table)
    ways: dict[int, Ways] = {0: {steps.begin(table): Partial()}, **{end: {} for _, end in segments}}
    ends = dict(segments)
    moves = Moves(graph, table, weights, limit, moving=limit is None)
    others = math.inf

    @functools.cache
    def onward(begin: int, state: State) -> list[Move]:
        """The candidates that may be done in `state` at the begin of a segment, but for parts of it."""
        end = ends[begin]
        every = moves.of(begin, state)  # inside the segment, it chooses
        return [((to, after), step) for to, after, step in every if to > end or end == begin + 1]

    for begin, end in segments:
        going_on = moves.dominance.worth_going_on(ways[begin], begin)
        alone = end in ends and ends[end] == end + 1
        together: dict[object, Ways] = {}
        for state, partial in sorted(going_on.items(), key=lambda way: way[1].value):
            together.setdefault(state if limit else state.running and state.running.of, {})[state] = partial
            for (behind, after), step in onward(begin, state):
                offer(ways[behind], after, partial.then(step))
        for begun in together.values() if end - begin > 1 else ():
            problem = SegmentProblem(
                graph=graph,
                table=table,
                weights=weights,
                segment=(begin, end),
                begins={state: counted(way.value - least(begun)) for state, way in begun.items()},
                limit=limit,
            )
            rivals = {after: way.value for after, way in ways[end].items()}
            then = functools.partial(onward, end) if alone and not problem.running else None
            found, least_of_others = at_once(problem, begun, rivals, then)
            others = min(others, least_of_others)
            for after, way in found.items():
                offer(ways[end], after, way)
    least_way = best(ways[len(graph.regions)])
    if least_way is None:
        return None
    latency_ns = least_way.latency_ns
    if not weights.per_ns:  # branches of covers that were found one by one overlap all the same
        latency_ns = execute(graph, least_way.chosen, table).latency_ns
    return replace(least_way, bound=min(least_way.bound, others), latency_ns=latency_ns).solution()


def solve_whole(
    graph: RegionGraph,
    table: CostTable,
    weights: Weights = LATENCY,
    bounds: Sequence[Bound] = (),
    limit: MemoryLimit | None = None,
) -> Solution | None:
    """The same by one integer program, under rows that no part of the network can answer for by itself.

    None if no cover keeps to them.

    Raises
    ------
    UsageError
        If neither a cover nor a proof that there is none was found within `TIME_LIMIT_S`.
    """
    begin = steps.begin(table)
    problem = SegmentProblem(
        graph=graph,
        table=table,
        weights=weights,
        segment=(0, len(graph.regions)),
        begins={begin: 0.0},
        bounded=bool(bounds),
        limit=limit,
    )
    best, _, possible = solved(Program(problem, longest_ns(problem), bounds), {begin: Partial()})
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
        delays = (v.delays_ns, *v.launching.values())
        slowest[v.begin] = max([slowest[v.begin], *(ns for each in delays for ns in each.values())])
    changes = {}
    for (tensor, *_), edge in problem.table.transforms.items():
        changes[tensor] = max(changes.get(tensor, 0.0), edge.latency_ns)
    readers = problem.graph.readers
    changed = sum(ns * max(len(readers.get(tensor, ())), 1) for tensor, ns in changes.items())
    return sum(slowest.values()) + changed
