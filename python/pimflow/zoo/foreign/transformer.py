"""Operators that ONNX Runtime's optimiser writes into files of transformers and of CNNs (com.microsoft)."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from pimflow.zoo.foreign.builder import ExpandedNode

MICROSOFT = "com.microsoft"


def gelu(node: ExpandedNode) -> None:
    """Expand Gelu and BiasGelu: by the error function."""
    emit = node.builder.emit
    x = _add_bias(node)
    wave = emit("Erf", [emit("Div", [x, node.builder.scalar(math.sqrt(2))])])
    half = emit("Mul", [x, emit("Add", [wave, node.builder.scalar(1)])])
    node.bind(emit("Mul", [half, node.builder.scalar(0.5)]))


def fast_gelu(node: ExpandedNode) -> None:
    """Expand FastGelu: by tanh, with an optional bias."""
    emit, scalar = node.builder.emit, node.builder.scalar
    x = _add_bias(node)
    cube = emit("Mul", [emit("Mul", [x, x]), x])
    inner = emit("Add", [x, emit("Mul", [cube, scalar(0.044715)])])
    wave = emit("Tanh", [emit("Mul", [inner, scalar(math.sqrt(2 / math.pi))])])
    half = emit("Mul", [x, scalar(0.5)])
    node.bind(emit("Mul", [half, emit("Add", [wave, scalar(1)])]))


def quick_gelu(node: ExpandedNode) -> None:
    """Expand QuickGelu: ``x * sigmoid(alpha * x)``."""
    emit, x = node.builder.emit, node.operand(0)
    steep = emit("Mul", [x, node.builder.scalar(node.attrs.get("alpha", 1.702))])
    node.bind(emit("Mul", [x, emit("Sigmoid", [steep])]))


def _add_bias(node: ExpandedNode) -> str:
    return (
        node.builder.emit("Add", [node.operand(0), node.operand(1)]) if node.operand(1) else node.operand(0)
    )


def skip_layer_normalization(node: ExpandedNode) -> None:
    """Expand SkipLayerNormalization; its fourth result is the sum that is normalised."""
    x, skip, gamma, beta, bias = (node.operand(index) for index in range(5))
    if node.result(1) or node.result(2):
        raise node.unsupported("with its mean or deviation as a result is not supported")
    total = node.builder.emit("Add", [x, skip])
    if bias:
        total = node.builder.emit("Add", [total, bias])
    node.bind(_layer_normalization(node, total, gamma, beta))
    node.bind(total, 3)


def _layer_normalization(node: ExpandedNode, x: str, gamma: str, beta: str) -> str:
    """The layer normalisation of `x` along its last axis; the standard has it from opset 17 on."""
    emit, epsilon = node.builder.emit, node.attrs.get("epsilon", 1e-12)
    if node.opset >= 17:
        operands = [x, gamma, beta] if beta else [x, gamma]
        return emit("LayerNormalization", operands, axis=-1, epsilon=epsilon)
    centred = emit("Sub", [x, node.reduce("ReduceMean", x, [-1])])
    variance = node.reduce("ReduceMean", emit("Mul", [centred, centred]), [-1])
    deviation = emit("Sqrt", [emit("Add", [variance, node.builder.scalar(epsilon)])])
    scaled = emit("Mul", [emit("Div", [centred, deviation]), gamma])
    return emit("Add", [scaled, beta]) if beta else scaled


def embed_layer_normalization(node: ExpandedNode) -> None:
    """Expand EmbedLayerNormalization: the sum of three tables' rows, normalised; and lengths of a mask."""
    emit, constant = node.builder.emit, node.builder.constant
    ids, segments, words, places, kinds, gamma, beta, mask, place_ids = (
        node.operand(index) for index in range(9)
    )
    if not place_ids:
        length = emit("Gather", [emit("Shape", [ids]), constant(np.array(1))])
        place_ids = emit("Range", [constant(np.array(0)), length, constant(np.array(1))])
    total = emit("Add", [emit("Gather", [words, ids]), emit("Gather", [places, place_ids])])
    if segments:
        total = emit("Add", [total, emit("Gather", [kinds, segments])])
    node.bind(_layer_normalization(node, total, gamma, beta))
    counts = node.reduce("ReduceSum", mask or emit("Mul", [ids, emit("Sub", [ids, ids])]), [1], keepdims=0)
    node.bind(emit("Cast", [counts], to=TensorProto.INT32), 1)
    node.bind(total, 2)


