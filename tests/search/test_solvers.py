"""Do the solvers find the same optimum, and is it the one that an exhaustive search finds?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from problems import covers, longest_path_ns, problems

from pimflow.placement.solvers.dynamic_programming import LATENCY, Weights, solve_dp
from pimflow.placement.solvers.evaluate import execute
from pimflow.placement.solvers.exhaustive import every_cover, solve_exhaustive
from pimflow.placement.solvers.ilp import solve_ilp, solve_whole
from pimflow.placement.solvers.segments import is_serial

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
