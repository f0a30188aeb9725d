"""Do fused groups that run give the results of their layers, and move the bytes that were counted?"""

import dataclasses
import json

import numpy as np
import pytest
from fused_cuda import compile_group_for_cuda
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from length import examples
from onnx_networks import all_tensors, classifiers, models
from replay import replay

from pimflow import zoo
from pimflow.commands.fuse import fuse
from pimflow.commands.main import main
from pimflow.errors import InfeasibleError, UnsupportedOpError, UsageError, VerificationError
from pimflow.fusion import Accelerator, Group, GroupTiling, layers_from_onnx, place
from pimflow.fusion.channels import possible_runs
from pimflow.fusion.kernels import execution
from pimflow.fusion.kernels.generator import generate
from pimflow.fusion.kernels.onnx_formulas import computations
from pimflow.fusion.kernels.parameters import KernelTarget
from pimflow.pim_backend.runtime import targets
from pimflow.pim_backend.runtime.cuda_binary import compile_kernels, cuda_compiler

PROPERTY = settings(derandomize=True, deadline=None, max_examples=examples(9))


@st.composite
def cases(draw, channels=False):
    """A loaded model and a group of some of its layers, with any tiling and reuse; or by channels."""
    model = zoo.load_model(draw(models()))
    graph = layers_from_onnx(model)
    end = draw(st.integers(2, len(graph.layers)))
    begin = draw(st.integers(0, end - 2))
    if graph.layers[begin].inputs[0].endswith(".normalised"):  # which the file does not name
        begin -= 1
    weighted = [layer.name for layer in graph.layers[begin:end] if layer.weight_elements]
    reuse = draw(st.sampled_from(["none", "lifetime", "deep", "deep"]))
    resident = frozenset(name for name in weighted if reuse == "none" or draw(st.booleans()))
    cuts = dict(n=draw(st.integers(1, 2)), h=draw(st.integers(1, 4)), w=draw(st.integers(1, 3)))
    tiling = GroupTiling(**cuts, retain=draw(st.booleans()))
    group = Group(graph=graph, begin=begin, end=end, tiling=tiling, reuse=reuse, resident=resident)
    return model, draw(channel_variants(group)) if channels else group


@st.composite
def channel_variants(draw, group):
    """The group with runs that go channel by channel, those with sums first."""
    runs = []
    for run in sorted(possible_runs(group.layers, sums=True), key=lambda run: not run.sums):
        if all(run.end <= chosen_run.begin or run.begin >= chosen_run.end for chosen_run in runs) and draw(
            st.booleans()
        ):
            runs.append(run)
    inside = {group.layers[step].name for run in runs for step in range(run.begin, run.end)}
    assume(runs)
    return dataclasses.replace(
        group,
        channel_runs=tuple(sorted(runs)),
        reuse="lifetime",
        resident=group.resident - inside,
        tiling=dataclasses.replace(group.tiling, retain=False),
    )


def run(group, placed, formulas, values):
    values = {name: array.ravel() for name, array in values.items()}
    counts = execution.build(group, placed, formulas).run(values)
    return {name: values[name] for name in group.output_names}, counts


@pytest.mark.long
@PROPERTY
@given(cases() | cases(channels=True), st.integers(0, 2**32 - 1))
def test_a_group_computes_its_layers_and_moves_what_was_counted(case, seed):
    model, group = case
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    tensors = all_tensors(model, np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32))
    formulas = computations(model, group.graph)
    placed = place(group, 4, 10**9)
    placed = place(group, 4, placed.on_chip_bytes)
    inputs = {name: np.ascontiguousarray(tensors[name]) for name in group.input_names}
    results, counts = run(group, placed, formulas, inputs)
    for name in group.output_names:
        if name in tensors:
            reference = tensors[name].ravel()
            assert np.abs(results[name] - reference).max() <= 1e-5 * max(1, np.abs(reference).max()), name
    ran = replay(group, placed, 4)
    assert sum(counts.values()) == 4 * (ran.loaded + ran.stored) == 4 * group.traffic_elements
    assert counts["stored_bytes"] == 4 * ran.stored


