"""Does a recurrent layer, step by step, compute what ONNX Runtime computes?"""

import numpy as np
import pytest
from graphs import outputs, shaped_model
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from onnx import TensorProto, helper, numpy_helper
from onnx_models import onnx_model
from test_frontend import matches_onnx_runtime, reference, weight

from pimflow import zoo
from pimflow.errors import UnsupportedOpError
from pimflow.frontend import onnx_graph
from pimflow.frontend.recurrent import GATES, LIMIT, unroll

WIDTH, HIDDEN = 3, 4


def layer(kind, steps=3, batch=1, direction="forward", bias=True, initial=False, **attributes):
    """A recurrent layer whose every result is a result of the network."""
    directions, rows = 1 + (direction == "bidirectional"), GATES[kind] * HIDDEN
    weights = {"w": weight(directions, rows, WIDTH), "r": weight(directions, rows, HIDDEN)}
    operands = ["x", "w", "r", "b" if bias else ""]
    if bias:
        weights["b"] = weight(directions, 2 * rows)
    shapes = {"x": (steps, batch, WIDTH)}
    states = ["h", "c"][: 1 + (kind == "LSTM")]
    if initial:
        shapes |= {name: (directions, batch, HIDDEN) for name in states}
        operands += ["", *states]
    results = ["y", *(f"y{name}" for name in states)]
    node = helper.make_node(
        kind, operands, results, "layer", hidden_size=HIDDEN, direction=direction, **attributes
    )
    return shaped_model([node], shapes, weights, results)


@pytest.mark.long
@settings(max_examples=examples(8))
@given(
    kind=st.sampled_from(["LSTM", "GRU", "RNN"]),
    steps=st.integers(1, 4),
    batch=st.integers(1, 2),
    direction=st.sampled_from(["forward", "reverse", "bidirectional"]),
    bias=st.booleans(),
    initial=st.booleans(),
    reset=st.integers(0, 1),
)
def test_any_recurrent_layer(kind, steps, batch, direction, bias, initial, reset):
    attributes = {"linear_before_reset": reset} if kind == "GRU" else {}
    matches_onnx_runtime(layer(kind, steps, batch, direction, bias, initial, **attributes))


