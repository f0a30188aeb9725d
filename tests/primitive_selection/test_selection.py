"""Are selections of primitives the best ones, and within their budgets?"""

import ctypes
import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from length import examples, long_but
from papers.taso_instances import candidate, inceptions, network, problem_of
from scipy import optimize
from selections import added_up, choices, problems, product_form

from pimflow import memory
from pimflow.errors import InfeasibleError, UnknownNameError, UsageError
from pimflow.primitive_selection.problem import MEMORY_MODELS, Budgets
from pimflow.primitive_selection.program import solve
from pimflow.primitive_selection.search import check_names, everywhere, fastest, front, greedy, minimise

FEW = settings(max_examples=examples(24), deadline=None)
PICK = {"time": 0, "memory": 1, "workspace": 2}
drawn = st.one_of(*(problems(model) for model in MEMORY_MODELS))


@FEW
@given(drawn)
def test_sums_are_those_of_the_definitions(problem):
    for choice in itertools.islice(choices(problem), 20):
        sums = problem.evaluate(choice)
        assert (sums.time_ns, sums.memory_bytes, sums.workspace_bytes) == added_up(problem, choice)


@FEW
@given(drawn, st.randoms(use_true_random=False))
def test_the_program_counts_as_the_definitions_do(problem, random):
    """Where every layer has one candidate, the program has nothing to choose, and all to count."""
    every = list(choices(problem))
    for choice in random.sample(every, min(3, len(every))):
        alone = problem.restricted(lambda name, c, choice=choice: c is choice[name])
        time_ns, memory_bytes, _ = added_up(problem, choice)
        assert solve(alone, "time", Budgets()).value == pytest.approx(time_ns, rel=1e-6)
        assert solve(alone, "memory", Budgets()).value == pytest.approx(memory_bytes, rel=1e-6)


@FEW
@given(drawn, st.sampled_from(sorted(PICK)), st.floats(0, 1), st.floats(0, 1))
def test_the_best_of_all_within_budgets(problem, objective, share, other):
    """Against every choice: the least of the objective, or no choice at all."""
    every = [added_up(problem, choice) for choice in choices(problem)]
    low, high = (tuple(f(values) for values in zip(*every)) for f in (min, max))

    def between(which, at):
        return int(low[which] + (high[which] - low[which]) * at) - 1 + int(2 * at)

    budgets = Budgets(time_ns=between(0, share)) if objective != "time" else Budgets()
    budgets = replace(budgets, memory_bytes=between(1, other))
    kept = [v for v in every if v[0] <= budgets.time_ns and v[1] <= budgets.memory_bytes]
    if not kept:
        with pytest.raises(InfeasibleError):
            minimise(problem, objective, budgets)
        return
    found = minimise(problem, objective, budgets)
    values = added_up(problem, found.choice)
    assert values[PICK[objective]] == min(v[PICK[objective]] for v in kept)
    assert values[0] <= budgets.time_ns and values[1] <= budgets.memory_bytes
    assert found.gap <= 1e-6


@FEW
@given(problems("sum", most=6), st.floats(0, 1))
def test_as_fast_as_the_products_of_the_paper(problem, share):
    least = minimise(problem, "memory").sums.memory_bytes
    most = fastest(problem).sums.memory_bytes
    budget = least + int((most - least) * share)
    found = minimise(problem, "time", Budgets(memory_bytes=budget))
    assert found.sums.time_ns == pytest.approx(product_form(problem, budget), rel=1e-6)


