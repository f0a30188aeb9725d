"""Does a region count what its operators multiply? Closed formulas of each operator say."""

import math

import numpy as np
import pytest
from graphs import main_module, shaped_model
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from onnx import helper
from tvm import relax
from tvm.relax import op

from pimflow.frontend import onnx_graph
from pimflow.relay_passes.flat import main_bindings
from pimflow.relay_passes.regions.arithmetic import Arithmetic, arithmetic
from pimflow.relay_passes.regions.extract_regions import extract_regions

CONVOLUTIONS = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}
TRANSPOSED = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose, 3: op.nn.conv3d_transpose}


def count(make, *shapes: tuple[int, ...]) -> Arithmetic:
    """What the operator computes that `make` makes of tensors."""
    params = [relax.Var(f"p{i}", relax.TensorType(dims, "float32")) for i, dims in enumerate(shapes)]
    return arithmetic(main_bindings(main_module(params, lambda builder: builder.emit(make(*params)))))


@st.composite
def convolutions(draw):
    """Input, filters and attributes of a convolution over one, two or three axes, channels first."""
    axes = draw(st.integers(1, 3))
    groups, inputs, outputs = (draw(st.integers(1, 3)) for _ in range(3))
    taps = [draw(st.integers(1, 3)) for _ in range(axes)]
    sizes = [draw(st.integers(4, 7)) for _ in range(axes)]
    strides = [draw(st.integers(1, 3)) for _ in range(axes)]
    padding = [draw(st.integers(0, 1)) for _ in range(axes)]
    return axes, groups, inputs, outputs, taps, sizes, strides, padding


@given(convolutions())
@settings(max_examples=examples(60), deadline=None)
def test_convolutions_over_one_two_and_three_axes(drawn):
    axes, groups, inputs, outputs, taps, sizes, strides, padding = drawn
    attributes = {"strides": strides, "padding": padding * 2, "groups": groups}
    arithmetic = count(
        lambda x, w: CONVOLUTIONS[axes](x, w, **attributes),
        (2, groups * inputs, *sizes),
        (groups * outputs, inputs, *taps),
    )
    pixels = [(x + 2 * p - k) // s + 1 for x, p, k, s in zip(sizes, padding, taps, strides)]
    assert arithmetic.product.macs == 2 * math.prod(pixels) * groups * outputs * inputs * math.prod(taps)
    assert (arithmetic.operations, arithmetic.multiplications) == (0, 0)
    assert arithmetic.product.n * arithmetic.product.many == groups * outputs
    assert arithmetic.product.second_elements == groups * outputs * inputs * math.prod(taps)


@given(convolutions())
@settings(max_examples=examples(60), deadline=None)
def test_transposed_convolutions_multiply_no_zeros_between_pixels(drawn):
    """Each element of the input by each tap of each output channel of its group."""
    axes, groups, inputs, outputs, taps, sizes, strides, _ = drawn
    attributes = {"strides": strides, "groups": groups}
    arithmetic = count(
        lambda x, w: TRANSPOSED[axes](x, w, **attributes),
        (2, groups * inputs, *sizes),
        (groups * inputs, outputs, *taps),
    )
    assert arithmetic.product.macs == 2 * math.prod(sizes) * groups * inputs * outputs * math.prod(taps)


@pytest.mark.parametrize(
    ("first", "second", "macs"),
    [
        ((5, 7), (7, 3), 5 * 7 * 3),
        ((4, 5, 7), (4, 7, 3), 4 * 5 * 7 * 3),
        ((4, 5, 7), (7, 3), 4 * 5 * 7 * 3),
        ((5, 7), (4, 7, 3), 4 * 5 * 7 * 3),
        ((2, 4, 5, 7), (4, 7, 3), 2 * 4 * 5 * 7 * 3),
        ((4, 1, 7), (4, 7, 1), 4 * 7),
        ((7,), (7, 3), 7 * 3),
    ],
)
def test_matrix_products(first, second, macs):
    arithmetic = count(op.matmul, first, second)
    assert (arithmetic.product.macs, arithmetic.operations) == (macs, 0)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "product", "operations"),
    [
        ("bij,bkj->bik", [(2, 3, 4), (2, 5, 4)], (2, 3, 5, 4), 0),
        ("bhid,bhjd->bhij", [(2, 3, 4, 8), (2, 3, 5, 8)], (6, 4, 5, 8), 0),
        ("i,j->ij", [(6,), (5,)], None, 30),
        ("bi,bi->b", [(9, 4), (9, 4)], None, 2 * 36),
    ],
)
def test_einsum(subscripts, shapes, product, operations):
    arithmetic = count(lambda *tensors: op.einsum(relax.Tuple(list(tensors)), subscripts), *shapes)
    result = arithmetic.product
    sizes = result and (result.many, result.m, result.n, result.k)
    assert sizes == product
    assert arithmetic.operations == operations


@pytest.mark.parametrize(
    ("make", "operations", "multiplications"),
    [
        (lambda x: op.add(x, x), 320, 0),
        (lambda x: op.multiply(x, x), 320, 320),
        (lambda x: op.reshape(x, (20, 16)), 0, 0),
        (lambda x: op.permute_dims(x, [1, 0]), 0, 0),
        (lambda x: op.nn.pad(x, [1, 1, 1, 1]), 0, 0),
        (lambda x: op.sum(x, [1]), 320, 0),
        (lambda x: op.mean(x, [1]), 320 + 5, 5),
        (lambda x: op.max(x, [1]), 320, 0),
        (lambda x: op.exp(x), 320, 0),
        (lambda x: op.nn.softmax(x, 1), 5 * 320, 320),
        (lambda x: op.nn.gelu(x), 5 * 320, 3 * 320),
    ],
)
def test_operations_of_elements(make, operations, multiplications):
    """Of 5 rows of 64; a softmax: largest, difference, exponential, sum, quotient."""
    arithmetic = count(make, (5, 64))
    assert arithmetic.product is None
    assert (arithmetic.operations, arithmetic.multiplications) == (operations, multiplications)


def test_a_window_costs_an_operation_a_tap():
    arithmetic = count(lambda x: op.nn.max_pool2d(x, (5, 5), padding=(2, 2)), (1, 4, 9, 9))
    assert arithmetic.operations == 25 * 4 * 81


def test_regions_of_a_network():
    """Each region counts its own operators; layers with a geometry say theirs."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["y"], "line", pads=[1, 1]),
        helper.make_node("Transpose", ["y"], ["t"], "turn", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["y", "t"], ["p"], "product"),
        helper.make_node("MatMul", ["p", "v"], ["z"], "dense"),
    ]
    weights = {"w": np.ones((6, 4, 3), np.float32), "v": np.ones((6, 5), np.float32)}
    graph = extract_regions(onnx_graph.from_onnx(shaped_model(nodes, {"x": (2, 4, 10)}, weights, ["z"])), "n")
    macs = {region.name: region.macs for region in graph.regions if region.macs}
    assert macs == {"line": 2 * 10 * 6 * 4 * 3, "product": 2 * 6 * 6 * 10, "dense": 12 * 6 * 5}
    assert [region.geometry is None for region in graph.regions if region.macs] == [False, True, False]
