"""Do the solvers find the same optimum, and is it the one that an exhaustive search finds?"""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from problems import covers, longest_path_ns, of_layouts, of_shared_channels, problems

from pimflow.core.candidate import LEFT, OVER_ALL
from pimflow.core.integer_program import IntegerProgram, Outcome
from pimflow.placement.solvers import evaluate, ilp, segments, steps
from pimflow.placement.solvers.dynamic_programming import solve_dp
from pimflow.placement.solvers.evaluate import execute
from pimflow.placement.solvers.exhaustive import every_cover, solve_exhaustive
from pimflow.placement.solvers.ilp import solve_ilp, solve_whole
from pimflow.placement.solvers.plan_memory import MemoryLimit, PlanMemory
from pimflow.placement.solvers.segments import is_serial
from pimflow.placement.solvers.time_bounds import TimeBounds
from pimflow.placement.solvers.variants import SegmentProblem
from pimflow.placement.solvers.ways import LATENCY, Weights

weights = st.sampled_from(
    [
        LATENCY,
        Weights(per_ns=0.0, per_pj=1.0),
        Weights(per_ns=3.0, per_pj=2.0),
        Weights(per_ns=0.0, per_error=1.0),
        Weights(per_error=9.0),
    ]
)


def value(graph, table, chosen, weighing) -> float:
    """By the oracle: transitions that are due are those that a longest path has tasks of."""
    energy_pj = sum(pj for c in chosen for t in c.tasks for pj in t.energies_pj.values())
    done, waiting = {}, set()
    for c in chosen:
        names = [n for covered in c.covers for n in graph.region(covered).inputs if n not in c.covers]
        for name in waiting & set(names):
            edge = table.absorb[name] if c.input.accepts_pending else table.settle[name]
            done[name] = edge.task.energy_pj if edge.task else 0.0
        waiting = (waiting - set(names)) | ({c.covers[-1]} if c.output.pending else set())
    latency_ns = longest_path_ns(graph, table, chosen)
    timed = weighing.per_ns * latency_ns + weighing.per_pj * (energy_pj + sum(done.values()))
    return timed + weighing.per_error * sum(c.error for c in chosen)


@given(problems(max_regions=4), weights)
@settings(max_examples=examples(60))
def test_the_exhaustive_search_is_right(problem, weighing):
    graph, table = problem
    every = covers(graph, table)
    assert sorted(repr(chosen) for chosen, *_ in every_cover(graph, table)) == sorted(map(repr, every))
    for chosen, latency_ns, energy_pj in every_cover(graph, table):
        run = execute(graph, chosen, table)
        assert (latency_ns, sum(run.energies_pj.values())) == (run.latency_ns, pytest.approx(energy_pj))
    best = min(value(graph, table, chosen, weighing) for chosen in every)
    assert solve_exhaustive(graph, table, weighing).value == pytest.approx(best, rel=1e-12)


@given(problems(max_regions=5), weights)
@settings(max_examples=examples(72))
def test_the_integer_program_is_as_good_as_an_exhaustive_search(problem, weighing):
    graph, table = problem
    best = solve_exhaustive(graph, table, weighing)
    for solver in (solve_ilp, solve_whole):
        found = solver(graph, table, weighing)
        assert found.value == pytest.approx(best.value, rel=1e-5)
        assert found.bound <= best.value * (1 + 1e-9)
        assert value(graph, table, found.candidates, weighing) == pytest.approx(found.value, rel=1e-9)
        assert longest_path_ns(graph, table, found.candidates) == pytest.approx(found.latency_ns, rel=1e-9)


@given(problems(max_regions=7, chain=True), weights)
@settings(max_examples=examples(24))
def test_solvers_agree_on_chains(problem, weighing):
    graph, table = problem
    values = [solver(graph, table, weighing).value for solver in (solve_dp, solve_ilp, solve_whole)]
    assert values == pytest.approx([values[0]] * 3, rel=1e-5)


@given(problems(max_regions=6))
@settings(max_examples=examples(36))
def test_one_by_one_is_never_faster_than_at_once(problem):
    graph, table = problem
    serial, overlapped = solve_dp(graph, table), solve_ilp(graph, table)
    assert overlapped.value <= serial.value * (1 + 1e-9)
    if is_serial(graph):
        assert overlapped.value == pytest.approx(longest_path_ns(graph, table, serial.candidates), rel=1e-9)
    assert longest_path_ns(graph, table, serial.candidates) <= serial.latency_ns * (1 + 1e-12)


