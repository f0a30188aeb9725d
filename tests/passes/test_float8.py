"""Do numbers of 8 bits with an exponent round as the standard says?"""

import numpy as np
import pytest
from graphs import outputs
from length import long_but
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_models import onnx_model

from pimflow import frontend
from pimflow.errors import UnsupportedOpError

KINDS = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
# All numbers of fp16, infinities and NaN; numbers that fp16 lacks; some that only fp32 has, beside ties.
HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
SINGLE = np.array([1e6, -1e6, 464.0001, 464, 2.0**-10 * (1 + 2**-20), 2.0**-17, -1e-9, 240.0001, 61440, 1e38])
NUMBERS = np.concatenate([HALVES, SINGLE.astype(np.float32)])


def model(nodes, dims, weights=(), opset=21):
    return onnx_model(nodes, {"x": dims}, {"y": dims}, weights, opset=opset)


@pytest.mark.parametrize("saturate", [1, 0])
@pytest.mark.parametrize("kind", long_but(KINDS[:1], KINDS))
def test_casts_of_all_fp16_numbers(kind, saturate):
    target = getattr(TensorProto, kind)
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=target, saturate=saturate),
        helper.make_node("Cast", ["narrow"], ["y"], to=TensorProto.FLOAT),
    ]
    network = model(nodes, [NUMBERS.size])
    (expected,) = ReferenceEvaluator(network).run(None, {"x": NUMBERS})
    (result,) = outputs(frontend.load(network).module, [NUMBERS])
    np.testing.assert_array_equal(result, expected)
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(result[is_number]), np.signbit(expected[is_number]))


@pytest.mark.parametrize("kind", long_but(KINDS[:1], KINDS))
def test_quantised_weights_and_activations(kind):
    target, rng = getattr(TensorProto, kind), np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(target)
    weight = rng.standard_normal((8, 4)).astype(np.float32).astype(dtype)
    weights = [
        numpy_helper.from_array(weight, "w"),
        numpy_helper.from_array(np.zeros((), dtype), "zero"),
        numpy_helper.from_array(np.float32(0.25), "scale"),
        numpy_helper.from_array(np.linspace(0.5, 2, 4, dtype=np.float32), "scales"),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["a"]),
        helper.make_node("DequantizeLinear", ["w", "scales"], ["b"], axis=1),
        helper.make_node("MatMul", ["a", "b"], ["y"]),
    ]
    network = onnx_model(nodes, {"x": [3, 8]}, {"y": [3, 4]}, weights, opset=21)
    x = rng.standard_normal((3, 8)).astype(np.float32)
    (expected,) = ReferenceEvaluator(network).run(None, {"x": x})
    (result,) = outputs(frontend.load(network).module, [x])
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_a_cast_to_bf16_keeps_nan():
    """The largest NaN too, to whose bits half of the last place cannot be added."""
    x = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x3F800001], np.uint32).view(np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["narrow"], ["y"], to=TensorProto.FLOAT),
    ]
    (result,) = outputs(frontend.load(model(nodes, [4])).module, [x])
    np.testing.assert_array_equal(result, [np.nan, np.nan, np.nan, 1])


def test_results_of_8_bits_are_refused():
    cast = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E5M2)
    network = onnx_model([cast], {"x": [2]}, {"y": (TensorProto.FLOAT8E5M2, [2])}, opset=21)
    with pytest.raises(UnsupportedOpError, match="output 'y' of type FLOAT8E5M2 is not supported"):
        frontend.load(network)
