"""The exact choice where branches run on both devices at once: an integer program a segment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pimflow.core.candidate import CostTable
from pimflow.core.integer_program import TIME_LIMIT_S
from pimflow.core.region import RegionGraph
from pimflow.errors import UsageError
from pimflow.placement.solvers import steps
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
    worth_going_on,
)
from pimflow.placement.solvers.evaluate import Moment, advance
from pimflow.placement.solvers.plan_memory import MemoryLimit, fits
from pimflow.placement.solvers.program import Bound, Program
from pimflow.placement.solvers.segments import merged
from pimflow.placement.solvers.steps import State
from pimflow.placement.solvers.variants import SegmentProblem

SAME = 1e-6  # of a segment: what is less is no other way to end it


def solved(program: Program) -> tuple[Partial | None, State, bool]:
    """The best cover found within the time limit, if any, the state it ends in, whether there may be one."""
    outcome, variants = program.solve()
    problem, chosen = program.problem, tuple(v.candidate for v in variants)
    if not variants:
        return None, problem.state, not outcome.infeasible
    # By the evaluator, without the solver's tolerances.
    moment, energy_pj = Moment(free_ns={}, ready_ns={}, state=problem.state), 0.0
    for candidate in chosen:
        moment, placed = advance(problem.graph, problem.table, candidate, moment)
        energy_pj += sum(task.energy_pj for task, _ in placed)
    latency_ns = max(moment.ready_ns.values())
    value = problem.weights.of(latency_ns, energy_pj, chosen)
    bound = min(value, outcome.bound)
    best = Partial(value=value, bound=bound, latency_ns=latency_ns, chosen=chosen)
    return best, moment.state, True


def at_once(problem: SegmentProblem, rivals: Mapping[State, float]) -> Ways:
    """The best covers of a segment when its branches overlap, by the state they end in.

    Parameters
    ----------
    rivals : mapping of State to float
        By state, what a cover has to fall below to be of use: others end there.
    """
    ways: Ways = {}
    weights = problem.weights
    serial = one_by_one(problem.graph, problem.table, weights, problem.segment, problem.state, problem.limit)
    if len(problem.resources) == 1:  # nothing overlaps
        return serial
    floor = weights.per_pj * _least_pj(problem)
    ends: dict[State, list[Partial]] = {}
    for until, known in serial.items():
        late = Partial(value=known.value, bound=floor, latency_ns=known.latency_ns, chosen=known.chosen)
        offer(ways, until, late)
        ends.setdefault(replace(until, running=None), []).append(known)
    least = floor
    if problem.state.running is None and len(ends) > 1 and weights.per_ns:
        # However it ends: most ways to begin turn out to be no use by this alone.
        best, _, _ = solved(Program(problem, None, longest_ns(problem)))
        least = max(floor, best.bound) if best else floor
    for until, known in ends.items():
        # Whatever is better than running one by one, or than another way to end so, ends sooner than this.
        value = min(*(partial.value for partial in known), rivals.get(until, math.inf))
        horizon_ns = (value - floor) / weights.per_ns if weights.per_ns else longest_ns(problem)
        if problem.state.running is None:
            bound = least
            if value > least or not weights.per_ns:
                best, _, possible = solved(Program(problem, until, horizon_ns))
                if best:
                    ways[until] = best
                    continue
                bound = least if possible else value
            ways[until] = replace(ways[until], bound=min(bound, ways[until].value))
        elif found := _leaving_most(problem, until, horizon_ns, floor):
            ways = {state: each for state, each in ways.items() if replace(state, running=None) != until}
            for state, each in found:
                offer(ways, state, each)
    return ways


def _leaving_most(
    problem: SegmentProblem, until: State, horizon_ns: float, floor: float
) -> list[tuple[State, Partial]]:
    """Covers that end in `until`: the best, and those behind which more of a launch is hidden.

    One that is later than another by as much as it hides more of the longest launch on each device, added
    up, is of no use.
    """
    weights, longest_ns = problem.weights, problem.table.longest_launch_ns
    found: list[tuple[State, Partial]] = []
    asked: list[tuple[dict[str, float], float]] = [({}, horizon_ns)]
    while asked:
        least_ns, within_ns = asked.pop()
        program = Program(problem, until, within_ns)
        for device, ns in least_ns.items():
            program.ahead.require(device, ns)
        best, state, _ = solved(program)
        if best is None:
            continue
        found.append((state, best))
        if not weights.per_ns:
            continue
        hidden_ns = {device: state.running.hides_ns(device, True) for device in longest_ns}
        more_ns = {device: max(ns - hidden_ns[device], 0.0) for device, ns in longest_ns.items()}
        within_ns = (best.value - floor) / weights.per_ns + sum(more_ns.values())
        apart_ns = SAME * within_ns
        for device, ns in more_ns.items():
            if ns > apart_ns:
                asked.append(({**least_ns, device: hidden_ns[device] + apart_ns}, within_ns))
    return found


def _least_pj(problem: SegmentProblem) -> float:
    """A lower bound of the energy of all covers of the segment."""
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
    for begin, end in segments:
        going_on = worth_going_on(ways[begin], weights, table.longest_launch_ns)
        for state, partial in sorted(going_on.items(), key=lambda way: way[1].value):
            if end - begin > 1:
                problem = SegmentProblem(
                    graph=graph, table=table, weights=weights, segment=(begin, end), state=state, limit=limit
                )
                rivals = {after: way.value - partial.value for after, way in ways[end].items()}
                for after, step in at_once(problem, rivals).items():
                    offer(ways[end], after, partial.then(step))
            for candidate in table.candidates[graph.regions[begin].name]:
                behind = begin + len(candidate.covers)
                if not fits(graph, table, candidate, state, limit):
                    continue
                if behind > end or behind == end == begin + 1:  # what a segment has inside was chosen above
                    after = steps.after(graph, table, candidate, state)
                    offer(ways[behind], after, partial.then(done(graph, table, weights, candidate, state)))
    found = best(ways[len(graph.regions)])
    return found and found.solution()


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
    problem = SegmentProblem(
        graph=graph,
        table=table,
        weights=weights,
        segment=(0, len(graph.regions)),
        state=steps.begin(table),
        bounded=bool(bounds),
        limit=limit,
    )
    best, _, possible = solved(Program(problem, None, longest_ns(problem), bounds))
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
