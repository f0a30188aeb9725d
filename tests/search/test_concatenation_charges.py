"""Who reads a result, and who what a kernel keeps beside it, as a concatenation: who is charged for what?

The oracle knows no regions: it counts the kernels of the module that a plan was applied to.
"""

import itertools

import numpy as np
import pytest
import tvm
from answers import best_label
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but
from onnx import helper, numpy_helper
from onnx_models import onnx_model

from pimflow import frontend
from pimflow.commands.shared import prepare
from pimflow.compiler import phases
from pimflow.core.candidate import CostTable
from pimflow.core.region import RegionGraph
from pimflow.hardware import system
from pimflow.placement import CandidateGenerator, Costs, Profiling
from pimflow.placement.solvers.evaluate import evaluate, execute
from pimflow.placement.solvers.exhaustive import all_covers
from pimflow.relay_passes.flat import layer_name, main_bindings
from pimflow.relay_passes.regions.extract_regions import region_groups
from pimflow.relay_passes.regions.kernel_groups import kernel_groups

SYSTEM = system().with_launches(gpu_ns=500.0, pim_ns=200.0)
WIDTH, SIZE = 32, 8  # channels of a convolution, pixels each way
COSTS = Costs(SYSTEM, Profiling())


class BranchBuilder:
    """An ONNX network, node by node; what nothing reads is returned."""

    def __init__(self) -> None:
        self.nodes, self.weights, self.read = [], [], set()
        self.channels = {"x": WIDTH}

    def add(
        self, kind: str, operands: list[str], channels: int, weights: tuple[np.ndarray, ...] = (), **attrs
    ):
        name = f"{kind.lower()}{len(self.nodes)}"
        stored = [numpy_helper.from_array(array, f"{name}.{i}") for i, array in enumerate(weights)]
        self.weights += stored
        inputs = [*operands, *(tensor.name for tensor in stored)]
        self.nodes.append(helper.make_node(kind, inputs, [f"{name}.y"], name=name, **attrs))
        self.read |= set(operands)
        self.channels[f"{name}.y"] = channels
        return f"{name}.y"

    def conv(self, x: str, activation: bool = True) -> str:
        draw = np.random.default_rng(len(self.nodes))
        size = (WIDTH, self.channels[x], 1, 1)
        weights = draw.standard_normal(size, np.float32), draw.standard_normal(WIDTH, np.float32)
        y = self.add("Conv", [x], WIDTH, weights)
        return self.add("Relu", [y], WIDTH) if activation else y

    def concat(self, parts: list[str]) -> str:
        return self.add("Concat", parts, sum(self.channels[part] for part in parts), axis=1)

    def ends(self) -> list[str]:
        return [name for name in self.channels if name not in self.read and name != "x"]

    def load(self) -> frontend.Network:
        shapes = {name: (1, width, SIZE, SIZE) for name, width in self.channels.items()}
        inputs, outputs = {"x": shapes["x"]}, {name: shapes[name] for name in self.ends()}
        return frontend.load(onnx_model(self.nodes, inputs, outputs, self.weights, name="drawn"))


def concat_network() -> BranchBuilder:
    """`first` reads a concatenation and keeps it for `second`; others read the result of `first`."""
    network = BranchBuilder()
    stem = network.conv("x")
    concatenation = network.concat([stem, network.conv(stem)])
    first = network.conv(concatenation)
    second = network.conv(concatenation)
    network.conv(network.concat([network.conv(first), second]))
    return network


@st.composite
def networks(draw) -> frontend.Network:
    """Convolutions and concatenations over what came before, as in DenseNet and Inception; one result."""
    network = BranchBuilder()
    values = [network.conv("x")]
    for _ in range(draw(st.integers(2, 6))):
        recent = values[-4:]
        if len(recent) > 1 and draw(st.booleans()):
            parts = draw(st.lists(st.sampled_from(recent), min_size=2, max_size=3, unique=True))
            values.append(network.concat(parts))
        else:
            values.append(network.conv(draw(st.sampled_from(recent)), draw(st.booleans())))
    ends = network.ends()
    network.conv(network.concat(ends) if len(ends) > 1 else ends[0])
    return network.load()


def table_of(graph: RegionGraph, generator: CandidateGenerator) -> CostTable:
    """GPU and PIM of every region."""
    candidates = {r.name: tuple(generator.candidates(r)) for r in graph.regions}
    capable = [r for r in graph.regions if not generator.unsupported_reason(r)]
    return CostTable(
        candidates=candidates,
        epilogue_cost={r.name: generator.epilogue_cost(r) for r in capable},
        fused_epilogue_cost={r.name: generator.fused_epilogue_cost(r) for r in capable},
    )


