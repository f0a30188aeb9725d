"""Integer programs of the same numbers are solved once, and only those."""

import math
import random

import pytest
import scipy.optimize

from pimflow.core import integer_program
from pimflow.core.integer_program import IntegerProgram


def knapsack(**changes: float) -> IntegerProgram:
    """The lightest pair of three things that are worth five."""
    given = {"first": 2.0, "second": 3.0, "third": 4.0, "worth": 5.0} | changes
    program = IntegerProgram()
    columns = [program.binary(given[name]) for name in ("first", "second", "third")]
    program.row(list(zip(columns, (2.0, 3.0, 4.0))), low=given["worth"])
    return program


@pytest.fixture
def solved(monkeypatch):
    """The programs that HiGHS is asked to solve, none being known."""
    found = []
    own = IntegerProgram._solved
    monkeypatch.setattr(integer_program, "_OUTCOMES", {})
    monkeypatch.setattr(IntegerProgram, "_solved", lambda *given: found.append(given) or own(*given))
    return found


def test_the_same_numbers_are_solved_once(solved):
    outcomes = [knapsack().solve(), knapsack().solve(), knapsack().solve([([(2, 1.0)], 1.0, 1.0)])]
    assert [outcome.value for outcome in outcomes] == [5.0, 5.0, 6.0]
    assert outcomes[0] is outcomes[1] and len(solved) == 2


@pytest.mark.parametrize(
    ("changed", "value"), [({"first": 2.5}, 5.5), ({"worth": 6.0}, 6.0), ({"worth": 10.0}, float("inf"))]
)
def test_other_numbers_are_solved_anew(solved, changed, value):
    assert knapsack().solve().value == 5.0
    assert knapsack(**changed).solve().value == value
    assert len(solved) == 2


def test_one_row_more_is_another_program(solved):
    """Also where the numbers of both are the same one after the other."""
    one, two = IntegerProgram(), IntegerProgram()
    for program in (one, two):
        program.binary(1.0), program.binary(2.0)
    one.row([(0, 1.0), (1, 1.0)], low=1.0)
    two.row([(0, 1.0)], low=1.0)
    two.row([(1, 1.0)], low=1.0)
    assert (one.solve().value, two.solve().value) == (1.0, 3.0)


def test_so_many_are_remembered(solved, monkeypatch):
    monkeypatch.setattr(integer_program, "MOST_REMEMBERED", 2)
    for cost in (1.0, 2.0, 3.0, 3.0, 2.0, 1.0):
        knapsack(first=cost).solve()
    assert len(integer_program._OUTCOMES) == 2 and len(solved) == 4


def test_a_shorter_time_limit_is_another_question(solved, monkeypatch):
    knapsack().solve()
    monkeypatch.setattr(integer_program, "TIME_LIMIT_S", 30.0)
    knapsack().solve()
    assert len(solved) == 2


def market_split(seed: int, rows: int, columns: int) -> IntegerProgram:
    """The least slack by which binaries miss some sums: small programs whose search trees are large."""
    draw, program = random.Random(seed), IntegerProgram()
    taken = [program.binary() for _ in range(columns)]
    for _ in range(rows):
        factors = [draw.randrange(100) for _ in taken]
        more, less = program.column(1.0), program.column(1.0)
        entries = [*zip(taken, factors), (more, 1.0), (less, -1.0)]
        program.row(entries, low=sum(factors) // 2, high=sum(factors) // 2)
    return program


@pytest.mark.parametrize("seed", range(3))
def test_what_is_not_near_enough_after_many_nodes_is_pursued(solved, seed, monkeypatch):
    monkeypatch.setattr(integer_program, "MANY_NODES", 1)
    proved = market_split(seed, 2, 14).solve()
    pursued, taken = (market_split(seed, 2, 14).solve((), near) for near in (1e-9, math.inf))
    assert pursued.value == pytest.approx(proved.value) and pursued.gap < 1e-6
    assert len(solved) == 3 and taken.value >= proved.value * (1 - 1e-9)
    assert taken.bound <= proved.value * (1 + 1e-9)


def test_without_a_solution_after_many_nodes_the_search_goes_on(solved, monkeypatch):
    own, limits = scipy.optimize.milp, []

    def none_at_first(*given, options, **more):
        limits.append(options.get("node_limit"))
        found = own(*given, options=options, **more)
        if limits[-1] is not None:
            found.x = found.mip_gap = found.mip_node_count = None
            found.status = 4  # as scipy has it where nodes run out
        return found

    monkeypatch.setattr(scipy.optimize, "milp", none_at_first)
    assert knapsack().solve((), 1e-4).value == 5.0
    assert limits == [integer_program.MANY_NODES, None]
