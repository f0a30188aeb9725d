"""Are errors of layers those of the outputs, do they add up as documented, and is a bound on them kept?"""

import json
from dataclasses import replace

import numpy as np
import pytest

import pimflow
from pimflow import frontend, zoo
from pimflow.commands.memory.decompose import export_decomposed
from pimflow.core.output_error import relative_error
from pimflow.core.plan import Plan
from pimflow.decomposition.calibration import Calibration
from pimflow.decomposition.layer_errors import layer_errors
from pimflow.decomposition.network import combine_alternatives, decompose
from pimflow.decomposition.onnx_chains import with_chains
from pimflow.decomposition.request import DecompositionRequest
from pimflow.errors import InfeasibleError, PlanError, UsageError
from pimflow.frontend import onnx_graph, onnx_runtime
from pimflow.relay_passes.decomposition.decompose import decomposable_layers
from pimflow.zoo import glyphs

RANKS = "tucker:0.25:0.5:0.75,where=pays"
# docs/decomposition.md: to the first order errors add up, and those of layers beside others are no larger.
FARTHEST = 1.1
BOUND = 0.3
SMALL = pimflow.system().with_launches(gpu_ns=300.0, pim_ns=100.0)  # beside which small layers differ


@pytest.fixture(scope="module")
def data() -> dict[str, np.ndarray]:
    images, labels = glyphs.pictures(48)
    return {"input": images, "labels": labels}


@pytest.fixture(scope="module")
def changes():
    return decompose(frontend.load("glyphs"), DecompositionRequest.parse(RANKS)).alternatives()


@pytest.fixture(scope="module")
def samples(changes, data):
    return Calibration.read(data, changes[0].original)


@pytest.fixture(scope="module")
def errors(changes, samples):
    return layer_errors(changes, samples)


def outputs(network, samples) -> np.ndarray:
    run = network.reference.prepared()
    return np.concatenate([run(inputs)[0] for inputs, _ in samples.batches()])


@pytest.mark.long
def test_an_error_is_that_of_the_outputs_with_one_layer_decomposed(changes, samples, errors):
    """As TVM's own pipeline computes them, where ONNX Runtime measured."""
    original = outputs(changes[0].original, samples)
    for layer, rule in (("conv4", 2),):
        one_layer = combine_alternatives(changes, {layer: rule})
        error = relative_error(outputs(one_layer.network, samples), original)
        assert errors[layer][rule] == pytest.approx(error, rel=1e-3)
    without_model = replace(changes[0].original, reference=replace(changes[0].original.reference, model=None))
    few = tuple(replace(change, original=without_model, layers=change.layers[3:4]) for change in changes[:1])
    assert layer_errors(few, samples)["conv4"] == pytest.approx(errors["conv4"][:1], rel=1e-3)


def test_without_data_an_error_is_that_of_the_filters(changes):
    filter_errors = layer_errors(changes, None)
    for rule, change in enumerate(changes):
        for layer in change.layers:
            assert filter_errors[layer.layer][rule] == layer.relative_error


@pytest.mark.long
def test_errors_of_layers_add_up_to_no_less_than_documented(changes, samples, errors):
    draw, network, pushed = np.random.default_rng(0), changes[0].original, {}
    model = zoo.load_model("glyphs")
    layers_by_name = {layer.name: layer for layer in decomposable_layers(onnx_graph.from_onnx(model, pushed))}
    original, ratios = outputs(network, samples), []
    for _ in range(24):
        chosen = {layer: int(draw.integers(3)) for layer in errors if draw.random() < 0.6} or {"conv4": 0}
        layers = [
            change_layer
            for rule, change in enumerate(changes)
            for change_layer in change.layers
            if chosen.get(change_layer.layer) == rule
        ]
        written = with_chains(model, layers, layers_by_name, pushed)
        run = onnx_runtime.reference(written).prepared()
        results = np.concatenate([run(inputs)[0] for inputs, _ in samples.batches()])
        total = relative_error(results, original)
        ratios.append(total / sum(errors[layer][rule] for layer, rule in chosen.items()))
    assert max(ratios) <= FARTHEST


@pytest.mark.long
def test_the_report_has_ranks_and_both_errors(data, tmp_path):
    compiled = pimflow.compile(
        "glyphs",
        system=SMALL,
        decompose=RANKS,
        max_error=BOUND,
        objective="energy",
        modes="gpu,pim",
        calibration=data,
        tolerance=1e-2,
        out=tmp_path / "build",
        conventions="none",
    )
    decomposition = compiled.report.extras.decomposition
    assert decomposition.errors_measured and 0 < decomposition.error_sum <= BOUND
    assert decomposition.error_sum == pytest.approx(sum(layer.error for layer in decomposition.layers))
    assert decomposition.calibration.max_relative_difference <= FARTHEST * decomposition.error_sum
    plan = json.loads((tmp_path / "build" / "plan.json").read_text())
    rules = {layer.name: layer.rule for layer in compiled.report.extras.decomposition.layers}
    assert plan["ranks"] == rules and set(rules.values()) <= {"0.25", "0.5", "0.75"}
    replanned = pimflow.search("glyphs", SMALL, decompose=RANKS, plan=tmp_path / "build" / "plan.json")
    assert replanned.plan.ranks == rules
    assert replanned.evaluation.latency_ns == pytest.approx(compiled.report.plan.latency_ns)
    with pytest.raises(InfeasibleError, match="error of 'glyphs': needs"):
        pimflow.search("glyphs", SMALL, decompose=RANKS, plan=replanned.plan, max_error=1e-3)
    with pytest.raises(PlanError, match="give the request that it was made for"):
        pimflow.search("glyphs", SMALL, decompose="tucker:0.3:0.4,where=pays", plan=replanned.plan)


@pytest.mark.long
def test_a_bound_holds_where_all_layers_are_decomposed(tmp_path):
    with pytest.raises(InfeasibleError, match=r"error of 'toy': needs \d.*; try --max-error"):
        pimflow.search("toy", decompose="tucker:0.1", max_error=0.5)
    assert pimflow.search("toy", decompose="tucker:1.0", max_error=0.5, modes="gpu").plan.choices
    with pytest.raises(InfeasibleError, match="error of 'toy'"):
        export_decomposed("toy", "tucker:0.1", tmp_path / "toy.onnx", max_error=0.5)
    with pytest.raises(UsageError, match="--max-error has no effect without --decompose"):
        pimflow.search("toy", max_error=0.5)


def test_ranks_of_a_plan_file_are_texts(tmp_path):
    plan = pimflow.search("toy", modes="gpu").plan
    assert "ranks" not in json.loads(plan.to_json())
    named = replace(plan, ranks={"down.conv": "0.5"})
    assert Plan.from_json(named.to_json()) == named
    for wrong_ranks in ('["down.conv"]', '{"down.conv": 0.5}'):
        text = named.to_json().replace(json.dumps(named.ranks, indent=1).replace("\n", "\n "), wrong_ranks)
        with pytest.raises(PlanError, match="field 'ranks' is no table of texts"):
            Plan.from_json(text)
