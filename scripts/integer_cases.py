"""Small networks of integers, as ONNX, whose GPU kernels the sweep of ``prove_kernels.py`` checks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MICROSOFT = "com.microsoft"
OPSET = 21
EXTENTS = (1, 17, 129)  # odd ones: no tile divides them
SCALES = {"s": np.float32(0.03), "z": np.uint8(120), "t": np.float32(0.05), "u": np.uint8(90)}
WEIGHT_SCALES = {"ws": np.float32(0.002), "wz": np.int8(0)}
WITH_FLOATS = ("QDQ", "dynamic", "recurrent", "blocks of weights")  # kinds whose kernels store floats
IntegerModel = tuple[str, str, Callable[[], onnx.ModelProto]]


def integer_models() -> Iterator[IntegerModel]:
    """The kind of each network, its name, and what builds it."""
    for sizes in itertools.product(EXTENTS, repeat=3):
        title = " x ".join(map(str, sizes))
        yield "QOperator", f"QLinearMatMul {title}", partial(qlinear_product, *sizes)
        yield "dynamic", f"MatMulInteger {title}", partial(dynamic_product, *sizes)
    for size, channels, filters in itertools.product((3, 17), (1, 17), (1, 40)):
        title = f"{size} x {size}, {channels} to {filters} channels"
        yield "QOperator", f"QLinearConv {title}", partial(qlinear_convolution, size, channels, filters)
        yield "QDQ", f"Conv {title}", partial(dequantised_convolution, size, channels, filters)
        yield "dynamic", f"ConvInteger {title}", partial(dynamic_convolution, size, channels, filters)
    yield "QOperator", "QLinearConv of 17 groups", partial(qlinear_convolution, 9, 17, 17, groups=17)
    yield "QOperator", "QGemm", qgemm
    yield "QOperator", "residual and pool", qlinear_residual
    yield "QDQ", "Gemm, int8 of each output", dequantised_gemm
    yield "recurrent", "DynamicQuantizeLSTM", dynamic_lstm
    yield "blocks of weights", "MatMulNBits", product_of_bits
    for dtype in ("int8", "uint8", "int16", "int32", "int64"):
        yield "elementwise", f"elementwise of {dtype}", partial(elementwise, dtype)
    for dtype in ("int8", "uint8", "int16", "int32", "int64"):
        yield "reductions", f"reductions of {dtype}", partial(reductions, dtype)
        yield "selections", f"selections of {dtype}", partial(selections, dtype)


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[str, Sequence[int]]],
    constants: Mapping[str, np.ndarray],
    outputs: Mapping[str, tuple[str, Sequence[int] | None]],
) -> onnx.ModelProto:
    """A network; of its inputs and outputs, by name, the types and shapes."""
    values, results = (
        [
            helper.make_tensor_value_info(name, _element(dtype), shape)
            for name, (dtype, shape) in specs.items()
        ]
        for specs in (inputs, outputs)
    )
    stored = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(list(nodes), "integers", values, results, stored)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _element(dtype: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _node(kind: str, operands: str, results: str = "y", **attributes: Any) -> onnx.NodeProto:
    """A node of names that blanks separate; ``_`` is an operand that is left out."""
    domain = MICROSOFT if kind in _MICROSOFT else ""
    names = ["" if name == "_" else name for name in operands.split()]
    outputs = results.split()
    return helper.make_node(kind, names, outputs, outputs[0], domain=domain, **attributes)


_MICROSOFT = ("QGemm", "QLinearAdd", "QLinearGlobalAveragePool", "MatMulNBits", "DynamicQuantizeLSTM")


def _drawn(*shape: int, dtype: str = "int8") -> np.ndarray:
    limits = np.iinfo(dtype)
    values = np.random.default_rng([*shape, 1]).integers(limits.min + (dtype == "int8"), limits.max, shape)
    return values.astype(dtype)


def qlinear_product(rows: int, columns: int, depth: int) -> onnx.ModelProto:
    """A product of uint8 with int8 weights."""
    constants = SCALES | WEIGHT_SCALES | {"w": _drawn(depth, columns)}
    product = _node("QLinearMatMul", "x s z w ws wz t u")
    return _model([product], {"x": ("uint8", (rows, depth))}, constants, {"y": ("uint8", None)})


def qlinear_convolution(size: int, channels: int, filters: int, groups: int = 1) -> onnx.ModelProto:
    """A convolution of uint8 with a border of its zero point, and a bias."""
    constants = SCALES | WEIGHT_SCALES | {"w": _drawn(filters, channels // groups, 3, 3)}
    constants["b"] = np.arange(filters, dtype=np.int32) * 99
    layer = _node("QLinearConv", "x s z w ws wz t u b", pads=[1] * 4, group=groups)
    return _model([layer], {"x": ("uint8", (1, channels, size, size))}, constants, {"y": ("uint8", None)})


def qgemm() -> onnx.ModelProto:
    """A product with transposed weights and a bias, in one operator of Microsoft's."""
    constants = SCALES | WEIGHT_SCALES | {"w": _drawn(17, 33), "b": np.arange(17, dtype=np.int32) * 99}
    layer = _node("QGemm", "x s z w ws wz b t u", transB=1)
    return _model([layer], {"x": ("uint8", (3, 33))}, constants, {"y": ("uint8", None)})