def apply_candidates(network: frontend.Network, generator: CandidateGenerator, chosen: tuple) -> tvm.IRModule:
    programs = {
        c.covers[0]: generator.pim_program(generator.graph.region(c.covers[0]), c.rewrite, 0)
        for c in chosen
        if c.rewrite.mode == "PIM"
    }
    return phases.apply_plan(network.module, phases.PlanRewrites(programs=programs), SYSTEM)


def launches_and_kernels(network: frontend.Network, pick) -> tuple[int, int]:
    """GPU launches that a plan is charged, and kernels of the module that it was applied to."""
    graph = prepare.regions(network, SYSTEM)
    generator = CandidateGenerator(graph, SYSTEM, COSTS, ("GPU", "PIM"))
    generator.prepare()
    table = table_of(graph, generator)
    chosen = tuple(pick(region.name, table.candidates[region.name]) for region in graph.regions)
    events = evaluate(graph, chosen, table, SYSTEM).timeline.events
    charged = sum(event.launched for event in events if event.resource == "gpu")
    return charged, sum(
        group.fusible for group in kernel_groups(apply_candidates(network, generator, chosen))
    )


def test_readers_of_a_result_and_of_what_is_kept_beside_it():
    network = concat_network().load()
    graph = prepare.regions(network, SYSTEM)
    first = next(region for region in graph.regions if region.kernel.extra_output_elements)
    second, last = graph.readers[first.name]
    assert graph.consumers[first.name] == (last,)
    assert graph.region(second).extra_inputs == (0,) and not graph.region(last).extra_inputs
    generator = CandidateGenerator(graph, SYSTEM, COSTS, ("GPU", "PIM"))
    # Only one kernel reads the finished result, so it stores nothing for others.
    assert generator.defers_epilogue(first) and generator.fused_epilogue_cost(first).task is None


DEVICES = list(itertools.product(("GPU", "PIM"), repeat=3))


@pytest.mark.parametrize("devices", long_but([DEVICES[1], DEVICES[-2]], DEVICES))
def test_a_kept_concatenation_takes_over_nothing(devices):
    """Whatever does the layer that keeps it, its other reader, and that of the layer's result."""
    network = concat_network().load()
    graph = prepare.regions(network, SYSTEM)
    first = next(region.name for region in graph.regions if region.kernel.extra_output_elements)
    mode_of = dict(zip((first, *graph.readers[first]), devices, strict=True))

    def pick(name, candidates):
        return next(c for c in candidates if c.rewrite.mode == mode_of.get(name, "GPU"))

    charged, built = launches_and_kernels(network, pick)
    assert charged == built


@settings(max_examples=examples(8), deadline=None)
@given(networks(), st.randoms(use_true_random=False))
def test_launches_charged_are_kernels_built_whatever_is_joined(network, draw):
    charged, built = launches_and_kernels(network, lambda _, candidates: draw.choice(candidates))
    assert charged == built


@settings(max_examples=examples(8), deadline=None)
@given(networks())
def test_consumers_are_those_that_read_the_result(network):
    """By the variables that the module's kernels read."""
    mod = network.module
    graph, groups = prepare.regions(network, SYSTEM), region_groups(mod, views=SYSTEM.uses_views)
    inside = {name: {b.var for b in group.bindings} for name, group in groups.items()}
    read = {
        name: {v for b in group.bindings for v in tvm.relax.analysis.free_vars(b.value)} - inside[name]
        for name, group in groups.items()
    }
    for name, group in groups.items():
        results = {reader for reader in groups if group.result in read[reader]}
        any_readers = {reader for reader in groups if reader != name and read[reader] & inside[name]}
        assert set(graph.consumers[name]) == results
        assert set(graph.readers[name]) == any_readers
    returned = {b.var for b in main_bindings(mod)} & fields(mod)
    assert set(graph.outputs) == {name for name in groups if returned & inside[name]}
    kept_alone = {name for name in graph.outputs if groups[name].result not in returned}
    assert set(graph.extra_outputs) == kept_alone
    assert all(layer_name(mod, group.title) == name for name, group in groups.items())


def fields(mod: tvm.IRModule) -> set:
    """What ``main`` returns, with the fields of a tuple."""
    body = mod["main"].body.body
    value = next((b.value for b in main_bindings(mod) if b.var.same_as(body)), None)
    return {body, *(value.fields if isinstance(value, tvm.relax.Tuple) else ())}


def test_the_search_foresees_what_the_evaluator_finds():
    network = concat_network().load()
    graph = prepare.regions(network, SYSTEM)
    generator = CandidateGenerator(graph, SYSTEM, COSTS, ("GPU", "PIM"))
    generator.prepare()
    table = table_of(graph, generator)
    label = best_label(graph, table)
    latency_ns = execute(graph, label.candidates, table).latency_ns
    assert label.latency_ns == pytest.approx(latency_ns, rel=1e-9)
    assert latency_ns == pytest.approx(min(ns for _, ns, _ in all_covers(graph, table)), rel=1e-6)
