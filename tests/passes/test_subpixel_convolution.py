"""Do the phases of a transposed convolution make up what ONNX Runtime computes?"""

import pytest
from graphs import operators, shaped_model
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from onnx import helper
from test_frontend import matches_onnx_runtime, node, weight

from pimflow.errors import UnsupportedOpError
from pimflow.frontend import onnx_graph


@st.composite
def networks(draw):
    """A convolution, a transposed one with any attributes, bias and activation, and another convolution."""

    def pair(low, high):
        return [draw(st.integers(low, high)) for _ in range(2)]

    kernel, strides, dilations = pair(1, 5), pair(1, 3), pair(1, 2)
    reach = [(k - 1) * d for k, d in zip(kernel, dilations)]
    pads = [draw(st.integers(0, min(r, 4))) for r in reach * 2]
    groups = draw(st.sampled_from([1, 2, 4]))
    attributes = {
        "kernel_shape": kernel,
        "strides": strides,
        "dilations": dilations,
        "pads": pads,
        "output_padding": [draw(st.integers(0, s - 1)) for s in strides],
        "group": groups,
    }
    weights = {"w": weight(4, 3, 1, 1), "t": weight(4, 4 // groups, *kernel)}
    weights |= {"b": weight(4), "v": weight(2, 4, 1, 1)}
    nodes = [
        node("Conv", "x w", "a"),
        node("ConvTranspose", "a t" + draw(st.sampled_from(["", " b"])), "c", **attributes),
        node("Relu", "c", "d"),
        node("Conv", "d v", "y"),
    ]
    return shaped_model(nodes, {"x": (draw(st.integers(1, 2)), 3, *pair(4, 7))}, weights, ["y"])


@pytest.mark.long
@settings(max_examples=examples(15))
@given(networks())
def test_any_transposed_convolution(model):
    mod = onnx_graph.from_onnx(model)
    assert operators(mod).count("nn.conv2d") == 3
    assert "nn.conv2d_transpose" not in operators(mod)
    matches_onnx_runtime(model, mod)


def test_without_a_convolution_before_it():
    up = node("ConvTranspose", "x t", "y", strides=[2, 2])
    model = shaped_model([up], {"x": (1, 3, 4, 4)}, {"t": weight(3, 2, 2, 2)}, ["y"])
    mod = onnx_graph.from_onnx(model)
    assert operators(mod).count("nn.conv2d") == 1
    matches_onnx_runtime(model, mod)


def test_a_computed_filter_is_refused():
    model = shaped_model(
        [helper.make_node("ConvTranspose", ["x", "t"], ["y"], "up")],
        {"x": (1, 3, 4, 4), "t": (3, 2, 2, 2)},
        {},
        ["y"],
    )
    with pytest.raises(UnsupportedOpError, match="ConvTranspose is supported with a constant filter only"):
        onnx_graph.from_onnx(model)
