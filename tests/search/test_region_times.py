"""Do busy and idle times of the layers add up to the latency, for the GPU alone and for plans?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but
from problems import covers, problems

from pimflow import frontend
from pimflow.core.candidate import RESOURCES
from pimflow.hardware import system
from pimflow.placement import search
from pimflow.placement.solvers.evaluate import evaluate
from pimflow.relay_passes.regions.extract_regions import extract_regions

BRANCHING = ("toy", "squeezenet-1.1", "googlenet")


def check_sums(evaluation):
    times = evaluation.region_times.values()
    assert sum(each.latency_ns for each in times) == pytest.approx(evaluation.latency_ns, abs=0.001)
    for resource in RESOURCES:
        busy_ns, idle_ns = (sum(getattr(t, kind)[resource] for t in times) for kind in ("busy_ns", "idle_ns"))
        assert busy_ns == pytest.approx(evaluation.timeline.busy_ps(resource) / 1000)
        assert busy_ns + idle_ns == pytest.approx(evaluation.timeline.end_ps / 1000)
        assert all(each.busy_ns[resource] >= 0 and each.idle_ns[resource] >= 0 for each in times)


@pytest.mark.long
@pytest.mark.parametrize("model", long_but(BRANCHING[:2], BRANCHING))
def test_columns_of_networks_add_up(model):
    """Also in branches, where a layer waits for the others: waiting is no time of the layer."""
    search_result = search(extract_regions(frontend.load(model).module, model), system())
    alone = search_result.gpu_only
    for evaluation in (alone, search_result.evaluation):
        check_sums(evaluation)
    for times in alone.region_times.values():
        assert times.idle_ns["gpu"] == 0 and times.busy_ns["gpu"] == pytest.approx(times.latency_ns)


@given(problems(), st.data())
@settings(max_examples=examples(40))
def test_columns_of_any_plan_add_up(problem, data):
    graph, table = problem
    check_sums(evaluate(graph, data.draw(st.sampled_from(covers(graph, table))), table, system()))
