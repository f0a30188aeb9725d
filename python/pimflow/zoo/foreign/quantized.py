"""Operators on 8-bit and 4-bit tensors: QOperator (ONNX and com.microsoft) and weights of n bits.

Sums of products are int32 and exact, as those of ONNX Runtime are; then comes its fp32 arithmetic, in its
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pimflow.weight_types import GROUPS, group_type
from pimflow.zoo.foreign.builder import ExpandedNode, NodeBuilder
from pimflow.zoo.foreign.renamed import channels_first, channels_last
from pimflow.zoo.foreign.transformer import emit_heads


def qlinear_conv(node: ExpandedNode) -> None:
    """Expand QLinearConv: an exact convolution in int32, its bias, and the scale of the result."""
    builder, attrs, rank = node.builder, node.attrs, node.rank(3)
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = (node.operand(i) for i in range(9))
    is_last = attrs.pop("channels_last", 0)
    x = builder.move_axes(x, channels_first(rank)) if is_last else x
    total = builder.emit("ConvInteger", [x, w, x_zero, w_zero], **attrs)
    by_channel = builder.constant(np.array([-1] + [1] * (rank - 2)))
    if bias:
        total = builder.emit("Add", [total, builder.emit("Reshape", [bias, by_channel])])
    scale = _product_scale(node, x_scale, w_scale)
    if node.rank(4) and node.weights[w_scale].dims[0] > 1:
        scale = builder.emit("Reshape", [scale, by_channel])
    result = _requantize(node, total, scale, y_scale, y_zero, _type_of(node, 7))
    node.bind(builder.move_axes(result, channels_last(rank)) if is_last else result)


def qlinear_mat_mul(node: ExpandedNode) -> None:
    """Expand QLinearMatMul: an exact product in int32, and the scale of the result."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (node.operand(i) for i in range(8))
    total = node.builder.emit("MatMulInteger", [a, b, a_zero, b_zero])
    scale = _product_scale(node, a_scale, b_scale)
    node.bind(_requantize(node, total, scale, y_scale, y_zero, _type_of(node, 7)))


def qgemm(node: ExpandedNode) -> None:
    """Expand QGemm: an exact product in int32 and its bias, quantised or in fp32."""
    builder = node.builder
    a, a_scale, a_zero, b, b_scale, b_zero, bias, y_scale, y_zero = (node.operand(i) for i in range(9))
    if node.attrs.get("transA", 0):
        a = builder.emit("Transpose", [a], perm=[1, 0])
    if node.attrs.get("transB", 0):
        b = builder.emit("Transpose", [b], perm=[1, 0])
    total = builder.emit("MatMulInteger", [a, b, *([a_zero, b_zero] if b_zero else [a_zero])])
    if bias:
        total = builder.emit("Add", [total, bias])
    scale = _product_scale(node, a_scale, b_scale)
    if node.attrs.get("alpha", 1.0) != 1:
        scale = builder.emit("Mul", [scale, builder.scalar(node.attrs["alpha"])])
    if y_scale:
        node.bind(_requantize(node, total, scale, y_scale, y_zero, _type_of(node, 8)))
    else:
        node.bind(builder.emit("Mul", [builder.emit("Cast", [total], to=TensorProto.FLOAT), scale]))


