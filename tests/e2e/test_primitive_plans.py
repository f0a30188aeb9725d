"""Does a network compute the reference by the primitives of a plan, in the launches that it charges?"""

import random
from dataclasses import replace

import numpy as np
import pytest
import tvm
from drawn_networks import Graph
from edited_plans import edited, edited_plan
from length import long_but
from tvm import relax, tirx

import pimflow
from pimflow import frontend
from pimflow.commands.shared import prepare
from pimflow.compiler import build, phases
from pimflow.compiler.verification import verify
from pimflow.core.plan import Choice
from pimflow.core.rewrite import GpuRewrite, PimRewrite
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Goal, apply, search
from pimflow.primitives.launches import usable_primitives
from pimflow.relay_passes.flat import main_bindings

SYSTEM = system(dtype="fp32", splits="grid")
GOAL = Goal(modes="gpu,pim", primitives=True)
CUDA = targets.target_by_name("cuda+pim")


def block():
    """A stem, two 3x3 layers with a shortcut around, 1x1 layers, and a product of one row."""
    graph = Graph((1, 3, 18, 22))

    def conv(x: str, name: str, channels: int, kernel: int, stride: int = 1) -> str:
        return graph.conv(x, channels, kernel, stride=stride, name=name)

    stem = graph.relu(conv(graph.relu(conv("x0", "stem", 32, 3)), "entry", 32, 1))
    inner = conv(graph.relu(conv(stem, "first", 32, 3)), "second", 32, 3)
    total = graph.relu(graph.add("Add", [inner, stem], graph.shapes[stem]))
    last = graph.relu(conv(total, "last", 48, 1, 2))
    pooled = graph.add("GlobalAveragePool", [last], (1, 48, 1, 1))
    graph.product(graph.reshape(pooled, 1, 48), 24)
    return graph.model()


def launches_built(applied: tvm.IRModule) -> int:
    """Grids of the kernels that ``main`` calls, as they are scheduled for a GPU."""
    with CUDA:
        mod = tvm.transform.Sequential(phases.scheduling_phases(CUDA, SYSTEM))(applied)
    count = 0
    for binding in main_bindings(mod):
        value = binding.value
        called = value.args[0] if isinstance(value, relax.Call) and value.args else None
        if isinstance(called, tvm.ir.GlobalVar) and isinstance(mod[called], tirx.PrimFunc):
            grids = mod[called].script().count('thread="blockIdx.x"')
            assert grids, called
            count += grids
    return count


def check(network, plan_result):
    """Launches charged and built, but for those of results that a kernel stores besides; and values."""
    charged = [event for event in plan_result.evaluation.timeline.events if event.resource == "gpu"]
    readers = plan_result.graph.consumers
    stored = sum(bool(c.deferred_epilogue) and len(readers[c.covers[-1]]) > 1 for c in plan_result.candidates)
    launch_count = launches_built(build.apply_search_result(network.module, plan_result))
    assert launch_count == sum(event.launched for event in charged) + stored
    inputs = network.example_inputs()
    compiled = build.build(network, plan_result, targets.target_by_name("llvm+pim"))
    verify(network, compiled, SYSTEM, inputs, network.reference(inputs), 1e-4).require()


@pytest.mark.parametrize(
    "name",
    long_but(
        [], ["", "winograd-2d-f4-cuda-hwc-32x32", "im2row-cuda-hwc-32x64", "implicit-gemm-cuda-hwc-64x64"]
    ),
)
def test_what_pim_leaves_undone_is_taken_in_and_stored_for_others(name):
    """The ReLU behind ``entry``, which its first reader applies and the shortcut reads too."""
    network = frontend.load(block())
    graph = prepare.regions(network, SYSTEM)
    plain = search(graph, SYSTEM, goal=Goal(modes="gpu"))
    changed = {"entry": {"mode": "PIM", "gpu_share": 0.0}, "first": {"primitive": name}}
    choices = tuple(edited(c, **changed.get(c.region, {})) for c in plain.plan.choices)
    plan_result = apply(graph, SYSTEM, replace(plain.plan, choices=choices))
    assert plan_result.candidate_by_region["entry"].deferred_epilogue and len(graph.consumers["entry"]) == 2
    check(network, plan_result)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_give_the_reference_and_launch_what_is_charged(seed):
    network, draw = frontend.load(block()), random.Random(seed)
    graph = prepare.regions(network, SYSTEM)
    search_result = search(graph, SYSTEM, goal=GOAL)
    choices, several = [], 0
    for region, choice in zip(graph.regions, search_result.plan.choices, strict=True):
        names = [primitive.name for primitive in usable_primitives(region)]
        on_pim = not search_result.generator.unsupported_reason(region) and draw.random() < 0.3
        name = "" if on_pim or not names else draw.choice(names)
        several += "winograd" in name or "im2row" in name
        rewrite = PimRewrite() if on_pim else GpuRewrite(primitive=name)
        choices.append(Choice(regions=choice.regions, rewrite=rewrite))
    plan_result = apply(graph, SYSTEM, replace(search_result.plan, choices=tuple(choices)))
    assert several and len(plan_result.primitives()) >= 2
    check(network, plan_result)


def test_workspaces_lie_in_the_pool():
    network = frontend.load(block())
    graph = prepare.regions(network, SYSTEM)
    plain = search(graph, SYSTEM, goal=Goal(modes="gpu"))
    name = "winograd-2d-f4-cuda-hwc-32x32"
    plan_result = apply(graph, SYSTEM, edited_plan(plain.plan, "first", primitive=name))
    plans, stages = [], plan_result.primitives()["first"].stages(graph.region("first").geometry)
    with CUDA:
        phases.lower(build.apply_search_result(network.module, plan_result), CUDA, SYSTEM, plans.append)
        phases.lower(build.apply_search_result(network.module, plain), CUDA, SYSTEM, plans.append)
    workspace_bytes = plan_result.candidate_by_region["first"].footprint.workspace_bytes
    assert workspace_bytes == sum(4 * int(np.prod(shape)) for shape in stages.values())
    assert plans[0].pool_bytes > workspace_bytes
    assert len(plans[0].offsets_bytes) == len(plans[1].offsets_bytes) + len(stages)


@pytest.mark.long
def test_the_report_says_what_they_save():
    built = pimflow.compile(
        block(), system=SYSTEM, target="cuda+pim", select={"device": "cuda"}, modes="gpu", conventions="none"
    )
    part, rows = built.report.extras.primitives, {row.name: row for row in built.report.regions}
    assert built.verification.is_verified
    names = {name: primitive.name for name, primitive in built.search_result.primitives().items()}
    assert names == {choice.layer: choice.primitive for choice in part.choices} != {}
    assert {name: row.primitive for name, row in rows.items() if row.primitive} == names
    assert part.layers == 5 and part.saved_gpu_only_ns >= 0
    without = pimflow.search(block(), SYSTEM, modes="gpu")
    assert part.latency_operators_ns == without.evaluation.latency_ns
    assert part.saved_ns == without.evaluation.latency_ns - built.report.plan.latency_ns
    again = pimflow.compile(block(), system=SYSTEM, target="cuda+pim", plan=built.plan, conventions="none")
    assert again.report.plan.speedup == built.report.plan.speedup
    assert again.report.extras.primitives.choices == part.choices