def qlinear_residual() -> onnx.ModelProto:
    """A convolution of which another addend is the input, and the means of its maps."""
    constants = SCALES | WEIGHT_SCALES | {"w": _drawn(17, 17, 3, 3)}
    nodes = [
        _node("QLinearConv", "x s z w ws wz t u", "c", pads=[1] * 4),
        _node("QLinearAdd", "c t u x s z t u", "a"),
        _node("QLinearGlobalAveragePool", "a t u t u"),
    ]
    return _model(nodes, {"x": ("uint8", (1, 17, 9, 9))}, constants, {"y": ("uint8", None)})


def dequantised_convolution(size: int, channels: int, filters: int) -> onnx.ModelProto:
    """A convolution and its activation between quantised tensors, and a map that goes on in floats."""
    constants = SCALES | WEIGHT_SCALES | {"w": _drawn(filters, channels, 3, 3)}
    nodes = [
        *(_node("QuantizeLinear", "x s z", "xq"), _node("DequantizeLinear", "xq s z", "xd")),
        _node("DequantizeLinear", "w ws wz", "wd"),
        *(_node("Conv", "xd wd", "c", pads=[1] * 4), _node("Relu", "c", "r")),
        *(_node("QuantizeLinear", "r t u", "q"), _node("DequantizeLinear", "q t u")),
    ]
    return _model(nodes, {"x": ("float32", (1, channels, size, size))}, constants, {"y": ("float32", None)})


def dequantised_gemm() -> onnx.ModelProto:
    """A product between int8 tensors, whose weights have a scale for each output."""
    constants = {
        "s": np.float32(0.03),
        "z": np.int8(-3),
        "ws": np.linspace(0.001, 0.003, 17, dtype=np.float32),
    }
    constants |= {"w": _drawn(33, 17), "t": np.float32(0.05), "u": np.int8(5)}
    nodes = [
        *(_node("QuantizeLinear", "x s z", "xq"), _node("DequantizeLinear", "xq s z", "xd")),
        _node("DequantizeLinear", "w ws", "wd", axis=1),
        _node("Gemm", "xd wd", "g"),
        *(_node("QuantizeLinear", "g t u", "q"), _node("DequantizeLinear", "q t u")),
    ]
    return _model(nodes, {"x": ("float32", (3, 33))}, constants, {"y": ("float32", None)})


def dynamic_product(rows: int, columns: int, depth: int) -> onnx.ModelProto:
    """A product whose input is quantised by its own range."""
    constants = {"w": _drawn(depth, columns, dtype="uint8"), "wz": np.uint8(128)}
    nodes = [
        _node("DynamicQuantizeLinear", "x", "q s z"),
        *(_node("MatMulInteger", "q w z wz", "p"), _node("Cast", "p", "c", to=TensorProto.FLOAT)),
        _node("Mul", "c s"),
    ]
    return _model(nodes, {"x": ("float32", (rows, depth))}, constants, {"y": ("float32", None)})


def dynamic_convolution(size: int, channels: int, filters: int) -> onnx.ModelProto:
    """A convolution whose input is quantised by its own range; a border needs a known zero point."""
    constants = {"w": _drawn(filters, channels, 3, 3)}
    nodes = [
        _node("DynamicQuantizeLinear", "x", "q s z"),
        *(_node("ConvInteger", "q w z", "p"), _node("Cast", "p", "c", to=TensorProto.FLOAT)),
        _node("Mul", "c s"),
    ]
    return _model(nodes, {"x": ("float32", (1, channels, size, size))}, constants, {"y": ("float32", None)})


