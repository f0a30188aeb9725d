"""Is every network charged as many launches as its executable calls kernels, alone and by plans?"""

import random

import numpy as np
import pytest
import tvm
from drawn_networks import Graph, random_network
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but

from pimflow import frontend
from pimflow.compiler import build, phases
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets
from pimflow.placement import search
from pimflow.placement.best_plan import with_candidates
from pimflow.relay_passes.flat import main_bindings, operator
from pimflow.relay_passes.memory.keep_views import JOIN, PART
from pimflow.relay_passes.regions.extract_regions import extract_regions

# Lanes of hbm-pim are left out: between PIM regions, their sums are charged a kernel that no executor needs.
SYSTEMS = ({}, {"dtype": "fp32"}, {"pim": "aim-gddr6"}, {"padding": "symmetric"}, {"copies": "made"})


def executable_kernels(network, plan_result) -> list[str]:
    """Kernels that the executable for a CPU calls, which stands in for the GPU; PIM's regions are none."""
    target = targets.target_by_name("llvm+pim")
    with target:
        lowered = tvm.transform.Sequential(phases.scheduling_phases(target, plan_result.system))(
            build.apply_search_result(network.module, plan_result)
        )
    names = []
    for binding in main_bindings(lowered):
        kind, value = operator(binding.value), binding.value
        if kind == "call_tir":
            names.append(value.args[0].name_hint)
        elif kind == "call_pure_packed":
            assert str(value.args[0].global_symbol) in (PART, JOIN)
        elif kind == "call_dps_packed":
            assert str(value.args[0].global_symbol).startswith("pim_")
        else:
            assert kind in ("", "memory.view", "null_value")
    return names


def launch_labels(plan_result) -> list[str]:
    events = plan_result.evaluation.timeline.events
    assert all(event.begun_ps <= event.end_ps for event in events)
    return [event.label for event in events if event.launched and event.resource == "gpu"]


def gpu_only_plan(search_result):
    """The network on the GPU with all channels."""
    channels = search_result.system.gpu.memory_channels
    return with_candidates(
        search_result,
        tuple(search_result.generator.gpu_candidates(r, channels)[0] for r in search_result.graph.regions),
    )


def pim_plan(search_result):
    """The network on PIM, as far as PIM can compute it."""
    lists = (search_result.table.candidates[region.name] for region in search_result.graph.regions)
    modes = ({c.rewrite.mode: c for c in reversed(candidates) if len(c.covers) == 1} for candidates in lists)
    return with_candidates(search_result, tuple(by_mode.get("PIM", by_mode["GPU"]) for by_mode in modes))


def any_plan(search_result, draw: random.Random):
    """A plan of any candidates, PIM's as often as all others."""
    chosen, covered = [], set()
    for region in search_result.graph.regions:
        if region.name in covered:
            continue
        candidates = search_result.table.candidates[region.name]
        pim_candidates = [c for c in candidates if c.uses_pim]
        chosen.append(draw.choice(pim_candidates if pim_candidates and draw.random() < 0.5 else candidates))
        covered.update(chosen[-1].covers)
    return with_candidates(search_result, tuple(chosen))


def check_same_launches(model, draw: random.Random, plans: int = 2, **changes) -> None:
    network, target = frontend.load(model), system(**changes)
    graph = extract_regions(network.module, "drawn", views=target.uses_views)
    search_result = search(graph, target)
    for plan_result in (
        gpu_only_plan(search_result),
        search_result,
        pim_plan(search_result),
        *(any_plan(search_result, draw) for _ in range(plans)),
    ):
        names, labels = executable_kernels(network, plan_result), launch_labels(plan_result)
        assert len(names) == len(labels), (labels, names)


def reshapes() -> Graph:
    """Tensors in other shapes, by all operators that say so, before and behind products and alone."""
    graph = Graph((1, 4, 32), (1, 1, 8, 8))
    heads = graph.transpose(graph.reshape(graph.product("x0", 32), 4, 1, 2, 16), 1, 2, 0, 3)
    graph.add("Softmax", [heads], graph.shapes[heads], axis=-1)
    turned = graph.transpose(heads, 0, 2, 1, 3)
    graph.product(graph.reshape(turned, 1, 4, 32), 16)
    graph.product(graph.reshape(turned, 4, 32), 16, bias=True)
    graph.conv("x1", 16, 3)
    tokens = graph.transpose(graph.reshape(graph.conv("x1", 8), 1, 8, 64), 0, 2, 1)
    graph.add("Relu", [tokens], graph.shapes[tokens])
    graph.conv(graph.reshape(graph.transpose(tokens, 0, 2, 1), 1, 8, 8, 8), 8)
    return graph


def second_operands() -> Graph:
    """Keys are the second operand of the product that reads them, and PIM leaves them unfinished."""
    graph = Graph((1, 9, 32))
    graph.attention("x0", 2)
    return graph


