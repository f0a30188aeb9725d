"""Does PyTorch compute what ONNX Runtime does, and is its memory counted?"""

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from onnx_models import onnx_model
from papers import onnx_torch

from pimflow import zoo
from pimflow.errors import UnsupportedOpError

pytest.importorskip("torch")
pytestmark = [pytest.mark.long, pytest.mark.torch]


@pytest.mark.parametrize("name", ["toy", "mobilenet-v2", "srgan", "efficientnet-b0", "mnasnet-1.0"])
def test_outputs_are_those_of_onnx_runtime(name):
    model = zoo.load_model(name)
    inputs = zoo.example_inputs(model)
    check_outputs(model, inputs)


def test_outputs_of_a_small_bert(small_bert):
    model = zoo.load_model(small_bert)
    inputs = zoo.example_arrays(zoo.input_types(model), rows=zoo.index_bounds(model))
    check_outputs(model, inputs)


def check_outputs(model, inputs):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for actual, expected in zip(onnx_torch.run(model, inputs), session.run(None, inputs), strict=True):
        assert actual.shape == expected.shape
        assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()


def _chain(kind: str):
    """A product, then two more operators, of 262144 B each."""
    dims = (256, 256)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="a"),
        helper.make_node("Relu", ["a"], ["b"], name="b"),
        helper.make_node(kind, ["b"], ["y"], name="y"),
    ]
    return onnx_model(nodes, {"x": dims}, {"y": dims}, {"w": np.ones(dims, np.float32)})


def test_the_peak_of_a_chain_is_its_weight_its_input_and_two_tensors():
    model = zoo.load_model(_chain("Sigmoid"))
    tensor = 4 * 256 * 256
    peak_bytes = onnx_torch.peak_bytes(model, zoo.example_inputs(model))
    assert 4 * tensor <= peak_bytes < 4 * tensor + 65536


def test_other_operators_are_refused_by_name():
    model = zoo.load_model(_chain("Sin"))
    with pytest.raises(UnsupportedOpError, match="Sin is none of"):
        onnx_torch.run(model, zoo.example_inputs(model))
