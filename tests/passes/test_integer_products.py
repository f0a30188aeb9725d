"""Are products of 8-bit tensors exact, on PIM that multiplies integers and on the GPU beside other PIM?"""

import functools
import math

import numpy as np
import onnx
import pytest
from graphs import outputs
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from onnx import TensorProto, helper
from onnx_models import onnx_model
from test_frontend import reference

import pimflow
from pimflow import zoo
from pimflow.compiler.region_check import ReferenceSums
from pimflow.frontend import onnx_graph
from pimflow.frontend.integer_products import IntegerProduct
from pimflow.relay_passes.flat import main_bindings, operator

compile_only = functools.partial(pimflow.compile, conventions="none")
INTEGER_PIM = "lpddr6-pim"
DRAW = np.random.default_rng(0)
SCALES = {"s": np.float32(0.03), "z": np.uint8(120), "t": np.float32(0.05), "u": np.uint8(90)}


def drawn(*dims: int) -> np.ndarray:
    return DRAW.integers(-127, 128, dims).astype(np.int8)


def quantised_network() -> onnx.ModelProto:
    """A convolution with a border of the zero point, a grouped one, and a product, all of 8 bits."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "narrow"),
        helper.make_node("QLinearConv", [*"qsz", "v", "ws", "wz", *"tu", "b"], ["a"], "conv", pads=[1] * 4),
        helper.make_node("QLinearConv", [*"atu", "w", "ws", "wz", *"tu"], ["c"], "grouped", group=4),
        helper.make_node("Flatten", ["c"], ["f"], "flat"),
        helper.make_node("QLinearMatMul", [*"ftu", "m", "ws", "wz", *"tu"], ["r"], "fc"),
        helper.make_node("DequantizeLinear", ["r", "t", "u"], ["y"], "wide"),
    ]
    weights = {"v": drawn(16, 8, 3, 3), "w": drawn(16, 4, 2, 2), "m": drawn(400, 12)}
    weights |= {"ws": np.float32(0.002), "wz": np.int8(0), "b": np.arange(16, dtype=np.int32) * 99}
    return onnx_model(nodes, {"x": [1, 8, 6, 6]}, {"y": None}, SCALES | weights, name="quantised")


def dynamic_network() -> onnx.ModelProto:
    """A product whose input is quantised by its own range."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "narrow"),
        helper.make_node("MatMulInteger", ["q", "w", "z", "wz"], ["p"], "fc"),
        helper.make_node("Cast", ["p"], ["c"], "cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["c", "s"], ["y"], "scaled"),
    ]
    weights = {"w": DRAW.integers(0, 255, (64, 24)).astype(np.uint8), "wz": np.uint8(128)}
    return onnx_model(nodes, {"x": [2, 64]}, {"y": None}, weights, name="dynamic")


@pytest.mark.parametrize(
    ("model", "pins"),
    [
        (quantised_network, dict.fromkeys(("conv.0", "grouped.0", "fc.0"), "pim")),
        (quantised_network, {"conv.0": "split:0.5", "fc.0": "pim"}),
        (dynamic_network, {"fc": "pim"}),
    ],
    ids=["pim", "split", "dynamic"],
)
def test_a_product_of_8_bits_is_exact_in_pim(model, pins):
    compiled = compile_only(model(), system=pimflow.system(pim=INTEGER_PIM), pins=pins)
    verification = compiled.verification
    assert verification.is_verified and verification.max_relative_error == 0
    assert {check.region for check in verification.regions} >= pins.keys()
    programs = compiled.search_result.programs()
    assert {program.dtype for program in programs.values()} == {"int8"}
    assert {program.geometry.weights for program in programs.values()} == {"int8"}


def test_other_pim_leaves_it_to_the_gpu_and_says_why():
    plan = compile_only(quantised_network(), system=pimflow.system(pim="newton-gddr6")).plan
    reasons = {choice.region: choice.reason for choice in plan.choices}
    for layer in ("conv.0", "grouped.0", "fc.0"):
        assert "a product of 8-bit integers, which the PIM device does not multiply" in reasons[layer]


def test_sums_of_integers_have_no_tolerance():
    sums = ReferenceSums(
        dtype="fp32", expected=np.array([[5.0, -7.0]]), magnitude=np.full((1, 2), 1e9), products=9
    )
    assert sums.error_over_bound(np.array([[5, -7]], np.int32)) == 0
    assert sums.error_over_bound(np.array([[5, -6]], np.int32)) == math.inf


def test_borders_are_padded_in_the_layout_of_the_convolution():
    mod = onnx_graph.from_onnx(quantised_network())
    kinds = [operator(binding.value) for binding in main_bindings(mod)]
    assert kinds.count("permute_dims") <= 2 and kinds.count("nn.conv2d") == 2
    assert "nn.pad" in kinds[: kinds.index("nn.conv2d")]