def dynamic_lstm() -> onnx.ModelProto:
    """A recurrent layer with weights of 8 bits, over three steps."""
    width, hidden = 5, 7
    weights = {"w": _drawn(1, width, 4 * hidden), "r": _drawn(1, hidden, 4 * hidden)}
    bias = np.random.default_rng(0).uniform(-1, 1, (1, 8 * hidden)).astype(np.float32)
    scales = {name: np.float32([0.005]) for name in ("ws", "rs")} | {
        name: np.int8([3]) for name in ("wz", "rz")
    }
    layer = _node("DynamicQuantizeLSTM", "x w r b _ _ _ _ ws wz rs rz", hidden_size=hidden)
    outputs = {"y": ("float32", (3, 1, 2, hidden))}
    return _model([layer], {"x": ("float32", (3, 2, width))}, weights | scales | {"b": bias}, outputs)


def product_of_bits() -> onnx.ModelProto:
    """A product with weights of 4 bits in blocks of 32, the last of which is not full."""
    rows, columns, block = 17, 80, 32
    blocks = -(-columns // block)
    constants = {
        "w": _drawn(rows, blocks, block // 2, dtype="uint8"),
        "z": _drawn(rows * -(-blocks // 2), dtype="uint8"),
    }
    constants["s"] = np.random.default_rng(0).uniform(0.01, 0.1, rows * blocks).astype(np.float32)
    layer = _node("MatMulNBits", "x w s z", K=columns, N=rows, bits=4, block_size=block)
    return _model([layer], {"x": ("float32", (3, columns))}, constants, {"y": ("float32", None)})


_BINARY = ("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Less")


def elementwise(dtype: str) -> onnx.ModelProto:
    """Operators of one or two odd maps, each with a result as a wider integer, made in the same kernel."""
    calls: list[tuple[str, str, dict[str, Any]]] = [(kind, "x v", {}) for kind in _BINARY]
    calls += [("Mod", "x v", {"fmod": 1}), *((kind, "x", {}) for kind in ("BitwiseNot", "Abs", "Sign"))]
    if dtype.startswith("u"):
        calls += [("BitShift", "x v", {"direction": direction}) for direction in ("LEFT", "RIGHT")]
    else:
        calls.append(("Neg", "x", {}))
    wide = "int64" if dtype == "int64" else "int32"
    nodes = list[onnx.NodeProto]()
    for index, (kind, operands, attributes) in enumerate(calls):
        nodes.append(_node(kind, operands, f"r{index}", **attributes))
        nodes.append(_node("Cast", f"r{index}", f"y{index}", to=_element(wide)))
    results = {f"y{index}": (wide, None) for index in range(len(calls))}
    return _model(nodes, {name: (dtype, (3, 43)) for name in "xv"}, {}, results)


def reductions(dtype: str) -> onnx.ModelProto:
    """Extremes and their places along both axes of an odd map, and sums where the standard has them."""
    nodes = [_node("ReduceMax", "x rows", "a"), _node("ReduceMin", "x columns", "b")]
    nodes += [_node("ArgMax", "x", "c", axis=0), _node("ArgMin", "x", "d", axis=1)]
    results = {name: (dtype if name in "ab" else "int64", None) for name in "abcd"}
    if dtype in ("int32", "int64"):
        nodes += [_node("ReduceSum", "x columns", "e"), _node("ReduceProd", "x rows", "f")]
        results |= {name: (dtype, None) for name in "ef"}
    constants = {"rows": np.int64([0]), "columns": np.int64([1])}
    return _model(nodes, {"x": (dtype, (17, 43))}, constants, results)


def selections(dtype: str) -> onnx.ModelProto:
    """Rows that integers choose, a border, a part, and a choice between them."""
    nodes = [
        *(
            _node("Gather", "x i", "g"),
            _node("Pad", "g widths _", "p"),
            _node("Slice", "p from to axes", "l"),
        ),
        *(_node("Transpose", "l", "r", perm=[1, 0]), _node("Less", "r r2", "m")),
        _node("Where", "m r r2"),
    ]
    constants = {"widths": np.int64([1, 0, 0, 2]), "from": np.int64([1]), "to": np.int64([40])}
    constants |= {
        "axes": np.int64([1]),
        "r2": _drawn(39, 6, dtype="uint8" if dtype == "uint8" else "int8").astype(dtype),
    }
    return _model(nodes, {"x": (dtype, (17, 43)), "i": ("int64", (5,))}, constants, {"y": (dtype, None)})
