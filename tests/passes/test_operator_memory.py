"""Are lifetimes before lowering those that the papers and the compiled network have?"""

import pytest
from graphs import inputs
from length import long_but
from skip_graphs import SkipGraph
from tvm import relax

from pimflow import memory, zoo
from pimflow.compiler import phases
from pimflow.frontend import load
from pimflow.hardware import system
from pimflow.memory.reorder import StepGraph
from pimflow.pim_backend.runtime.targets import target_by_name
from pimflow.relay_passes.decomposition.layer_flops import flops, layer_flops
from pimflow.relay_passes.flat import main_bindings
from pimflow.relay_passes.memory.buffers import buffers
from pimflow.relay_passes.memory.operator_memory import operator_liveness
from pimflow.relay_passes.regions.extract_regions import extract_regions

PIXELS = 16


def region_steps(mod):
    return StepGraph.from_regions(extract_regions(mod), "fp32", count_inputs=False)


def chain(wide: bool = True):
    """Two 3x3 convolutions with biases and activations: the layers of TeMCO's figure 3."""
    graph = SkipGraph(3)
    first = graph.conv(graph.x, 8, "first", kernel=3)
    first = graph.emit(relax.op.add(first, graph.constant(1, 1, 1, 8)), "first_bias")
    first = graph.emit(relax.op.nn.relu(first), "first_relu")
    second = graph.conv(first, 6, "second", kernel=3)
    return graph.module(second)


def low_rank_chain():
    graph = SkipGraph(3)
    return graph.module(graph.layer(graph.layer(graph.x, 8, "a"), 6, "b", activation=None))


def test_layers_one_by_one_take_what_equation_3_says():
    c1, c2 = 8, 6
    # The input of the network, C in the equation, is no internal tensor here.
    terms = [c1, 2 * c1, c1 + c2]
    assert operator_liveness(chain()).peak_bytes == 4 * PIXELS * max(terms)
    assert operator_liveness(chain(), element_bytes=2).peak_bytes == 2 * PIXELS * max(terms)


def test_decomposed_layers_one_by_one_take_what_equation_4_says():
    r, c1, c2 = 2, 8, 6
    terms = [r, 2 * r, r + c1, 2 * c1, c1 + r, 2 * r, r + c2]
    assert operator_liveness(low_rank_chain()).peak_bytes == 4 * PIXELS * max(terms)


def test_activations_belong_to_kernels():
    assert region_steps(chain()).peak_bytes() == 4 * PIXELS * (8 + 6)
    assert region_steps(low_rank_chain()).peak_bytes() == 4 * PIXELS * (8 + 2)


def test_a_batch_norm_is_one_layer_and_a_sum_has_a_result_of_its_own():
    graph = SkipGraph(8)
    scaled = graph.emit(relax.op.multiply(graph.x, graph.constant(1, 1, 1, 8)), "scaled")
    shifted = graph.emit(relax.op.add(scaled, graph.constant(1, 1, 1, 8)), "shifted")
    mod = graph.module(graph.add(shifted, graph.x, "sum"))
    assert [life.name for life in operator_liveness(mod).lifetimes] == ["scaled", "sum"]


def test_what_a_kernel_computes_for_itself_counts_where_schedules_store_it():
    def network(activation: bool):
        graph = SkipGraph(3)
        parts = [graph.conv(graph.x, 8, name) for name in "ab"]
        total = graph.concat(parts, "both")
        total = graph.emit(relax.op.nn.relu(total), "relu") if activation else total
        total = graph.emit(relax.op.sigmoid(total), "sigmoid") if activation else total
        return graph.module(graph.conv(total, 2, "last", "fconv"))

    plain, computed = (region_steps(network(active)) for active in (False, True))
    assert plain.peak_bytes() == 4 * PIXELS * (16 + 2)
    assert computed.peak_bytes() == 4 * PIXELS * (16 + 16 + 2)


@pytest.mark.parametrize("name", long_but(["toy"], ["toy", "squeezenet-1.1"]))
def test_the_estimate_is_near_the_compiled_network(name):
    network = load(name)
    lowered = buffers(phases.allocate(network.module, target_by_name("llvm+pim"), system("pimflow")))
    compiled = memory.plan(lowered.liveness().lifetimes).pool_bytes
    estimate = memory.plan(region_steps(network.module).lifetimes(), "best").pool_bytes
    assert estimate == pytest.approx(compiled, rel=0.15)


def test_flops_are_twice_the_products():
    assert flops(load("toy").module) == 2 * zoo.describe("toy").macs
    (first, *_, second) = (b.value for b in main_bindings(chain()))
    assert layer_flops(first) == 2 * PIXELS * 8 * 3 * 9 and layer_flops(second) == 2 * PIXELS * 6 * 8 * 9
    assert len(inputs(chain())) == 1
