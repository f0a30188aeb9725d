"""Operators of ONNX that TVM's importer lacks, or computes otherwise than the standard, as simpler ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper

from pimflow.frontend.float8 import FLOAT8
from pimflow.frontend.onnx_algebra import cumulative_product, determinant
from pimflow.frontend.onnx_deformable import deform_conv
from pimflow.frontend.onnx_indexing import (
    col2im,
    max_pool,
    max_unpool,
    one_hot,
    reverse_sequence,
    tensor_scatter,
)
from pimflow.frontend.onnx_ngrams import tf_idf_vectorizer
from pimflow.frontend.onnx_signal import dft, stft
from pimflow.zoo.foreign import operator_key
from pimflow.zoo.foreign.builder import ExpandedNode
from pimflow.zoo.nodes import RECURRENT, attributes


def dynamic_quantize_linear(node: ExpandedNode) -> None:
    """Expand DynamicQuantizeLinear; the scale of a tensor of zeros is 1, where TVM divides 0 by 0."""
    emit, scalar, x = node.builder.emit, node.builder.scalar, node.operand(0)
    zero = scalar(0)
    low = emit("Min", [node.reduce("ReduceMin", x, [], 0), zero])
    high = emit("Max", [node.reduce("ReduceMax", x, [], 0), zero])
    width = emit("Sub", [high, low])
    scale = emit("Div", [width, scalar(255)])
    scale = emit("Where", [emit("Equal", [width, zero]), scalar(1), scale])
    place = emit("Round", [emit("Clip", [emit("Sub", [zero, emit("Div", [low, scale])]), zero, scalar(255)])])
    offset = emit("Cast", [place], to=TensorProto.UINT8)
    for index, value in enumerate((emit("QuantizeLinear", [x, scale, offset]), scale, offset)):
        node.bind(value, index)


def is_inf(node: ExpandedNode) -> None:
    """Expand an IsInf of one sign, which TVM's importer ignores."""
    signs = [
        sign for sign, name in ((1, "positive"), (-1, "negative")) if node.attrs.get(f"detect_{name}", 1)
    ]
    bound = node.builder.scalar(signs[0] * np.inf if signs else np.nan)  # nothing equals NaN
    node.bind(node.builder.emit("Equal", [node.operand(0), bound]))


def reduce_log_sum_exp(node: ExpandedNode) -> None:
    """Expand ReduceLogSumExp; an infinite maximum is not subtracted."""
    emit, x = node.builder.emit, node.operand(0)
    axes = node.attrs.get("axes", ())
    if node.operand(1):
        axes = node.value(1).tolist()
    if not axes and node.attrs.get("noop_with_empty_axes", 0):
        node.bind(x)
        return
    top = node.reduce("ReduceMax", x, axes)
    top = emit("Where", [emit("IsInf", [top]), node.builder.scalar(0), top])
    total = node.reduce("ReduceSum", emit("Exp", [emit("Sub", [x, top])]), axes)
    result = emit("Add", [emit("Log", [total]), top])
    if not node.attrs.get("keepdims", 1):
        rank = node.rank(0)
        kept = [axis % rank for axis in axes] or list(range(rank))
        if node.opset < 13:
            result = emit("Squeeze", [result], axes=kept)
        else:
            result = emit("Squeeze", [result, node.builder.constant(np.array(kept))])
    node.bind(result)


def _normalise(node: ExpandedNode, x: str, axes: list[int], epsilon: float) -> tuple[str, str, str]:
    """`x` less its mean, over its deviation; the mean, and the inverse of the deviation."""
    emit = node.builder.emit
    mean = node.reduce("ReduceMean", x, axes)
    difference = emit("Sub", [x, mean])
    variance = node.reduce("ReduceMean", emit("Mul", [difference, difference]), axes)
    deviation = emit("Sqrt", [emit("Add", [variance, node.builder.scalar(epsilon)])])
    inverse = emit("Div", [node.builder.scalar(1), deviation])
    return emit("Mul", [difference, inverse]), mean, inverse


def mean_variance_normalization(node: ExpandedNode) -> None:
    """Expand MeanVarianceNormalization; TVM's importer subtracts squares, which cancel for large means."""
    axes = list(node.attrs.get("axes", (0, 2, 3)))
    node.bind(_normalise(node, node.operand(0), axes, 1e-18)[0])  # 1e-9, squared, beside the deviation


def layer_normalization(node: ExpandedNode) -> None:
    """Expand a LayerNormalization whose mean is a result, or whose scale has one element."""
    rank, emit = node.rank(0), node.builder.emit
    first = node.attrs.get("axis", -1) % rank
    value, mean, inverse = _normalise(
        node, node.operand(0), list(range(first, rank)), node.attrs.get("epsilon", 1e-5)
    )
    value = emit("Mul", [value, node.operand(1)])
    node.bind(emit("Add", [value, node.operand(2)]) if node.operand(2) else value)
    node.bind(mean, 1)
    node.bind(inverse, 2)


