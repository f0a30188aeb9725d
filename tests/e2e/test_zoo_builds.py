"""Are networks of every kind compiled to what ONNX Runtime computes?"""

import json

import numpy as np
import onnxruntime

from pimflow import api, artifact, zoo


def test_mobilenet_v1_is_compiled_and_right(tmp_path):
    report = api.compile("mobilenet-v1", tmp_path / "out").report
    assert report["verified"] is True and report["speedup"] >= 1
    assert len(report["regions"]) == 1 + 2 * 13 + 2  # convolutions, pool and product: nothing by itself


def test_bert_is_compiled_and_right_on_other_sentences_too(small_bert, tmp_path):
    compiled = api.compile(small_bert, tmp_path / "out")
    assert compiled.report["verified"] is True
    names = [region["name"] for region in compiled.report["regions"]]
    per_layer = ("query.product", "key.product", "value.product", "scores", "softmax", "context")
    per_layer += ("attention.product", "attention.norm", "intermediate.product", "output.product")
    assert {f"layers.{i}.{part}" for i in (0, 1) for part in per_layer} <= set(names)

    session = onnxruntime.InferenceSession(small_bert.SerializeToString(), providers=["CPUExecutionProvider"])
    for seed in (1, 2):
        inputs = zoo.example_inputs(small_bert, seed)
        results = artifact.run(tmp_path / "out", inputs)
        for result, expected in zip(results, session.run(None, inputs), strict=True):
            assert abs(result - expected).max() <= 2e-3 * abs(expected).max()


def test_a_compiled_network_remembers_how_many_rows_its_tables_have(small_bert, tmp_path):
    api.compile(small_bert, tmp_path / "out")
    table = json.loads((tmp_path / "out/interface.json").read_text())
    assert table["inputs"]["input_ids"]["rows"] == 50 and table["inputs"]["token_type_ids"]["rows"] == 2
    assert "rows" not in table["inputs"]["attention_mask"]
    by_default, given = api.run(tmp_path / "out"), zoo.example_inputs(small_bert)
    for result, again in zip(by_default, artifact.run(tmp_path / "out", given), strict=True):
        np.testing.assert_array_equal(result, again)
