"""Is what the label search finds the best of every cover, and what is a plan found within a limit?"""

import itertools
import math
import random
from dataclasses import replace

import pytest
from answers import labels, min_value, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from problems import (
    criteria,
    graph_of,
    launch_ahead_problems,
    layout_problems,
    longest_path_ns,
    problems,
    shared_channel_problems,
    view_problems,
)

from pimflow.core.candidate import Candidate, CostTable, Footprint, Task
from pimflow.core.rewrite import OPERATOR_KERNELS, PimRewrite
from pimflow.core.tensor_placement import IN_ALL_CHANNELS, IN_GPU_CHANNELS
from pimflow.hardware import system
from pimflow.placement import Goal
from pimflow.placement.solvers import plan_search
from pimflow.placement.solvers.evaluate import evaluate, execute
from pimflow.placement.solvers.exhaustive import all_covers
from pimflow.placement.solvers.label_search import (
    COMPARED_LABELS,
    ERROR,
    LATENCY,
    Criterion,
    SearchQuery,
    search,
)
from pimflow.placement.solvers.objectives import ROUNDING
from pimflow.placement.solvers.plan_search import PlanSearch

JOINED = [(), (0,), (0,), (1, 2)]
WIDE = [(), (0,), (0,), (0,), (1, 2, 3)]
KINDS = {
    "branches": problems(max_regions=5),
    "chain": problems(max_regions=7, chain=True),
    "layouts": layout_problems(max_regions=4),
    "one resource": layout_problems(("cpu",), max_regions=4),
    "shared channels": shared_channel_problems(max_regions=5),
    "copied back": shared_channel_problems(max_regions=4, copied=True),
    "shared channels, joined": shared_channel_problems(inputs=JOINED, fused=False),
    "launches ahead": launch_ahead_problems(problems(max_regions=4)),
    "launches ahead, chain": launch_ahead_problems(problems(max_regions=5, chain=True)),
    "launches ahead, shared channels": launch_ahead_problems(shared_channel_problems(max_regions=3)),
    "views": view_problems(shared_channel_problems(max_regions=5)),
    "views, launches ahead": launch_ahead_problems(view_problems(shared_channel_problems(max_regions=4))),
    "wide": problems(inputs=WIDE, fused=False),
    "wide, shared channels": shared_channel_problems(inputs=WIDE, fused=False),
}
EXAMPLES = 100
shares = st.floats(0, 1)
# Constant power of a milliwatt: a picojoule a nanosecond, beside which the drawn energies matter.
BASE = system()
QUIET = replace(
    BASE,
    gpu=replace(BASE.gpu, energy=BASE.gpu.energy | {"static_w": 0.001}),
    pim=replace(BASE.pim, energy=BASE.pim.energy | {"background_mw_per_channel": 0.0}),
)
kinds = pytest.mark.parametrize("kind", KINDS)


def same(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-9)


def bound_at(values, share: float) -> float:
    """A bound between the least and the most of `values`."""
    return min(values) + share * (max(values) - min(values))


def pareto_front(pairs) -> list[tuple[float, float]]:
    front, min_second = [], math.inf
    for first, second in sorted(pairs):
        if second < min_second - 1e-9 * abs(second):
            front.append((first, second))
            min_second = second
    return front


def same_front(pairs, others) -> bool:
    fronts = pareto_front(pairs), pareto_front(others)
    numbers = [list(itertools.chain(*front)) for front in fronts]
    return len(numbers[0]) == len(numbers[1]) and all(map(same, *numbers))