@FEW
@given(problems("liveness"))
def test_the_planner_places_it_in_that_memory(problem):
    """What is live fits in a pool of that size but for holes, and in none that is smaller."""
    found = minimise(problem, "memory")
    live, _ = problem.liveness(found.choice)
    resident = problem.weight_bytes + sum(-(-c.filter_bytes // 64) * 64 for c in found.choice.values())
    planned = memory.plan([life for life in live.lifetimes if life.size_bytes])
    assert planned.lower_bound_bytes == found.sums.memory_bytes - resident
    assert planned.pool_bytes >= planned.lower_bound_bytes


@FEW
@given(drawn, st.floats(0, 1))
def test_greedy_is_never_better(problem, share):
    least = minimise(problem, "memory").sums.memory_bytes
    most = fastest(problem).sums.memory_bytes
    budgets = Budgets(memory_bytes=least + int((most - least) * share))
    found = greedy(problem, budgets)
    assume(found is not None)
    assert found.memory_bytes <= budgets.memory_bytes
    assert found.time_ns >= minimise(problem, "time", budgets).sums.time_ns * (1 - 1e-9)


@FEW
@given(drawn, st.sampled_from(["memory", "workspace"]), st.integers(2, 6))
def test_fronts_are_monotone(problem, over, points):
    found = front(problem, points, over)
    taken = [added_up(problem, point.selected.choice) for point in found]
    axis = PICK[over]
    for (one, smaller), (other, larger) in itertools.pairwise(zip(found, taken)):
        assert smaller[0] > larger[0] and smaller[axis] < larger[axis]
        assert one.budget_bytes < other.budget_bytes
    assert all(values[axis] <= point.budget_bytes for point, values in zip(found, taken))
    assert taken[-1][0] == fastest(problem).sums.time_ns
    assert taken[0][axis] == min(added_up(problem, choice)[axis] for choice in choices(problem))


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


def two_layers(memory_model="liveness"):
    graph = network([(), (0,)], [16, 16])
    small = candidate("r0", "small", "HWC", "HWC", 9.0, workspace=0)
    large = candidate("r0", "large", "HWC", "HWC", 1.0, workspace=6400)
    alone = candidate("r1", "alone", "HWC", "HWC", 2.0, workspace=640)
    return problem_of(graph, {"r0": (small, large), "r1": (alone,)}, lambda *_: 3.0, memory_model)


def test_what_cannot_be_had_is_said_with_its_layer():
    problem = two_layers()
    with pytest.raises(InfeasibleError, match="peak in layer 'r1'") as caught:
        minimise(problem, "time", Budgets(memory_bytes=100))
    assert (caught.value.demand, caught.value.bound) == (2 * 1024 + 640, 100)
    with pytest.raises(InfeasibleError, match="time of 'drawn', most of it in layer 'r1'") as caught:
        minimise(problem, "memory", Budgets(time_ns=2.5))
    assert caught.value.demand == 3
    with pytest.raises(
        InfeasibleError, match=r"within the other budgets.*layer 'r0'.*11ns or more"
    ) as caught:
        minimise(problem, "time", Budgets(memory_bytes=3000, time_ns=10.0))
    assert caught.value.demand == 11


def test_one_kind_everywhere():
    problem = two_layers()
    assert everywhere(problem, [lambda c: c.name == "small"]).time_ns == 11.0
    assert everywhere(problem, [lambda c: c.name == "none"]).time_ns == 3.0


@pytest.mark.parametrize("layers", long_but([8, 13], [8, 13, 30, 70]))  # of the paper's Table 1
def test_as_many_layers_as_the_paper(layers):
    problem = inceptions(layers, 57, "sum")
    begin = time.process_time()  # other work on the machine does not count
    quick = fastest(problem)
    assert time.process_time() - begin < 1.0
    small = minimise(problem, "memory").sums
    assert quick.gap < 1e-12 and small.memory_bytes < quick.sums.memory_bytes
    half = Budgets(memory_bytes=(small.memory_bytes + quick.sums.memory_bytes) // 2)
    assert quick.sums.time_ns <= minimise(problem, "time", half).sums.time_ns <= greedy(problem, half).time_ns


def test_wrong_uses():
    with pytest.raises(UnknownNameError, match="workspace"):
        check_names("workspaces", "sum")
    with pytest.raises(UnknownNameError, match="liveness"):
        check_names("time", "livenes")
    with pytest.raises(UsageError, match="at least 2 points"):
        front(two_layers(), 1)
