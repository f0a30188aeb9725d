"""Who reads a result, and who what a kernel keeps beside it, as a concatenation?

Launches of such networks are counted in tests/e2e/test_launch_counts.py.
"""

import pytest
import tvm
from answers import best_label
from drawn_networks import Graph
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow import frontend
from pimflow.commands.shared import prepare
from pimflow.core.candidate import CostTable
from pimflow.core.region_graph import RegionGraph
from pimflow.hardware import system
from pimflow.placement import CandidateGenerator, Costs, Profiling
from pimflow.placement.solvers.evaluate import execute
from pimflow.placement.solvers.exhaustive import all_covers
from pimflow.relay_passes.flat import layer_name, main_bindings
from pimflow.relay_passes.regions.extract_regions import region_groups

SYSTEM = system().with_launches(gpu_ns=500.0, pim_ns=200.0)
WIDTH, SIZE = 32, 8  # channels of a convolution, pixels each way
COSTS = Costs(SYSTEM, Profiling())


def conv(graph: Graph, x: str, activation: bool = True) -> str:
    y = graph.conv(x, WIDTH)
    return graph.relu(y) if activation else y


def concat_network() -> frontend.Network:
    """`first` reads a concatenation and keeps it for `second`; others read the result of `first`."""
    graph = Graph((1, WIDTH, SIZE, SIZE))
    stem = conv(graph, "x0")
    concatenation = graph.concat(stem, conv(graph, stem))
    first, second = conv(graph, concatenation), conv(graph, concatenation)
    conv(graph, graph.concat(conv(graph, first), second))
    return frontend.load(graph.model())


@st.composite
def networks(draw) -> frontend.Network:
    """Convolutions and concatenations over what came before, as in DenseNet and Inception; one result."""
    graph = Graph((1, WIDTH, SIZE, SIZE))
    values = [conv(graph, "x0")]
    for _ in range(draw(st.integers(2, 6))):
        recent = values[-4:]
        if len(recent) > 1 and draw(st.booleans()):
            parts = draw(st.lists(st.sampled_from(recent), min_size=2, max_size=3, unique=True))
            values.append(graph.concat(*parts))
        else:
            values.append(conv(graph, draw(st.sampled_from(recent)), draw(st.booleans())))
    ends = graph.results()
    conv(graph, graph.concat(*ends) if len(ends) > 1 else ends[0])
    return frontend.load(graph.model())


def table_of(graph: RegionGraph, generator: CandidateGenerator) -> CostTable:
    """GPU and PIM of every region."""
    candidates = {r.name: tuple(generator.candidates(r)) for r in graph.regions}
    capable = [r for r in graph.regions if not generator.unsupported_reason(r)]
    alone = {r.name: generator.epilogue_cost(r) for r in capable}
    together = {r.name: generator.fused_epilogue_cost(r) for r in capable}
    return CostTable(candidates=candidates, epilogue_cost=alone, fused_epilogue_cost=together)


def test_readers_of_a_result_and_of_what_is_kept_beside_it():
    network = concat_network()
    graph = prepare.regions(network, SYSTEM)
    first = next(region for region in graph.regions if region.kernel.extra_output_elements)
    second, last = graph.readers[first.name]
    assert graph.consumers[first.name] == (last,)
    assert graph.region(second).extra_inputs == (0,) and not graph.region(last).extra_inputs
    generator = CandidateGenerator(graph, SYSTEM, COSTS, ("GPU", "PIM"))
    # Only one kernel reads the finished result, so it stores nothing for others.
    assert generator.defers_epilogue(first) and generator.fused_epilogue_cost(first).task is None


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
    network = concat_network()
    graph = prepare.regions(network, SYSTEM)
    generator = CandidateGenerator(graph, SYSTEM, COSTS, ("GPU", "PIM"))
    generator.prepare()
    table = table_of(graph, generator)
    label = best_label(graph, table)
    latency_ns = execute(graph, label.candidates, table).latency_ns
    assert label.latency_ns == pytest.approx(latency_ns, rel=1e-9)
    assert latency_ns == pytest.approx(min(ns for _, ns, _ in all_covers(graph, table)), rel=1e-6)
