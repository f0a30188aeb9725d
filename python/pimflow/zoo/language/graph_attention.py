"""Attention of a block, added to the graph of a decoder."""

from __future__ import annotations

from onnx import TensorProto, helper

from pimflow.zoo.language.decoder_parts import LatentAttention
from pimflow.zoo.language.graph_builder import GraphBuilder, present_name


def attention(graph: GraphBuilder, name: str, layer: int, source: str) -> str:
    """Attention over the cache and the step's tokens, with its products."""
    d = graph.decoder
    if d.latent is not None:
        query, key, value = _latent_operands(graph, name, layer, source, d.latent)
    else:
        query, key = (_heads_of_part(graph, name, part, layer, source) for part in ("query", "key"))
        value = graph.heads(f"{name}.value", graph.product(f"{name}.value", source), d.kv_heads)
    key, key_scales = _append_to_cache(graph, name, layer, "key", key, d.key_size)
    value, value_scales = _append_to_cache(graph, name, layer, "value", value, d.value_size)
    key = _repeat_heads(graph, f"{name}.key", key, d.key_size)
    value = _repeat_heads(graph, f"{name}.value", value, d.value_size)
    key = graph.node("Transpose", f"{name}.key.columns", [key], perm=[0, 1, 3, 2])
    scores = graph.node("MatMul", f"{name}.scores", [query, key])
    if key_scales:
        scores = graph.node("Mul", f"{name}.scores.of_keys", [scores, key_scales])
    scores = graph.node("Mul", f"{name}.scaled", [scores, graph.constant("scale", d.attention_scale)])
    scores = graph.cap(f"{name}.scores", scores, d.score_softcap)
    scores = graph.fall(name, scores)
    scores = graph.node("Add", f"{name}.masked", [scores, graph.mask()])
    scores = graph.hide_outside(name, scores, d.window(layer))
    shares = _softmax(graph, name, scores)
    if value_scales:
        shares = graph.node("Mul", f"{name}.shares.of_values", [shares, value_scales])
    mixed, size = graph.node("MatMul", f"{name}.mixed", [shares, value]), d.value_size
    if d.latent is not None:
        weight, size = graph.weight(f"{name}.value_heads.weight"), d.latent.value_size
        mixed = graph.node("MatMul", f"{name}.value_heads", [mixed, weight])
    mixed = graph.node("Transpose", f"{name}.mixed.tokens", [mixed], perm=[0, 2, 1, 3])
    joined = graph.integers("joined", [graph.batch, graph.tokens, d.heads * size])
    mixed = graph.node("Reshape", f"{name}.mixed.joined", [mixed, joined])
    return graph.product(f"{name}.attention", mixed)


def _heads_of_part(graph: GraphBuilder, name: str, part: str, layer: int, source: str) -> str:
    """Queries or keys in heads, with their norm, rotated."""
    d, part_name = graph.decoder, f"{name}.{part}"
    result = graph.product(part_name, source)
    result = graph.norm(f"{part_name}_norm", result) if d.query_norm == "whole" else result
    result = graph.heads(part_name, result, d.heads if part == "query" else d.kv_heads)
    result = graph.norm(f"{part_name}_norm", result) if d.query_norm == "heads" else result
    if d.positions != "rotary" or layer in d.unturned_layers:
        return result
    size, turned = d.head_size, d.rotation_size
    if turned == size:
        return graph.rotate(part_name, result, layer)
    still = graph.cut(f"{part_name}.still", result, turned, size)
    moved = graph.rotate(part_name, graph.cut(f"{part_name}.moved", result, 0, turned), layer)
    return graph.node("Concat", f"{part_name}.whole", [moved, still], axis=-1)


