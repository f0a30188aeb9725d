"""Attention operators of ONNX that TVM's importer does not support, or computes differently."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from tvm import relax

from pimflow.core.attention import Attention
from pimflow.errors import UnsupportedOpError
from pimflow.frontend.onnx_experts import mixture_of_experts
from pimflow.frontend.onnx_node import OnnxNode
from pimflow.frontend.onnx_rotary import (
    angle_rows,
    microsoft_rotary_embedding,
    rms_normalization,
    rotary_embedding,
    rotate,
    skip_rms_normalization,
    token_positions,
)
from pimflow.relay_passes.attention import MASKED_SCORE, query_visibility
from pimflow.relay_passes.caches import append_tokens
from pimflow.relay_passes.flat import shape

op = relax.op
MICROSOFT = "com.microsoft"


def attention(node: OnnxNode) -> relax.Expr:
    """Convert Attention of ONNX, opset 23 and later."""
    q, k, v, mask, past_k, past_v, lengths = (node.operand(index) for index in range(7))
    assert q is not None and k is not None and v is not None
    heads, kv_heads = int(node.number("q_num_heads")), int(node.number("kv_num_heads"))
    three = len(shape(q)) == 3
    q, k, v = (node.split_heads(x, count) for x, count in ((q, heads), (k, kv_heads), (v, kv_heads)))
    past = 0 if past_k is None else shape(past_k)[2]
    if past_k is not None and past_v is not None:
        k = node.emit(op.concat([past_k, k], axis=2), "key")
        v = node.emit(op.concat([past_v, v], axis=2), "value")
    config = _attention_config(
        q,
        k,
        v,
        scale=node.attrs.get("scale", shape(q)[3] ** -0.5),
        causal=bool(node.number("is_causal")) or node.number("right_window_size", -1) == 0,
        offset=past,
        window=int(node.number("left_window_size", -1)) + 1,
        softcap=float(node.number("softcap")),
        positioned=lengths is not None,
    )
    operands, seeing = [q, k, v], None
    ahead = int(node.number("right_window_size", -1))
    if ahead > 0:
        mask = _with_horizon(node, mask, config, past + ahead)
    if mask is not None:
        mask = _additive_mask(node, mask, config)
        seeing = _query_visibility(node, mask, config)
        config = replace(config, masked=True)
        operands.append(mask)
    if lengths is not None:
        position = op.subtract(lengths, relax.const(config.queries, str(lengths.ty.dtype)))
        operands.append(node.emit(op.astype(node.emit(position), "int64")))
        seeing = _visibility_by_position(node, config, operands[-1], seeing)
    parts: dict[str, relax.Var] | None = {} if node.results > 3 else None
    result = node.emit_attention(config, operands, parts)
    if seeing is not None:
        result = node.emit(op.multiply(result, seeing))
    results = [node.merge_heads(result) if three else result, k, v]
    if parts is not None:
        results.append(_score_output(node, config, parts, seeing))
    return relax.Tuple(results[: node.results]) if node.results > 1 else results[0]


def _attention_config(q: relax.Expr, k: relax.Expr, v: relax.Expr, **attributes: Any) -> Attention:
    """The attention of queries, keys and values in four axes, with the other fields of `attributes`."""
    (batch, heads, queries, size), (_, kv_heads, keys, _) = shape(q), shape(k)
    if heads % kv_heads:
        raise UnsupportedOpError(f"{heads} heads cannot share {kv_heads} KV heads evenly")
    if not attributes["causal"] and not attributes["window"]:
        attributes["offset"] = 0
    return Attention(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        value_size=shape(v)[3],
        queries=queries,
        keys=keys,
        **{**attributes, "scale": float(attributes["scale"])},
    )


def _additive_mask(node: OnnxNode, mask: relax.Expr, config: Attention) -> relax.Expr:
    """Convert any mask (of any rank, boolean or additive, also too short) to an additive one of rank 4."""
    value, flags = node.value_of(mask), "bool" in str(mask.ty.dtype)
    dims = (1,) * (4 - len(shape(mask))) + shape(mask)
    short = config.keys - dims[3] if dims[3] > 1 or config.keys == 1 else 0
    if isinstance(value, np.ndarray):
        array = np.where(value, 0.0, MASKED_SCORE) if flags else np.maximum(value, MASKED_SCORE)
        pads = [(0, 0)] * 3 + [(0, short)]
        return relax.const(np.pad(array.reshape(dims), pads, constant_values=MASKED_SCORE).astype("float32"))
    if flags:
        none, hidden = relax.const(0.0, "float32"), relax.const(MASKED_SCORE, "float32")
        mask = node.emit(op.where(mask, none, hidden))
    else:
        mask = node.emit(op.maximum(mask, relax.const(MASKED_SCORE, "float32")))
    if shape(mask) != dims:
        mask = node.emit(op.reshape(mask, dims))
    return node.emit(op.nn.pad(mask, [0] * 7 + [short], "constant", MASKED_SCORE)) if short else mask


def _with_horizon(node: OnnxNode, mask: relax.Expr | None, config: Attention, first: int) -> relax.Expr:
    """Add to a mask that query i does not see keys after ``first + i``."""
    if config.positioned:
        raise UnsupportedOpError("'right_window_size' with 'nonpad_kv_seqlen' is not supported")
    seen = np.tri(config.queries, config.keys, first, dtype=bool)
    horizon = relax.const(np.where(seen, 0.0, MASKED_SCORE).astype("float32").reshape(1, 1, *seen.shape))
    if mask is None:
        return horizon
    mask = _additive_mask(node, mask, config)
    return node.emit(op.maximum(node.emit(op.add(mask, horizon)), relax.const(MASKED_SCORE, "float32")))


def _query_visibility(node: OnnxNode, mask: relax.Expr, config: Attention) -> relax.Expr | None:
    """Factors of results: 1 for queries that see a key, else 0; None if all queries do."""
    causal = (
        None
        if config.positioned
        else np.where(config.visible_keys(), 0.0, MASKED_SCORE).astype("float32")[:, None]
    )
    if isinstance(mask, tvm.ir.GenericConst):
        total_mask = mask.value.numpy() if causal is None else mask.value.numpy() + causal[:1]
        seeing = (total_mask.max(-1, keepdims=True) > MASKED_SCORE / 2).astype("float32")
        return None if seeing.all() else relax.const(seeing)
    key = (mask, None if causal is None else causal.tobytes())
    if key not in node.sight:
        if causal is not None and causal.any():
            mask = node.emit(op.add(mask, relax.const(causal[:1])))
        node.sight[key] = query_visibility(mask, lambda value, _: node.emit(value))
    return node.sight[key]


def _visibility_by_position(
    node: OnnxNode, config: Attention, position: relax.Expr, seeing: relax.Expr | None
) -> relax.Expr | None:
    """`seeing`, with 0 also for queries before the first place of the cache."""
    if not config.causal:
        return seeing
    query_numbers = relax.const(np.arange(1, config.queries + 1, dtype="float32").reshape(1, 1, -1, 1))
    first = node.emit(op.reshape(node.emit(op.astype(position, "float32")), (config.batch, 1, 1, 1)))
    seen = node.emit(op.clip(node.emit(op.add(first, query_numbers)), 0, 1))
    return seen if seeing is None else node.emit(op.multiply(seeing, seen))


def _score_output(
    node: OnnxNode, config: Attention, parts: dict[str, relax.Var], seeing: relax.Expr | None
) -> relax.Expr:
    """The fourth result: scores after one of the steps of attention."""
    mode = int(node.number("qk_matmul_output_mode"))
    products = [parts[name] for name in ("scores", "scaled", "by_head") if name in parts]
    if mode == 3:
        scores = parts["softmax"] if seeing is None else node.emit(op.multiply(parts["softmax"], seeing))
    elif mode == 0 or (mode == 1 and not config.softcap):
        scores = products[-1]
    elif mode == 1:
        scores = parts["capped"]
    else:
        scores = next(parts[name] for name in ("causal", "masked", "capped", *parts) if name in parts)
        counts = node.emit(op.greater(scores, relax.const(MASKED_SCORE / 2, "float32")))
        scores = node.emit(op.where(counts, scores, relax.const(-np.inf, "float32")))
    return (
        scores if shape(scores) == config.score_shape else node.emit(op.reshape(scores, config.score_shape))
    )


def group_query_attention(node: OnnxNode) -> relax.Expr:
    """Convert GroupQueryAttention of com.microsoft: rotary embedding, cache update and attention."""
    node.refuse_unsupported(
        *("kv_cache_bit_width", "k_quant_type", "v_quant_type", "sliding_window_cache"), after=12
    )
    if node.results > 3:
        raise UnsupportedOpError("result 'output_qk' is not supported")
    q, k, v, past_k, past_v, last, _, cosines, sines, ids, bias = (node.operand(index) for index in range(11))
    heads, kv_heads = int(node.attrs["num_heads"]), int(node.attrs["kv_num_heads"])
    assert q is not None and last is not None
    if k is None or v is None:
        q, k, v = _split_packed(node, q, heads, kv_heads)
    q, k, v = (node.split_heads(x, count) for x, count in ((q, heads), (k, kv_heads), (v, kv_heads)))
    batch, _, tokens, size = shape(q)
    past = 0 if past_k is None else shape(past_k)[2]
    constant = node.constant(6)
    total = None if constant is None else int(constant.reshape(()))
    length = _cache_length(node, past, total, tokens)
    prompt = not past or total == tokens
    position = _first_positions(node, last, batch, 0 if prompt else None, tokens)
    if node.number("do_rotary"):
        if cosines is None or sines is None:
            raise UnsupportedOpError("a rotary embedding without its tables is not supported")
        ids = token_positions(node, position, batch, tokens) if ids is None else ids
        angles = [angle_rows(node, table, ids, 1) for table in (cosines, sines)]
        interleaved = bool(node.number("rotary_interleaved"))
        q, k = (rotate(node, x, *angles, interleaved=interleaved) for x in (q, k))
    if past_k is not None and past_v is not None and past:
        updates = (past_k, k, "key"), (past_v, v, "value")
        k, v = (_update_cache(node, *update, position, length) for update in updates)
    elif length > tokens:
        k, v = (node.emit(op.nn.pad(x, [0, 0, 0, 0, 0, length - tokens, 0, 0])) for x in (k, v))
    config = _attention_config(
        q,
        k,
        v,
        scale=node.number("scale") or size**-0.5,
        causal=bool(node.number("causal", 1)),
        window=max(int(node.number("local_window_size", -1)), 0),
        softcap=float(node.number("softcap")),
        positioned=not prompt,
        masked=bias is not None,
        sinks=node.operand(11) is not None or bool(node.number("smooth_softmax")),
    )
    operands = [q, k, v]
    operands += [] if bias is None else [_additive_mask(node, bias, config)]
    operands += [_sinks(node, heads)] if config.sinks else []
    operands += [position] if config.positioned else []
    return relax.Tuple(
        [node.merge_heads(node.emit_attention(config, operands)), k, v][: max(node.results, 1)]
    )


def _sinks(node: OnnxNode, heads: int) -> relax.Expr:
    """The sinks of a GroupQueryAttention, [1, heads, 1, 1]; zeros if its softmax is only smooth."""
    sinks = node.operand(11)
    if sinks is None:
        return relax.const(np.zeros((1, heads, 1, 1), np.float32))
    return node.emit(op.reshape(sinks, (1, heads, 1, 1)))


def _cache_length(node: OnnxNode, past: int, total: int | None, tokens: int) -> int:
    """Tokens in the cache after the step, of which `past` were there; `total` if the node says how many."""
    length = node.present or (0 if total is None else max(past, total))
    if not length and not past:
        length = tokens
    if length < max(past, tokens):
        raise UnsupportedOpError(
            "the length of its cache is not known; declare the shape of its second result"
        )
    return length


def _split_packed(node: OnnxNode, x: relax.Expr, heads: int, kv_heads: int) -> list[relax.Expr]:
    """Split queries, keys and values that are packed in one tensor."""
    size = shape(x)[2] // (heads + 2 * kv_heads)
    ends = np.cumsum([0, heads, kv_heads, kv_heads]) * size
    return [
        node.emit(op.strided_slice(x, [2], [int(begin)], [int(end)], assume_inbound=True))
        for begin, end in itertools.pairwise(ends)
    ]


def _first_positions(
    node: OnnxNode, last: relax.Expr, batch: int, fixed_position: int | None, tokens: int
) -> relax.Expr:
    """Cache position of the first token of each request, int64 [batch], from that of the `last` token."""
    if fixed_position is not None:
        return relax.const(np.full(batch, fixed_position), "int64")
    value = node.value_of(last)
    if isinstance(value, np.ndarray):
        return relax.const(value.reshape(-1).astype(np.int64) + 1 - tokens, "int64")
    wide = node.emit(op.astype(node.emit(op.reshape(last, (batch,))), "int64"))
    return wide if tokens == 1 else node.emit(op.subtract(wide, relax.const(tokens - 1, "int64")))


def _update_cache(
    node: OnnxNode, past: relax.Expr, new_entries: relax.Expr, kind: str, position: relax.Expr, length: int
) -> relax.Expr:
    """The cache after the new tokens are stored."""
    missing = length - shape(past)[2]
    if isinstance(position, tvm.ir.GenericConst) and (position.value.numpy() == shape(past)[2]).all():
        return node.emit(op.concat([past, new_entries], axis=2), kind)
    if missing:
        past = node.emit(op.nn.pad(past, [0, 0, 0, 0, 0, missing, 0, 0]))
    result = append_tokens(past, new_entries, position, lambda value, _: node.emit(value))
    node.names[result] = kind
    return result


def multi_head_attention(node: OnnxNode) -> relax.Expr:
    """Convert MultiHeadAttention of com.microsoft."""
    node.refuse_unsupported(after=8)
    if node.results > 3:
        raise UnsupportedOpError("result 'qk' is not supported")
    q, k, v, bias, padding, mask, past_k, past_v = (node.operand(index) for index in range(8))
    heads = int(node.attrs["num_heads"])
    if q is None or k is None or v is None or len(shape(q)) != 3 or 5 in (len(shape(k)), len(shape(v))):
        raise UnsupportedOpError("packed queries, keys and values are not supported")
    if bias is not None:
        widths = np.cumsum([0, shape(q)[2], shape(q)[2], shape(bias)[0] - 2 * shape(q)[2]])
        cuts = [
            node.emit(op.strided_slice(bias, [0], [int(begin)], [int(end)], assume_inbound=True))
            for begin, end in itertools.pairwise(widths)
        ]
        q, k, v = (node.emit(op.add(x, cut)) if len(shape(x)) == 3 else x for x, cut in zip((q, k, v), cuts))
    q, k, v = (node.split_heads(x, heads) for x in (q, k, v))
    past = 0 if past_k is None else shape(past_k)[2]
    if past_k is not None and past_v is not None and past:
        k = node.emit(op.concat([past_k, k], axis=2), "key")
        v = node.emit(op.concat([past_v, v], axis=2), "value")
    config = _attention_config(
        q,
        k,
        v,
        scale=node.number("scale") or shape(q)[3] ** -0.5,
        causal=bool(node.number("unidirectional")),
        offset=past,
        window=0,
    )
    masks = [] if mask is None else [_additive_mask(node, mask, config)]
    if padding is not None:
        masks.append(_padding_mask(node, padding, shape(k)[2]))
    if masks:
        config = replace(config, masked=True)
        masks = [masks[0] if len(masks) == 1 else node.emit(op.add(*masks))]
    result = node.emit_attention(config, [q, k, v, *masks])
    return relax.Tuple([node.merge_heads(result), k, v][: max(node.results, 1)])


def _padding_mask(node: OnnxNode, padding: relax.Expr, keys: int) -> relax.Expr:
    """The additive mask of flags [batch, keys] or [batch, queries, keys], or of lengths [batch]."""
    batch, dims = shape(node.operand(0))[0], shape(padding)
    if dims == (batch,):
        lengths = node.emit(op.reshape(node.emit(op.astype(padding, "int64")), (batch, 1)))
        padding = node.emit(op.less(relax.const(np.arange(keys)[None]), lengths))
        dims = (batch, keys)
    if len(dims) not in (2, 3):
        raise UnsupportedOpError(f"a 'key_padding_mask' of shape {dims} is not supported")
    hidden = relax.const(float(node.number("mask_filter_value", -10000.0)), "float32")
    away = node.emit(op.subtract(relax.const(1.0, "float32"), node.emit(op.astype(padding, "float32"))))
    queries = dims[1] if len(dims) == 3 else 1
    return node.emit(op.reshape(node.emit(op.multiply(away, hidden)), (dims[0], 1, queries, dims[-1])))


CONVERTERS: dict[tuple[str, str], Callable[[OnnxNode], relax.Expr]] = {
    ("", "Attention"): attention,
    ("", "RotaryEmbedding"): rotary_embedding,
    ("", "SimplifiedLayerNormalization"): rms_normalization,
    (MICROSOFT, "SimplifiedLayerNormalization"): rms_normalization,
    (MICROSOFT, "MoE"): mixture_of_experts,
    (MICROSOFT, "GroupQueryAttention"): group_query_attention,
    (MICROSOFT, "MultiHeadAttention"): multi_head_attention,
    (MICROSOFT, "RotaryEmbedding"): microsoft_rotary_embedding,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): skip_rms_normalization,
}
