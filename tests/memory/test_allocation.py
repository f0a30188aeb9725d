"""Does the executed program allocate what was planned, and give the same whichever way it allocates?"""

import math

import numpy as np
import onnx
import pytest
import tvm
from drawn_networks import random_network
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but
from onnx import helper, numpy_helper
from onnx_models import onnx_model
from papers import occamy_operators
from papers.occamy_operators import operator_liveness
from tvm import relax

import pimflow
from pimflow import frontend, zoo
from pimflow.compiler import phases
from pimflow.compiler.measurement.allocations import NAIVE, heap_bytes
from pimflow.core.output_error import OUTPUT_BOUND, relative_error
from pimflow.errors import ArtifactError, UnknownNameError, UsageError
from pimflow.hardware import system

# What the process itself may take or give back meanwhile; the smallest difference looked for is 131072 B.
NOISE_BYTES = 1 << 16


def with_workspaces() -> onnx.ModelProto:
    """Two pixel shuffles, whose kernels take a workspace each."""
    filters = {"w": (64, 16, 1, 1), "v": (256, 16, 1, 1), "u": (16, 64, 1, 1)}
    weights = [numpy_helper.from_array(np.ones(dims, "float32"), name) for name, dims in filters.items()]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["wide"], name="wide"),
        helper.make_node("DepthToSpace", ["wide"], ["shuffled"], name="shuffled", blocksize=2),
        helper.make_node("Conv", ["shuffled", "v"], ["wider"], name="wider"),
        helper.make_node("DepthToSpace", ["wider"], ["large"], name="large", blocksize=2),
        helper.make_node("Conv", ["large", "u"], ["y"], name="y"),
    ]
    return onnx_model(nodes, {"x": (1, 16, 32, 32)}, {"y": (1, 16, 128, 128)}, weights, name="shuffles")


NETWORKS = {"toy": lambda: ("toy", 8), "workspaces": lambda: (with_workspaces(), None)}


@pytest.fixture(scope="module", params=long_but(["workspaces"], list(NETWORKS)))
def network(request):
    return NETWORKS[request.param]()


@pytest.fixture(scope="module")
def allocation_runs(network):
    return pimflow.measure_allocations(network[0], batch=network[1], runs=1)


@pytest.fixture(scope="module")
def allocation_plan(network):
    return pimflow.plan_memory(network[0], system(), batch=network[1])


@pytest.mark.long
def test_the_pool_is_one_allocation_of_the_planned_size(allocation_runs, allocation_plan):
    pool = allocation_runs["pool"]
    assert (pool.allocations, pool.groups) == (1, 1)
    assert pool.allocated_bytes == allocation_plan.plan.pool_bytes


def test_eager_and_lazy_allocate_what_the_analysis_says(allocation_runs, allocation_plan):
    eager, lazy = allocation_runs["eager"], allocation_runs["lazy"]
    assert eager.allocations == lazy.allocations == allocation_plan.eager_allocations > 1
    assert eager.allocated_bytes == lazy.allocated_bytes == allocation_plan.eager_bytes
    assert (eager.groups, lazy.groups) == (1, allocation_plan.lazy_groups)


@pytest.mark.skipif(heap_bytes() is None, reason="the C library does not say what it has handed out")
def test_the_measured_peak_is_the_planned_one(allocation_runs, allocation_plan):
    sizes = allocation_plan.plan.pool_bytes, allocation_plan.eager_bytes, allocation_plan.lazy_peak_bytes
    expected = dict(zip(("pool", "eager", "lazy"), sizes))
    for allocation, size_bytes in expected.items():
        assert abs(allocation_runs[allocation].peak_bytes - size_bytes) <= NOISE_BYTES


def test_a_program_without_kernels_takes_less(allocation_runs):
    for run in allocation_runs.values():
        assert 0 < run.allocating_ns < run.latency_ns