def in_every_layout(graph, table, chosen) -> tuple[float, float]:
    """Time and energy of all transforms of a plan, looked up reader by reader."""
    doing = {name: c for c in chosen for name in c.covers}
    time_ns = energy_pj = 0.0
    for c in chosen:
        read = dict.fromkeys(n for name in c.covers for n in graph.region(name).inputs if n not in c.covers)
        for tensor in read:
            given = doing[tensor].output.layout if tensor in doing else "NHWC"
            edge = table.transforms.get((tensor, given, c.input.layout))
            time_ns += edge.task.duration_ns if edge else 0.0
            energy_pj += edge.task.energy_pj if edge else 0.0
    return time_ns, energy_pj


def nothing_pending(problem):
    """So that a network is cut before branches are joined, each with a result in a layout of its own."""
    graph, table = problem
    candidates = {
        name: tuple(replace(c, output=replace(c.output, pending=())) for c in found)
        for name, found in table.candidates.items()
    }
    return graph, replace(table, candidates=candidates)


joined = of_shared_channels(inputs=[(), (0,), (0,), (1, 2)], fused=False).map(nothing_pending)


@given(st.one_of(of_shared_channels(max_regions=4), joined), weights)
@settings(max_examples=examples(60))
def test_the_use_of_channels_is_chosen_with_the_rest(problem, weighing):
    graph, table = problem
    best = solve_exhaustive(graph, table, weighing)
    for solver in (solve_ilp, solve_whole):
        found = solver(graph, table, weighing)
        assert found.value == pytest.approx(best.value, rel=1e-5)
        assert found.bound <= best.value * (1 + 1e-9)
        assert execute(graph, found.candidates, table).latency_ns == pytest.approx(found.latency_ns, rel=1e-9)
    for chosen, *_ in every_cover(graph, table):
        doing = {name: c for c in chosen for name in c.covers}
        reading = [(c, n) for c in chosen for name in c.covers for n in graph.region(name).inputs]
        for c, name in reading:
            if name in doing and doing[name].output.layout != LEFT:
                assert c is doing[name] or c.input.layout == OVER_ALL


@given(st.one_of(of_shared_channels(max_regions=5), joined), weights, st.booleans(), st.booleans())
@settings(max_examples=examples(60))
def test_few_ways_one_by_one_and_fewer_cuts_find_the_same(problem, weighing, uncut, ahead):
    """Where tensors lie in many ways, not all of them are gone through region by region, nor ended in."""
    graph, table = problem
    table = replace(table, launched_ahead=ahead)
    best = solve_exhaustive(graph, table, weighing)
    with pytest.MonkeyPatch.context() as fewer:
        fewer.setattr(ilp, "MOST_WAYS", 1)
        fewer.setattr(segments, "MOST_LAYOUTS", 1 if uncut else 100)
        fewer.setattr(segments, "MOST_BEHIND", 0)
        found = solve_ilp(graph, table, weighing)
    assert found.value == pytest.approx(best.value, rel=1e-5)
    assert found.bound <= best.value * (1 + 1e-9)


@given(st.one_of(of_shared_channels(max_regions=5), joined), weights, st.booleans())
@settings(max_examples=examples(30))
def test_of_large_parts_covers_are_right_and_the_bound_holds(problem, weighing, ahead):
    """They have no programs for single states to end in, or one."""
    graph, table = problem
    table = replace(table, launched_ahead=ahead)
    best, serial = solve_exhaustive(graph, table, weighing), solve_dp(graph, table, weighing)
    with pytest.MonkeyPatch.context() as large:
        large.setattr(ilp, "MANY_COLUMNS", 0)
        found = solve_ilp(graph, table, weighing)
    assert found.bound <= best.value * (1 + 1e-9) <= found.value * (1 + 2e-9)
    assert found.value <= serial.value * (1 + 1e-9)


@given(of_shared_channels(max_regions=5, chain=True, copied=True), weights, st.booleans())
@settings(max_examples=examples(60))
def test_no_way_that_may_be_best_is_left_out(problem, weighing, ahead):
    graph, table = problem
    table = replace(table, launched_ahead=ahead)
    best = solve_exhaustive(graph, table, weighing)
    for solver in (solve_dp, solve_ilp):
        found = solver(graph, table, weighing)
        assert found.value == pytest.approx(best.value, rel=1e-5)
        assert found.bound <= best.value * (1 + 1e-9)


