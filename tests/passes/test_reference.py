"""Does ONNX Runtime get the model that it is the reference for?"""

import tempfile
from pathlib import Path

import numpy as np
import onnx
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from onnx import TensorProto, helper, numpy_helper

from pimflow import zoo
from pimflow.frontend import load, onnx_graph, onnx_runtime
from pimflow.frontend.onnx_rewrites import strip_weights


@st.composite
def models(draw):
    """Of one addition, with tensors of all sizes, as raw bytes or as typed values."""
    sizes = draw(st.lists(st.integers(0, 3000), min_size=1, max_size=4))
    tensors = []
    for index, size in enumerate(sizes):
        values = np.random.default_rng(index).standard_normal(size).astype(np.float32)
        tensors.append(helper.make_tensor(f"w{index}", TensorProto.FLOAT, [size], values, raw=False))
        if draw(st.booleans()):
            tensors[-1] = numpy_helper.from_array(values, f"w{index}")
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [sizes[0]])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [sizes[0]])
    nodes = [helper.make_node("Add", ["x", "w0"], ["y"])]
    graph = helper.make_graph(nodes, "sum", [value], [result], tensors, doc_string="text")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.example", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="test")
    helper.set_model_props(model, {"key": "value"})
    return model


@settings(max_examples=examples(15))
@given(models())
def test_what_the_reference_reads_is_the_model(model):
    before = model.SerializeToString()
    with tempfile.TemporaryDirectory() as folder:
        path = onnx_runtime.write_model(model, Path(folder), strip_weights(model))
        loaded = onnx.load(path)
        for tensor in loaded.graph.initializer:
            tensor.ClearField("data_location")  # onnx writes the default there
        assert loaded == model
        moved = onnx.load(path, load_external_data=False).graph.initializer
        large = {t.name for t in model.graph.initializer if len(t.raw_data) >= onnx_runtime.PAGE_BYTES}
        assert large <= {t.name for t in moved if t.external_data}
    assert model.SerializeToString() == before
    x = np.ones(model.graph.initializer[0].dims, np.float32)
    (y,) = onnx_runtime.reference(model)({"x": x})
    np.testing.assert_array_equal(y, x + numpy_helper.to_array(model.graph.initializer[0]))


def test_weights_drawn_where_they_are_kept_are_those_of_the_model():
    """Networks of the zoo are never held as models with their weights."""
    full_model, network = zoo.load_model("toy"), load("toy")
    tvm.ir.assert_structural_equal(onnx_graph.from_onnx(full_model), network.module)
    with tempfile.TemporaryDirectory() as folder:
        model = zoo.load_model("toy", seed=None)
        read = onnx.load(onnx_runtime.write_model(model, Path(folder), strip_weights(model)))
    assert {t.name: numpy_helper.to_array(t).tobytes() for t in read.graph.initializer} == {
        t.name: numpy_helper.to_array(t).tobytes() for t in full_model.graph.initializer
    }
    inputs = network.example_inputs()
    for y, right in zip(network.reference(inputs), onnx_runtime.reference(full_model)(inputs), strict=True):
        np.testing.assert_array_equal(y, right)


def test_what_onnx_runtime_lacks_is_evaluated_by_the_standard():
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in "aby"]
    node = helper.make_node("SwiGLU", ["a", "b"], ["y"], "gate")
    graph = helper.make_graph([node], "net", values[:2], values[2:])
    model = zoo.load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)]))
    inputs = zoo.example_inputs(model)
    (result,) = onnx_runtime.reference(model)(inputs)
    expected = inputs["a"] / (1 + np.exp(-inputs["a"])) * inputs["b"]
    np.testing.assert_allclose(result, expected, rtol=1e-5)