def _latent_operands(
    graph: GraphBuilder, name: str, layer: int, source: str, latent: LatentAttention
) -> tuple[str, str, str]:
    """Queries in heads, and the one head of keys and values, of the step's tokens.

    Queries are multiplied with the weights of keys: [batch, heads, tokens, rank + rotation_size].
    """
    d = graph.decoder
    middle = source
    if latent.query_rank:
        middle = graph.norm(f"{name}.query_latent_norm", graph.product(f"{name}.query_latent", source))
    query = graph.heads(f"{name}.query", graph.product(f"{name}.query", middle), d.heads)
    still, size = d.head_size - d.rotation_size, d.head_size
    first = graph.cut(f"{name}.query.still", query, 0, still)
    first = graph.node("MatMul", f"{name}.key_heads", [first, graph.weight(f"{name}.key_heads.weight")])
    moved = graph.rotate(f"{name}.query", graph.cut(f"{name}.query.moved", query, still, size), layer)
    query = graph.node("Concat", f"{name}.query.whole", [first, moved], axis=-1)
    vector = graph.product(f"{name}.latent", source)
    vector = graph.node("Unsqueeze", f"{name}.latent.head", [vector, graph.integers("axis_1", [1])])
    value = graph.cut(f"{name}.latent.still", vector, 0, latent.rank)
    value = graph.norm(f"{name}.latent_norm", value)
    moved = graph.cut(f"{name}.latent.moved", vector, latent.rank, d.key_size)
    moved = graph.rotate(f"{name}.latent", moved, layer)
    return query, graph.node("Concat", f"{name}.key.whole", [value, moved], axis=-1), value


def _append_to_cache(
    graph: GraphBuilder, name: str, layer: int, part: str, source: str, size: int
) -> tuple[str, str]:
    """Append keys or values to those in the cache; also the scales by query head, empty without any.

    The caches are outputs of the graph. Those of a narrow type are integers, beside a scale for each token
    and head; scales are [batch, heads, 1, context].
    """
    kind = graph.decoder.cache_type
    if not kind:
        return _append(graph, layer, part, source, size), ""
    integers, scales = graph.quantise(source, kind)
    integers = _append(graph, layer, part, integers, size)
    scales = _append(graph, layer, f"{part}_scale", scales, 1)
    scales = _repeat_heads(graph, f"{name}.{part}.scales", scales, 1)
    return integers, graph.node("Transpose", f"{name}.{part}.scale_row", [scales], perm=[0, 1, 3, 2])


def _append(graph: GraphBuilder, layer: int, part: str, source: str, size: int) -> str:
    """Append to a part of a layer's cache; the result is an output of the graph."""
    d = graph.decoder
    name, past_tokens = present_name(layer, part), graph.context - graph.tokens
    shape = (graph.batch, d.kv_heads, graph.context, size)
    result = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    if d.cache_type and part in ("key", "value"):
        helper.set_model_props(result, {"cache": d.cache_type})
    graph.present.append(result)
    if not past_tokens:
        return graph.node("Identity", name, [source])
    past_values = graph.cache(layer, part, (*shape[:2], past_tokens, size))
    return graph.node("Concat", name, [past_values, source], axis=2)


def _repeat_heads(graph: GraphBuilder, name: str, source: str, size: int) -> str:
    """Repeat each head of keys or values for all heads of queries that share it."""
    d = graph.decoder
    if d.group == 1:
        return source
    apart = graph.node("Unsqueeze", f"{name}.apart", [source, graph.integers("axis_2", [2])])
    shape = [graph.batch, d.kv_heads, d.group, graph.context, size]
    repeated = graph.node("Expand", f"{name}.repeated", [apart, graph.integers(f"repeated_{size}", shape)])
    shape = [graph.batch, d.heads, graph.context, size]
    return graph.node("Reshape", f"{name}.shared", [repeated, graph.integers(f"shared_{size}", shape)])


def _softmax(graph: GraphBuilder, name: str, scores: str) -> str:
    """Shares of all keys; with sinks, of the sum over all keys and the sink of a head."""
    d = graph.decoder
    if not d.sinks:
        return graph.node("Softmax", f"{name}.softmax", [scores], axis=-1)
    shape = graph.integers("sink_places", [1, d.heads, 1, 1])
    sinks = graph.node("Reshape", f"{name}.sink_heads", [graph.weight(f"{name}.sinks.bias"), shape])
    places = graph.integers("sink_columns", [graph.batch, d.heads, graph.tokens, 1])
    sinks = graph.node("Expand", f"{name}.sink_columns", [sinks, places])
    scores = graph.node("Concat", f"{name}.with_sinks", [scores, sinks], axis=-1)
    shares = graph.node("Softmax", f"{name}.softmax", [scores], axis=-1)
    return graph.cut(f"{name}.shares", shares, 0, graph.context)
