"""Are candidates of several regions found, timed, written and read like those of one?"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from edited_plans import edited_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from problems import covers, graph_of, longest_path_ns, problems, runs

from pimflow import frontend
from pimflow.commands.compile.explain import explain
from pimflow.core.candidate import Cost, makespan_ns
from pimflow.core.plan import Plan
from pimflow.core.rewrite import OPERATOR_KERNELS, FusedGroupRewrite, Mode, PipelineRewrite
from pimflow.errors import PlanError
from pimflow.hardware import system
from pimflow.placement import CandidateGenerator, apply, best_plan, plan_application, search
from pimflow.placement.solvers import plan_state
from pimflow.placement.solvers.evaluate import evaluate
from pimflow.relay_passes.regions.extract_regions import extract_regions

SYSTEM = system(channel_sharing="partitioned")


@given(problems(), st.data())
@settings(max_examples=examples(90))
def test_the_evaluator_finds_the_longest_path(problem, data):
    graph, table = problem
    chosen = data.draw(st.sampled_from(covers(graph, table)))
    evaluation = evaluate(graph, chosen, table, SYSTEM)
    assert evaluation.latency_ns == pytest.approx(longest_path_ns(graph, table, chosen), rel=1e-12)
    assert evaluation.region_times.keys() == {region.name for region in graph.regions}


def test_what_is_no_run_is_refused():
    graph = graph_of([(), (0,), (0,), (1, 2), (3,)])
    long_run = ("r0", "r1", "r2", "r3")  # the run contains both branches
    assert set(runs(graph)) == {long_run, ("r1", "r2", "r3"), ("r1", "r2", "r3", "r4"), ("r2", "r3"),
                                ("r2", "r3", "r4"), ("r3", "r4")}  # fmt: skip
    candidate = CandidateGenerator(_toy(), SYSTEM).make(_toy().regions[0], OPERATOR_KERNELS)

    def check(names, rewrite=OPERATOR_KERNELS):
        covering = replace(candidate, covers=names, rewrite=rewrite)
        plan_state.check_covers(graph, SimpleNamespace(candidates={names[0]: (covering,)}))

    refused = [("r0", "r1"), ("r1", "r2"), ("r3", "r4", "r5")]  # r0 is read outside, r1 too; no r5
    # r3 reads r1 first, not r2: each stage along rows reads the region before it.
    staged = PipelineRewrite(cuts=(1,), modes=(Mode.GPU, Mode.PIM))
    for names, rewrite in [(names, OPERATOR_KERNELS) for names in refused] + [(("r2", "r3"), staged)]:
        with pytest.raises(ValueError, match="covers no run"):
            check(names, rewrite)
    for names in runs(graph):
        check(names)
    check(("r3", "r4"), staged)


def _toy():
    return extract_regions(frontend.load("toy").module, "toy")


@pytest.fixture
def toy(monkeypatch):
    """The toy network, two of whose regions can be done by one kernel in hardly any time."""
    graph = _toy()
    names = next(run for run in runs(graph) if len(run) == 2)

    class Fusing(CandidateGenerator):
        def candidates(self, region):
            candidates = super().candidates(region)
            if region.name != names[0]:
                return candidates
            quick = tuple(replace(task, execution_ns=1.0) for task in candidates[0].tasks)
            fused = {"name": "FUSED", "covers": names, "tasks": quick, "rewrite": FusedGroupRewrite()}
            return [*candidates, replace(candidates[0], **fused)]

    monkeypatch.setattr(best_plan, "CandidateGenerator", Fusing)
    monkeypatch.setattr(plan_application, "CandidateGenerator", Fusing)
    return graph, names


def test_a_run_goes_through_search_plan_and_report(toy):
    graph, names = toy
    search_result = search(graph, SYSTEM)
    fused = next(c for c in search_result.candidates if len(c.covers) > 1)
    choices = search_result.candidate_by_region
    assert fused.covers == names and choices[names[0]] is choices[names[1]] is fused
    assert len(search_result.plan.choices) == len(graph.regions) - 1
    assert search_result.plan.choice(names[1]) is search_result.plan.choice(names[0])
    times = search_result.evaluation.region_times
    assert times[names[1]].latency_ns == 0.0 < times[names[0]].latency_ns

    reapplied = apply(graph, SYSTEM, Plan.from_json(search_result.plan.to_json()))
    assert reapplied.candidates == search_result.candidates
    assert reapplied.evaluation.latency_ns == search_result.evaluation.latency_ns

    for name in names:
        explained = explain(search_result, graph.region(name))
        assert [c.covers for c in explained.candidates if c.chosen] == [names]
        assert explained.text()
    assert makespan_ns(fused.tasks) == Cost.from_candidate(fused).latency_ns


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mode": "PIM", "gpu_share": 0.0}, "cannot be PIM together so; candidates: FUSED"),
        ({"schedule": "sideways"}, "candidates: FUSED"),
        ({"covers": ()}, "do each region of 'toy' once"),
    ],
)
def test_a_run_that_cannot_be_done_is_refused(toy, changes, says):
    graph, names = toy
    plan = search(graph, SYSTEM).plan
    with pytest.raises(PlanError, match=says):
        apply(graph, SYSTEM, edited_plan(plan, names[0], **changes))