@pytest.mark.long
@pytest.mark.parametrize("lengths", [[3, 3], [1, 3], [0, 2]])
@pytest.mark.parametrize("computed", [False, True])
def test_sequences_that_end_early(lengths, computed):
    """States stay from the end on, and hidden values there are zeros, in both directions."""
    model = layer("LSTM", batch=2, direction="bidirectional")
    model.graph.node[0].input.append("lengths")
    ends = np.array(lengths, "int32")
    if computed:
        model.graph.input.append(helper.make_tensor_value_info("lengths", TensorProto.INT32, [2]))
    else:
        model.graph.initializer.append(numpy_helper.from_array(ends, "lengths"))
    operands = {"x": weight(3, 2, WIDTH), **({"lengths": ends} if computed else {})}
    results = outputs(onnx_graph.from_onnx(model), list(operands.values()))
    for result, expected in zip(results, reference(model, operands), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.long
def test_weights_that_depend_on_constants():
    model = layer("GRU")
    stored = model.graph.initializer[0]
    narrow = numpy_helper.from_array((numpy_helper.to_array(stored) * 127).astype("int8"), "narrow")
    model.graph.initializer.extend([narrow, numpy_helper.from_array(np.float32(1 / 127), "scale")])
    model.graph.initializer.remove(stored)
    model.graph.node.insert(0, helper.make_node("DequantizeLinear", ["narrow", "scale"], ["w"], "wide"))
    matches_onnx_runtime(model)


def test_products_in_8_bits():
    random = np.random.default_rng(0)
    weights = {
        "w": random.integers(-100, 100, (2, WIDTH, 4 * HIDDEN), dtype="int8"),
        "r": random.integers(-100, 100, (2, HIDDEN, 4 * HIDDEN), dtype="int8"),
        "b": weight(2, 8 * HIDDEN),
        **{name: np.array([0.01, 0.02], "float32") for name in ("ws", "rs")},
        **{name: np.array([0, 3], "int8") for name in ("wz", "rz")},
    }
    node = helper.make_node(
        *("DynamicQuantizeLSTM", ["x", "w", "r", "b", "", "", "", "", "ws", "wz", "rs", "rz"], ["y"], "lstm"),
        domain="com.microsoft",
        hidden_size=HIDDEN,
        direction="bidirectional",
    )
    model = onnx_model([node], {"x": (3, 1, WIDTH)}, {"y": (3, 2, 1, HIDDEN)}, weights)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    model = zoo.load_model(model)
    unrolled = unroll(model)  # kernels of another last bit would take other 8-bit steps now and then
    operands = zoo.example_inputs(model)
    for result, expected in zip(reference(unrolled, operands), reference(model, operands), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("reshaped", [False, True])
def test_a_layer_behind_an_8_bit_layer(reshaped):
    """Its sizes are known once the first is unrolled, also if they are computed from the first's shape."""
    random = np.random.default_rng(1)
    shared = {name: np.float32([0.01]) for name in ("ws", "rs")} | {z: np.int8([0]) for z in ("wz", "rz")}
    weights = {
        name: random.integers(-99, 99, (1, rows, 4 * HIDDEN), dtype="int8")
        for name, rows in (("w0", WIDTH), ("r0", HIDDEN), ("w1", HIDDEN), ("r1", HIDDEN))
    }
    nodes = []
    for index, (x, y) in enumerate((("x", "a"), ("b", "c"))):
        operands = [x, f"w{index}", f"r{index}", *[""] * 5, "ws", "wz", "rs", "rz"]
        attributes = {"domain": "com.microsoft", "hidden_size": HIDDEN}
        nodes.append(helper.make_node("DynamicQuantizeLSTM", operands, [y], y, **attributes))
        result = "b" if index == 0 else "y"
        if reshaped:
            nodes.append(helper.make_node("Shape", [y], [f"{y} dims"]))
            nodes.append(helper.make_node("Gather", [f"{y} dims", "places"], [f"{y} kept"]))
            nodes.append(helper.make_node("Reshape", [y, f"{y} kept"], [result]))
        else:
            nodes.append(helper.make_node("Squeeze", [y, "one"], [result]))
    weights |= shared | {"one": np.array([1]), "places": np.array([0, 2, 3])}
    model = onnx_model(nodes, {"x": (3, 1, WIDTH)}, {"y": (3, 1, HIDDEN)}, weights)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    model = zoo.load_model(model)
    unrolled = unroll(model)
    assert not {node.op_type for node in unrolled.graph.node} & GATES.keys()
    operands = zoo.example_inputs(model)
    for result, expected in zip(reference(unrolled, operands), reference(model, operands), strict=True):
        np.testing.assert_allclose(result, expected, atol=0.02)


HARD = ["HardSigmoid", "LeakyRelu", "ScaledTanh"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ("LSTM", {"activations": ["Relu", "Sigmoid", "Tanh"]}),
        ("LSTM", {"activations": HARD, "activation_alpha": [0.3, 0.1, 2.0], "activation_beta": [0.4, 0.5]}),
        ("LSTM", {"clip": 0.2}),
        ("LSTM", {"input_forget": 1}),
        ("GRU", {"clip": 0.1, "activations": ["hardsigmoid", "Softsign"]}),
        ("RNN", {"activations": ["Affine"], "activation_alpha": [0.5], "activation_beta": [0.1]}),
    ],
)
def test_other_activations(kind, attributes):
    matches_onnx_runtime(layer(kind, **attributes))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"steps": LIMIT + 1}, f"'layer': GRU over {LIMIT + 1} steps: {LIMIT} are supported"),
        ({"activations": ["Swish", "Tanh"]}, "'layer': GRU with the activation 'Swish' is not supported"),
    ],
)
def test_what_is_refused(arguments, why):
    with pytest.raises(UnsupportedOpError, match=why):
        onnx_graph.from_onnx(layer("GRU", **arguments))