def read_twice() -> Graph:
    """The kernel of an activation that reads a layer twice does not finish the layer."""
    graph = Graph((1, 8, 8, 8))
    graph.hard_swish(graph.conv("x0", 16))
    return graph


def read_through() -> Graph:
    """A layer that others read too is not finished by one that reads it through an activation."""
    graph = Graph((1, 8, 8, 8))
    x = graph.conv("x0", 16)
    graph.conv(graph.add("Relu", [x], graph.shapes[x]), 16)
    graph.conv(graph.add("Abs", [x], graph.shapes[x]), 16)
    return graph


def several_in_front() -> Graph:
    """What is in front of a layer is two kernels, if the layer's own does not begin with them."""
    graph = Graph((1, 8, 32))
    x = graph.add("Sub", ["x0", graph.constant(np.float32(0.5))], (1, 8, 32))
    graph.product(graph.hard_swish(x), 16)
    return graph


def broadcast() -> Graph:
    """What PIM returns is smaller than the result: a kernel that finishes it reads no less than nothing."""
    graph = Graph((1, 8, 1, 1), (1, 16, 8, 8))
    x = graph.add("Add", [graph.conv("x0", 16, bias=False), "x1"], (1, 16, 8, 8))
    graph.conv(x, 16), graph.conv(x, 8)
    return graph


def squares() -> Graph:
    """Squares of what PIM leaves undone are in the kernel of their sum, which so finishes it."""
    graph = Graph((2, 32))
    x = graph.add("Sigmoid", ["x0"], (2, 32))
    y = graph.product(x, 16, bias=True)
    graph.add("Tanh", [x], (2, 32))
    graph.add("ReduceL2", [y, graph.constant(np.int64([0]))], (16,), keepdims=0)
    return graph


def output_with_reader() -> Graph:
    """What the network returns is finished by the layer that reads it."""
    graph = Graph((1, 8, 32))
    x = graph.product("x0", 16, bias=True)
    graph.add("Identity", [x], (1, 8, 16))
    graph.add("Softmax", [x], (1, 8, 16), axis=-1)
    return graph


def read_in_other_orders() -> Graph:
    """The layer that reads a result first is the last one done: it ends with the layout of an output."""
    graph = Graph((1, 8, 8, 8))
    x = graph.conv("x0", 16)
    size = {"kernel_shape": [2, 2], "strides": [2, 2]}
    graph.add("AveragePool", [x], (1, 16, 4, 4), **size)
    y = graph.add("MaxPool", [x], (1, 16, 4, 4), **size)
    graph.conv(y, 16), graph.conv(y, 8)
    return graph


def read_in_between() -> Graph:
    """A layer that ends behind others which read its operand too does not finish that."""
    graph = Graph((1, 8, 8, 8))
    x = graph.conv("x0", 16)
    graph.add("AveragePool", [x], (1, 16, 4, 4), kernel_shape=[2, 2], strides=[2, 2])
    graph.add("Tanh", [x], graph.shapes[x])
    return graph


def add_beside() -> Graph:
    """The sum is in the kernel of the layer that had it, or, where PIM has the layer, one of its own."""
    graph = Graph((1, 64), (1, 128))
    beside = graph.slice("x1", 1, 8, 72)
    y = graph.product(graph.add("Add", ["x0", "x0"], (1, 64)), 64)
    graph.add("Add", [beside, y], (1, 64))
    return graph


def concatenation_that_stays() -> Graph:
    """The first to read it keeps it for the second; others read what the first makes of it."""
    graph = Graph((1, 32, 8, 8))
    stem = graph.relu(graph.conv("x0", 32))
    joined = graph.concat(stem, graph.relu(graph.conv(stem, 32)))
    first, second = graph.relu(graph.conv(joined, 32)), graph.relu(graph.conv(joined, 32))
    graph.relu(graph.conv(graph.concat(graph.relu(graph.conv(first, 32)), second), 32))
    return graph


CAUSES = (
    *(reshapes, second_operands, read_twice, read_through, several_in_front, broadcast),
    *(squares, output_with_reader, read_in_other_orders, read_in_between),
    *(add_beside, concatenation_that_stays),
)


@pytest.mark.long
@pytest.mark.parametrize("made", CAUSES)
@pytest.mark.parametrize("pim", long_but(["newton-gddr6"], ["newton-gddr6", "aim-gddr6"]))
def test_launches_of_what_differed_once(made, pim):
    check_same_launches(made().model(), random.Random(0), 3, pim=pim)


@settings(max_examples=examples(25))
@given(st.randoms(use_true_random=False), st.sampled_from(SYSTEMS))
def test_launches_of_any_network(draw, changes):
    check_same_launches(random_network(draw, most_layers=6), draw, 1, **changes)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_launches_of_larger_networks(seed):
    draw = random.Random(seed)
    check_same_launches(random_network(draw, most_layers=14), draw, 3, **SYSTEMS[seed % len(SYSTEMS)])
