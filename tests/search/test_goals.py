"""Is the plan the best for what was asked, within its bounds, and does a refusal say what would do?"""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from problems import BASE, QUIET, covers, problems

from pimflow.core.candidate import Footprint
from pimflow.core.goal import SOLVERS
from pimflow.core.kernel import ConvGeometry
from pimflow.core.quantities import ENERGY_UNITS, LATENCY_UNITS, quantity
from pimflow.core.region import KernelShape, Region
from pimflow.core.region_graph import RegionGraph
from pimflow.errors import InfeasibleError, UnknownNameError, UsageError
from pimflow.hardware import system
from pimflow.placement import Goal, search
from pimflow.placement.solvers.evaluate import evaluate
from pimflow.placement.solvers.infeasible import infeasible_error
from pimflow.placement.solvers.objectives import EvaluatedPlan
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.placement.solvers.plan_search import PlanSearch

objectives = st.sampled_from(["latency", "energy", "edp"])
shares = st.sampled_from([None, 0.0, 0.3, 0.6, 1.0])


def bounds_between(evaluations, latency_share, energy_share) -> dict[str, float]:
    """Bounds between the least and the most that any plan takes."""
    names = {"max_latency_ns": (latency_share, "latency_ns"), "max_energy_pj": (energy_share, "energy_pj")}
    bounds = {}
    for name, (share, attribute) in names.items():
        values = [getattr(evaluation, attribute) for evaluation in evaluations]
        if share is not None:
            bounds[name] = min(values) + share * (max(values) - min(values))
    return bounds


def plan_evaluations(graph, table) -> list[EvaluatedPlan]:
    """Every cover, evaluated."""
    memory = PlanMemory(graph, QUIET.dtype)
    pairs = [(cover, evaluate(graph, cover, table, QUIET)) for cover in covers(graph, table)]
    return [EvaluatedPlan(candidates=c, evaluation=e, memory_bytes=memory.pool_bytes(c)) for c, e in pairs]


@given(problems(max_regions=4), objectives, st.sampled_from(SOLVERS), shares, shares)
@settings(max_examples=examples(90))
def test_no_plan_within_the_bounds_is_better(problem, objective, solver, latency_share, energy_share):
    graph, table = problem
    all_plans = plan_evaluations(graph, table)
    results = [plan.evaluation for plan in all_plans]
    goal = Goal(objective=objective, solver=solver, **bounds_between(results, latency_share, energy_share))
    allowed = [goal.value(plan.evaluation) for plan in all_plans if goal.allows(plan)]
    best = PlanSearch(graph, table, QUIET, goal).best()
    if not allowed:
        assert best is None
        return
    assert goal.allows(best)
    assert goal.value(best.evaluation) == pytest.approx(min(allowed), rel=1e-9)


@given(problems(max_regions=4), objectives, shares, shares)
@settings(max_examples=examples(48))
def test_errors_add_up_to_no_more_than_asked_for(problem, objective, latency_share, error_share):
    """A looser bound never makes a worse plan, and what is refused says the least error that there is."""
    graph, table = problem
    all_plans = plan_evaluations(graph, table)
    bounds = bounds_between([plan.evaluation for plan in all_plans], latency_share, None)
    errors = [plan.error for plan in all_plans]
    tight = min(errors) + (error_share or 0.0) * (max(errors) - min(errors))
    values = []
    for max_error in (tight, tight + 0.25, None):
        goal = Goal(objective=objective, max_error=max_error, **bounds)
        plans = PlanSearch(graph, table, QUIET, goal)
        allowed = [goal.value(plan.evaluation) for plan in all_plans if plans.allows(plan)]
        best = plans.best()
        assert (best is None) == (not allowed)
        if best is None:
            min_error = min(plan.error for plan in all_plans if replace(goal, max_error=None).allows(plan))
            least_ns = min(plan.evaluation.latency_ns for plan in all_plans if plan.error <= max_error)
            refusal = infeasible_error([plans])
            assert str(refusal).startswith("latency of") and "within the other bounds" in str(refusal)
            assert refusal.demand == pytest.approx(least_ns)
            named = next(lever for lever in refusal.levers if lever.startswith("--max-error"))
            assert float(named.split()[1]) == pytest.approx(min_error, abs=1e-3)
            continue
        assert plans.allows(best)
        values.append(goal.value(best.evaluation))
        assert values[-1] == pytest.approx(min(allowed), rel=1e-9)
        assert values[-1] <= values[0] * (1 + 1e-9)


@given(problems(max_regions=4), shares, shares)
@settings(max_examples=examples(48))
def test_a_refusal_says_what_would_do(problem, latency_share, energy_share):
    """Bounds of four fifths of what there is: what levers name are bounds that are kept."""
    graph, table = problem
    evaluations = [evaluate(graph, chosen, table, QUIET) for chosen in covers(graph, table)]
    goal = Goal(**{n: 0.8 * b for n, b in bounds_between(evaluations, latency_share, energy_share).items()})
    plans = PlanSearch(graph, table, QUIET, goal)
    if plans.best():
        return
    error = infeasible_error([plans])
    assert isinstance(error, InfeasibleError) and error.exit_code == 4 and error.demand > error.bound
    within = "within the other bounds" in str(error)
    for lever in error.levers:
        option, _, amount = lever.partition(" ")
        if option not in BOUNDS:
            continue
        field, units = BOUNDS[option]
        bound = {field: quantity(amount, units, option)}
        enough = replace(goal, **bound) if within else Goal(**bound)
        assert PlanSearch(graph, table, QUIET, enough).best()


