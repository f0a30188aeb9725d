"""Do the variants of a decomposed network take what is said of them, and compute the same?"""

import itertools
import json

import numpy as np
import onnx
import pytest
import reproduce_temco as script
from onnx import helper, numpy_helper
from onnx_models import onnx_model
from papers.temco_variants import VARIANTS, decomposition_variants, memory_over_time, two_layers
from skip_networks import hourglass

from pimflow.core.output_error import OUTPUT_BOUND
from pimflow.errors import UnknownNameError
from pimflow.hardware import system

pytestmark = pytest.mark.long

NOISE_BYTES = 1 << 16  # what the observer itself may hold


def chain(widths: tuple[int, ...], kernel: int, height: int) -> onnx.ModelProto:
    """Convolutions ``conv0``, ``conv1``, … with an activation behind each."""
    rng, nodes, weights, hidden = np.random.default_rng(0), [], [], "x"
    window = dict(kernel_shape=[kernel, kernel], pads=[kernel // 2] * 4)
    for index, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        filters = rng.standard_normal((outputs, inputs, kernel, kernel)).astype(np.float32)
        weights.append(numpy_helper.from_array(filters, f"w{index}"))
        nodes.append(helper.make_node("Conv", [hidden, f"w{index}"], [f"c{index}"], f"conv{index}", **window))
        nodes.append(helper.make_node("Relu", [f"c{index}"], [f"r{index}"], f"relu{index}"))
        hidden = f"r{index}"
    shape = (1, widths[0], height, height)
    return onnx_model(nodes, {"x": shape}, {hidden: (1, widths[-1], height, height)}, weights, name="chain")


@pytest.fixture(scope="module")
def forms():
    return decomposition_variants(hourglass(), system())


@pytest.mark.parametrize(
    ("widths", "kernel", "height", "ratio"),
    [((3, 16, 24, 8, 4), 3, 8, 0.3), ((4, 8, 8, 32, 4), 5, 6, 0.5), ((3, 24, 8, 8, 2), 3, 12, 1.0)],
)
def test_equations_are_what_the_planner_finds(widths, kernel, height, ratio):
    """They and the planner share nothing: one counts channels, the other the lifetimes of a graph."""
    variants = decomposition_variants(
        chain(widths, kernel, height), system(), decompose_as=f"tucker:{ratio}", batch=2
    )
    comparison = two_layers(variants, "conv1", "conv2")
    assert comparison.planned == comparison.equations
    assert comparison.equations[3] >= 2 * 4 * 2 * widths[2] * height**2  # two maps of the activation, fp32


def test_a_layer_that_was_not_decomposed(forms):
    with pytest.raises(UnknownNameError, match="decomposed layer 'conv1'"):
        two_layers(forms, "conv1", "conv2")


def test_each_form_takes_no_more_and_runs_in_its_plan(forms):
    pools = forms.pools(system())
    assert pools["skip-opt+fusion"] <= pools["fusion"]
    assert pools["skip-opt"] <= pools["decomposed, coalesced"] <= pools["decomposed"]
    assert pools["skip-opt+fusion"] < pools["original, coalesced"] <= pools["original"]
    measured = forms.run(VARIANTS, system(), runs=1)
    assert list(measured) == ["decomposed", *VARIANTS]
    for name, row in measured.items():
        assert row["error"] <= OUTPUT_BOUND["fp32"]
        assert row["allocated_bytes"] == pools["decomposed, coalesced" if name == "decomposed" else name]
        if row["peak_bytes"] is not None:
            assert abs(row["peak_bytes"] - row["allocated_bytes"]) < NOISE_BYTES


def test_skip_connections_wait(forms):
    """The skip connection is a map of 32 channels at the full height; nothing waits without one."""
    memory_trace = memory_over_time(forms.networks["decomposed"])
    assert max(memory_trace.live_bytes) == forms.pools(system())["decomposed"]
    assert max(memory_trace.skip_bytes) == 32 * 32 * 32 * 4
    assert 0 <= memory_trace.share_at_peak <= memory_trace.largest_share < 1
    plain_chain = decomposition_variants(chain((3, 8, 8, 4), 3, 6), system(), decompose_as="tucker:0.5")
    assert not any(memory_over_time(plain_chain.networks["decomposed"]).skip_bytes)


def test_times_are_means_over_the_networks_of_stored_rows(tmp_path):
    """Two files of a network each; one network twice as fast with the passes, the other half as fast."""

    def run(latency_ns: float, peak_bytes: int | None, error: float) -> dict[str, object]:
        return {"latency_ns": latency_ns, "allocated_bytes": 90, "peak_bytes": peak_bytes, "error": error}

    for name, ns, peak_bytes, error in (("vgg-16", 1.0, 100, 0.0), ("unet", 4.0, None, 1e-6)):
        forms = {"decomposed": run(2.0, 90, 0.0), "skip-opt+fusion": run(ns, peak_bytes, error)}
        row = {"network": name, "batch": 4, "original_bytes": 1000, "forms": forms}
        (tmp_path / f"{name}.json").write_text(json.dumps({"times": [row]}))
    rows = script.slice_rows(sorted(tmp_path.iterdir()), ["times"])["times"]
    text = script.times_table(rows)
    assert "Batch 4, 2 networks" in text and "time over decomposed 1.000 (paper, on a GPU: 1.08)" in text
    assert "memory as run 90.5 % less" in text  # peaks of 100, and of 90 where only the plan is known
    assert "within the bound of 1e-05" in text and "NOT" not in text
    rows[0]["forms"]["skip-opt+fusion"]["error"] = 1e-4
    assert "NOT within the bound" in script.times_table(rows)


def test_tables(forms, monkeypatch):
    monkeypatch.setattr(script, "variants", lambda *_: forms)
    rows = script.pools(["unet"], [4], "tucker:0.1", lambda _: None)
    text = script.pools_table(rows)
    pools = rows[0]["pool_bytes"]
    reduction_percent = 100 * (1 - pools["skip-opt+fusion"] / pools["original"])
    assert (
        f"| {reduction_percent:.1f} | 79.3 | 79.3: {'met' if reduction_percent >= 79.3 else 'not met'} |"
        in text
    )
    assert f"1 networks, 1 - geometric mean: {reduction_percent:.1f} %" in text
