"""Are integer programs solved, and is what is said of their outcomes true?"""

import random

import numpy as np
import pytest

from pimflow.core import integer_program
from pimflow.core.integer_program import IntegerProgram


def knapsack(worth: float, unit: float = 1.0) -> IntegerProgram:
    """The lightest of three things that together are worth something."""
    program = IntegerProgram()
    columns = [program.binary(cost * unit) for cost in (2.0, 3.0, 4.0)]
    program.row(list(zip(columns, (2.0, 3.0, 4.0))), low=worth)
    return program


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e12])  # of costs: tolerances of the solver are absolute
@pytest.mark.parametrize(("worth", "value", "chosen"), [(5.0, 5.0, [0, 1]), (6.0, 6.0, [0, 2])])
def test_the_least_cost_is_found(worth, value, chosen, unit):
    outcome = knapsack(worth, unit).solve()
    assert outcome.value == pytest.approx(value * unit) and outcome.gap < 1e-6
    assert [column for column in range(3) if outcome.chosen(column)] == chosen


def test_nothing_is_chosen_without_a_solution():
    outcome = knapsack(10.0).solve()
    assert outcome.values is None and outcome.value == float("inf") and not outcome.chosen(0)


def test_rows_and_costs_may_come_after_an_answer():
    program = IntegerProgram()
    columns = [program.binary(1.0), program.binary(2.0)]
    program.cover(columns)
    assert program.solve().value == 1.0
    program.row([(columns[0], 1.0)], high=0.0)
    assert program.solve().value == 2.0
    program.charge([(columns[1], 0.5)])
    assert program.solve().value == 2.5


def test_what_is_not_proved_in_time_shows_in_the_gap(monkeypatch):
    """Market split: the least slack by which binaries miss some sums has a large search tree."""
    draw, program = random.Random(0), IntegerProgram()
    taken = [program.binary() for _ in range(40)]
    for _ in range(4):
        factors = [draw.randrange(100) for _ in taken]
        more, less = program.column(1.0), program.column(1.0)
        entries = [*zip(taken, factors), (more, 1.0), (less, -1.0)]
        program.row(entries, low=sum(factors) // 2, high=sum(factors) // 2)
    monkeypatch.setattr(integer_program, "TIME_LIMIT_S", 0.5)
    outcome = program.solve()
    assert outcome.values is not None and np.isfinite(outcome.value)
    assert outcome.bound < outcome.value and outcome.gap > 0.01
