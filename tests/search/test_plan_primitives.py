"""Are the GPU's convolution primitives candidates like any other: priced by their launches, never a loss?"""

import json
from dataclasses import replace

import pytest
from conv_chains import chains
from edited_plans import edited_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow import frontend
from pimflow.commands.compile.explain import explain
from pimflow.commands.shared import prepare
from pimflow.core.plan import Plan
from pimflow.core.rewrite import GpuRewrite
from pimflow.errors import PlanError, UsageError
from pimflow.hardware import system
from pimflow.placement import CandidateGenerator, Costs, Goal, Profiling, apply, profile, search
from pimflow.placement.solvers.exhaustive import all_covers
from pimflow.placement.solvers.plan_search import PlanSearch
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.launches import can_compute, region_launches, usable_primitives
from pimflow.simulators.gpu.learned_model import Learned
from pimflow.simulators.gpu.model import kernel_cost

SYSTEM = system(dtype="fp32", splits="grid")
GPU = SYSTEM.gpu
WITH, WITHOUT = Goal(modes="gpu,pim", primitives=True), Goal(modes="gpu,pim")


def graphs(most=4, residuals=True):
    """Convolutions in a row, with work for Winograd or little of it."""
    shapes = st.tuples(st.just(1), st.sampled_from((7, 28)), st.just(28), st.sampled_from((16, 64)))
    return chains(shapes, st.integers(1, most), (16, 64), (1, 3, 3), residuals=residuals)


def launches_of(primitive, region):
    """What a region of these graphs launches, by what the primitive is: kinds, and bytes in and out."""
    layer = region.geometry
    moved = {"in": 4 * layer.h * layer.w * layer.c, "out": 4 * layer.pixels * layer.oc}
    moved["added"] = 4 * sum(region.input_elements[1:])
    stages = {name: 4 * _size(shape) for name, shape in primitive.stages(layer).items()}
    if primitive.family == "winograd":
        launches = [(moved["in"], stages["transformed"]), (stages["transformed"], stages["products"])]
        launches.append((stages["products"] + moved["added"], moved["out"]))
    elif stages:
        launches = [(moved["in"], stages["windows"]), (stages["windows"] + moved["added"], moved["out"])]
    else:
        skipped = max(layer.stride) > max(layer.kh, layer.kw)
        read = 4 * layer.pixels * layer.c if skipped else moved["in"]
        launches = [(read + moved["added"], moved["out"])]
    return launches


def _size(shape):
    size = 1
    for extent in shape:
        size *= extent
    return size


@settings(max_examples=examples(15), deadline=None)
@given(graphs())
def test_a_primitive_is_charged_all_that_it_launches(graph):
    generator = CandidateGenerator(graph, SYSTEM, primitives=True)
    for region in graph.regions:
        for primitive in usable_primitives(region):
            candidate = generator.make(region, GpuRewrite(primitive=primitive.name))
            launches = launches_of(primitive, region)
            assert [task.launched for task in candidate.tasks] == [True] * len(launches)
            assert {task.launch_ns for task in candidate.tasks} == {GPU.launch_ns}
            one_by_one = [(n - 1,) if n else () for n in range(len(launches))]
            assert [task.after for task in candidate.tasks] == one_by_one
            kernels = region_launches(primitive, region)
            assert [(k.input_bytes, k.output_bytes) for k in kernels] == launches
            assert sum(k.weight_bytes for k in kernels) == primitive.filter_bytes(region.geometry)
            times = [
                kernel_cost(k, GPU, dtype="fp32", channels=SYSTEM.gpu_channels).execution_ns for k in kernels
            ]
            assert [task.execution_ns for task in candidate.tasks] == times


@settings(max_examples=examples(15), deadline=None)
@given(graphs(most=3))
def test_more_candidates_are_never_a_loss(graph):
    apart, together = (search(graph, SYSTEM, goal=goal) for goal in (WITHOUT, WITH))
    slack = 1 + 1e-9
    assert together.evaluation.latency_ns <= apart.evaluation.latency_ns * slack
    assert together.gpu_only.latency_ns <= apart.gpu_only.latency_ns
    assert together.evaluation.latency_ns <= together.gpu_only.latency_ns * slack
    for name, candidates in apart.table.candidates.items():
        assert {c.name for c in candidates} <= {c.name for c in together.table.candidates[name]}


@settings(max_examples=examples(15), deadline=None)
@given(graphs(most=2))
def test_the_best_of_all_covers_is_found(graph):
    """Three layers may have 60,000 covers."""
    label, exhaustive = (
        search(graph, SYSTEM, goal=replace(WITH, solver=solver)) for solver in ("label", "exhaustive")
    )
    assert label.evaluation.latency_ns == pytest.approx(exhaustive.evaluation.latency_ns, rel=1e-9)


@settings(max_examples=examples(9), deadline=None)
@given(graphs())
def test_the_gpu_alone_has_the_fastest_of_all_primitives_too(graph):
    """One after the other, by the model and all channels: no candidate that was left out would be faster."""
    generator = CandidateGenerator(graph, SYSTEM, primitives=True)
    times_by_region = [
        [
            sum(task.duration_ns for task in generator.make(region, GpuRewrite(primitive=name), 32).tasks)
            for name in ["", *(primitive.name for primitive in usable_primitives(region))]
        ]
        for region in graph.regions
    ]
    search_result = search(graph, SYSTEM, goal=WITH)
    assert search_result.gpu_only.latency_ns == pytest.approx(sum(map(min, times_by_region)))