def q_embed_layer_normalization(node: ExpandedNode) -> None:
    """Expand QEmbedLayerNormalization: EmbedLayerNormalization of 8-bit tables."""
    operands = [node.operand(index) for index in range(8)]
    for table in range(2, 7):
        scale, zero = node.operand(6 + table), node.operand(11 + table)
        if operands[table]:
            operands[table] = node.builder.emit("DequantizeLinear", [operands[table], scale, zero])
    results = node.builder.emit_tuple("EmbedLayerNormalization", operands, 2, MICROSOFT, **node.attrs)
    for index, result in enumerate(results):
        node.bind(result, index)


def fused_mat_mul(node: ExpandedNode) -> None:
    """Expand FusedMatMul and TransposeMatMul: a scaled product of perhaps transposed operands.

    The first axis of an operand with ``transBatch`` is the one before its last.
    """
    operands = [node.operand(index) for index in (0, 1)]
    for index, side in enumerate("AB"):
        swaps, moves = (node.attrs.get(f"{name}{side}", 0) for name in ("trans", "transBatch"))
        if not swaps and not moves:
            continue  # so that the rank need not be known
        axes = list(range(node.rank(index)))
        if moves and len(axes) > 2:
            axes = [*axes[1:-1], axes[0], axes[-1]]
        if swaps:
            axes[-2:] = axes[-2:][::-1]
        operands[index] = node.builder.move_axes(operands[index], axes)
    builder, factor = node.builder, node.attrs.get("alpha", 1.0)
    product = builder.emit("MatMul", operands)
    node.bind(product if factor == 1 else builder.emit("Mul", [product, builder.scalar(factor)]))


def fused_conv(node: ExpandedNode) -> None:
    """Expand FusedConv: a convolution, a sum with an operand, an activation."""
    attrs = node.attrs
    kind = attrs.pop("activation", b"").decode()
    parameters = list(attrs.pop("activation_params", ()))
    x = node.builder.emit("Conv", [name for name in list(node.proto.input)[:3] if name], **attrs)
    if node.operand(3):
        x = node.builder.emit("Add", [x, node.operand(3)])
    node.bind(_activation(node, x, kind, parameters))


def fused_gemm(node: ExpandedNode) -> None:
    """Expand FusedGemm: a Gemm and an activation."""
    attrs = node.attrs
    kind = attrs.pop("activation", b"").decode()
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    parameters = [attrs.pop(name) for name in names if name in attrs]
    x = node.builder.emit("Gemm", list(node.proto.input), **attrs)
    node.bind(_activation(node, x, kind, parameters))


def _activation(node: ExpandedNode, x: str, kind: str, parameters: list[float]) -> str:
    """The activation of a fused operator, applied to `x`."""
    emit, scalar = node.builder.emit, node.builder.scalar
    if not kind:
        return x
    if kind == "Clip":
        return emit(kind, [x, *map(scalar, parameters)])
    if kind in _ACTIVATIONS:
        return emit(kind, [x], **dict(zip(_ACTIVATIONS[kind], parameters)))
    if kind not in _SCALED or len(parameters) < 2:
        raise node.unsupported(f"with activation '{kind}' is not supported")
    steep = emit(_SCALED[kind], [emit("Mul", [x, scalar(parameters[1])])])
    return emit("Mul", [steep, scalar(parameters[0])])


# Attributes that parameters become.
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("HardSwish", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"), ()),
    **dict.fromkeys(("Elu", "LeakyRelu", "ThresholdedRelu"), ("alpha",)),
    "HardSigmoid": ("alpha", "beta"),
}
_SCALED = {"ParametricSoftplus": "Softplus", "ScaledTanh": "Tanh"}  # alpha f(beta x)


