"""Is every network charged as many launches as its executable calls kernels, alone and by plans?"""

import random

import numpy as np
import pytest
import tvm
from drawn_networks import Graph, drawn_network
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


def called(network, planned) -> list[str]:
    """Kernels that the executable for a CPU calls, which stands in for the GPU; PIM's regions are none."""
    target = targets.target_by_name("llvm+pim")
    with target:
        lowered = tvm.transform.Sequential(phases.scheduling_phases(target, planned.system))(
            build.apply_search_result(network.module, planned)
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


def charged(planned) -> list[str]:
    events = planned.evaluation.timeline.events
    assert all(event.begun_ps <= event.end_ps for event in events)
    return [event.label for event in events if event.launched and event.resource == "gpu"]


def alone(found):
    """The network on the GPU with all channels."""
    channels = found.system.gpu.memory_channels
    return with_candidates(
        found, tuple(found.generator.on_gpu(region, channels)[0] for region in found.graph.regions)
    )


def on_pim(found):
    """The network on PIM, as far as PIM can compute it."""
    every = (found.table.candidates[region.name] for region in found.graph.regions)
    modes = ({c.rewrite.mode: c for c in reversed(of) if len(c.covers) == 1} for of in every)
    return with_candidates(found, tuple(each.get("PIM", each["GPU"]) for each in modes))


def any_plan(found, draw: random.Random):
    """A plan of any candidates, PIM's as often as all others."""
    chosen, done = [], set()
    for region in found.graph.regions:
        if region.name in done:
            continue
        every = found.table.candidates[region.name]
        on_pim = [c for c in every if c.rewrite.mode != "GPU"]
        chosen.append(draw.choice(on_pim if on_pim and draw.random() < 0.5 else every))
        done.update(chosen[-1].covers)
    return with_candidates(found, tuple(chosen))


def same_launches(model, draw: random.Random, plans: int = 2, **changes) -> None:
    network, target = frontend.load(model), system(**changes)
    graph = extract_regions(network.module, "drawn", views=target.uses_views)
    found = search(graph, target)
    for planned in (alone(found), found, on_pim(found), *(any_plan(found, draw) for _ in range(plans))):
        names, labels = called(network, planned), charged(planned)
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


def returned() -> Graph:
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


CAUSES = (
    *(reshapes, second_operands, read_twice, read_through, several_in_front, broadcast),
    *(squares, returned, read_in_other_orders, read_in_between),
)


@pytest.mark.parametrize("made", CAUSES)
@pytest.mark.parametrize("pim", long_but(["newton-gddr6"], ["newton-gddr6", "aim-gddr6"]))
def test_launches_of_what_differed_once(made, pim):
    same_launches(made().model(), random.Random(0), 3, pim=pim)


@settings(max_examples=examples(25))
@given(st.randoms(use_true_random=False), st.sampled_from(SYSTEMS))
def test_launches_of_any_network(draw, changes):
    same_launches(drawn_network(draw, most_layers=6), draw, 1, **changes)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_launches_of_larger_networks(seed):
    draw = random.Random(seed)
    same_launches(drawn_network(draw, most_layers=14), draw, 3, **SYSTEMS[seed % len(SYSTEMS)])
