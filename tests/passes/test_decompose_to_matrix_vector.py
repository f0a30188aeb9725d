"""Is a convolution in matrix-vector form the same convolution?"""

import numpy as np
import pytest
import tvm
from graphs import as_module, close, conv2d_nhwc, main_module, names, operators
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from tvm import relax
from tvm.script import relax as R

from pimflow.relay_passes.pim.decompose_to_matrix_vector import DecomposeToMatrixVector

FILTERS = np.random.default_rng(0).standard_normal((4, 2, 1, 3), np.float32)
MATRIX = np.ascontiguousarray(FILTERS.reshape(4, 6).T)
POINTWISE = np.random.default_rng(1).standard_normal((5, 1, 1, 4), np.float32)


@as_module
def MatrixBefore(x: R.Tensor((2, 6, 5, 3), "float32")):
    tall = conv2d_nhwc(x, FILTERS, strides=[2, 1], padding=[1, 0, 2, 1], dilation=[3, 1])
    point = conv2d_nhwc(tall, POINTWISE)
    y = R.nn.relu(point)
    return y


@as_module
def MatrixVectorExpected(x: R.Tensor((2, 6, 5, 3), "float32")):
    pad = R.nn.pad(x, [0, 0, 1, 2, 0, 1, 0, 0])
    upper = R.strided_slice(pad, [1, 2], [0, 0], [5, 6], [2, 1], assume_inbound=True)
    lower = R.strided_slice(pad, [1, 2], [3, 0], [8, 6], [2, 1], assume_inbound=True)
    windows = R.concat((upper, lower), axis=3)
    tall = R.matmul(windows, R.const(MATRIX))
    point = R.matmul(tall, R.const(np.ascontiguousarray(POINTWISE.reshape(5, 4).T)))
    y = R.nn.relu(point)
    return y


def test_rewrite():
    after = DecomposeToMatrixVector()(MatrixBefore)
    tvm.ir.assert_structural_equal(after, MatrixVectorExpected)
    assert names(after, "matmul") == names(MatrixBefore, "nn.conv2d") == ["tall", "point"]
    close(MatrixBefore, after)
    tvm.ir.assert_structural_equal(DecomposeToMatrixVector()(after), after)


def test_only_the_layers_named():
    after = DecomposeToMatrixVector(["point"])(MatrixBefore)
    assert names(after, "nn.conv2d") == ["tall"]
    assert names(after, "matmul") == ["point"]
    close(MatrixBefore, after)
    tvm.ir.assert_structural_equal(DecomposeToMatrixVector(["absent"])(MatrixBefore), MatrixBefore)


# Depthwise, in another layout, and with a filter that is no constant.
@as_module
def NotDense(x: R.Tensor((1, 6, 5, 3), "float32"), w: R.Tensor((3, 2, 1, 3), "float32")):
    a = conv2d_nhwc(x, FILTERS[:3, ..., :1], groups=3)
    b = R.nn.conv2d(a, w, data_layout="NHWC", kernel_layout="OHWI")
    c = R.nn.conv2d(b, R.const(FILTERS.reshape(6, 4, 1, 1)), data_layout="NCHW")
    return c


def test_other_convolutions_stay():
    tvm.ir.assert_structural_equal(DecomposeToMatrixVector()(NotDense), NotDense)


@pytest.mark.long
@settings(max_examples=examples(8))
@given(st.data())
def test_any_dense_convolution(data):
    kernel = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dilation = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    c, oc = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    height, width = ((k - 1) * d + 1 + data.draw(st.integers(0, 4)) for k, d in zip(kernel, dilation))
    weights = np.random.default_rng(2).standard_normal((oc, *kernel, c)).astype(np.float32)
    x = relax.Var("x", relax.TensorType((data.draw(st.integers(1, 2)), height, width, c), "float32"))
    attributes = {
        "strides": data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        "padding": data.draw(st.tuples(*[st.integers(0, 3)] * 4)),
        "dilation": dilation,
    }
    conv = conv2d_nhwc(x, weights, **attributes)
    before = main_module([x], lambda builder: builder.emit(conv, name_hint="conv"))
    after = DecomposeToMatrixVector()(before)
    assert "nn.conv2d" not in operators(after)
    close(before, after)


@pytest.mark.parametrize("stride", [(1, 1), (2, 1)])
def test_a_point_needs_no_windows(stride):
    x = relax.Var("x", relax.TensorType((1, 4, 4, 4), "float32"))
    after = DecomposeToMatrixVector()(main_module([x], lambda _: conv2d_nhwc(x, POINTWISE, strides=stride)))
    assert operators(after) == (["matmul"] if stride == (1, 1) else ["strided_slice", "matmul"])