def mat_mul_integer_to_float(node: ExpandedNode) -> None:
    """Expand MatMulIntegerToFloat: an exact product in int32, scaled, with a bias in fp32."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = (node.operand(i) for i in range(7))
    node.bind(_float_product(node, [a, b, a_zero, b_zero], _product_scale(node, a_scale, b_scale), bias))


def dynamic_quantize_mat_mul(node: ExpandedNode) -> None:
    """Expand DynamicQuantizeMatMul: operands are quantised by their own range."""
    x, b, b_scale, b_zero, bias = (node.operand(i) for i in range(5))
    a, a_scale, a_zero = node.builder.emit_tuple("DynamicQuantizeLinear", [x], 3)
    node.bind(_float_product(node, [a, b, a_zero, b_zero], _product_scale(node, a_scale, b_scale), bias))


def qattention(node: ExpandedNode) -> None:
    """Expand QAttention: an exact product for queries, keys and values, then MultiHeadAttention in fp32."""
    node.refuse("do_rotary", beyond=9)
    x, weights, bias, x_scale, w_scale, _, x_zero, w_zero = (node.operand(i) for i in range(8))
    scale = _product_scale(node, x_scale, w_scale)
    packed = _float_product(node, [x, weights, x_zero, w_zero], scale, bias)
    width = int(node.weights[weights].dims[1]) if weights in node.weights else 0
    emit_heads(node, packed, width, 5, 8, None)


def _float_product(node: ExpandedNode, operands: Sequence[str], scale: str, bias: str) -> str:
    """The product of two 8-bit tensors, times `scale`, plus `bias`, in fp32.

    `operands` are the tensors and their zero points, which may be missing.
    """
    builder, (a, b, a_zero, b_zero) = node.builder, operands
    zeros = [a_zero, b_zero] if b_zero else [a_zero] if a_zero else []
    total = builder.emit("Cast", [builder.emit("MatMulInteger", [a, b, *zeros])], to=TensorProto.FLOAT)
    scaled = builder.emit("Mul", [total, scale])
    return builder.emit("Add", [scaled, bias]) if bias else scaled


def _product_scale(node: ExpandedNode, left: str, right: str) -> str:
    return node.builder.emit("Mul", [left, right])


def _requantize(node: ExpandedNode, total: str, scale: str, y_scale: str, y_zero: str, kind: int) -> str:
    """Round an int32 `total`, times `scale` over `y_scale`, to the 8-bit type `kind`."""
    builder = node.builder
    factor = builder.emit("Div", [scale, y_scale])
    value = builder.emit("Mul", [builder.emit("Cast", [total], to=TensorProto.FLOAT), factor])
    rounded = builder.emit("Round", [value])
    if y_zero and numpy_helper.to_array(node.weights[y_zero]).any():
        rounded = builder.emit("Add", [rounded, builder.emit("Cast", [y_zero], to=TensorProto.FLOAT)])
    bounds = (-128, 127) if kind == TensorProto.INT8 else (0, 255)
    inside = builder.emit("Clip", [rounded, *(builder.scalar(bound) for bound in bounds)])
    return builder.emit("Cast", [inside], to=kind)


def _type_of(node: ExpandedNode, index: int) -> int:
    """The 8-bit type of the result, which is that of its zero point."""
    name = node.operand(index)
    if not name:
        return TensorProto.UINT8
    if name not in node.weights:
        raise node.unsupported("with a computed zero point of its result is not supported")
    return node.weights[name].data_type


def qlinear_binary(op: str) -> Callable[[ExpandedNode], None]:
    """The expansion of QLinearAdd and QLinearMul, by `op`."""

    def expand(node: ExpandedNode) -> None:
        """Compute in fp32, and round."""
        operands = [_dequantize(node, begin) for begin in (0, 3)]
        _quantize(node, node.builder.emit(op, operands), node.operand(6), node.operand(7))

    return expand


def qlinear_unary(op: str, *names: str) -> Callable[[ExpandedNode], None]:
    """The expansion of an operator of one 8-bit tensor as `op` in fp32, with the attributes `names`."""

    def expand(node: ExpandedNode) -> None:
        """Compute in fp32, and round."""
        kept = {name: node.attrs[name] for name in names if name in node.attrs}
        value, rank = _dequantize(node, 0), len(kept.get("kernel_shape", (0, 0))) + 2
        if node.attrs.get("channels_last", 0):
            value = node.builder.move_axes(value, channels_first(rank))
            value = node.builder.move_axes(node.builder.emit(op, [value], **kept), channels_last(rank))
        else:
            value = node.builder.emit(op, [value], **kept)
        _quantize(node, value, node.operand(3), node.operand(4))

    return expand


def qlinear_concat(node: ExpandedNode) -> None:
    """Expand QLinearConcat: operands of several scales become a tensor of one."""
    parts = [_dequantize(node, begin) for begin in range(2, len(node.proto.input), 3)]
    joined = node.builder.emit("Concat", parts, axis=node.attrs["axis"])
    _quantize(node, joined, node.operand(0), node.operand(1))


def qlinear_where(node: ExpandedNode) -> None:
    """Expand QLinearWhere: operands of two scales become a tensor of a third."""
    value = node.builder.emit("Where", [node.operand(0), _dequantize(node, 1), _dequantize(node, 4)])
    _quantize(node, value, node.operand(7), node.operand(8))


def dequantize_linear(node: ExpandedNode) -> None:
    """Expand DequantizeLinear of com.microsoft, whose integers may have 16 bits."""
    emit, scale, zero = node.builder.emit, *_by_axis(node)
    value = emit("Cast", [node.operand(0)], to=TensorProto.FLOAT)
    if zero:
        value = emit("Sub", [value, emit("Cast", [zero], to=TensorProto.FLOAT)])
    node.bind(emit("Mul", [value, scale]))


def quantize_linear(node: ExpandedNode) -> None:
    """Expand QuantizeLinear of com.microsoft, whose integers may have 16 bits."""
    emit, scalar, (scale, zero) = node.builder.emit, node.builder.scalar, _by_axis(node)
    kind = node.kind(2) if zero else TensorProto.UINT8
    if kind not in (TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16):
        raise node.unsupported(f"to {TensorProto.DataType.Name(kind)} is not supported")
    value = emit("Round", [emit("Div", [node.operand(0), scale])])
    if zero:
        value = emit("Add", [value, emit("Cast", [zero], to=TensorProto.FLOAT)])
    bounds = np.iinfo(helper.tensor_dtype_to_np_dtype(kind))
    node.bind(emit("Cast", [emit("Clip", [value, scalar(bounds.min), scalar(bounds.max)])], to=kind))


def _by_axis(node: ExpandedNode) -> list[str]:
    """Scale and zero point, along their axis if there are several; a missing zero point is empty."""
    names = [node.operand(1), node.operand(2)]
    if not node.rank(1) or node.shape(1) == [1]:
        return names
    rest = node.rank(0) - 1 - node.attrs.get("axis", 1) % node.rank(0)
    return [name and node.builder.reshape(name, [-1, *[1] * rest]) for name in names]


def _dequantize(node: ExpandedNode, begin: int) -> str:
    """The values of the tensor, scale and zero point that are the operands from `begin` on."""
    return node.builder.emit(
        "DequantizeLinear", [name for name in (node.operand(begin + i) for i in range(3)) if name]
    )


def _quantize(node: ExpandedNode, value: str, scale: str, zero: str) -> None:
    node.bind(node.builder.emit("QuantizeLinear", [value, scale, *([zero] if zero else [])]))


def mat_mul_nbits(node: ExpandedNode) -> None:
    """Expand MatMulNBits: a product with weights of a few bits, which become fp32."""
    attrs, builder = node.attrs, node.builder
    rows, columns, bits, block = (int(attrs[name]) for name in ("N", "K", "bits", "block_size"))
    if bits not in (2, 4, 8) or block < 1:
        raise node.unsupported(f"of {bits} bits in blocks of {block} is not supported")
    blocks = -(-columns // block)
    weights = _unpack(node.value(1).reshape(rows, blocks, -1), bits)[:, :, :block].reshape(rows, -1)
    groups = node.value(4) if node.operand(4) else np.arange(columns) // block  # the block of a column
    zero = np.full((rows, blocks), 1 << bits >> 1, "float32")
    if node.operand(3):
        stored = node.value(3)
        if stored.dtype == np.uint8:
            stored = _unpack(stored.reshape(rows, -1), bits)
        zero = stored.reshape(rows, -1)[:, :blocks].astype("float32")
    if groups.shape[0] < columns or not ((groups >= 0) & (groups < blocks)).all():
        raise node.unsupported(f"with blocks outside of 0 to {blocks - 1} in 'g_idx' is not supported")
    groups = groups[:columns]
    scales = node.value(2).astype("float32").reshape(rows, blocks)
    matrix = ((weights[:, :columns] - zero[:, groups]) * scales[:, groups]).T
    result = builder.emit("MatMul", [node.operand(0), builder.constant(matrix)])
    node.bind(builder.emit("Add", [result, node.operand(5)]) if node.operand(5) else result)


# Values of 4 bits that bitsandbytes calls FP4 (arXiv 2305.14314 has NF4).
_FP4 = (0.0, 5.208333333e-03, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


def mat_mul_bnb4(node: ExpandedNode) -> None:
    """Expand MatMulBnb4: a product with weights of 4 bits, one scale for each block of the whole matrix."""
    rows, columns, block, kind = (int(node.attrs[name]) for name in ("N", "K", "block_size", "quant_type"))
    if kind not in (0, 1) or block < 1:
        raise node.unsupported(f"of type {kind} in blocks of {block} is not supported")
    table = np.array(_NF4 if kind else [*_FP4, *(-value for value in _FP4)], "float32")
    packed = node.value(1).ravel()
    values = table[np.stack([packed >> 4, packed & 15], axis=1).ravel()][: rows * columns]
    scales = node.value(2).astype("float32").ravel()
    if values.size < rows * columns or scales.size * block < values.size:
        raise node.unsupported(f"with fewer weights or scales than {rows} x {columns} need is not supported")
    matrix = (values * np.repeat(scales, block)[: values.size]).reshape(rows, columns).T
    node.bind(node.builder.emit("MatMul", [node.operand(0), node.builder.constant(matrix)]))


def gather_block_quantized(node: ExpandedNode) -> None:
    """Expand GatherBlockQuantized: rows of a table of a few bits, which becomes fp32."""
    attrs, table, scales = node.attrs, node.value(0), node.value(2).astype("float32")
    bits, block = int(attrs.get("bits", 4)), int(attrs.get("block_size", 128))
    is_packed = table.dtype == np.uint8
    if is_packed and bits < 8:
        table = _unpack(table, bits)
    axis = int(attrs.get("quantize_axis", 1)) % table.ndim
    zero = np.float32(1 << bits >> 1 if is_packed else 0)
    if node.operand(3):
        stored = node.value(3)
        zero = _unpack(stored, bits) if is_packed and bits < 8 else stored
        zero = _by_block(zero.astype("float32"), axis, block, table.shape[axis])
    values = (table.astype("float32") - zero) * _by_block(scales, axis, block, table.shape[axis])
    rows = node.builder.emit(
        "Gather", [node.builder.constant(values), node.operand(1)], axis=int(attrs.get("gather_axis", 0))
    )
    node.bind(rows)


def _by_block(values: np.ndarray, axis: int, block: int, extent: int) -> np.ndarray:
    """One value for each element of a table whose blocks along `axis` have `values`."""
    return np.repeat(values, block, axis).take(range(extent), axis)


def narrow_products(model: onnx.ModelProto) -> dict[str, str]:
    """By the product that a MatMulNBits becomes, the type in which its weights are stored.

    Those of types that are none of `weight_types.WEIGHT_TYPES`, such as of 2 bits, are widened.
    """
    types = {}
    for node in (node for node in model.graph.node if node.op_type == "MatMulNBits"):
        sizes = {entry.name: entry.i for entry in node.attribute}
        bits, group = sizes.get("bits", 4), sizes.get("block_size", 0)
        if bits in (4, 8) and group in GROUPS:
            has_zeros = len(node.input) > 3 and bool(node.input[3])
            product = NodeBuilder(node.name or node.output[0]).first_name
            types[product] = group_type(bits, group, zeros=has_zeros)
    return types


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of `bits` bits from bytes along the last axis, the lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (packed[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(*packed.shape[:-1], -1)
