"""Does a recurrent layer, step by step, compute what ONNX Runtime computes?"""

import pytest
from graphs import shaped_model
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from onnx import helper
from test_frontend import matches_onnx_runtime, weight

from pimflow.errors import UnsupportedOpError
from pimflow.frontend import onnx_graph
from pimflow.frontend.recurrent import GATES, LIMIT

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


def test_other_activations():
    matches_onnx_runtime(layer("LSTM", activations=["Relu", "Sigmoid", "Tanh"]))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"steps": LIMIT + 1}, f"'layer': GRU over {LIMIT + 1} steps: {LIMIT} are supported"),
        ({"clip": 1.0}, "'layer': GRU with 'clip' is not supported"),
        ({"activations": ["Elu", "Tanh"]}, "'layer': GRU with 'activations' is not supported"),
    ],
)
def test_what_is_refused(arguments, why):
    with pytest.raises(UnsupportedOpError, match=why):
        onnx_graph.from_onnx(layer("GRU", **arguments))