@given(st.one_of(problems(max_regions=4), of_shared_channels(max_regions=4)), st.booleans())
@settings(max_examples=examples(60))
def test_times_of_all_covers_lie_between_their_bounds(problem, ahead):
    graph, table = problem
    table = replace(table, launched_ahead=ahead)
    segment, begins = (0, len(graph.regions)), {steps.begin(table): 0.0}
    whole = SegmentProblem(graph=graph, table=table, weights=LATENCY, segment=segment, begins=begins)
    bounds = TimeBounds(whole)
    for chosen, latency_ns, _ in every_cover(graph, table):
        moment = evaluate.begin(table)
        for candidate in chosen:
            moment, _ = evaluate.advance(graph, table, candidate, moment)
            last = whole.order[candidate.covers[-1]]
            ready_ns = moment.ready_ns[candidate.covers[-1]]
            pairs = [(ready_ns, bounds.ready_ns[last], bounds.ready_tail_ns[last])]
            for each in whole.resources:
                free_ns = moment.free_ns.get(each, 0.0)
                pairs.append((free_ns, bounds.free_ns[each, last], bounds.free_tail_ns[each, last]))
            for ns, least_ns, tail_ns in pairs:
                assert least_ns <= ns * (1 + 1e-9) and ns + tail_ns <= latency_ns * (1 + 1e-9)


@given(of_shared_channels(max_regions=4), weights)
@settings(max_examples=examples(30))
def test_the_bound_holds_where_no_program_answers_in_time(problem, weighing):
    """Covers that nobody knows one of may be better than all that are known."""
    graph, table = problem
    best = solve_exhaustive(graph, table, weighing)
    unanswered = Outcome(values=None, value=math.inf, bound=-math.inf, infeasible=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ilp, "MOST_WAYS", 1)
        patched.setattr(IntegerProgram, "solve", lambda *_: unanswered)
        found = solve_ilp(graph, table, weighing)
    assert found is None or found.bound <= best.value * (1 + 1e-9) <= found.value * (1 + 2e-9)


@given(of_shared_channels(max_regions=4, spread=False))
@settings(max_examples=examples(40))
def test_each_change_of_use_is_charged_and_no_wide_kernel_runs_beside_pim(problem):
    graph, table = problem
    for chosen, latency_ns, _ in every_cover(graph, table):
        assert latency_ns == pytest.approx(longest_path_ns(graph, table, chosen), rel=1e-12)
        events = execute(graph, chosen, table).events
        held = [(e.start_ps, e.end_ps) for e in events if e.resource == "pim"]
        held = sorted([*held, *((e.begun_ps, e.end_ps) for e in events if "pim" in e.also)])
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(held))


@given(of_shared_channels(max_regions=7, chain=True), weights)
@settings(max_examples=examples(24))
def test_solvers_agree_on_chains_that_share_channels(problem, weighing):
    graph, table = problem
    values = [solver(graph, table, weighing).value for solver in (solve_dp, solve_ilp, solve_whole)]
    assert values == pytest.approx([values[0]] * 3, rel=1e-5)


laid_out = st.one_of(
    of_layouts(max_regions=4), of_layouts(("gpu",), max_regions=4), of_layouts(("cpu",), max_regions=4)
)


@given(laid_out, weights)
@settings(max_examples=examples(60))
def test_layouts_are_chosen_with_the_rest(problem, weighing):
    """One program for one resource and for several, against every cover, timed by the evaluator."""
    graph, table = problem
    best = solve_exhaustive(graph, table, weighing)
    for solver in (solve_ilp, solve_whole):
        found = solver(graph, table, weighing)
        assert found.value == pytest.approx(best.value, rel=1e-5)
        assert found.bound <= best.value * (1 + 1e-9)
    plain = replace(table, transforms={})
    for chosen, latency_ns, energy_pj in every_cover(graph, table):
        added_ns, added_pj = in_every_layout(graph, table, chosen)
        without = execute(graph, chosen, plain)
        assert energy_pj == pytest.approx(sum(without.energies_pj.values()) + added_pj)
        assert without.latency_ns <= latency_ns
        if table.transforms and len({task.resource for c in chosen for task in c.tasks} | {"gpu"}) == 1:
            assert latency_ns == pytest.approx(without.latency_ns + added_ns), "one after the other"


@given(st.one_of(laid_out, problems(max_regions=4)), weights, st.floats(0, 1))
@settings(max_examples=examples(60))
def test_within_memory_all_solvers_agree(problem, weighing, share):
    graph, table = problem
    memory = PlanMemory(graph, "fp32", table)
    least = memory.least(table)
    sizes = [memory.of(chosen) for chosen in covers(graph, table)]
    assert least == min(sizes)
    limit = MemoryLimit(memory=memory, at_most=least + share * (max(sizes) - least))
    best = solve_exhaustive(graph, table, weighing, limit)
    for solver in (solve_ilp, lambda *of: solve_whole(*of[:3], limit=of[3])):
        found = solver(graph, table, weighing, limit)
        assert found.value == pytest.approx(best.value, rel=1e-5)
        assert memory.of(found.candidates) <= limit.at_most
    serial = solve_dp(graph, table, weighing, limit)
    assert memory.of(serial.candidates) <= limit.at_most
    assert solve_ilp(graph, table, weighing, MemoryLimit(memory=memory, at_most=least - 1)) is None
