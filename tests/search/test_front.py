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


def all_figures(graph, table):
    memory = PlanMemory(graph, SYSTEM.dtype)
    for cover in covers(graph, table):
        evaluation = evaluate(graph, cover, table, SYSTEM)
        yield evaluation.latency_ns, evaluation.energy_pj, memory.pool_bytes(cover)


@settings(max_examples=examples(30))
@given(problems(max_regions=4), st.integers(1, 9))
def test_no_plan_of_a_front_is_dominated(problem, points):
    graph, table = problem
    front_plans = front(PlanSearch(graph, table, SYSTEM, Goal()), points)
    assert 1 <= len(front_plans) <= points
    plans = list(all_figures(graph, table))
    for plan in front_plans:
        assert plan.figures == pytest.approx(next(p for p in plans if p == pytest.approx(plan.figures)))
        assert not any(rival is not plan and rival.is_as_good(plan) for rival in front_plans)
        beaten = [p for p in plans if all(a < b * (1 - TOLERANCE) for a, b in zip(p, plan.figures))]
        assert beaten == [], "a plan that is better in everything"
    if len(front_plans) >= 3:
        for axis in range(3):
            min_value = min(p[axis] for p in plans)
            assert min(f.figures[axis] for f in front_plans) == pytest.approx(min_value, rel=TOLERANCE)


@settings(max_examples=examples(12))
@given(problems(max_regions=4), st.floats(0, 1))
def test_a_front_keeps_to_the_bounds(problem, share):
    graph, table = problem
    plans = list(all_figures(graph, table))
    low, high = min(p[0] for p in plans), max(p[0] for p in plans)
    goal = Goal(max_latency_ns=low + share * (high - low) + 1e-3)
    front_plans = front(PlanSearch(graph, table, SYSTEM, goal), 6)
    assert front_plans and all(plan.figures[0] <= goal.max_latency_ns * (1 + 1e-9) for plan in front_plans)


def test_a_front_has_a_plan():
    with pytest.raises(UsageError, match="at least 1 plan, not 0"):
        front(None, 0)