def rms_normalization(node: ExpandedNode) -> None:
    """Expand an RMSNormalization over several axes."""
    rank, emit, x = node.rank(0), node.builder.emit, node.operand(0)
    axes = list(range(node.attrs.get("axis", -1) % rank, rank))
    square = node.reduce("ReduceMean", emit("Mul", [x, x]), axes)
    root = emit("Sqrt", [emit("Add", [square, node.builder.scalar(node.attrs.get("epsilon", 1e-5))])])
    node.bind(emit("Mul", [emit("Div", [x, root]), node.operand(1)]))


def batch_normalization(node: ExpandedNode) -> None:
    """Expand a BatchNormalization with statistics of each element, not of channels (`spatial` of 0)."""
    emit, (x, scale, shift, mean, variance) = node.builder.emit, map(node.operand, range(5))
    deviation = emit("Sqrt", [emit("Add", [variance, node.builder.scalar(node.attrs.get("epsilon", 1e-5))])])
    normal = emit("Div", [emit("Sub", [x, mean]), deviation])
    node.bind(emit("Add", [emit("Mul", [normal, scale]), shift]))


def space_to_depth(node: ExpandedNode) -> None:
    """Expand a SpaceToDepth whose result has channels as its slowest axis."""
    emit, constant = node.builder.emit, node.builder.constant
    (n, c, h, w), size = node.shape(0), node.attrs["blocksize"]
    blocks = emit("Reshape", [node.operand(0), constant(np.array([n, c, h // size, size, w // size, size]))])
    moved = emit("Transpose", [blocks], perm=[0, 1, 3, 5, 2, 4])
    node.bind(emit("Reshape", [moved, constant(np.array([n, c * size * size, h // size, w // size]))]))


def lp_pool(node: ExpandedNode) -> None:
    """Expand an LpPool of partial windows: zeros complete them, and add nothing to a norm."""
    attrs, sizes = node.attrs, node.shape(0)[2:]
    window, rank = list(attrs["kernel_shape"]), len(sizes)
    strides, dilations = (list(attrs.get(name, [1] * rank)) for name in ("strides", "dilations"))
    pads = list(attrs.get("pads", [0] * 2 * rank))
    if attrs.get("auto_pad", b"NOTSET") != b"NOTSET" or 0 in sizes:
        raise node.unsupported("with partial windows and automatic padding is not supported")
    for axis, size in enumerate(sizes):
        reach = (window[axis] - 1) * dilations[axis] + 1
        free = size + pads[axis] + pads[rank + axis] - reach
        pads[rank + axis] += -free % strides[axis]
    kept = {name: value for name, value in attrs.items() if name not in ("ceil_mode", "pads", "auto_pad")}
    node.bind(node.builder.emit("LpPool", [node.operand(0)], pads=pads, **kept))


def quantize_float8(node: ExpandedNode) -> None:
    """Expand a QuantizeLinear to numbers of 8 bits with an exponent, or their DequantizeLinear.

    Their zero point is 0.
    """
    emit, attrs, scale = node.builder.emit, node.attrs, node.operand(1)
    if node.shape(1):
        axis, rank = attrs.get("axis", 1), node.rank(0)
        scale = node.builder.reshape(scale, [-1, *[1] * (rank - 1 - axis % rank)])
    if node.proto.op_type == "DequantizeLinear":
        node.bind(emit("Mul", [emit("Cast", [node.operand(0)], to=TensorProto.FLOAT), scale]))
        return
    kind = node.kind(2) if node.operand(2) else attrs["output_dtype"]
    quotient = emit("Div", [node.operand(0), scale])
    node.bind(emit("Cast", [quotient], to=kind, saturate=attrs.get("saturate", 1)))


def quantize(node: ExpandedNode) -> None:
    """Expand a quantisation in blocks, or of types with an exponent."""
    if node.attrs.get("block_size", 0):
        quantize_blocks(node)
    else:
        quantize_float8(node)


def eye_like(node: ExpandedNode) -> None:
    """Expand EyeLike: a constant."""
    rows, columns = node.shape(0)
    dtype = helper.tensor_dtype_to_np_dtype(node.attrs.get("dtype") or node.kind(0))
    node.bind(node.builder.constant(np.eye(rows, columns, node.attrs.get("k", 0), dtype)))


def quantize_blocks(node: ExpandedNode) -> None:
    """Expand a QuantizeLinear or DequantizeLinear with a scale for each block of elements along an axis."""
    emit, attrs, dims = node.builder.emit, node.attrs, node.shape(0)
    axis, size = attrs.get("axis", 1) % len(dims), attrs["block_size"]
    if dims[axis] % size:
        raise node.unsupported(f"in blocks of {size} of {dims[axis]} elements is not supported")
    blocks = [*dims[:axis], dims[axis] // size, size, *dims[axis + 1 :]]
    scales = [*dims[:axis], dims[axis] // size, 1, *dims[axis + 1 :]]
    x, scale = (
        node.builder.reshape(node.operand(index), shape) for index, shape in ((0, blocks), (1, scales))
    )
    offset = node.builder.scalar(0)
    if node.operand(2):
        offset = node.builder.reshape(emit("Cast", [node.operand(2)], to=TensorProto.FLOAT), scales)
    if node.proto.op_type == "DequantizeLinear":
        result = emit("Mul", [emit("Sub", [emit("Cast", [x], to=TensorProto.FLOAT), offset]), scale])
    else:
        kind = node.kind(2) if node.operand(2) else attrs.get("output_dtype") or TensorProto.UINT8
        if kind not in (TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16):
            raise node.unsupported(f"to {TensorProto.DataType.Name(kind)} is not supported")
        bounds = np.iinfo(helper.tensor_dtype_to_np_dtype(kind))
        result = emit("Add", [emit("Round", [emit("Div", [x, scale])]), offset])
        result = emit("Clip", [result, node.builder.scalar(bounds.min), node.builder.scalar(bounds.max)])
        result = emit("Cast", [result], to=kind)
    node.bind(node.builder.reshape(result, dims))


def batch_first(node: ExpandedNode) -> None:
    """Expand a recurrent layer whose sequences have the batch as their first axis: transpose around it."""
    builder = node.builder
    attrs = {name: value for name, value in node.attrs.items() if name != "layout"}
    operands = [
        builder.emit("Transpose", [name], perm=[1, 0, 2]) if name and index in (0, 5, 6) else name
        for index, name in enumerate(node.proto.input)
    ]
    results = builder.emit_tuple(node.proto.op_type, operands, len(node.proto.output), **attrs)
    for index, name in enumerate(results):
        order = [1, 0, 2] if index else [2, 0, 1, 3]
        node.bind(builder.emit("Transpose", [name], perm=order), index)


BODIES: dict[tuple[str, str], Callable[[ExpandedNode], None]] = {
    **{("", kind): batch_first for kind in RECURRENT},
    **{("", kind): quantize for kind in ("QuantizeLinear", "DequantizeLinear")},
    ("", "BatchNormalization"): batch_normalization,
    ("", "Col2Im"): col2im,
    ("", "CumProd"): cumulative_product,
    ("", "DeformConv"): deform_conv,
    ("", "Det"): determinant,
    ("", "DFT"): dft,
    ("", "DynamicQuantizeLinear"): dynamic_quantize_linear,
    ("", "EyeLike"): eye_like,
    ("", "IsInf"): is_inf,
    ("", "LayerNormalization"): layer_normalization,
    ("", "LpPool"): lp_pool,
    ("", "MaxPool"): max_pool,
    ("", "MaxUnpool"): max_unpool,
    ("", "MeanVarianceNormalization"): mean_variance_normalization,
    ("", "OneHot"): one_hot,
    ("", "ReduceLogSumExp"): reduce_log_sum_exp,
    ("", "ReverseSequence"): reverse_sequence,
    ("", "RMSNormalization"): rms_normalization,
    ("", "SpaceToDepth"): space_to_depth,
    ("", "STFT"): stft,
    ("", "TensorScatter"): tensor_scatter,
    ("", "TfIdfVectorizer"): tf_idf_vectorizer,
}


def needs_body(node: onnx.NodeProto, scalars: set[str], floats8: set[str]) -> bool:
    """Whether TVM's importer computes a node wrongly.

    Parameters
    ----------
    scalars, floats8 : set of str
        Constants of one element, and tensors of 8 bits with an exponent.
    """
    if operator_key(node) not in BODIES:
        return False
    attrs = attributes(node)
    if node.op_type == "BatchNormalization":
        return not attrs.get("spatial", 1)
    if node.op_type == "IsInf":
        return not (attrs.get("detect_positive", 1) and attrs.get("detect_negative", 1))
    if node.op_type == "LayerNormalization":
        return any(node.output[1:]) or node.input[1] in scalars
    if node.op_type == "LpPool":
        return bool(attrs.get("ceil_mode", 0))
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        is_float8 = not floats8.isdisjoint(node.input) or attrs.get("output_dtype", 0) in FLOAT8
        return bool(attrs.get("block_size", 0)) or is_float8
    if node.op_type in RECURRENT:
        return bool(attrs.get("layout", 0))
    if node.op_type == "MaxPool":
        return any(node.output[1:])
    if node.op_type == "RMSNormalization":
        return attrs.get("axis", -1) != -1
    return node.op_type != "SpaceToDepth" or attrs.get("mode", b"DCR") == b"CRD"
