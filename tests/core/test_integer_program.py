"""Are integer programs solved, and is what is said of their outcomes true?"""

import random

import numpy as np
import pytest

from pimflow.core import integer_program
from pimflow.core.integer_program import IntegerProgram


def knapsack(value: float, unit: float = 1.0) -> IntegerProgram:
    """The lightest of three things that together are worth something."""
    program = IntegerProgram()
    columns = [program.add_binary(cost * unit) for cost in (2.0, 3.0, 4.0)]
    program.add_row(list(zip(columns, (2.0, 3.0, 4.0))), low=value)
    return program


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e12])  # of costs: tolerances of the solver are absolute
@pytest.mark.parametrize(("worth", "value", "chosen"), [(5.0, 5.0, [0, 1]), (6.0, 6.0, [0, 2])])
def test_the_least_cost_is_found(worth, value, chosen, unit):
    outcome = knapsack(worth, unit).solve()
    assert outcome.value == pytest.approx(value * unit) and outcome.gap < 1e-6
    assert [column for column in range(3) if outcome.is_chosen(column)] == chosen


def test_nothing_is_chosen_without_a_solution():
    outcome = knapsack(10.0).solve()
    assert outcome.values is None and outcome.value == float("inf") and not outcome.is_chosen(0)


def test_rows_and_costs_may_come_after_an_answer():
    program = IntegerProgram()
    columns = [program.add_binary(1.0), program.add_binary(2.0)]
    program.add_exactly_one(columns)
    assert program.solve().value == 1.0
    program.add_row([(columns[0], 1.0)], high=0.0)
    assert program.solve().value == 2.0
    program.add_costs([(columns[1], 0.5)])
    assert program.solve().value == 2.5


def test_what_is_not_proved_in_time_shows_in_the_gap(monkeypatch):
    """Market split: the least slack by which binaries miss some sums has a large search tree."""
    draw, program = random.Random(0), IntegerProgram()
    binaries = [program.add_binary() for _ in range(40)]
    for _ in range(4):
        factors = [draw.randrange(100) for _ in binaries]
        surplus, shortfall = program.add_column(1.0), program.add_column(1.0)
        entries = [*zip(binaries, factors), (surplus, 1.0), (shortfall, -1.0)]
        program.add_row(entries, low=sum(factors) // 2, high=sum(factors) // 2)
    monkeypatch.setattr(integer_program, "TIME_LIMIT_S", 0.5)
    outcome = program.solve()
    assert outcome.values is not None and np.isfinite(outcome.value)
    assert outcome.bound < outcome.value and outcome.gap > 0.01
