"""Does the artifact do what is charged, and compute the reference, whatever the plan?"""

import random
from dataclasses import replace

import numpy as np
import pytest
from drawn_networks import Graph
from length import long_but
from onnx import helper
from onnx_models import onnx_model

from pimflow import frontend
from pimflow.compiler import build, phases
from pimflow.compiler.verification import verify
from pimflow.core.plan import Choice
from pimflow.core.rewrite import Mode, SplitRewrite
from pimflow.core.split import AXES
from pimflow.core.stages import Pipeline
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets
from pimflow.placement import apply, search
from pimflow.placement.candidates import pipelines
from pimflow.placement.costs.splits import all_splits
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.relay_passes.regions.kernel_groups import kernel_groups


def perceptron():
    """Three fully connected layers: one leaves nothing undone, one a bias and a clamp, one a bias."""
    graph = Graph((1, 96))
    hidden = graph.relu(graph.product(graph.product("x0", 128), 64, bias=True))
    graph.product(hidden, 40, bias=True)
    return graph.model()


def residuals():
    """Products of five vectors, to which others are added: alone, beside a bias, behind a gate."""
    graph = Graph((5, 48))

    def add_layer(x: str, y: str) -> str:
        return graph.add("Add", [x, y], (5, 48))

    first = add_layer(graph.product(graph.product("x0", 48), 48), "x0")
    second = add_layer("x0", graph.product(first, 48, bias=True))
    gated = graph.add("Mul", [second, graph.add("Tanh", [second], (5, 48))], (5, 48))
    graph.product(add_layer(first, graph.product(gated, 48)), 48)
    return graph.model()