@kinds
@given(st.data(), criteria)
@settings(max_examples=examples(EXAMPLES))
def test_no_cover_has_a_lower_sum(kind, data, criterion):
    graph, table = data.draw(KINDS[kind])
    answer = labels(graph, table, criterion)
    (label,) = answer.plans
    best = min_value(graph, table, criterion)
    run = execute(graph, label.candidates, table)
    assert same(criterion.value(run.latency_ns, sum(run.energies_pj.values()), label.candidates), best)
    assert same(label.values[0], best) and same(answer.bound, best)
    bounded = replace(criterion, upper_bound=best * (1 + ROUNDING))
    assert labels(graph, table, bounded).plans  # no lower bound is above it
    if criterion == ERROR:  # times are not followed
        assert math.isnan(label.latency_ns)
        return
    assert same(label.latency_ns, run.latency_ns)
    if not (table.transforms or table.overlaps_launches):
        assert same(label.latency_ns, longest_path_ns(graph, table, label.candidates))


@pytest.mark.long
@pytest.mark.parametrize("compared_labels", [1, COMPARED_LABELS])
@kinds
@given(st.data(), criteria, shares)
@settings(max_examples=examples(EXAMPLES))
def test_no_cover_in_a_budget_has_a_lower_sum_or_is_smaller(kind, compared_labels, data, criterion, share):
    graph, table = data.draw(KINDS[kind])
    problem = problem_of(graph, table)
    covers = [
        (problem.memory.pool_bytes(cover), criterion.value(latency_ns, energy_pj, cover))
        for cover, latency_ns, energy_pj in all_covers(graph, table)
    ]
    sizes = [size for size, _ in covers]
    budget = bound_at(sizes, share)
    values, smallest = [], []
    for only_gpu in (False, True):  # a plan without PIM has one pool
        options = {"counts_memory": True, "only_gpu": only_gpu, "compared_labels": compared_labels}
        for label in search(
            problem, SearchQuery(criteria=(criterion,), max_memory_bytes=budget, **options)
        ).plans:
            values.append(label.values[0])
            pool_bytes = problem.memory.pool_bytes(label.candidates)
            on_gpu = not any(c.uses_pim for c in label.candidates)
            assert pool_bytes <= label.pool_bytes <= budget
            assert pool_bytes == label.pool_bytes or (on_gpu and not only_gpu)
        smallest += search(problem, SearchQuery(criteria=(), minimises_memory=True, **options)).plans
    assert same(min(values), min(value for size, value in covers if size <= budget))
    assert min(label.pool_bytes for label in smallest) == min(sizes)


@pytest.mark.long
@kinds
@given(st.data(), shares)
@settings(max_examples=examples(EXAMPLES))
def test_no_cover_within_bounds_is_better(kind, data, share):
    graph, table = data.draw(KINDS[kind])
    problem = problem_of(graph, table)
    covers = [
        (latency_ns, energy_pj, sum(c.alternative.error for c in cover))
        for cover, latency_ns, energy_pj in all_covers(graph, table)
    ]
    latency_ns, _, error = (bound_at(values, share) for values in zip(*covers))
    for minimised, limit, best in (
        (Criterion(per_pj=1.0), replace(LATENCY, upper_bound=latency_ns), (1, 0, latency_ns)),
        (LATENCY, replace(ERROR, upper_bound=error), (0, 2, error)),
    ):
        value, bounded, limit_value = best
        (label,) = search(problem, SearchQuery(criteria=(minimised, limit))).plans
        assert label.values[1] <= limit_value
        assert same(label.values[0], min(f[value] for f in covers if f[bounded] <= limit_value))


@pytest.mark.long
@kinds
@given(st.data(), st.sampled_from([0.0, 1.0]), shares)
@settings(max_examples=examples(EXAMPLES))
def test_a_front_has_all_that_no_cover_beats(kind, data, static_pj_per_ns, share):
    """Without a bound, and of the plans within a budget as `PlanSearch` asks for them."""
    graph, table = data.draw(KINDS[kind])
    energy = Criterion(per_ns=static_pj_per_ns, per_pj=1.0)
    covers = [
        (latency_ns, energy.value(latency_ns, energy_pj, cover))
        for cover, latency_ns, energy_pj in all_covers(graph, table)
    ]
    answer = search(problem_of(graph, table), SearchQuery(criteria=(LATENCY, energy), front=True))
    assert same_front([label.values for label in answer.plans], covers)
    plans = PlanSearch(graph, table, QUIET, Goal())
    evaluated = [
        (evaluate(graph, cover, table, QUIET), plans.memory.pool_bytes(cover))
        for cover, *_ in all_covers(graph, table)
    ]
    budget = bound_at([size for _, size in evaluated], share)
    within = [(plan.latency_ns, plan.energy_pj) for plan, size in evaluated if size <= budget]
    front = plans.front(0.0, budget)
    assert all(plan.memory_bytes <= budget for plan in front)
    figures = [(plan.evaluation.latency_ns, plan.evaluation.energy_pj) for plan in front]
    assert same_front(figures, within)


