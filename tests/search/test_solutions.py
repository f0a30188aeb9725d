"""Is a solution that was kept the one that would be found, and for nothing else than what was solved?"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from problems import problems

from pimflow.hardware import system
from pimflow.host.result_cache import ResultCache
from pimflow.placement import Goal
from pimflow.placement.solvers.minimiser import Minimiser
from pimflow.placement.solvers.objectives import SOLVERS
from pimflow.placement.solvers.ways import LATENCY


@given(problem=problems(max_regions=4, chain=True), solver=st.sampled_from(["dp", "ilp"]))
@settings(max_examples=examples(24))
def test_a_solution_is_found_once(problem, solver, tmp_path_factory):
    graph, table = problem
    cache = ResultCache(tmp_path_factory.mktemp("kept") / "results.sqlite")
    solved, original = [], SOLVERS[solver]

    def counted(*args):
        solved.append(args)
        return original(*args)

    with pytest.MonkeyPatch.context() as counting:
        counting.setitem(SOLVERS, solver, counted)
        goal = Goal(solver=solver)
        plain = Minimiser(graph, table, system(), goal).unbounded(LATENCY).solution
        kept = [Minimiser(graph, table, system(), goal, cache).unbounded(LATENCY).solution for _ in range(2)]
        assert kept == [plain, plain] and len(solved) == 2
        slower = slowed(table)
        again = Minimiser(graph, slower, system(), goal, cache).unbounded(LATENCY).solution
        assert len(solved) == 3
        assert again == Minimiser(graph, slower, system(), goal).unbounded(LATENCY).solution
    cache.close()


@given(problem=problems(max_regions=4))
@settings(max_examples=examples(12))
def test_each_solver_has_solutions_of_its_own(problem, tmp_path_factory):
    """Branches overlap for one of them only."""
    graph, table = problem
    cache = ResultCache(tmp_path_factory.mktemp("kept") / "results.sqlite")
    for solver in ("dp", "ilp"):
        found, plain = (
            Minimiser(graph, table, system(), Goal(solver=solver), kept).unbounded(LATENCY).solution
            for kept in (cache, None)
        )
        assert found == plain
    cache.close()


def slowed(table):
    """Another table: the first candidate takes longer."""
    region, (first, *others) = next(iter(table.candidates.items()))
    tasks = tuple(replace(task, execution_ns=task.execution_ns + 1) for task in first.tasks)
    return replace(table, candidates=table.candidates | {region: (replace(first, tasks=tasks), *others)})
