"""Are networks of every kind compiled to what ONNX Runtime computes?"""

import json

import numpy as np
import onnxruntime
import pytest

import pimflow
from pimflow import frontend, zoo
from pimflow.commands.run import run
from pimflow.relay_passes.regions.extract_regions import extract_regions

pytestmark = pytest.mark.long


def test_layers_of_mobilenet_v1_leave_nothing_by_itself():
    regions = extract_regions(frontend.load("mobilenet-v1").module).regions
    assert len(regions) == 1 + 2 * 13 + 2  # convolutions, pool and product


def test_bert_is_compiled_and_right_on_other_sentences_too(small_bert, tmp_path):
    report = pimflow.compile(small_bert, tmp_path / "fp16", conventions="none").report
    assert report.verification.verified is True
    modes = {region.name: region.mode for region in report.regions}
    # Query, key and value do not wait for each other: both devices share them.
    with_pim = {name for name, mode in modes.items() if mode != "GPU"}
    for layer in ("layers.0", "layers.1"):
        assert {f"{layer}.{part}.product" for part in ("attention", "output")} <= with_pim
        assert {f"{layer}.{part}.product" for part in ("query", "key", "value")} & with_pim
    assert all(name.endswith(".product") for name in with_pim)
    others = ("scores", "softmax", "context", "attention.norm", "output.norm")
    assert {f"layers.{i}.{part}" for i in (0, 1) for part in others} <= set(modes)

    # In fp32, for the rounding of fp16 grows with the sentence.
    pimflow.compile(small_bert, tmp_path / "fp32", system=pimflow.system(dtype="fp32"), conventions="none")
    session = onnxruntime.InferenceSession(small_bert.SerializeToString(), providers=["CPUExecutionProvider"])
    for seed in (1, 2):
        inputs = zoo.example_inputs(small_bert, seed)
        results = run.run(tmp_path / "fp32", inputs)
        for result, expected in zip(results, session.run(None, inputs), strict=True):
            assert abs(result - expected).max() <= 1e-5 * abs(expected).max()


def test_a_compiled_network_remembers_how_many_rows_its_tables_have(small_bert, tmp_path):
    pimflow.compile(small_bert, tmp_path / "out", conventions="none")
    table = json.loads((tmp_path / "out/interface.json").read_text())
    assert table["inputs"]["input_ids"]["rows"] == 50 and table["inputs"]["token_type_ids"]["rows"] == 2
    assert "rows" not in table["inputs"]["attention_mask"]
    by_default, inputs = pimflow.run(tmp_path / "out"), zoo.example_inputs(small_bert)
    for result, expected in zip(by_default, run.run(tmp_path / "out", inputs), strict=True):
        np.testing.assert_array_equal(result, expected)