def dequantised_network(activation: str, zero: np.ndarray, per_output: bool) -> onnx.ModelProto:
    """A convolution and a product between QuantizeLinear and DequantizeLinear."""
    scales = np.linspace(0.001, 0.003, 6, dtype=np.float32) if per_output else np.float32(0.002)
    weights = {"v": drawn(6, 8, 3, 3), "vs": scales, "m": drawn(6 * 36, 5), "ms": np.float32(0.003)}
    weights |= {"b": np.arange(6, dtype=np.int32) * 99, "bs": np.float32(0.03) * scales, "z": zero}
    pairs = [("x", "s"), ("r", "t"), ("y", "t")]
    nodes = {
        name: [
            helper.make_node("QuantizeLinear", [name, scale, "z"], [f"{name}.q"], f"{name}.narrow"),
            helper.make_node("DequantizeLinear", [f"{name}.q", scale, "z"], [f"{name}.d"], f"{name}.wide"),
        ]
        for name, scale in pairs
    }
    nodes["y"][1].output[0] = "result"
    model_nodes = [
        *nodes["x"],
        helper.make_node("DequantizeLinear", ["v", "vs"], ["v.d"], "v.wide", axis=0),
        helper.make_node("DequantizeLinear", ["b", "bs"], ["b.d"], "b.wide", axis=0),
        helper.make_node("Conv", ["x.d", "v.d", "b.d"], ["c"], "conv", pads=[1] * 4),
        helper.make_node(activation, ["c"], ["r"], "activation"),
        *nodes["r"],
        helper.make_node("Flatten", ["r.d"], ["f"], "flat"),
        helper.make_node("QuantizeLinear", ["f", "t", "z"], ["f.q"], "f.narrow"),
        helper.make_node("DequantizeLinear", ["f.q", "t", "z"], ["f.d"], "f.wide"),
        helper.make_node("DequantizeLinear", ["m", "ms"], ["m.d"], "m.wide"),
        helper.make_node("Gemm", ["f.d", "m.d"], ["y"], "fc"),
        *nodes["y"],
    ]
    stored = {"s": np.float32(0.03), "t": np.float32(0.05)} | weights
    return zoo.load_model(onnx_model(model_nodes, {"x": [1, 8, 6, 6]}, {"result": None}, stored, name="net"))


@pytest.mark.parametrize(
    ("activation", "zero", "integers"),
    [
        ("Relu", np.uint8(0), ["nn.conv2d", "matmul"]),
        ("Relu", np.int8(-128), ["nn.conv2d", "matmul"]),
        ("Relu", np.uint8(100), ["matmul"]),  # zero is no end of the range, so integers do not do the Relu
        ("Sigmoid", np.int8(5), ["matmul"]),
    ],
)
def test_layers_between_dequantised_tensors_sum_integers(activation, zero, integers):
    model = dequantised_network(activation, zero, per_output=zero.dtype == np.int8)
    mod = onnx_graph.from_onnx(model)
    layers = [b for b in main_bindings(mod) if operator(b.value) in ("nn.conv2d", "matmul")]
    sums = [operator(b.value) for b in layers if str(b.var.ty.dtype) == "int32"]
    assert len(layers) == 2 and sums == integers
    operands = zoo.example_inputs(model)
    (y,), (expected,) = outputs(mod, list(operands.values())), reference(model, operands)
    steps = np.abs(y - expected) / 0.05
    assert steps.max() < 1.01 and np.count_nonzero(steps > 0.01) <= 1 and expected.std() > 0.1


@settings(max_examples=examples(20), deadline=None)
@given(
    data=st.sampled_from(["int8", "uint8"]),
    kind=st.sampled_from(["int8", "uint8"]),
    zeros=st.tuples(st.integers(-128, 127), st.integers(-20, 20)),
    per_output=st.booleans(),
    seed=st.integers(0, 99),
)
def test_zero_points_add_what_numpy_says(data, kind, zeros, per_output, seed):
    draw = np.random.default_rng(seed)
    x_zero = np.array(zeros[0] + 128 * (data == "uint8"), data)
    w_zero = np.full(5 if per_output else (), zeros[1] + 128 * (kind == "uint8"), kind)
    x = draw.integers(np.iinfo(data).min, np.iinfo(data).max, (3, 7), endpoint=True).astype(data)
    w = (w_zero.astype(int) + draw.integers(-100, 100, (7, 5))).clip(0 if kind == "uint8" else -128, 127)
    w = w.astype(kind)
    nodes = [helper.make_node("MatMulInteger", ["x", "w", "z", "wz"], ["y"], "fc")]
    element = helper.np_dtype_to_tensor_dtype(np.dtype(data))
    model = onnx_model(
        nodes, {"x": (element, [3, 7])}, {"y": None}, {"w": w, "z": x_zero, "wz": w_zero}, name="product"
    )
    (y,) = outputs(onnx_graph.from_onnx(model), [x])
    wide = (x.astype(int) - x_zero.astype(int)) @ (w.astype(int) - w_zero.astype(int))
    assert np.array_equal(y, wide)


def test_weights_beyond_8_bits_are_not_narrowed():
    from tvm import relax

    x = relax.Var("x", relax.TensorType((1, 2), "uint8"))
    for zero, fits in ((0, False), (200, False), (128, True)):
        weights = np.array([[0, 250], [255, 3]], np.uint8)
        product = IntegerProduct(x, weights, None, np.array(zero, np.uint8), lambda expr: expr)
        assert product.is_narrow == fits
