"""Where the weights of a decoder are in a GGUF file, and their values."""

from __future__ import annotations

import numpy as np

from pimflow.errors import ModelError, one_line
from pimflow.weight_types import WEIGHT_TYPES
from pimflow.zoo.language.decoder import BLOCK_PRODUCTS, Decoder, Shape
from pimflow.zoo.language.gguf_architectures import ARCHITECTURES
from pimflow.zoo.language.gguf_file import GgufFile

# Names in a file of the weights of a block, and of all others.
_BLOCK = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "query_latent": "attn_q_a",
    "query_latent_norm": "attn_q_a_norm",
    "latent": "attn_kv_a_mqa",
    "latent_norm": "attn_kv_a_norm",
    "key_heads": "attn_k_b",
    "value_heads": "attn_v_b",
    "sinks": "attn_sinks",
    "attention": "attn_output",
    "attention_result_norm": "post_attention_norm",
    "feed_forward_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "feed_forward_result_norm": "post_ffw_norm",
}
_EXPERTS = {
    "router": "ffn_gate_inp",
    "router_correction": "exp_probs_b",
    "gate": "ffn_gate_exps",
    "up": "ffn_up_exps",
    "down": "ffn_down_exps",
    **{f"shared_{part}": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_OTHER = {
    "tokens": "token_embd",
    "tokens_norm": "token_embd_norm",
    "positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
}
_FUSED_ATTENTION, _FUSED_HEADS, FACTORS = "attn_qkv", "attn_kv_b", "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"


def products_with_bias(file: GgufFile) -> frozenset[str]:
    """Products with a bias, by the tensors of the first block and of the output."""
    named = {name: stored for name, stored in (_BLOCK | _EXPERTS).items() if name in BLOCK_PRODUCTS}
    dense = {name: stored for name, stored in _BLOCK.items() if name in BLOCK_PRODUCTS}
    pairs = [*named.items(), *dense.items()]
    biased = {name for name, stored in pairs if f"blk.0.{stored}.bias" in file.tensors}
    if f"blk.0.{_FUSED_ATTENTION}.bias" in file.tensors:
        biased |= {"query", "key", "value"}
    return frozenset(biased | ({"head"} if "output.bias" in file.tensors else set()))


def require_tensors(file: GgufFile, decoder: Decoder) -> None:
    """Raise `ModelError` unless the tensors of `file` are the weights of `decoder`."""
    where, expected = decoder.source, {}
    read = {FACTORS, SHORT_FACTORS, LONG_FACTORS} if decoder.positions == "rotary" else set()
    for name, shape in decoder.weights().items():
        *inner, rows = _stored_axes(file, decoder, name, shape)
        tensor, begin = _place(file, decoder, name)
        expected[tensor] = (*inner, begin + rows)  # parts of a tensor come in order
    for tensor, shape in expected.items():
        if (stored_shape := file.tensor(tensor).shape) != shape:
            raise ModelError(f"{where}: tensor '{tensor}' has shape {stored_shape}, not {shape}")
    if unsupported := sorted(file.tensors.keys() - expected.keys() - read):
        raise ModelError(
            f"{where}: has a tensor '{one_line(unsupported[0])[:80]}', which is not supported but changes "
            "the results"
        )


def _stored_axes(file: GgufFile, decoder: Decoder, name: str, shape: Shape) -> Shape:
    """The axes of a weight in a file, the fastest first: inputs of a product or values of a row."""
    if name.endswith(".table"):
        return shape[::-1]
    if _is_of_fused_heads(file, name) and decoder.latent:
        size = decoder.head_size - decoder.turned_size + decoder.latent.value_size
        return (decoder.latent.rank, decoder.heads * size)
    if len(shape) == 3 and name.endswith(".bias"):
        return (shape[2], shape[0])
    return (*shape[1:], shape[0]) if len(shape) == 3 else shape


def _is_of_fused_heads(file: GgufFile, name: str) -> bool:
    """Whether a weight is a part of one product for keys and values of all heads, as older files have it."""
    *block, part, _ = name.split(".")
    is_part = part in ("key_heads", "value_heads")
    return is_part and f"blk.{block[1]}.{_FUSED_HEADS}.weight" in file.tensors


def _place(file: GgufFile, decoder: Decoder, name: str) -> tuple[str, int]:
    """The tensor of a weight, and its first row there: some files have several products in one."""
    *block, part, kind = name.split(".")
    suffix = "bias" if kind == "bias" and part != "sinks" else "weight"
    if not block:
        return f"{_OTHER[part]}.{suffix}", 0
    layer, prefix, begin = int(block[1]), f"blk.{block[1]}.", 0
    if decoder.has_experts(layer) and part in _EXPERTS:
        return f"{prefix}{_EXPERTS[part]}.{suffix}", 0
    if _is_of_fused_heads(file, name):
        return f"{prefix}{_FUSED_HEADS}.{suffix}", 0
    names = ARCHITECTURES[file.fields["general.architecture"]].names
    stored = names.get(part, _BLOCK[part])
    if part == "query" and decoder.latent and decoder.latent.query_rank:
        stored = "attn_q_b"
    if part in ("query", "key", "value") and f"{prefix}{_FUSED_ATTENTION}.weight" in file.tensors:
        stored = _FUSED_ATTENTION
        queries, keys = decoder.heads * decoder.head_size, decoder.kv_heads * decoder.head_size
        begin = {"query": 0, "key": queries, "value": queries + keys}[part]
    elif part in ("gate", "up") and f"{prefix}ffn_gate.weight" not in file.tensors:
        gated = f"layers.{layer}.gate.weight" in decoder.block_weights(layer)
        stored, begin = "ffn_up", decoder.feed_forward if gated and part == "up" else 0
    return f"{prefix}{stored}.{suffix}", begin


def narrow_types(file: GgufFile, decoder: Decoder) -> dict[str, str]:
    """Types of the matrices that are stored in blocks; others are widened, or as wide as the device's."""
    kinds = {
        name: file.tensor(_place(file, decoder, name)[0]).kind.name.lower()
        for name, shape in decoder.weights().items()
        if len(shape) == 2
    }
    return {
        name: kind for name, kind in kinds.items() if kind in WEIGHT_TYPES and WEIGHT_TYPES[kind].block > 1
    }


def read_weight(file: GgufFile, decoder: Decoder, name: str, pairs_neighbours: bool) -> np.ndarray:
    """Read a weight by its name in `Decoder.weights`, in fp32.

    Parameters
    ----------
    pairs_neighbours : bool
        Whether rotary positions turn neighbouring elements in the file; here they are halves.
    """
    tensor, begin = _place(file, decoder, name)
    shape, part = decoder.weights()[name], name.split(".")[-2]
    *_, rows = _stored_axes(file, decoder, name, shape)
    values = file.tensor(tensor).values(str(file.path), begin, rows)
    if _is_of_fused_heads(file, name):
        still = decoder.head_size - decoder.turned_size
        heads = values.reshape(decoder.heads, -1, values.shape[1])
        result = heads[:, :still] if part == "key_heads" else heads[:, still:].swapaxes(1, 2)
        return np.ascontiguousarray(result)
    if pairs_neighbours and part in ("query", "key", "latent"):
        values = _halves(values, decoder, len(values) if part == "latent" else decoder.head_size)
    if name.endswith(".weight"):
        values = values.swapaxes(-1, -2)
    return np.ascontiguousarray(values).reshape(shape)


def _halves(values: np.ndarray, decoder: Decoder, size: int) -> np.ndarray:
    """Rows of heads of `size` whose pairs are the halves of what is rotated, from pairs of neighbours."""
    turned = decoder.turned_size
    begin = size - turned if decoder.latent else 0
    end = begin + turned
    order = [*range(begin), *range(begin, end, 2), *range(begin + 1, end, 2), *range(end, size)]
    heads = values.reshape(-1, size, *values.shape[1:])
    return heads[:, order].reshape(values.shape)