def chain_memory_bytes(graph, cover):
    """Of regions in a row: the most of an operand, a result and a workspace, or of a result and its parts.

    If PIM takes part, what lies in each set of memory channels counts by itself.
    """
    peaks, before = dict.fromkeys(("left", "all", "pim"), 0), "left"
    apart = any(candidate.uses_pim for candidate in cover)
    for region, candidate in zip(graph.regions, cover, strict=True):
        layer, axis = region.geometry, getattr(candidate.rewrite, "axis", "")
        primitive = PRIMITIVES.get(candidate.primitive)
        stages = primitive.stages(layer).values() if primitive else ()
        operand = 0 if region is graph.regions[0] else _up(4 * layer.h * layer.w * layer.c)
        result = _up(4 * layer.pixels * layer.oc)
        parts = result if axis == "reduction" else 0
        joined = 2 * result if axis == "channels" and layer.pixels > 1 else 0
        channel_set = candidate.output.channels if apart else "left"
        live = dict.fromkeys(peaks, 0)
        live[before] += operand
        live[channel_set] += result + parts + _up(4 * sum(map(_size, stages)))
        peaks = {channels: max(size, live[channels]) for channels, size in peaks.items()}
        peaks[channel_set] = max(peaks[channel_set], joined)
        before = channel_set
    return sum(peaks.values())


def _up(size_bytes):
    return (size_bytes + 63) // 64 * 64


@pytest.mark.long
@settings(max_examples=examples(18), deadline=None)
@given(graphs(most=3, residuals=False), st.floats(0, 1))
def test_a_memory_budget_binds_the_plan(graph, share):
    """Against every cover: the fastest of those that keep to it."""
    quick = SYSTEM.with_launches(gpu_ns=100.0, pim_ns=100.0)  # so that every primitive pays somewhere
    table = profile(graph, CandidateGenerator(graph, quick, modes=WITH.modes, primitives=True))
    covers = [(cover, ns) for cover, ns, _ in all_covers(graph, table)]
    sizes = [chain_memory_bytes(graph, cover) for cover, _ in covers]
    fastest = min(range(len(covers)), key=lambda index: covers[index][1])
    budget = min(sizes) + share * (sizes[fastest] - min(sizes))
    result = PlanSearch(graph, table, quick, replace(WITH, max_memory_bytes=budget)).best()
    assert chain_memory_bytes(graph, result.candidates) <= budget * (1 + 1e-6)
    best_ns = min(ns for (_, ns), size in zip(covers, sizes) if size <= budget)
    assert result.evaluation.latency_ns == pytest.approx(best_ns, rel=1e-9)


@pytest.fixture(scope="module")
def toy():
    graph = prepare.regions(frontend.load("toy"), SYSTEM)
    return graph, search(graph, SYSTEM, goal=WITH)


@pytest.mark.long
def test_a_plan_file_names_them(toy):
    graph, search_result = toy
    chosen = search_result.primitives()
    assert chosen and all(p.target == "cuda" for p in chosen.values())
    rows = json.loads(search_result.plan.to_json())["choices"]
    assert {row["region"]: row["primitive"] for row in rows if "primitive" in row} == {
        name: primitive.name for name, primitive in chosen.items()
    }
    reapplied = apply(graph, SYSTEM, Plan.from_json(search_result.plan.to_json()))
    assert reapplied.candidates == search_result.candidates
    assert reapplied.evaluation.latency_ns == search_result.evaluation.latency_ns
    assert reapplied.gpu_only.latency_ns == search_result.gpu_only.latency_ns, "the baseline has them too"
    for name, primitive in chosen.items():
        explained = explain(search_result, graph.region(name))
        starred = [c.name for c in explained.candidates if c.chosen]
        assert starred == [f"GPU {primitive.name}"]


@pytest.mark.parametrize(
    ("primitive", "says"),
    [
        ("winograd-2d-f4-cuda-hwc-64x46", "did you mean .*winograd-2d-f4-cuda-hwc-64x64"),
        pytest.param("im2row-hwc-7x32", "it is for a CPU", marks=pytest.mark.long),
        ("depthwise-cuda-hwc-8x32", "nothing says how long it takes"),
        pytest.param("operator-cuda-hwc", "where no primitive is named", marks=pytest.mark.long),
    ],
)
def test_a_primitive_that_cannot_be_is_refused(toy, primitive, says):
    graph, search_result = toy
    region = next(iter(search_result.primitives()))
    plan = edited_plan(search_result.plan, region, primitive=primitive)
    with pytest.raises(PlanError, match=says) as refused:
        apply(graph, SYSTEM, Plan.from_json(plan.to_json(), "plan.json"))
    assert f"'{region}'" in str(refused.value)


def test_only_what_the_gpu_does_by_itself_has_one(toy):
    graph, search_result = toy
    on_pim = next(c.region for c in search_result.plan.choices if c.mode == "PIM")
    name = next(iter(search_result.primitives().values())).name
    with pytest.raises(PlanError, match=f"'{on_pim}'.*wholly on the GPU"):
        apply(graph, SYSTEM, edited_plan(search_result.plan, on_pim, primitive=name))
    with pytest.raises(UsageError, match="compute in fp32, not in fp16"):
        apply(graph, system(splits="grid"), search_result.plan)
    learned = Costs(SYSTEM, Profiling(gpu=Learned()))
    with pytest.raises(UsageError, match="gpu=learned has no times of primitives"):
        search(graph, SYSTEM, learned, WITH)


def test_a_plan_carries_them_over_where_they_still_apply(toy):
    graph, search_result = toy
    name = next(iter(search_result.primitives()))
    gathering = replace(graph.region(name), prologue=("concat",))
    changed_graph = replace(graph, regions=tuple(gathering if r.name == name else r for r in graph.regions))
    carried = search_result.plan.to_graph(changed_graph, can_compute)
    assert carried.choice(name).primitive == "" and carried.choice(name).mode == "GPU"
    assert search_result.plan.to_graph(graph, can_compute).choices == search_result.plan.choices