def attention(node: ExpandedNode) -> None:
    """Expand Attention: one product for queries, keys and values, then MultiHeadAttention."""
    node.refuse("do_rotary", "past_present_share_buffer", beyond=6)
    x, weights, bias = (node.operand(index) for index in range(3))
    packed = node.builder.emit("MatMul", [x, weights])
    packed = node.builder.emit("Add", [packed, bias]) if bias else packed
    emit_heads(node, packed, int(node.weights[weights].dims[1]) if weights in node.weights else 0, 3, 4, 5)


def emit_heads(node: ExpandedNode, packed: str, width: int, mask: int, past: int, scores: int | None) -> None:
    """Emit MultiHeadAttention of `packed` queries, keys and values of `width` together.

    Parameters
    ----------
    mask, past, scores : int
        Indices of operands: the mask, the cache, and what is added to scores.
    """
    builder, attrs = node.builder, node.attrs
    sizes = attrs.get("qkv_hidden_sizes") or [width // 3] * 3
    if not sum(sizes):
        raise node.unsupported("with computed weights and without 'qkv_hidden_sizes' is not supported")
    operands = [*builder.split(packed, sizes, 2), "", "", "", "", ""]
    if node.operand(mask):
        _place_mask(node, mask, operands)
    if scores is not None and node.operand(scores):
        if operands[5]:
            raise node.unsupported("with a mask of three dimensions and added scores is not supported")
        operands[5] = node.operand(scores)
    if node.operand(past):
        halves = builder.split(node.operand(past), [1, 1], 0)
        first = builder.constant(np.array([0]))
        operands[6:] = [builder.emit("Squeeze", [half, first]) for half in halves]
    names = ("num_heads", "scale", "unidirectional", "mask_filter_value")
    kept = {name: attrs[name] for name in names if name in attrs}
    count = 3 if node.result(1) else 1
    results = builder.emit_tuple("MultiHeadAttention", operands, count, MICROSOFT, **kept)
    node.bind(results[0])
    if node.result(1):
        first = builder.constant(np.array([0]))
        node.bind(builder.concat([builder.emit("Unsqueeze", [part, first]) for part in results[1:]], 0), 1)


def _place_mask(node: ExpandedNode, index: int, operands: list[str]) -> None:
    """Put a mask of keys [batch, keys], or lengths [batch], or a mask by query, into `operands`, in place."""
    builder, mask = node.builder, node.operand(index)
    rank = node.rank(index)
    if rank == 2:
        operands[4] = mask
    elif rank == 1:
        length = builder.emit(
            "Gather", [builder.emit("Shape", [node.operand(0)]), builder.constant(np.array(1))]
        )
        zero, one = builder.constant(np.array(0)), builder.constant(np.array(1))
        places = builder.emit("Range", [zero, length, one])
        # Ends of all sequences, and behind them the places where they begin, if there are twice as many.
        ends = builder.emit("Cast", [mask], to=TensorProto.INT64)
        ends = builder.emit("Unsqueeze", [ends, builder.constant(np.array([1]))])
        batch = next(iter(node.shapes.get(node.operand(0), ())), 0)
        has_begins = node.shape(index)[0] == 2 * batch > 0
        ends, *begins = builder.split(ends, [batch] * 2, 0) if has_begins else [ends]
        inside = builder.emit("Less", [places, ends])
        for begin in begins:
            before = builder.emit("Less", [places, begin])
            inside = builder.emit("And", [inside, builder.emit("Not", [before])])
        operands[4] = builder.emit("Cast", [inside], to=TensorProto.INT32)
    elif rank == 3:
        seen = builder.emit("Cast", [mask], to=TensorProto.FLOAT)
        hidden = builder.scalar(node.attrs.get("mask_filter_value", -10000.0))
        away = builder.emit("Mul", [builder.emit("Sub", [builder.scalar(1), seen]), hidden])
        operands[5] = builder.emit("Unsqueeze", [away, builder.constant(np.array([1]))])
    else:
        raise node.unsupported(f"with a mask of {rank} dimensions is not supported")