@pytest.mark.long
@settings(PROPERTY, max_examples=examples(6))
@given(cases(), st.integers(0, 2**32 - 1))
def test_sums_keep_their_order(case, seed):
    """Bit for bit what the layers give one by one, whole maps at a time."""
    model, group = case
    formulas = computations(model, group.graph)
    random = np.random.default_rng(seed)
    values = {n: random.uniform(-1, 1, group.graph.elements(n)).astype(np.float32) for n in group.input_names}
    results, _ = run(group, place(group, 4, 10**9), formulas, values)
    for position in range(group.begin, group.end):
        layer_group = Group(graph=group.graph, begin=position, end=position + 1)
        single, placed = execution.single_layer_group(layer_group, 4)
        single_results, counts = run(single, placed, formulas, values)
        assert sum(counts.values()) == 4 * layer_group.traffic_elements
        values |= single_results
    for name in group.output_names:
        assert np.array_equal(results[name], values[name]), name


@pytest.fixture(scope="module")
def toy():
    return fuse.fuse("toy", Accelerator(on_chip_bytes=24 << 10), reuse="lifetime", halo="retain")


@pytest.mark.parametrize(
    ("dtype", "on_chip", "bound"),
    [pytest.param("fp32", "24KiB", 1e-5, marks=pytest.mark.long), ("fp16", "12KiB", 2e-3)],
)
def test_command(dtype, on_chip, bound, capsys):
    """Tiles, retained rows, results over operands; all of it as counted."""
    options = ["--json", "--quiet", "--on-chip", on_chip, "--halo", "retain", "--dtype", dtype]
    assert main(["fuse", "toy", *options, "--execute"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["executed"]["counted_bytes"] == report["dram_bytes"] < report["dram_bytes_unfused"]
    assert any(group["tile"]["retain"] and group["tile"]["tiles"] > 1 for group in report["groups"])
    for group, ran in zip(report["groups"], report["executed"]["groups"], strict=True):
        assert ran["layers"] == group["layers"] and ran["counted_bytes"] == group["dram_bytes"]
        assert ran["loaded_bytes"] + ran["weight_bytes"] + ran["stored_bytes"] == ran["counted_bytes"]
        assert ran["error"] <= bound
    assert report["executed"]["error"] > bound / 100  # of the storage type


@pytest.mark.parametrize(
    ("options", "message"), [(["--dtype", "int8"], "fp32 or fp16; give one as --dtype, not int8")]
)
def test_what_cannot_be_executed_is_refused(options, message, capsys):
    assert main(["fuse", "toy", "--quiet", "--execute", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


@settings(PROPERTY, max_examples=examples(5))
@given(models(most=9), st.integers(300, 1200))
def test_a_network_runs_as_it_was_searched(model, on_chip):
    """Groups over branches and by channels among them: results and bytes of all of it."""
    try:
        plan = fuse.fuse(model, Accelerator(on_chip_bytes=on_chip), halo="retain")
    except InfeasibleError:
        return
    ran = execution.execute(model, plan)
    ran.require(plan)
    assert ran.counted_bytes == plan.dram_bytes


@pytest.mark.long
@settings(PROPERTY, max_examples=examples(5))
@given(classifiers(), st.integers(300, 4000), st.sampled_from(("recompute", "retain")))
def test_a_network_runs_as_it_is_compiled(model, on_chip, halo):
    """Every stored tensor against TVM's own pipeline, outputs against ONNX Runtime, all bytes."""
    try:
        plan = fuse.fuse(model, Accelerator(on_chip_bytes=on_chip), baseline="folded", halo=halo)
        ran = execution.execute(model, plan, baseline="folded")
    except (InfeasibleError, UnsupportedOpError):
        assume(False)
    ran.require(plan)
    assert ran.counted_bytes == plan.dram_bytes


@pytest.mark.parametrize("dtype, bound", [("fp32", 1e-5), pytest.param("fp16", 2e-3, marks=pytest.mark.long)])
def test_folded_layers_run(dtype, bound, capsys):
    """The toy, in tiles: a transposed input, a depthwise convolution, a residual, a mean and a product."""
    command = ["fuse", "toy", "--baseline", "folded", "--execute", "--json", "--quiet", "--dtype", dtype]
    assert main([*command, "--on-chip", "12KiB", "--halo", "retain"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["executed"]["counted_bytes"] == report["dram_bytes"] < report["dram_bytes_unfused"]
    assert max(group["tile"]["tiles"] for group in report["groups"]) > 1
    assert bound / 100 < report["executed"]["error"] <= bound


@pytest.mark.long
def test_a_wrong_place_between_folded_layers_is_seen():
    """A result that lies over the operand it is formed of; of a group whose results are not the network's."""
    plan = fuse.fuse("toy", Accelerator(on_chip_bytes=24 << 10), baseline="folded", reuse="lifetime")
    group, placed = plan.groups[0], plan.placements[0]
    offsets = {**placed.offsets_bytes, group.layers[0].name: placed.offsets_bytes[group.input_names[0]]}
    wrong = dataclasses.replace(plan, placements=(
        dataclasses.replace(placed, offsets_bytes=offsets), *plan.placements[1:]))  # fmt: skip
    assert not set(group.output_names) & set(plan.graph.outputs)
    with pytest.raises(VerificationError, match="differs from its reference"):
        execution.execute("toy", wrong, baseline="folded").require(wrong)


def test_a_plan_of_other_layers_is_refused(toy):
    with pytest.raises(UsageError, match="not of this network's folded layers"):
        execution.execute("toy", toy, baseline="folded")


@pytest.mark.long
def test_a_folded_layer_without_a_formula_is_named():
    """A concatenation that the convolution behind it takes in."""
    plan = fuse.fuse("squeezenet-1.1", baseline="folded", search="greedy")
    with pytest.raises(UnsupportedOpError, match=r"'features.4.squeeze'"):
        execution.execute("squeezenet-1.1", plan, baseline="folded")


def test_a_layer_without_a_formula_is_named():
    with pytest.raises(UnsupportedOpError, match=r"Gather.*cannot be executed fused"):
        model = zoo.load_model("bert-base", seed=None)
        computations(model, layers_from_onnx(model))


@pytest.mark.long
def test_a_wrong_place_or_count_is_seen(toy):
    """Weights laid over a tile that is alive; a plan that keeps fewer weights than the one that ran."""
    group, placed = toy.groups[0], toy.placements[0]
    weights = f"{group.layers[0].name}.weights"
    offsets = {**placed.offsets_bytes, weights: placed.offsets_bytes[group.input_names[0]]}
    wrong = dataclasses.replace(toy, placements=(
        dataclasses.replace(placed, offsets_bytes=offsets), *toy.placements[1:]))  # fmt: skip
    with pytest.raises(VerificationError, match="differs from its reference"):
        execution.execute("toy", wrong).require(wrong)
    ran = execution.execute("toy", toy)
    ran.require(toy)
    fewer = dataclasses.replace(ran.groups[0], weight_bytes=ran.groups[0].weight_bytes - 4)
    with pytest.raises(VerificationError, match="the search counted"):
        dataclasses.replace(ran, groups=(fewer, *ran.groups[1:])).require(toy)


@pytest.mark.long
def test_for_cuda_the_pool_is_shared_memory(toy):
    formulas = computations(zoo.load_model("toy"), toy.graph)
    target = targets.target_by_name("cuda+pim")
    group, placed = toy.groups[-1], toy.placements[-1]
    _, kernels = compile_kernels(lambda: compile_group_for_cuda(group, placed, formulas, target), target)
    assert kernels.source.count("__shared__") == 1 and "__syncthreads" in kernels.source
    assert bool(kernels.problem) != bool(cuda_compiler())


def test_on_a_gpu_threads_must_not_write_what_others_read(toy):
    """In the least memory, a convolution's result lies over its operand."""
    formulas = computations(zoo.load_model("toy"), toy.graph)
    resident = frozenset(layer.name for layer in toy.graph.layers[:2] if layer.weight_elements)
    group = Group(graph=toy.graph, begin=0, end=2, resident=resident)
    target, placed = KernelTarget(threads=32), place(group, 4, 10**9)
    generate("f", group, placed, formulas, target)
    with pytest.raises(InfeasibleError):
        while True:
            placed = place(group, 4, placed.on_chip_bytes - 4)
    with pytest.raises(UnsupportedOpError, match=f"'{toy.graph.layers[0].name}' .* give --reuse lifetime"):
        generate("f", group, placed, formulas, target)