BOUNDS = {"--max-latency": ("max_latency_ns", LATENCY_UNITS), "--max-energy": ("max_energy_pj", ENERGY_UNITS)}


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [
        ("1.5ms", LATENCY_UNITS, 1.5e6),
        ("800 us", LATENCY_UNITS, 8e5),
        ("250", LATENCY_UNITS, 250.0),
        ("2e3ns", LATENCY_UNITS, 2e3),
        ("20mJ", ENERGY_UNITS, 2e10),
        ("7", ENERGY_UNITS, 7.0),
    ],
)
def test_quantities_have_units(text, units, value):
    assert math.isclose(quantity(text, units, "--max"), value, rel_tol=1e-12)


@pytest.mark.parametrize(
    "text", ["", "fast", "-1ms", "0", "1e", "1.2.3", "3 hours", "1mJ", "inf", "nan", "1e999"]
)
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(UsageError, match=r"--max-latency '.*' is no number above zero in ns, us, ms, s"):
        quantity(text, LATENCY_UNITS, "--max-latency")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"objective": "latenci"}, UnknownNameError),
        ({"solver": "ip"}, UnknownNameError),
        ({"max_latency_ns": 0.0}, UsageError),
        ({"max_latency_ns": math.inf}, UsageError),
        ({"max_energy_pj": "little"}, UsageError),
        ({"max_energy_pj": True}, UsageError),
        ({"max_memory_bytes": -1}, UsageError),
        ({"max_error": -0.1}, UsageError),
        ({"max_error": math.nan}, UsageError),
    ],
)
def test_a_goal_that_means_nothing_is_refused(changes, error):
    with pytest.raises(error):
        Goal(**changes)


@given(problems(max_regions=4), shares, shares)
@settings(max_examples=examples(40))
def test_the_smallest_plan_within_the_bounds_and_of_those_the_fastest(problem, latency_share, energy_share):
    graph, table = problem
    all_plans = plan_evaluations(graph, table)
    bounds = bounds_between([plan.evaluation for plan in all_plans], latency_share, energy_share)
    goal = Goal(objective="memory", **bounds)
    allowed = [(p.memory_bytes, p.evaluation.latency_ns) for p in all_plans if goal.allows(p)]
    best = PlanSearch(graph, table, QUIET, goal).best()
    if not allowed:
        assert best is None
        return
    least_bytes, least_ns = min(allowed)
    assert (best.memory_bytes, goal.allows(best)) == (least_bytes, True)
    assert best.evaluation.latency_ns == pytest.approx(least_ns, rel=1e-9)


@given(problems(max_regions=3), st.data())
@settings(max_examples=examples(30))
def test_no_plan_within_the_rows_is_better(problem, data):
    """Candidates that are slower and take fewer rows are candidates too."""
    graph, table = problem

    def ways(c):
        """The candidate, and one that takes longer and fewer rows."""
        fewer, rows = sorted(data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5))))
        tasks = tuple(replace(task, execution_ns=task.execution_ns + 1) for task in c.tasks)
        slower = replace(c, name=f"{c.name} slower", tasks=tasks, footprint=Footprint(bank_rows=fewer))
        return replace(c, footprint=Footprint(bank_rows=rows)), slower

    candidates = {
        name: tuple(option for c in result for option in ways(c)) for name, result in table.candidates.items()
    }
    table = replace(table, candidates=candidates)
    all_plans = [
        (sum(c.footprint.bank_rows for c in cover), evaluate(graph, cover, table, BASE).latency_ns)
        for cover in covers(graph, table)
    ]
    at_most = data.draw(st.sampled_from(sorted({max(row_count, 1) for row_count, _ in all_plans})))
    best_ns = min(ns for row_count, ns in all_plans if row_count <= at_most)
    small = replace(BASE, pim=replace(BASE.pim, rows_per_bank=BASE.pim.row_base + at_most))
    result = PlanSearch(graph, table, small, Goal()).best()
    assert result.evaluation.latency_ns == pytest.approx(best_ns, rel=1e-9)
    assert sum(c.footprint.bank_rows for c in result.candidates) <= at_most


def test_what_can_be_met_fits_into_the_rows():
    """Three layers of which PIM has room for one: the error names what one of these plans needs."""
    fc = ConvGeometry(n=1, h=1, w=1, c=1024, oc=1024)
    regions = [
        Region(
            name=f"r{i}",
            operator="dense",
            operators=("dense",),
            inputs=(f"r{i - 1}" if i else "%x",),
            input_shapes=((1, 1024),),
            output_shape=(1, 1024),
            kernel=KernelShape(weight_elements=1 << 20),
            geometry=fc,
        )
        for i in range(3)
    ]
    graph = RegionGraph(name="fcs", regions=tuple(regions), outputs=("r2",))
    large = system()
    free = search(graph, large)
    rows = max(c.footprint.bank_rows for c in free.candidates)
    small = replace(large, pim=replace(large.pim, rows_per_bank=large.pim.row_base + rows))
    tight = search(graph, small)
    assert free.evaluation.latency_ns < tight.evaluation.latency_ns
    between_ns = (free.evaluation.latency_ns + tight.evaluation.latency_ns) / 2
    between_pj = (free.evaluation.energy_pj + tight.evaluation.energy_pj) / 2
    for goal in (Goal(max_latency_ns=between_ns), Goal(max_energy_pj=between_pj)):
        with pytest.raises(InfeasibleError) as refused:
            search(graph, small, goal=goal)
        named = "latency" if goal.max_latency_ns else "energy"
        assert named in str(refused.value) and "inf" not in str(refused.value)
