"""Experts as ONNX Runtime's operator has them: the mixture of those that a router chooses for each row."""

from __future__ import annotations

import math

import numpy as np
from tvm import relax

from pimflow.errors import UnsupportedOpError
from pimflow.frontend.onnx_node import OnnxNode
from pimflow.relay_passes.flat import shape

op = relax.op

_ACTIVATIONS = ("identity", "relu", "gelu", "silu", "swiglu")
_INTERLEAVED = 1  # of ``swiglu_fusion``: gate and up take turns in one product


def mixture_of_experts(node: OnnxNode) -> relax.Expr:
    """Convert MoE of com.microsoft.

    Operands are rows, what the router says of each expert, and weights [experts, outputs, inputs] and biases
    of two products. Where all rows together go through fewer experts than there are, the weights of those are
    gathered; else every expert computes all rows, and those that were not chosen have no share of them.
    """
    node.refuse_unsupported("use_sparse_mixer", after=6)
    activation = bytes(node.attrs.get("activation_type", b"relu")).decode()
    if activation not in _ACTIVATIONS:
        raise UnsupportedOpError(f"activation '{activation[:20]}' is not supported")
    if activation == "swiglu" and node.number("swiglu_fusion") != _INTERLEAVED:
        raise UnsupportedOpError("products of gate and up that do not take turns are not supported")
    x, logits = node.operands[:2]
    assert x is not None and logits is not None
    rows = node.emit(op.reshape(x, (-1, shape(x)[-1])))
    shares, choices = _choices(node, logits)
    count, used = shape(logits)[-1], shape(choices)[1]
    mix = _mixture_of_chosen if shape(rows)[0] * used < count else _mixture_of_all
    return node.emit(op.reshape(mix(node, rows, shares, choices, activation), shape(x)))


def _choices(node: OnnxNode, logits: relax.Expr) -> tuple[relax.Var, relax.Var]:
    """Shares and numbers of the chosen experts, both [rows, used]."""
    all_shares = node.emit(op.nn.softmax(logits, axis=-1), "shares")
    largest = node.emit(
        op.topk(all_shares, int(node.number("k", 1)), axis=-1, ret_type="both", largest=True, dtype="int64")
    )
    shares, choices = (node.emit(relax.TupleGetItem(largest, index)) for index in range(2))
    if node.number("normalize_routing_weights"):
        shares = node.emit(op.divide(shares, node.emit(op.sum(shares, axis=-1, keepdims=True))))
    return shares, choices


def _mixture_of_chosen(
    node: OnnxNode, rows: relax.Var, shares: relax.Var, choices: relax.Var, activation: str
) -> relax.Var:
    """Each chosen expert by itself, [rows, used, 1, size], and their sum by shares."""

    def product(operand: relax.Expr, weight: int) -> relax.Var:
        """A product with the weights of the chosen experts, and their biases."""
        result = op.matmul(operand, node.emit(op.take(_matrices(node, weight), choices, axis=0)))
        bias = node.operand(weight + 1)
        if bias is None:
            return node.emit(result)
        chosen = node.emit(op.expand_dims(node.emit(op.take(bias, choices, axis=0)), 2))
        return node.emit(op.add(node.emit(result), chosen))

    wide = product(node.emit(op.expand_dims(rows, [1, 2])), 2)
    results = product(_activation(node, wide, activation), 4)
    parts = node.emit(op.multiply(results, node.emit(op.expand_dims(shares, [2, 3]))))
    return node.emit(op.sum(parts, axis=[1, 2]))


def _mixture_of_all(
    node: OnnxNode, rows: relax.Var, shares: relax.Var, choices: relax.Var, activation: str
) -> relax.Var:
    """Every expert with all rows, [experts, rows, size], and their sum by shares."""

    def product(operand: relax.Expr, weight: int) -> relax.Var:
        """A product with the weights of all experts, and their biases."""
        result = node.emit(op.matmul(operand, _matrices(node, weight)))
        bias = node.operand(weight + 1)
        return result if bias is None else node.emit(op.add(result, node.emit(op.expand_dims(bias, 1))))

    wide = product(node.emit(op.expand_dims(rows, 0)), 2)
    results = product(_activation(node, wide, activation), 4)
    numbers = relax.const(np.arange(shape(results)[0]), "int64")
    chosen = node.emit(op.equal(node.emit(op.expand_dims(choices, 2)), numbers))
    placed = op.multiply(node.emit(op.astype(chosen, "float32")), node.emit(op.expand_dims(shares, 2)))
    table = node.emit(op.permute_dims(node.emit(op.sum(node.emit(placed), axis=1)), [1, 0]))
    parts = node.emit(op.multiply(results, node.emit(op.expand_dims(table, 2))))
    return node.emit(op.sum(parts, axis=0))


def _matrices(node: OnnxNode, weight: int) -> relax.Var:
    """Weights as [experts, inputs, outputs]."""
    return node.emit(op.permute_dims(node.operands[weight], [0, 2, 1]))


def _activation(node: OnnxNode, x: relax.Var, activation: str) -> relax.Var:
    """The activation; ``gelu`` is its approximation by tanh, as ONNX Runtime computes it here."""
    if activation == "swiglu":
        return _gate(node, x)
    if activation == "gelu":
        return node.emit(op.nn.gelu_tanh(x))
    if activation == "silu":
        return node.emit(op.nn.silu(x))
    return node.emit(op.nn.relu(x)) if activation == "relu" else x


def _gate(node: OnnxNode, x: relax.Var) -> relax.Var:
    """``g * sigmoid(alpha * g) * (u + beta)`` of gate and up, both within a limit."""
    axis, width = len(shape(x)) - 1, shape(x)[-1]
    gate, up = (
        node.emit(op.strided_slice(x, [axis], [begin], [width], [2], assume_inbound=True))
        for begin in range(2)
    )
    limit = float(node.number("swiglu_limit", math.inf))
    if math.isfinite(limit):
        gate = node.emit(op.minimum(gate, relax.const(limit, "float32")))
        up = node.emit(op.clip(up, -limit, limit))
    steep = op.multiply(gate, relax.const(float(node.number("activation_alpha", 1.0)), "float32"))
    active = node.emit(op.multiply(gate, node.emit(op.sigmoid(node.emit(steep)))))
    raised = op.add(up, relax.const(float(node.number("activation_beta", 0.0)), "float32"))
    return node.emit(op.multiply(active, node.emit(raised)))
