"""Do the GPU kernels of any layer hold: no races, nothing out of bounds, the values of plain loops?

`scripts/prove_kernels.py --sweep` checks all of `kernel_cases`; here are one of each kind, and drawn ones.
"""

import kernel_cases
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from length import examples
from onnx import TensorProto, helper
from onnx_models import onnx_model

from pimflow.compiler.kernel_checks.check import check_kernels

DTYPES = st.sampled_from(["fp16", "fp32"])
EXTENTS = st.sampled_from([1, 2, 3, 8, 16, 17, 31, 33, 64, 65])


def require(plain):
    checks = list(check_kernels(plain.schedule()))
    assert checks and [(check.name, check.verdict) for check in checks if not check.holds] == []


@pytest.mark.long
@pytest.mark.parametrize(("heads", "context", "dtype"), [(5, 17, "fp16"), (2, 2, "fp32")])
def test_kernels_of_a_decoder(heads, context, dtype):
    """In fp32, padded rows of DLight's products were stored over those of the next head."""
    require(kernel_cases.decoder_kernels(heads, context, dtype))


@pytest.mark.long
def test_kernels_of_fused_groups():
    plain = kernel_cases.planned_kernels("toy", "fp16", fuse=True, modes="gpu")
    assert plain.groups
    require(plain)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["im2row-cuda-hwc-64x64", "pointwise-cuda-hwc-64x64", "depthwise-cuda-hwc-8x32"]
)
def test_kernels_of_primitives(name):
    """Of 49 pixels in tiles of 52, the last threads read beyond the operand in shared memory."""
    require(kernel_cases.primitive_kernels(name, kernel_cases.LAYERS[2:]))


@settings(max_examples=examples(24))
@given(EXTENTS, EXTENTS, EXTENTS, st.integers(1, 3), DTYPES)
def test_any_product(rows, columns, depth, batch, dtype):
    require(kernel_cases.product_kernels(rows, columns, depth, dtype, batch))


@pytest.mark.long
@settings(max_examples=examples(24))
@given(
    st.integers(1, 17), EXTENTS, EXTENTS, st.sampled_from([1, 3, 5]), st.integers(1, 2), st.booleans(), DTYPES
)
def test_any_convolution(size, channels, filters, window, stride, depthwise, dtype):
    groups = channels if depthwise else 1
    filters = channels if depthwise else filters
    require(kernel_cases.convolution_kernels(size, (channels, filters), dtype, window, stride, groups))


@pytest.mark.long
@settings(max_examples=examples(24))
@given(st.integers(1, 130), st.integers(1, 300), DTYPES)
def test_any_reduction(rows, columns, dtype):
    require(kernel_cases.reduction_kernels(rows, columns, dtype))


@pytest.mark.long
@settings(max_examples=examples(4))
@given(st.integers(1, 8), st.integers(1, 40), DTYPES)
def test_any_attention(heads, context, dtype):
    require(kernel_cases.decoder_kernels(heads, context, dtype))


@pytest.mark.parametrize("kind", ["product", "3x3 convolution", "reductions"])
def test_cases_of_odd_extents_can_be_made(kind):
    case = next(case for case in kernel_cases.cases() if case.name.startswith(kind))
    assert case.part == "odd extents" and case.make().functions()


@pytest.mark.long
@settings(max_examples=examples(12))
@given(st.integers(1, 9), EXTENTS, st.sampled_from([1, 3, 16, 21]), st.sampled_from([1, 2, 4]), DTYPES)
@example(3, 16, 81, 4, "fp32")
def test_any_convolution_whose_result_is_flattened(size, channels, filters, parts, dtype):
    """In fp32, padded rows were stored over those of the next channels, as in ssd-resnet50 and yolov1."""
    require(kernel_cases.flat_convolution_kernels(size, (channels, filters * parts), filters, dtype))


@pytest.mark.long
def test_a_convolution_of_integers_has_a_schedule():
    """DLight's tensor cores of integers ended in an internal error of TVM."""
    node = helper.make_node("ConvInteger", ["x", "w"], ["y"], "conv", pads=[1] * 4)
    weights = {"w": np.ones((128, 64, 3, 3), np.int8)}
    inputs, outputs = {"x": (TensorProto.INT8, (1, 64, 9, 9))}, {"y": (TensorProto.INT32, None)}
    model = onnx_model([node], inputs, outputs, weights)
    assert kernel_cases.network_kernels(model, "fp16").schedule()