def depthwise():
    """Grouped layers, one after the other: strides, uneven padding, dilation, a multiplier."""
    draw = np.random.default_rng(0)
    layers = [  # channels, outputs, groups, kernel, and what else the operator says
        (8, 32, 1, 1, {}),
        (32, 32, 32, 3, {"pads": [1, 1, 1, 1]}),
        (32, 64, 32, 3, {"pads": [0, 1, 1, 0], "strides": [2, 1]}),
        (64, 64, 64, 3, {"pads": [2, 2, 2, 2], "dilations": [2, 2]}),
        (64, 48, 4, 3, {"pads": [1, 1, 1, 1], "strides": [1, 2]}),
    ]
    nodes, weights, read = [], {}, "x"
    for i, (inputs, outputs, groups, taps, attributes) in enumerate(layers):
        shape = (outputs, inputs // groups, taps, taps)
        weights[f"w{i}"] = (draw.standard_normal(shape) / np.sqrt(shape[1]) / taps).astype(np.float32)
        weights[f"b{i}"] = draw.standard_normal(outputs).astype(np.float32)
        reads = [read, f"w{i}", f"b{i}"]
        nodes.append(helper.make_node("Conv", reads, [f"c{i}"], name=f"conv{i}", group=groups, **attributes))
        read = f"r{i}" if i + 1 < len(layers) else "y"
        nodes.append(helper.make_node("Relu", [f"c{i}"], [read], name=f"relu{i}"))
    return onnx_model(nodes, {"x": [1, 8, 14, 13]}, {"y": None}, weights, name="depthwise")


NETWORKS = {
    "depthwise": (lambda: frontend.load(depthwise()), 4, {"rows"}),
    "depthwise, in latches": (lambda: frontend.load(depthwise()), 2, set()),
    "toy": (lambda: frontend.load("toy"), 6, {"rows", "channels", "reduction"}),
    "toy, padded alike": (lambda: frontend.load("toy"), 3, {"rows"}),
    "toy, two at once": (lambda: frontend.load("toy", batch=2), 3, {"channels", "batch"}),
    "perceptron": (lambda: frontend.load(perceptron()), 4, {"channels", "reduction"}),
    "toy, in latches": (lambda: frontend.load("toy"), 2, set()),
    "perceptron, in latches": (lambda: frontend.load(perceptron()), 2, set()),
    "residuals": (lambda: frontend.load(residuals()), 4, {"reduction"}),
    "residuals, in latches": (lambda: frontend.load(residuals()), 4, set()),
}


@pytest.mark.parametrize(
    "name", long_but(["perceptron", "depthwise, in latches", "residuals"], list(NETWORKS))
)
def test_random_plans_give_the_reference_and_launch_what_is_charged(name):
    """Any legal choice of modes: outputs verified, and as many kernels built as launches charged."""
    load, plans, expected = NETWORKS[name]
    variants = {"in latches": {"pim": "aim-gddr6"}, "padded alike": {"padding": "symmetric"}}
    target = system(**variants.get(name.partition(", ")[2], {}))
    network, draw = load(), random.Random(0)
    graph = extract_regions(network.module, name)
    search_result = search(graph, target)
    inputs = network.example_inputs()
    reference = network.reference(inputs)
    candidates_by_region = {region.name: candidates(search_result, region, draw) for region in graph.regions}
    axes, finished = set(), set()
    for _ in range(plans):
        choices = []
        for region in graph.regions:
            candidate = draw.choice(candidates_by_region[region.name])
            rewrite = candidate.rewrite
            finished |= set(getattr(rewrite, "device_epilogue", ()))
            choices.append(Choice(regions=(region.name,), rewrite=rewrite))
            axes |= {rewrite.axis} if isinstance(rewrite, SplitRewrite) else set()
        plan_result = apply(graph, target, replace(search_result.plan, choices=tuple(choices)))
        applied = phases.apply_plan(network.module, phases.PlanRewrites.from_search(plan_result), target)
        events = plan_result.evaluation.timeline.events
        launches = sum(event.launched for event in events if event.resource == "gpu")
        assert sum(group.fusible for group in kernel_groups(applied, views=target.uses_views)) == launches
        built = build.build(network, plan_result, targets.target_by_name("llvm+pim"))
        verify(network, built, target, inputs, reference).require()
    assert expected <= axes <= set(AXES)
    epilogues_by_network = {"residuals": {"bias", "add"}, "toy": {"bias", "add", "clip"}}
    finishes = epilogues_by_network.get(name.partition(",")[0], {"bias", "nn.relu"})
    # Without latches and activations a product adds a residual, and nothing else.
    assert finished == (finishes if name.endswith("latches") else finishes & {"add"})


def candidates(result, region, draw):
    """Those of the search, and a split along every axis that the region has, wherever, some several times."""
    generator = result.generator
    region_candidates = [c for c in result.table.candidates[region.name] if len(c.covers) == 1]
    splits = [] if generator.unsupported_reason(region) else all_splits(region.geometry, result.system.pim)
    for axis in AXES:
        along = [split for split in splits if split.axis == axis]
        for split in draw.sample(along, min(2, len(along))):
            region_candidates.append(generator.make(region, SplitRewrite.from_split(split, region.geometry)))
    # As often as all others.
    finished = [c for c in region_candidates if getattr(c.rewrite, "device_epilogue", ())]
    region_candidates += finished * (len(region_candidates) - 1)
    return region_candidates


@pytest.mark.long
@pytest.mark.parametrize("modes", ((Mode.GPU, Mode.PIM, Mode.GPU), (Mode.PIM, Mode.GPU, Mode.PIM)))
def test_grouped_layers_in_stages_give_the_reference(modes):
    network, target = frontend.load(depthwise()), system()
    graph = extract_regions(network.module, "depthwise")
    regions = tuple(region.name for region in graph.regions[1:4])
    search_result = search(graph, target)
    run = Pipeline(regions=regions, modes=modes, cuts=(2, 4))
    stages = pipelines.make(search_result.generator, run)
    choice = Choice(regions=regions, rewrite=stages.rewrite)
    choices = [Choice(regions=(region.name,)) for region in graph.regions]
    choices[1:4] = [choice]
    plan_result = apply(graph, target, replace(search_result.plan, choices=tuple(choices)))
    inputs = network.example_inputs()
    built = build.build(network, plan_result, targets.target_by_name("llvm+pim"))
    assert len(built.programs) == 3 * modes.count(Mode.PIM)
    verify(network, built, target, inputs, network.reference(inputs)).require()