@pytest.mark.long
@kinds
@given(st.data(), st.sampled_from([None, 0.0, 0.3, 0.7]))
@settings(max_examples=examples(EXAMPLES))
def test_no_cover_has_a_lower_product_of_latency_and_energy(kind, data, share):
    graph, table = data.draw(KINDS[kind])
    goal = Goal(objective="edp")
    memory = PlanSearch(graph, table, QUIET, goal).memory
    covers = [
        (goal.value(evaluate(graph, cover, table, QUIET)), memory.pool_bytes(cover))
        for cover, *_ in all_covers(graph, table)
    ]
    if share is not None:
        goal = replace(goal, max_memory_bytes=bound_at([size for _, size in covers], share))
    best = min(value for value, size in covers if share is None or size <= goal.max_memory_bytes)
    plan = PlanSearch(graph, table, QUIET, goal).best()
    assert same(goal.value(plan.evaluation) / best, 1)
    assert same(plan.value / best, 1) and plan.gap < 1e-9


def lanes(count: int, length: int, seed: int) -> tuple:
    """Chains side by side between a region and one that joins them, each with several candidates."""
    inputs = [()]
    ends = [0] * count
    for _ in range(length):
        for lane in range(count):
            inputs.append((ends[lane],))
            ends[lane] = len(inputs) - 1
    graph, draw = graph_of([*inputs, tuple(ends)]), random.Random(seed)

    def candidate(name: str, resource: str, number: int) -> Candidate:
        launch_ns, execution_ns, energy_pj = (float(draw.randint(1, 1000)) for _ in range(3))
        times = {"launch_ns": launch_ns, "execution_ns": execution_ns}
        task = Task(label=name, resource=resource, energies_pj={"work": energy_pj}, **times)
        return Candidate(
            name=f"{resource} {number}",
            covers=(name,),
            rewrite=OPERATOR_KERNELS if resource == "gpu" else PimRewrite(),
            tasks=(task,),
            footprint=Footprint(workspace_bytes=64 * draw.randint(0, 9)),
        )

    resources = ("gpu", "gpu", "pim", "pim")
    candidates = {
        region.name: tuple(candidate(region.name, *pair[::-1]) for pair in enumerate(resources))
        for region in graph.regions
    }
    return graph, CostTable(candidates=candidates)


LIMITS = {"seconds": {"seconds": 1e-9}, "labels": {"max_labels": 20}, "one label": {"max_labels": 1}}


@pytest.mark.long
@pytest.mark.parametrize("limit", LIMITS)
def test_within_a_limit_there_is_a_plan_and_a_bound(limit):
    gaps = 0
    for seed, criterion in itertools.product(range(3), (LATENCY, Criterion(per_ns=1.0, per_pj=1.0))):
        graph, table = lanes(6, 6, seed)
        full, limited = labels(graph, table, criterion), labels(graph, table, criterion, **LIMITS[limit])
        (best,), (label,) = full.plans, limited.plans
        assert full.bound == best.values[0]
        assert limited.bound <= best.values[0] * (1 + 1e-9) and best.values[0] <= label.values[0] * (1 + 1e-9)
        assert limited.labels < full.labels
        gaps += limited.bound < label.values[0] * (1 - 1e-9)
    assert gaps, "no limit was reached"


