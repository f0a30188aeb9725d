"""Attention in the flat form: a private function, described by an attribute, with a body of operators."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax

from pimflow.core.attention import Attention
from pimflow.relay_passes.flat import operator, shape

ATTENTION = "pimflow.attention"  # attribute of the function: an `Attention` in JSON
NAME = "attention"  # what `operator_kind` calls it
# Added to the scores of masked keys: their exponentials are 0, and twice the value still fits fp16.
MASKED_SCORE = -3e4

Emit = Callable[[relax.Expr, str], relax.Var]


def attention_from_call(mod: tvm.IRModule, value: relax.Expr) -> Attention | None:
    """The attention that `value` computes if it calls an attention function of `mod`; else None."""
    if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.GlobalVar):
        return None
    attrs = mod[value.op].attrs or {}
    return Attention.from_json(json.loads(str(attrs[ATTENTION]))) if ATTENTION in attrs else None


def operator_kind(mod: tvm.IRModule, value: relax.Expr) -> str:
    """Name of the operator that `value` calls (`flat.operator`); `NAME` for attention functions."""
    return operator(value) or (NAME if attention_from_call(mod, value) is not None else "")


def attention_function(attention: Attention, mask_shape: Sequence[int] = ()) -> relax.Function:
    """A function of Q, K, V and, if `attention` has them, a mask, sinks, scales and first positions.

    Scales are those of keys and of values; positions are of the first queries.
    """
    shapes = {"q": attention.query_shape, "k": attention.key_shape, "v": attention.value_shape}
    params = [relax.Var(name, relax.TensorType(dims, "float32")) for name, dims in shapes.items()]
    if attention.masked:
        params.append(relax.Var("mask", relax.TensorType(mask_shape, "float32")))
    if attention.sinks:
        params.append(relax.Var("sinks", relax.TensorType((1, attention.heads, 1, 1), "float32")))
    if attention.cache_type:
        scale_type = relax.TensorType(attention.scale_shape, "float32")
        params += [relax.Var(name, scale_type) for name in ("key_scales", "value_scales")]
    if attention.positioned:
        params.append(relax.Var("position", relax.TensorType((attention.batch,), "int64")))
    builder = relax.BlockBuilder()
    attrs = {ATTENTION: json.dumps(attention.to_json())}
    with builder.function(NAME, params, attrs=attrs, private=True):
        with builder.dataflow():
            result = emit_attention(
                attention, params, lambda value, name: builder.emit(value, name_hint=name)
            )
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    return builder.get()[NAME]


def scale_places(attention: Attention) -> range:
    """Which arguments of `attention_function` are scales of keys and of values; none if no cache has them."""
    begin = 3 + attention.masked + attention.sinks
    return range(begin, begin + 2 * bool(attention.cache_type))


def cache_operands(attention: Attention, call: relax.Call) -> list[relax.Expr]:
    """The caches that a call of `attention_function` reads: scales of keys and of values, keys, values."""
    return [*(call.args[place] for place in scale_places(attention)), *call.args[1:3]]


def query_visibility(mask: relax.Expr, emit: Emit) -> relax.Var:
    """Emit a factor for the results: 0 for each query from which `mask` hides all keys, else 1."""
    max_score = emit(relax.op.max(mask, axis=-1, keepdims=True), "most")
    above = emit(relax.op.subtract(max_score, relax.const(MASKED_SCORE * 0.9, "float32")), "above")
    return emit(relax.op.clip(above, 0, 1), "sight")


def is_cached_attention(attention: Attention) -> bool:
    """Whether `attention` reads a cache and becomes a function; otherwise it stays as plain operators.

    With as many queries as keys, each key is read so often that the products are ordinary matrix products.
    """
    return attention.positioned or attention.queries < attention.keys


def emit_attention(attention: Attention, operands: Sequence[relax.Expr], emit: Emit) -> relax.Var:
    """Emit the operators that compute `attention` of `operands` (those of `attention_function`).

    Query heads that share keys are rows of one product, so K and V are read in place, once for each KV head.
    """
    op, a = relax.op, attention
    q, k, v, *extra_operands = operands
    rows, shared = (a.batch, a.kv_heads, a.group * a.queries), a.group > 1
    if a.read:
        k, v = (emit(op.strided_slice(tensor, [2], [0], [a.read]), "read") for tensor in (k, v))
    if a.cache_type:  # in front of the products, whose kernels widen what they read
        scales = [_read_scales(a, operands[place], emit) for place in scale_places(a)]
        k, v = (emit(op.multiply(tensor, scale), "wide") for tensor, scale in zip((k, v), scales))
    if shared:
        q = emit(op.reshape(q, (*rows, a.head_size)), "queries")
    scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]), "keys")), "scores")
    if a.scale != 1:
        scores = emit(op.multiply(scores, relax.const(a.scale, "float32")), "scaled")
    if shared:
        scores = emit(op.reshape(scores, a.score_shape), "by_head")
    weights = emit_attention_weights(a, scores, extra_operands, emit)
    if shared:
        weights = emit(op.reshape(weights, (*rows, a.extent)), "weights")
    result = emit(op.matmul(weights, v), "values")
    if shared:
        result = emit(op.reshape(result, a.output_shape), "heads")
    blind_queries = None if a.positioned else ~a.visible_keys().any(-1)[0]
    if blind_queries is not None and blind_queries.any():
        visibility = np.where(blind_queries, 0.0, 1.0).astype("float32").reshape(1, 1, -1, 1)
        result = emit(op.multiply(result, relax.const(visibility)), "seeing")
    return result


def _read_scales(attention: Attention, scales: relax.Expr, emit: Emit) -> relax.Expr:
    """Emit those scales [batch, kv_heads, keys, 1] that are read."""
    if shape(scales)[2] == attention.extent:
        return scales
    return emit(relax.op.strided_slice(scales, [2], [0], [attention.extent]), "read_scales")


def emit_scaled(attention: Attention, x: relax.Expr, scales: relax.Expr, emit: Emit) -> relax.Var:
    """Emit scores or weights [batch, heads, queries, extent] times the scales of each KV head."""
    op, a = relax.op, attention
    scales = emit(op.reshape(_read_scales(a, scales, emit), (a.batch, a.kv_heads, 1, a.extent)), "scales")
    x = emit(op.reshape(x, (a.batch, a.kv_heads, a.group * a.queries, a.extent)), "by_matrix")
    x = emit(op.multiply(x, scales), "times_scales")
    return emit(op.reshape(x, a.score_shape), "by_head")


def emit_attention_weights(
    attention: Attention,
    scores: relax.Var,
    extra_operands: Sequence[relax.Expr],
    emit: Emit,
    *,
    scale: float = 1.0,
) -> relax.Var:
    """Emit the softmax of `scores` [batch, heads, queries, extent] over the keys that each query sees.

    Parameters
    ----------
    extra_operands : sequence of Expr
        The mask, sinks, scales and the position, as far as `attention` has them; scales are not applied.
    scale : float
        Factor of the scores, applied first; 1 where an earlier kernel has applied it.
    """
    op, a = relax.op, attention
    # An operator behind a call joins the kernel of the tensor that is added to it. The scale follows the
    # first sum, so that all operators here become one kernel.
    masks_before_scale = scale != 1 and a.positioned and not a.softcap
    if masks_before_scale:
        mask_bias = _position_mask_bias(a, extra_operands[-1], emit, MASKED_SCORE / scale)
        scores = emit(op.add(scores, mask_bias), "causal")
    if scale != 1:
        scores = emit(op.multiply(scores, relax.const(scale, "float32")), "scaled")
    if a.softcap:
        inner = emit(
            op.tanh(emit(op.multiply(scores, relax.const(1 / a.softcap, "float32")), "ratio")), "curve"
        )
        scores = emit(op.multiply(inner, relax.const(a.softcap, "float32")), "capped")
    if a.masked:
        scores = emit(op.add(scores, extra_operands[0]), "masked")
    mask_bias = None if masks_before_scale else _mask_bias(a, extra_operands, emit)
    if mask_bias is not None:
        scores = emit(op.add(scores, mask_bias), "causal")
    return _softmax(a, scores, extra_operands, emit)


def _softmax(
    attention: Attention, scores: relax.Var, extra_operands: Sequence[relax.Expr], emit: Emit
) -> relax.Var:
    """Emit the softmax of masked `scores`, over the sink of each head too if there are sinks."""
    op, a = relax.op, attention
    if not a.sinks:
        return emit(op.nn.softmax(scores, axis=-1), "softmax")
    sinks = extra_operands[int(a.masked)]
    if a.batch * a.queries > 1:
        sinks = emit(op.broadcast_to(sinks, (a.batch, a.heads, a.queries, 1)), "sinks")
    scores = emit(op.concat([scores, sinks], axis=-1), "with_sinks")
    shares = emit(op.nn.softmax(scores, axis=-1), "softmax")
    return emit(op.strided_slice(shares, [3], [0], [a.extent]), "shares")


def _mask_bias(attention: Attention, extra_operands: Sequence[relax.Expr], emit: Emit) -> relax.Expr | None:
    """The term that masks scores of keys that a query does not see; None if every query sees every key."""
    if attention.positioned:
        return _position_mask_bias(attention, extra_operands[-1], emit, MASKED_SCORE)
    allowed = attention.visible_keys()[0]
    return None if allowed.all() else relax.const(np.where(allowed, 0.0, MASKED_SCORE).astype("float32"))


def _position_mask_bias(
    attention: Attention, position: relax.Expr, emit: Emit, masked_score: float
) -> relax.Var:
    """Emit `masked_score`, or twice that, for masked keys, else 0, from positions.

    [batch, 1, queries, extent].
    """
    op, a = relax.op, attention
    first = emit(op.astype(position, "float32"), "first")
    first = emit(op.reshape(first, (a.batch, 1, 1, 1)), "firsts")
    key_index = np.arange(a.extent, dtype="float32").reshape(1, 1, 1, -1)
    query_index = np.arange(a.queries, dtype="float32").reshape(1, 1, -1, 1)
    # Distance of each key from the last one that the query sees: positive if the key is masked.
    distance = key_index - (query_index if a.causal else a.queries - 1)
    hidden_distance = emit(op.subtract(relax.const(distance), first), "behind")
    out = emit(op.clip(hidden_distance, 0, 1), "hidden")
    if a.window:
        since = emit(op.subtract(first, relax.const(key_index - query_index + (a.window - 1))), "before")
        out = emit(op.add(out, emit(op.clip(since, 0, 1), "outside")), "unseen")
    return emit(op.multiply(out, relax.const(masked_score, "float32")), "unseen")
