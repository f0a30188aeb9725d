"""Is the solver's plan the best one there is?"""

import itertools
from dataclasses import replace

import pytest

from pimflow import frontend
from pimflow.core.candidate import makespan_ns
from pimflow.hardware import system
from pimflow.placement import Candidates, profile, search
from pimflow.placement.evaluate import evaluate
from pimflow.placement.solve import solve_dp
from pimflow.relay_passes.extract_regions import extract_regions

SYSTEMS = {
    "full": system(),
    "free launches": system(pim_launch_ns=0.0),
    "dear launches": system(pim_launch_ns=5000.0),
    "paper": system(accounting="paper", timing="ramulator-pimflow"),
    "few channels": system(pim_channels=2),
}


@pytest.fixture(scope="module")
def toy():
    return extract_regions(frontend.load("toy").module, "toy")


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_combination_of_candidates_is_faster(toy, name):
    """All combinations of the GPU, PIM and two splits of every region, timed by the evaluator."""
    target = SYSTEMS[name]
    table = profile(toy, Candidates(toy, target))
    table = replace(table, candidates={n: found[:4] for n, found in table.candidates.items()})
    solution = solve_dp(toy, table)
    best_ns = min(
        evaluate(toy, chosen, table, target).latency_ns
        for chosen in itertools.product(*(table.candidates[r.name] for r in toy.regions))
    )
    assert solution.latency_ns == pytest.approx(best_ns, rel=1e-12)
    found_ns = evaluate(toy, solution.candidates, table, target).latency_ns
    assert found_ns == pytest.approx(solution.latency_ns, rel=1e-12)


def test_the_estimate_is_what_the_timeline_gives():
    graph = extract_regions(frontend.load("mobilenet-v2").module, "mobilenet-v2")
    found = search(graph, system())
    assert found.evaluation.latency_ns == pytest.approx(found.plan.latency_ns, rel=1e-9)
    assert found.plan.latency_ns >= found.plan.lower_bound_ns * (1 - 1e-12)
    assert found.evaluation.latency_ns <= found.gpu_only.latency_ns


def test_a_dependent_region_goes_on_with_the_submission_before_it(toy):
    target = system()
    maker = Candidates(toy, target)
    region = toy.region("widen.conv")
    alone = maker.make(region, "PIM")
    saved_ns = makespan_ns(alone.tasks) - makespan_ns(alone.continued().tasks)
    assert saved_ns == pytest.approx(target.pim_launch_ns)
    gpu = maker.make(region, "GPU")
    split = maker.make(region, "SPLIT", 8)
    assert gpu.continued() == gpu and split.continued() == split


def test_resources_do_one_task_at_a_time(toy):
    found = search(toy, system())
    for resource in ("gpu", "pim", "crossbar"):
        events = [e for e in found.evaluation.timeline.events if e.resource == resource]
        assert all(a.end_ps <= b.start_ps for a, b in itertools.pairwise(events))
        assert found.evaluation.timeline.busy_ps(resource) <= found.evaluation.timeline.end_ps
