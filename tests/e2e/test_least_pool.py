"""Is the pool that is built what the goal asked for, and no larger than what ``pimflow memory`` promises?"""

import json
import random

import numpy as np
import onnx
import pytest
from branching import convolution, model
from command_line import error_line

import pimflow
from pimflow.commands.memory.memory import plan_memory
from pimflow.commands.shared import prepare
from pimflow.commands.shared.options import NetworkOptions
from pimflow.commands.shared.search import SearchRequest
from pimflow.errors import InfeasibleError
from pimflow.hardware import system
from pimflow.placement import Profiling
from pimflow.placement.candidates import fused_groups
from pimflow.placement.candidates.candidates import CandidateGenerator

SYSTEM = system(channel_sharing="partitioned")  # pools do not depend on it
PROFILING = Profiling()
REQUEST = "tucker:0.25"


def random_network(seed: int) -> onnx.ModelProto:
    """Convolutions of drawn widths one behind the other, some with a residual, some with a pooling behind."""
    draw, weights = random.Random(seed), dict[str, np.ndarray]()
    nodes, source, channels = convolution("l0", "x", (8, 32), 3, weights), "l0", 32
    for index in range(1, draw.choice((3, 4, 5))):
        width = draw.choice((16, 32, 64))
        nodes += convolution(f"l{index}", source, (channels, width), draw.choice((1, 3)), weights)
        source, channels, previous = f"l{index}", width, (source, channels)
        kind = draw.choice(("plain", "sum", "pool"))
        if kind == "sum" and previous[1] == channels:
            nodes.append(onnx.helper.make_node("Add", [source, previous[0]], [f"s{index}"], f"s{index}"))
            source = f"s{index}"
        elif kind == "pool":
            shape = {"kernel_shape": [2, 2], "strides": [2, 2]}
            nodes.append(onnx.helper.make_node("MaxPool", [source], [f"p{index}"], f"p{index}", **shape))
            source = f"p{index}"
    nodes.append(onnx.helper.make_node("GlobalAveragePool", [source], ["y"], "mean"))
    return model(nodes, weights, 8)


def min_pool_bytes(network, **options) -> int:
    """The least that ``pimflow memory`` plans, with any of its options that keep the outputs."""
    skips, runs = {"optimize_skips": "pool"}, {"fuse_activations": True}
    option_sets = [skips, runs, skips | runs | {"reorder": True}]
    return min(plan_memory(network, SYSTEM, **options, **more).plan.pool_bytes for more in option_sets)


def place_network(network, **keywords):
    question = SearchRequest.from_arguments(SYSTEM, profiling=PROFILING, **keywords)
    return question.place_network(question.prepare_network(prepare.load(network, question.options)))


