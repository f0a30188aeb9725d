"""Are the plans of a front those that nothing beats?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from problems import covers, problems

from pimflow.errors import UsageError
from pimflow.hardware import system
from pimflow.placement import Goal
from pimflow.placement.solvers.evaluate import evaluate
from pimflow.placement.solvers.front import TOLERANCE, front
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.placement.solvers.plan_search import PlanSearch

SYSTEM = system()


def every(graph, table):
    memory = PlanMemory(graph, SYSTEM.dtype)
    for cover in covers(graph, table):
        found = evaluate(graph, cover, table, SYSTEM)
        yield found.latency_ns, found.energy_pj, memory.of(cover)


@settings(max_examples=examples(30))
@given(problems(max_regions=4), st.integers(1, 9))
def test_no_plan_of_a_front_is_dominated(problem, points):
    graph, table = problem
    found = front(PlanSearch(graph, table, SYSTEM, Goal()), points)
    assert 1 <= len(found) <= points
    plans = list(every(graph, table))
    for one in found:
        assert one.figures == pytest.approx(next(p for p in plans if p == pytest.approx(one.figures)))
        assert not any(other is not one and other.dominates(one) for other in found)
        beaten = [p for p in plans if all(a < b * (1 - TOLERANCE) for a, b in zip(p, one.figures))]
        assert beaten == [], "a plan that is better in everything"
    if len(found) >= 3:
        for axis in range(3):
            least = min(p[axis] for p in plans)
            assert min(f.figures[axis] for f in found) == pytest.approx(least, rel=TOLERANCE)


@settings(max_examples=examples(12))
@given(problems(max_regions=4), st.floats(0, 1))
def test_a_front_keeps_to_the_bounds(problem, share):
    graph, table = problem
    plans = list(every(graph, table))
    low, high = min(p[0] for p in plans), max(p[0] for p in plans)
    goal = Goal(max_latency_ns=low + share * (high - low) + 1e-3)
    found = front(PlanSearch(graph, table, SYSTEM, goal), 6)
    assert found and all(one.latency_ns <= goal.max_latency_ns * (1 + 1e-9) for one in found)


def test_a_front_has_a_plan():
    with pytest.raises(UsageError, match="at least 1 plan, not 0"):
        front(None, 0)
