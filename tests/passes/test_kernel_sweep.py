"""Do the GPU kernels of any layer hold: no races, nothing out of bounds, the values of plain loops?

`scripts/prove_kernels.py --sweep` checks all of `kernel_cases`; here are one of each kind, and drawn ones.
"""

from dataclasses import replace

import kernel_cases
import numpy as np
import pytest
import tvm_ffi
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_mutations import mutant
from length import examples
from onnx import TensorProto, helper
from onnx_models import onnx_model
from tvm import ir

from pimflow.compiler.kernel_checks.check import check_kernel, check_kernels
from pimflow.compiler.kernel_checks.findings import Fault

DTYPES = st.sampled_from(["fp16", "fp32"])
EXTENTS = st.sampled_from([1, 2, 3, 8, 16, 17, 31, 33, 64, 65])


def require(plain):
    checks = list(check_kernels(plain.schedule()))
    assert checks and [(check.name, check.verdict) for check in checks if not check.holds] == []


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
@example(5, 17, "fp16")
@example(2, 2, "fp32")
def test_any_attention(heads, context, dtype):
    """In fp32, padded rows of DLight's products were stored over those of the next head."""
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
@pytest.mark.parametrize(
    "name",
    [
        *("QLinearConv of 17 groups", "residual and pool"),
        *("elementwise of uint8", "reductions of int8", "reductions of int16"),
    ],
)
def test_kernels_of_integer_networks(name):
    """Grouped filters of int8, places of extremes and signs of uint8 ended in tracebacks.

    Threads of a warp that reduced int16 together raced.
    """
    require(next(case for case in kernel_cases.cases() if case.name == name).make())


def integer_convolution(channels, filters, size):
    node = helper.make_node("ConvInteger", ["x", "w", "z"], ["y"], "conv", pads=[1] * 4)
    values = np.random.default_rng(0).integers(-99, 99, (filters, channels, 3, 3))
    weights = {"w": values.astype(np.int8), "z": np.int8(3)}
    inputs, outputs = {"x": (TensorProto.INT8, (1, channels, size, size))}, {"y": (TensorProto.INT32, None)}
    return kernel_cases.network_kernels(onnx_model([node], inputs, outputs, weights), "fp16")


@pytest.mark.long
@pytest.mark.parametrize(("channels", "filters", "size"), [(16, 324, 3), (64, 128, 9)])
def test_convolutions_of_integers(channels, filters, size):
    """Of large ones some blocks run: what the others would write is unknown, not wrong."""
    require(integer_convolution(channels, filters, size))


@pytest.mark.parametrize("fault", ["a sum that begins with one", "a store that is one element further on"])
def test_faults_of_integer_kernels_are_found(fault):
    (kernel,) = integer_convolution(3, 5, 3).schedule()
    assert check_kernel(kernel).holds
    broken = mutant(kernel, fault, np.random.default_rng(0))
    assert broken is not None and check_kernel(broken).findings


def test_a_product_of_other_factors_is_a_wrong_value():
    """Integers that are all zero would not show it."""
    (kernel,) = integer_convolution(3, 5, 3).schedule()

    def doubled(load):
        """Twice what the kernel reads of its input."""
        return load + load if load.source.name.startswith("x0") else load

    body = tvm_ffi.structural_map(kernel.lowered.body, [(ir.TensorLoad, doubled)])
    (finding,) = check_kernel(replace(kernel, lowered=kernel.lowered.with_body(body))).findings
    assert finding.fault is Fault.WRONG_VALUE
