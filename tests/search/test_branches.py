"""Do branches run on both devices at once, does the search foresee it, and does more hardware never hurt?"""

from dataclasses import replace

import pytest
from answers import best_label
from drawn_networks import Graph
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from problems import problems

from pimflow import frontend
from pimflow.commands.shared import prepare
from pimflow.commands.shared.plan_report import Estimate
from pimflow.compiler import build
from pimflow.compiler.verification import verify
from pimflow.core.candidate import makespan_ns
from pimflow.fusion.narrow_parts import narrow_parts
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets
from pimflow.placement import CandidateGenerator, Costs, Goal, Profiling, profile, search
from pimflow.placement.solvers.evaluate import evaluate
from pimflow.placement.solvers.plan_state import charged_tasks, states

BASE = system(channel_sharing="partitioned")
QUICK = BASE.with_launches(gpu_ns=500.0, pim_ns=200.0)


def module_of_branches() -> frontend.Network:
    """Three branches of 1x1 and 3x3 convolutions, as Inception has them, over a map of 28x28."""
    graph = Graph((1, 8, 28, 28))

    def conv(x: str, channels: int, kernel: int = 1) -> str:
        return graph.relu(graph.conv(x, channels, kernel, bias=False))

    stem = conv("x0", 192)
    branches = [conv(stem, 64), conv(conv(stem, 96), 128, 3), conv(conv(stem, 16), 32, 3)]
    conv(graph.concat(*branches), 64)
    return frontend.load(graph.model())


@pytest.fixture(scope="module")
def network():
    return module_of_branches()


@pytest.fixture(scope="module")
def graph(network):
    return prepare.regions(network, BASE)


@pytest.fixture(scope="module")
def costs(graph):
    return Costs(BASE, Profiling())


def test_parts_begin_where_all_has_ended(graph):
    # Five convolutions and the one that reads all branches, joined in its kernel.
    assert narrow_parts(graph) == [(0, 1), (1, 7)]


def test_branches_overlap_as_the_search_foresees(graph, costs):
    search_result = search(graph, QUICK, costs, Goal())
    names = {region.name for region in graph.regions}
    assert search_result.evaluation.latency_ns == pytest.approx(search_result.plan.latency_ns, rel=1e-9)
    assert search_result.plan.lower_bound_ns == pytest.approx(search_result.plan.latency_ns, rel=1e-9)
    estimate = Estimate.from_search(search_result)
    assert estimate.solver == "label" and estimate.gap < 1e-9 and estimate.overlapped_ns.keys() <= names
    in_turn_ns = search_result.evaluation.latency_ns + sum(estimate.overlapped_ns.values())
    assert search_result.evaluation.latency_ns < 0.97 * in_turn_ns
    events = search_result.evaluation.timeline.events
    overlaps = [
        (g.label, p.label)
        for g in events
        for p in events
        if (g.resource, p.resource) == ("gpu", "pim")
        and max(g.start_ps, p.start_ps) < min(g.end_ps, p.end_ps)
        and not set(g.regions) & set(p.regions)
    ]
    assert overlaps, "no two regions run on both devices at once"


@pytest.mark.long
def test_a_plan_that_overlaps_gives_the_reference(network, graph, costs):
    search_result = search(graph, QUICK, costs)
    assert {choice.mode for choice in search_result.plan.choices} > {"GPU"}
    built = build.build(network, search_result, targets.target_by_name("llvm+pim"))
    inputs = network.example_inputs()
    verify(network, built, QUICK, inputs, network.reference(inputs)).require()


@given(problems(max_regions=6))
@settings(max_examples=examples(36))
def test_what_overlaps_makes_up_the_difference(problem):
    graph, table = problem
    chosen = best_label(graph, table).candidates
    tasks = [charged_tasks(graph, table, *step)[0] for step in zip(chosen, states(graph, chosen))]
    evaluation = evaluate(graph, chosen, table, BASE)
    overlapped = evaluation.overlap_ns
    assert all(ns > 0 for ns in overlapped.values())
    assert evaluation.latency_ns + sum(overlapped.values()) == pytest.approx(
        sum(map(makespan_ns, tasks)), abs=0.01
    )


@given(
    gpu_ns=st.floats(0, 2e4),
    pim_ns=st.floats(0, 2e4),
    objective=st.sampled_from(["latency", "energy", "edp"]),
)
@settings(max_examples=examples(9))
def test_a_plan_is_never_worse_than_the_gpu_alone(graph, costs, gpu_ns, pim_ns, objective):
    goal = Goal(objective=objective)
    search_result = search(graph, BASE.with_launches(gpu_ns=gpu_ns, pim_ns=pim_ns), costs, goal)
    assert goal.value(search_result.evaluation) <= goal.value(search_result.gpu_only)


@given(problems(max_regions=6), st.floats(0.1, 1.0), st.sampled_from(["pim", "crossbar"]))
@settings(max_examples=examples(36))
def test_a_faster_device_never_slows_the_best_plan(problem, factor, resource):
    graph, table = problem

    def quicker(candidate):
        tasks = tuple(
            replace(t, execution_ns=factor * t.execution_ns) if t.resource == resource else t
            for t in candidate.tasks
        )
        return replace(candidate, tasks=tasks)

    candidates = {name: tuple(map(quicker, options)) for name, options in table.candidates.items()}
    before, after = best_label(graph, table), best_label(graph, replace(table, candidates=candidates))
    assert after.latency_ns <= before.latency_ns * (1 + 1e-9)


@pytest.mark.long
def test_more_pim_channels_never_slow_the_best_plan(graph):
    """The GPU keeps its channels: the card grows by those of PIM."""
    before_ns = float("inf")
    for pim_channels in (2, 4, 8, 16):
        gpu = replace(BASE.gpu, memory_channels=BASE.gpu_channels + pim_channels)
        table_of = replace(QUICK, gpu=replace(gpu, launch_ns=500.0), pim_channels=pim_channels)
        table = profile(graph, CandidateGenerator(graph, table_of))
        latency_ns = best_label(graph, table).latency_ns
        assert latency_ns <= before_ns * (1 + 1e-9)
        before_ns = latency_ns


@pytest.mark.long
def test_dense_blocks_are_searched_to_the_end():
    """Each layer reads all before it, and each of these may lie in several ways."""
    graph = prepare.regions(frontend.load("densenet-121"), system())
    search_result = search(graph, system(), goal=Goal(modes=("gpu", "pim")))
    assert search_result.plan.latency_ns < search_result.baseline.latency_ns
    assert search_result.gap < 1e-9
    assert search_result.plan.lower_bound_ns == pytest.approx(search_result.plan.latency_ns, rel=1e-9)
