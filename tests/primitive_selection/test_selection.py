"""Are selections of primitives the best ones, and within their budgets?"""

import ctypes
import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from length import examples, long_but
from papers.taso_instances import candidate, inception_problem, network, selection_problem
from scipy import optimize
from selections import choice_costs, choices, problems

from pimflow import memory
from pimflow.core.candidate import Footprint
from pimflow.errors import InfeasibleError, UsageError
from pimflow.primitive_selection.problem import MEMORY_MODELS, Budgets
from pimflow.primitive_selection.program import solve
from pimflow.primitive_selection.search import fastest, front, greedy, minimise, uniform_selection

FEW = settings(max_examples=examples(24), deadline=None)
PICK = {"time": 0, "memory": 1, "workspace": 2}
drawn = st.one_of(*(problems(model) for model in MEMORY_MODELS))


@FEW
@given(drawn)
def test_sums_are_those_of_the_definitions(problem):
    for choice in itertools.islice(choices(problem), 20):
        sums = problem.evaluate(choice)
        assert (sums.time_ns, sums.memory_bytes, sums.workspace_bytes) == choice_costs(problem, choice)


@FEW
@given(drawn, st.randoms(use_true_random=False))
def test_the_program_counts_as_the_definitions_do(problem, random):
    """Where every layer has one candidate, the program has nothing to choose, and all to count."""
    every = list(choices(problem))
    for choice in random.sample(every, min(3, len(every))):
        alone = problem.restrict(lambda name, c, choice=choice: c is choice[name])
        time_ns, memory_bytes, _ = choice_costs(problem, choice)
        assert solve(alone, "time", Budgets()).value == pytest.approx(time_ns, rel=1e-6)
        assert solve(alone, "memory", Budgets()).value == pytest.approx(memory_bytes, rel=1e-6)


@FEW
@given(drawn, st.sampled_from(sorted(PICK)), st.floats(0, 1), st.floats(0, 1))
def test_the_best_of_all_within_budgets(problem, objective, time_share, memory_share):
    """Against every choice: the least of the objective, or no choice at all."""
    all_costs = [choice_costs(problem, choice) for choice in choices(problem)]
    low, high = (tuple(f(values) for values in zip(*all_costs)) for f in (min, max))

    def budget_at(axis, fraction):
        return int(low[axis] + (high[axis] - low[axis]) * fraction) - 1 + int(2 * fraction)

    budgets = Budgets(time_ns=budget_at(0, time_share)) if objective != "time" else Budgets()
    budgets = replace(budgets, memory_bytes=budget_at(1, memory_share))
    feasible = [v for v in all_costs if v[0] <= budgets.time_ns and v[1] <= budgets.memory_bytes]
    if not feasible:
        with pytest.raises(InfeasibleError):
            minimise(problem, objective, budgets)
        return
    selected = minimise(problem, objective, budgets)
    values = choice_costs(problem, selected.choice)
    assert values[PICK[objective]] == min(v[PICK[objective]] for v in feasible)
    assert values[0] <= budgets.time_ns and values[1] <= budgets.memory_bytes
    assert selected.gap <= 1e-6