@pytest.mark.long
@settings(max_examples=examples(6), deadline=None)
@given(st.randoms(use_true_random=False))
def test_every_way_to_allocate_gives_the_same_bits(draw):
    network = frontend.load(random_network(draw, most_layers=6))
    inputs = network.example_inputs()
    outputs = {}
    for allocation in phases.ALLOCATIONS:
        executable = phases.build(network.module, allocation=allocation)
        machine = relax.VirtualMachine(executable, tvm.cpu(), memory_cfg=NAIVE)
        result = machine["main"](*map(tvm.runtime.tensor, inputs.values()))
        tensors = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
        outputs[allocation] = [tensor.numpy() for tensor in tensors]
    for actual, expected in zip(outputs["pool"], network.reference(inputs), strict=True):
        assert relative_error(actual, expected) <= OUTPUT_BOUND["fp16"]  # some casts round to fp16
    for allocation in ("eager", "lazy"):
        for actual, expected in zip(outputs["pool"], outputs[allocation], strict=True):
            assert actual.tobytes() == expected.tobytes()


def test_refused():
    with pytest.raises(UnknownNameError, match="did you mean lazy"):
        phases.build(frontend.load("toy").module, allocation="lzay")
    with pytest.raises(UsageError, match="0 runs"):
        pimflow.measure_allocations("toy", runs=0)
    if not tvm.cuda().exist:
        with pytest.raises(ArtifactError, match="no device for cuda"):
            pimflow.measure_allocations("toy", target="cuda+pim")


def test_operators_of_a_small_network_counted_by_hand():
    dims, ones = (1, 2, 4, 4), np.ones((2, 2, 1, 1), np.float32)
    weights = {"w": ones, "b": ones[0, :, 0, 0], "zero": np.float32(0)}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="c"),
        helper.make_node("Clip", ["c", "zero"], ["r"], name="r"),
        helper.make_node("Add", ["r", "x"], ["y"], name="y"),
    ]
    model = onnx_model(nodes, {"x": dims}, {"y": dims}, weights)
    counts = occamy_operators.count_operators(model)
    tensor, filters, bias = 128, 16, 8
    assert (counts.operators, counts.variables, counts.lazy_groups) == (3, 6, 3)  # x, w, b, c, r, y
    assert counts.eager_bytes == 4 * tensor + filters + bias
    assert counts.lazy_peak_bytes == 3 * tensor  # x, c, r; and x, r, y
    assert counts.plan.pool_bytes == 3 * tensor


@pytest.mark.parametrize("batch", [None, 4])
def test_operators_of_a_zoo_network_counted_anew(batch):
    graph = zoo.load_model("toy", batch=batch).graph
    scalars = {weight.name for weight in graph.initializer if not weight.dims}
    named = {name for node in graph.node for name in (*node.input, *node.output)} - scalars - {""}
    counts = occamy_operators.count_operators("toy", batch=batch)
    assert (counts.operators, counts.variables) == (len(graph.node), len(named))
    sizes = {weight.name: 4 * math.prod(weight.dims) for weight in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        sizes[value.name] = 4 * math.prod(dim.dim_value for dim in value.type.tensor_type.shape.dim)
    assert counts.eager_bytes == sum(sizes[name] for name in named)
    assert counts.lazy_peak_bytes == _replay_peak_bytes(graph, sizes, named)
    assert {life.name for life in operator_liveness(graph).lifetimes} == named


def _replay_peak_bytes(graph: onnx.GraphProto, sizes: dict[str, int], named: set[str]) -> int:
    """The most bytes held while operators run one by one, and free what nobody needs later."""
    live = {value.name for value in graph.input}
    outputs = {value.name for value in graph.output}
    peak = 0
    for index, node in enumerate(graph.node):
        live |= {name for name in (*node.input, *node.output) if name in named}
        peak = max(peak, sum(sizes[name] for name in live))
        later = {name for later_node in graph.node[index + 1 :] for name in later_node.input}
        live &= later | outputs
    return peak