@pytest.mark.long
def test_every_budget_from_the_least_on_is_kept():
    min_bytes = place_network(random_network(4), decompose=REQUEST, objective="memory")[1].pool_bytes
    for share in (1.0, 1.3):
        choice = place_network(random_network(4), decompose=REQUEST, max_memory_bytes=share * min_bytes)[1]
        assert choice.pool_bytes <= share * min_bytes
    with pytest.raises(InfeasibleError) as error:
        place_network(random_network(4), decompose=REQUEST, max_memory_bytes=min_bytes // 3)
    least = int(error.value.demand)
    assert place_network(random_network(4), decompose=REQUEST, max_memory_bytes=least)[1].pool_bytes <= least


@pytest.mark.long
def test_a_run_may_end_with_what_flattens_its_result():
    """The kernel of the last pooling flattens too."""
    weights = {"fc": np.ones((8 * 8 * 32, 4), np.float32)}
    nodes = convolution("a", "x", (8, 32), 3, weights) + convolution("b", "a", (32, 32), 3, weights)
    window = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes.append(onnx.helper.make_node("MaxPool", ["b"], ["pool"], "pool", **window))
    nodes.append(onnx.helper.make_node("Flatten", ["pool"], ["flat"], "flat"))
    nodes.append(onnx.helper.make_node("MatMul", ["flat", "fc"], ["y"], "product"))
    network = model(nodes, weights, 8)
    search_result, choice = place_network(network, decompose=REQUEST, objective="memory")
    assert any("pool" in run for run in search_result.graph.runs)
    assert choice.pool_bytes <= min_pool_bytes(network, decompose=REQUEST)


@pytest.mark.long
def test_every_run_of_whole_regions_is_a_candidate():
    """Also on large maps behind a pooling, whose fastest tilings cannot be placed: VGG's first blocks."""
    weights: dict[str, np.ndarray] = {}
    widths, source, nodes = {"a": (3, 64), "b": (64, 64), "c": (64, 128), "d": (128, 128)}, "x", []
    for name, channels in widths.items():
        nodes += convolution(name, source, channels, 3, weights)
        source = name
        if name in "bd":
            window = {"kernel_shape": [2, 2], "strides": [2, 2]}
            nodes.append(onnx.helper.make_node("MaxPool", [name], [f"p{name}"], f"p{name}", **window))
            source = f"p{name}"
    nodes.append(onnx.helper.make_node("GlobalAveragePool", [source], ["y"], "mean"))
    options = NetworkOptions(batch=4, decompose="tucker:0.1", fuse_activations=True)
    network = prepare.load(model(nodes, weights, 3, rows=224), options)
    graph = prepare.prepare(network, options, SYSTEM).regions
    candidates = fused_groups.group_candidates(
        CandidateGenerator(graph, SYSTEM, modes=("GPU",)), SYSTEM.gpu.memory_channels
    )
    assert len(graph.runs) == 4 and {candidate.covers for candidate in candidates} == set(graph.runs)


@pytest.mark.long
def test_the_least_pool_that_a_bound_on_latency_leaves():
    fastest = pimflow.search("toy", SYSTEM).evaluation.latency_ns
    min_search, choice = place_network("toy", objective="memory")
    for share in (1.0, 1.1, 1.5):
        search_result, bounded = place_network("toy", objective="memory", max_latency_ns=share * fastest)
        assert search_result.evaluation.latency_ns <= share * fastest * (1 + 1e-6)
        assert bounded.pool_bytes >= choice.pool_bytes
    assert min_search.evaluation.latency_ns >= fastest


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("least")
    onnx.save(random_network(1), folder / "net.onnx")
    options = {"decompose": REQUEST, "objective": "memory", "system": SYSTEM}
    return folder, pimflow.compile(folder / "net.onnx", folder / "out", **options, conventions="none")


@pytest.mark.long
def test_the_pool_that_is_built_is_the_one_that_was_chosen(compiled):
    _, compilation = compiled
    memory = compilation.report.memory.pool
    assert compilation.verification.is_verified
    assert memory.pool_bytes == memory.choice.pool_bytes == compilation.builds[0].memory.pool_bytes
    assert memory.pool_bytes <= min(memory.choice.searched_bytes, memory.choice.frugal_bytes)
    assert memory.pool_bytes <= min_pool_bytes(random_network(1), decompose=REQUEST)
    assert memory.switched_on == compilation.plan.options != ()
    assert memory.weight_bytes == compilation.builds[0].weight_bytes


@pytest.mark.long
def test_its_plan_is_applied_without_the_objective(compiled):
    """The plan says which options its network was prepared with."""
    directory, compilation = compiled
    plan = directory / "out" / "plan.json"
    assert json.loads(plan.read_text())["options"] == list(compilation.plan.options)
    recompiled = pimflow.compile(directory / "net.onnx", plan=plan, decompose=REQUEST, conventions="none")
    assert recompiled.plan.choices == compilation.plan.choices
    assert recompiled.report.memory.pool.pool_bytes == compilation.report.memory.pool.pool_bytes


def test_a_plan_with_other_options_is_refused(compiled, tmp_path, capsys):
    directory, compilation = compiled
    text = json.loads(compilation.plan.to_json())
    (tmp_path / "plan.json").write_text(json.dumps({**text, "options": ["faster"]}))
    assert "options" in error_line(
        capsys, 3, "compile", directory / "net.onnx", "--plan", tmp_path / "plan.json"
    )


def test_options_of_networks_are_fields():
    from pimflow.core.plan import NETWORK_OPTIONS

    assert set(NETWORK_OPTIONS) <= set(vars(NetworkOptions()))