@FEW
@given(problems("liveness"))
def test_the_planner_places_it_in_that_memory(problem):
    """What is live fits in a pool of that size but for holes, and in none that is smaller."""
    best = minimise(problem, "memory")
    live, _ = problem.liveness(best.choice)
    total = problem.weight_bytes + sum(-(-c.footprint.filter_bytes // 64) * 64 for c in best.choice.values())
    planned = memory.plan([life for life in live.lifetimes if life.size_bytes])
    assert planned.lower_bound_bytes == best.sums.memory_bytes - total
    assert planned.pool_bytes >= planned.lower_bound_bytes


@FEW
@given(drawn, st.floats(0, 1))
def test_greedy_is_never_better(problem, share):
    min_bytes = minimise(problem, "memory").sums.memory_bytes
    max_bytes = fastest(problem).sums.memory_bytes
    budgets = Budgets(memory_bytes=min_bytes + int((max_bytes - min_bytes) * share))
    sums = greedy(problem, budgets)
    assume(sums is not None)
    assert sums.memory_bytes <= budgets.memory_bytes
    assert sums.time_ns >= minimise(problem, "time", budgets).sums.time_ns * (1 - 1e-9)


@FEW
@given(drawn, st.sampled_from(["memory", "workspace"]), st.integers(2, 6))
def test_fronts_are_monotone(problem, over, points):
    front_points = front(problem, points, over)
    costs = [choice_costs(problem, point.selected.choice) for point in front_points]
    axis = PICK[over]
    for (point_before, smaller), (point_after, larger) in itertools.pairwise(zip(front_points, costs)):
        assert smaller[0] > larger[0] and smaller[axis] < larger[axis]
        assert point_before.budget_bytes < point_after.budget_bytes
    assert all(values[axis] <= point.budget_bytes for point, values in zip(front_points, costs))
    assert costs[-1][0] == fastest(problem).sums.time_ns
    assert costs[0][axis] == min(choice_costs(problem, choice)[axis] for choice in choices(problem))


def test_remarks_of_the_solver_stay_out_of_what_is_printed(monkeypatch, capfd):
    """HiGHS writes lines to C's stdout, which keeps them back where that is no terminal."""
    c = ctypes.CDLL(None)

    def remarking(*arguments, **options):
        c.puts(b"HighsMipSolverData::tmpSolver.run();")
        return milp_of_scipy(*arguments, **options)

    milp_of_scipy = optimize.milp
    monkeypatch.setattr(optimize, "milp", remarking)
    assert fastest(two_layers()).sums.time_ns == 3.0
    print("said afterwards")
    c.fflush(None)
    assert capfd.readouterr().out == "said afterwards\n"


def test_a_front_has_two_points():
    with pytest.raises(UsageError, match="at least 2 points"):
        front(two_layers(), 1)


def two_layers(memory_model="liveness"):
    graph = network([(), (0,)], [16, 16])
    small = candidate("r0", "small", "HWC", "HWC", 9.0)
    large = candidate("r0", "large", "HWC", "HWC", 1.0, Footprint(workspace_bytes=6400))
    alone = candidate("r1", "alone", "HWC", "HWC", 2.0, Footprint(workspace_bytes=640))
    return selection_problem(graph, {"r0": (small, large), "r1": (alone,)}, lambda *_: 3.0, memory_model)


def test_what_cannot_be_had_is_said_with_its_layer():
    problem = two_layers()
    with pytest.raises(InfeasibleError, match="peak in layer 'r1'") as error:
        minimise(problem, "time", Budgets(memory_bytes=100))
    assert (error.value.demand, error.value.bound) == (2 * 1024 + 640, 100)
    with pytest.raises(InfeasibleError, match="time of 'drawn', most of it in layer 'r1'") as error:
        minimise(problem, "memory", Budgets(time_ns=2.5))
    assert error.value.demand == 3
    with pytest.raises(InfeasibleError, match=r"within the other budgets.*layer 'r0'.*11ns or more") as error:
        minimise(problem, "time", Budgets(memory_bytes=3000, time_ns=10.0))
    assert error.value.demand == 11


def test_one_kind_everywhere():
    problem = two_layers()
    small = uniform_selection(problem, [lambda c: c.name == "small"], [])
    assert (small.time_ns, small.substituted) == (11.0, ("r1",))
    none = uniform_selection(problem, [lambda c: c.name == "none"], [lambda c: c.name == "small"])
    assert (none.time_ns, none.substituted) == (11.0, ("r0", "r1"))
    assert uniform_selection(problem, [lambda c: c.name == "none"], []).time_ns == 3.0


@pytest.mark.long
@pytest.mark.parametrize("layers", long_but([8, 13], [8, 13, 30, 70]))  # of the paper's Table 1
def test_as_many_layers_as_the_paper(layers):
    problem = inception_problem(layers, 57, "sum")
    begin = time.process_time()  # other work on the machine does not count
    quick = fastest(problem)
    assert time.process_time() - begin < 1.0
    small = minimise(problem, "memory").sums
    assert quick.gap < 1e-12 and small.memory_bytes < quick.sums.memory_bytes
    half = Budgets(memory_bytes=(small.memory_bytes + quick.sums.memory_bytes) // 2)
    assert quick.sums.time_ns <= minimise(problem, "time", half).sums.time_ns <= greedy(problem, half).time_ns