@pytest.mark.long
@pytest.mark.parametrize("objective", ["latency", "energy", "edp", "memory"])
def test_a_search_that_ends_early_reports_the_gap(objective):
    graph, table = lanes(*((8, 5, 1) if objective == "latency" else (6, 6, 0)))
    full, hasty = (
        PlanSearch(graph, table, QUIET, Goal(objective=objective, search_seconds=seconds)).best()
        for seconds in (60.0, 1e-9)
    )
    assert full.gap < 1e-9
    assert hasty.bound <= full.value * (1 + 1e-9)
    assert full.value <= hasty.value * (1 + 1e-9)
    assert hasty.gap >= 1 - full.value / hasty.value - 1e-9
    if objective != "memory":
        assert 0 < hasty.gap < 1


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_budget_that_can_be_kept_is_kept_however_early_the_search_ends(share):
    graph, table = lanes(6, 6, 0)
    smallest, fastest = (
        PlanSearch(graph, table, QUIET, Goal(objective=objective)).best()
        for objective in ("memory", "latency")
    )
    budget = bound_at([smallest.memory_bytes, fastest.memory_bytes], share)
    plan = PlanSearch(graph, table, QUIET, Goal(max_memory_bytes=budget, search_seconds=1e-9)).best()
    assert plan and plan.memory_bytes <= budget


def test_a_front_within_a_budget_has_plans_of_the_gpu_alone():
    """These have one pool, in which a tensor takes the place of one of another set of channels."""

    def candidate(name, mode, read, written, ns):
        resource = "gpu" if mode == "GPU" else "pim"
        return Candidate(
            name=mode,
            covers=(name,),
            rewrite=OPERATOR_KERNELS if mode == "GPU" else PimRewrite(),
            tasks=(Task(label=name, resource=resource, execution_ns=ns, energies_pj={"work": ns}),),
            input=read,
            output=written,
        )

    candidates = {
        "r0": (
            candidate("r0", "GPU", IN_GPU_CHANNELS, IN_GPU_CHANNELS, 10.0),
            candidate("r0", "PIM", IN_GPU_CHANNELS, IN_GPU_CHANNELS, 20.0),
        ),
        "r1": (candidate("r1", "GPU", IN_GPU_CHANNELS, IN_ALL_CHANNELS, 1.0),),
        "r2": (candidate("r2", "GPU", IN_ALL_CHANNELS, IN_ALL_CHANNELS, 1.0),),
        "r3": (candidate("r3", "GPU", IN_ALL_CHANNELS, IN_GPU_CHANNELS, 1.0),),
    }
    table = CostTable(candidates=candidates)
    plans = PlanSearch(graph_of([(), (0,), (1,), (2,)]), table, QUIET, Goal())
    fastest = plans.minimum(LATENCY)
    assert [plan.figures[0] for plan in plans.front(0.0, fastest.memory_bytes)] == [13.0]


@pytest.mark.parametrize("objective", ["latency", "energy", "edp", "memory"])
@pytest.mark.parametrize("figure", ["values", "pool_bytes"])
def test_figures_that_the_evaluator_does_not_find_are_refused(objective, figure, monkeypatch):
    """Whatever the search says of a plan, the evaluator has the last word."""
    graph, table = lanes(2, 2, 0)
    search = plan_search.search

    def tamper(problem, question):
        answer = search(problem, question)
        plans = (
            replace(label, pool_bytes=label.pool_bytes - 64)
            if figure == "pool_bytes"
            else replace(label, values=tuple(value * (1 - 1e-6) for value in label.values))
            for label in answer.plans
        )
        return replace(answer, plans=tuple(plans))

    free = PlanSearch(graph, table, QUIET, Goal(objective=objective)).best()
    goal = Goal(objective=objective, max_memory_bytes=1.5 * free.memory_bytes)
    assert PlanSearch(graph, table, QUIET, goal).best()
    monkeypatch.setattr(plan_search, "search", tamper)
    with pytest.raises(AssertionError, match="the search says"):
        PlanSearch(graph, table, QUIET, goal).best()
