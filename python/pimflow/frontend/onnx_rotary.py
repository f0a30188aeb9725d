"""Rotary embeddings and RMS normalisation of ONNX and ONNX Runtime."""

from __future__ import annotations

import math

import numpy as np
import tvm
from tvm import relax

from pimflow.errors import UnsupportedOpError
from pimflow.frontend.onnx_node import OnnxNode
from pimflow.relay_passes.flat import shape

op = relax.op


def rotary_embedding(node: OnnxNode) -> relax.Expr:
    """Convert RotaryEmbedding of ONNX, opset 23 and later."""
    x, cosines, sines, ids = (node.operand(index) for index in range(4))
    return _apply_rotary(node, x, cosines, sines, ids)


def microsoft_rotary_embedding(node: OnnxNode) -> relax.Expr:
    """Convert RotaryEmbedding of com.microsoft: `position_ids` may be the place of the first token only."""
    node.refuse_unsupported("is_packed_batching")
    if node.number("scale", 1.0) != 1.0:
        raise UnsupportedOpError("attribute 'scale' is not supported")
    x, ids, cosines, sines = (node.operand(index) for index in range(4))
    assert x is not None and ids is not None
    if math.prod(shape(ids)) == 1:
        batch, tokens = shape(x)[0], shape(x)[2 if len(shape(x)) == 4 else 1]
        first = node.emit(op.broadcast_to(node.emit(op.reshape(ids, (1,))), (batch,)))
        ids = token_positions(node, first, batch, tokens)
    return _apply_rotary(node, x, cosines, sines, ids)


def _apply_rotary(
    node: OnnxNode, x: relax.Expr, cosines: relax.Expr, sines: relax.Expr, ids: relax.Expr | None
) -> relax.Expr:
    input_shape, heads_axis = shape(x), 1
    if len(input_shape) == 3:
        batch, tokens, width = input_shape
        size, heads = int(node.number("rotary_embedding_dim")), int(node.number("num_heads"))
        if not heads:  # com.microsoft's default: the tables give the size of a head
            heads = width // (2 * shape(cosines)[-1]) if not size else 0
        if not heads:
            raise UnsupportedOpError("a partial rotary embedding needs attribute 'num_heads'")
        x, heads_axis = node.emit(op.reshape(x, (batch, tokens, heads, width // heads))), 2
    angles = [angle_rows(node, table, ids, heads_axis) for table in (cosines, sines)]
    result = rotate(node, x, *angles, interleaved=bool(node.number("interleaved")))
    return op.reshape(result, input_shape) if len(input_shape) == 3 else result


def angle_rows(node: OnnxNode, table: relax.Expr, ids: relax.Expr | None, heads_axis: int) -> relax.Expr:
    """Rows of a table of angles for each token, with an axis of length 1 for the heads."""
    rows = table if ids is None else node.emit(op.take(table, ids, axis=0, mode="clip"))
    return node.emit(op.expand_dims(rows, heads_axis))


def rotate(
    node: OnnxNode, x: relax.Expr, cosines: relax.Expr, sines: relax.Expr, *, interleaved: bool
) -> relax.Expr:
    """Rotate pairs of channels of `x`; channels after those of the tables stay."""
    *lead, size = shape(x)
    half = shape(cosines)[-1]
    last = len(lead)

    def cut(y: relax.Expr, begin: int, end: int) -> relax.Expr:
        return node.emit(op.strided_slice(y, [last], [begin], [end], assume_inbound=True))

    rotary_part = x if 2 * half == size else cut(x, 0, 2 * half)
    if interleaved:
        pairs = node.emit(op.reshape(rotary_part, (*lead, half, 2)))
        parts = [
            node.emit(op.strided_slice(pairs, [last + 1], [which], [which + 1], assume_inbound=True))
            for which in (0, 1)
        ]
        real, imaginary = (node.emit(op.reshape(part, (*lead, half))) for part in parts)
    else:
        real, imaginary = cut(rotary_part, 0, half), cut(rotary_part, half, 2 * half)
    first = node.emit(
        op.subtract(node.emit(op.multiply(real, cosines)), node.emit(op.multiply(imaginary, sines)))
    )
    second = node.emit(
        op.add(node.emit(op.multiply(real, sines)), node.emit(op.multiply(imaginary, cosines)))
    )
    if interleaved:
        columns = [node.emit(op.reshape(component, (*lead, half, 1))) for component in (first, second)]
        result = node.emit(op.reshape(node.emit(op.concat(columns, axis=last + 1)), (*lead, 2 * half)))
        return result if 2 * half == size else node.emit(op.concat([result, cut(x, 2 * half, size)], last))
    rest = [] if 2 * half == size else [cut(x, 2 * half, size)]
    return node.emit(op.concat([first, second, *rest], axis=last))


def rms_normalization(node: OnnxNode) -> relax.Expr:
    """Convert SimplifiedLayerNormalization, ONNX Runtime's name of RMS normalisation."""
    x, scale = node.operand(0), node.operand(1)
    if node.results > 1:
        raise UnsupportedOpError("result 'inv_std_var' is not supported")
    return _rms_norm(node, x, scale, int(node.number("axis", -1)), 1e-5)


def skip_rms_normalization(node: OnnxNode) -> relax.Expr:
    """Convert SkipSimplifiedLayerNormalization: RMS normalisation of a sum, which is also a result."""
    x, skip, scale, bias = (node.operand(index) for index in range(4))
    total = node.emit(op.add(x, skip), "sum")
    if bias is not None:
        total = node.emit(op.add(total, bias), "biased")
    result = node.emit(_rms_norm(node, total, scale, -1, 1e-12))
    # The mean and the inverse deviation are for training; files name them to name the sum.
    return relax.Tuple([result, result, result, total][: node.results]) if node.results > 1 else result


def _rms_norm(node: OnnxNode, x: relax.Expr, scale: relax.Expr, axis: int, epsilon: float) -> relax.Expr:
    """RMS normalisation from `axis` on; `epsilon` is what a node without this attribute means."""
    rank = len(shape(x))
    axes = list(range(axis % rank, rank))
    return op.nn.rms_norm(x, scale, axes, float(node.number("epsilon", epsilon)))


def token_positions(node: OnnxNode, position: relax.Expr, batch: int, tokens: int) -> relax.Expr:
    """The place of each token, int64 [batch, tokens]."""
    offsets = np.arange(tokens, dtype=np.int64)[None]
    if isinstance(position, tvm.ir.GenericConst):
        return relax.const(position.value.numpy()[:, None] + offsets, "int64")
    column = node.emit(op.reshape(position, (batch, 1)))
    return column if tokens == 1 else node.emit(op.add(column, relax.const(offsets, "int64")))
