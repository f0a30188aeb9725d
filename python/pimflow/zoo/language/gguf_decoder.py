"""Decoders in GGUF files: sizes and weights of several architectures, dequantised by the `gguf` library.

Every key of a file's table that belongs to its architecture has an effect here, or the file is refused: an
ignored one would give another model. Quantised blocks are converted to fp32 when they are read. Facts of
architectures are those of llama.cpp's `llama-model.cpp` and `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pimflow.errors import ModelError, one_line
from pimflow.zoo.language import angle_scaling
from pimflow.zoo.language.angle_scaling import AngleScaling
from pimflow.zoo.language.decoder import Decoder
from pimflow.zoo.language.decoder_parts import Experts, LatentAttention
from pimflow.zoo.language.gguf_architectures import ARCHITECTURES, Architecture
from pimflow.zoo.language.gguf_file import GgufFile, open_file
from pimflow.zoo.language.gguf_table import Table
from pimflow.zoo.language.gguf_weights import (
    FACTORS,
    LONG_FACTORS,
    SHORT_FACTORS,
    narrow_types,
    products_with_bias,
    read_weight,
    require_tensors,
)

_SIGMOID = 2  # of ``expert_gating_func``; 1 is softmax, 3 that over those that are chosen


def read_decoder(path: Path) -> Decoder:
    """Read the decoder in a file, without its weights.

    Raises
    ------
    ModelError
        If the library is not installed, the file cannot be read, or its architecture, a key of its table or a
        tensor is not supported.
    """
    open_file(path)  # raises errors of reading
    return _read_decoder(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read_decoder(path: Path, _: int) -> Decoder:
    file = open_file(path)
    family, where = file.field("general.architecture", str), f"'{path}'"
    _require_whole_model(file, family, where)
    table, architecture = Table(file, family), ARCHITECTURES[family]
    blocks = table.size("block_count")
    if blocks > len(file.tensors):
        raise ModelError(f"{where}: has too few tensors for {blocks} blocks; it is incomplete")
    heads, hidden = table.size("attention.head_count"), table.size("embedding_length")
    sizes = _head_sizes(table, architecture, hidden, heads)
    rows = math.prod(file.tensor("token_embd.weight").shape[1:])
    vocabulary = len(file.array("tokenizer.ggml.tokens", str)) or rows
    table.require("vocab_size", int, vocabulary)
    _require_neutral(table)
    feed_forward, mixture = table.size("feed_forward_length"), _experts(table, architecture, blocks)
    fields: dict[str, Any] = {
        "max_context": table.size("context_length"),
        **architecture.fields,
        "norm_epsilon": _epsilon(table, architecture),
        **_angles(file, table, architecture, sizes.get("rotary_size", sizes["head_size"])),
        **_scales(table, architecture, blocks, hidden, heads),
        **sizes,
        "windows": _windows(table, architecture, blocks),
        "unturned_layers": _blocks_without_rotation(architecture, blocks),
        "biases": products_with_bias(file),
    }
    if architecture.says_parallel:
        fields["parallel"] = table.value("use_parallel_residual", bool, True)
    else:
        table.require("use_parallel_residual", bool, False)
    decoder = Decoder(
        name=one_line(path.stem),
        layers=blocks,
        hidden=hidden,
        heads=heads,
        feed_forward=table.size("expert_feed_forward_length", feed_forward) if mixture else feed_forward,
        dense_feed_forward=feed_forward,
        experts=mixture,
        vocabulary=vocabulary,
        tied="output.weight" not in file.tensors,
        file=os.fspath(path.resolve()),
        source=where,
        **fields,
    )
    table.require_all_read()
    require_tensors(file, decoder)
    return replace(decoder, weight_types=narrow_types(file, decoder))


def _head_sizes(table: Table, architecture: Architecture, hidden: int, heads: int) -> dict[str, Any]:
    """Fields of a decoder for the sizes of heads."""
    if architecture.has_latent:
        return _latent_fields(table, heads)
    size = table.size("attention.key_length", hidden // heads)
    table.require("attention.value_length", int, size)
    return {"kv_heads": table.size("attention.head_count_kv", heads), "head_size": size}


def _require_whole_model(file: GgufFile, family: str, where: str) -> None:
    """Raise `ModelError` for other architectures, and for parts of models."""
    if family not in ARCHITECTURES:
        raise ModelError(
            f"{where}: is a '{family}'; of GGUF files, those of these architectures are supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if file.field("general.type", str, "model") != "model" or (file.field("split.count", int) or 1) > 1:
        raise ModelError(f"{where}: is not a whole model, but a part of one")


def _require_neutral(table: Table) -> None:
    """Raise `ModelError` for features that are switched on, and that no decoder here has."""
    table.require("attention.causal", bool, True)
    table.require("attention.clamp_kqv", float, 0.0)
    table.require("attention.max_alibi_bias", float, 0.0)
    table.require("pooling_type", int, 0)
    table.require("tensor_data_layout", str, "Meta AI original pth")


def _epsilon(table: Table, architecture: Architecture) -> float:
    """What the norms add to a variance."""
    kind = "layer_norm" if architecture.fields.get("norm") == "layer" else "layer_norm_rms"
    return table.number(f"attention.{kind}_epsilon")


def _angles(file: GgufFile, table: Table, architecture: Architecture, head_size: int) -> dict[str, Any]:
    """Fields of a decoder for the angles of rotary positions; raises `ModelError` for other scalings."""
    if architecture.fields.get("positions", "rotary") != "rotary":
        return {}
    turned = table.size("rope.dimension_count", head_size)
    base = None if "local_rotary_base" in architecture.fields else 10000.0
    fields: dict[str, Any] = {"rotary_base": table.number("rope.freq_base", base), "rotary_size": turned}
    if "local_rotary_base" in architecture.fields:
        local = architecture.fields["local_rotary_base"]
        fields["local_rotary_base"] = table.number("rope.freq_base_swa", local)
    return fields | _scaling(file, table, fields["rotary_base"], turned).fields()


def _scaling(file: GgufFile, table: Table, base: float, turned: int) -> AngleScaling:
    """The scaling of angles; raises `ModelError` for a kind that is not supported."""
    kind = table.value("rope.scaling.type", str, "linear")
    longest = table.size("context_length")
    length = table.size("rope.scaling.original_context_length", longest)
    old = table.number("rope.scale_linear", 1.0, zero=1.0)
    factor = table.number("rope.scaling.factor", old, zero=old)
    scale = table.number("rope.scaling.attn_factor", 1.0)
    if (short := _divisors(file, table, SHORT_FACTORS, turned)) is not None:
        _divisors(file, table, LONG_FACTORS, turned)
        if kind not in ("none", "linear", "longrope") or factor != 1:
            raise ModelError(f"{table.where}: scales angles in two ways: not supported")
        return angle_scaling.longrope(short, length, factor=longest / length, scale=scale)
    if kind not in ("none", "linear", "yarn") or (scale != 1 and kind != "none"):
        raise ModelError(f"{table.where}: scales angles of positions by '{one_line(kind)}': not supported")
    if kind == "yarn":
        fast = table.number("rope.scaling.yarn_beta_fast", 32.0)
        slow = table.number("rope.scaling.yarn_beta_slow", 1.0)
        scale = 1.0 if "rope.scaling.yarn_log_multiplier" in table else None  # scores are scaled by it
        angles = angle_scaling.RotaryAngles(base=base, turned=turned, length=length)
        scaling = angle_scaling.yarn(angles, factor=factor, scale=scale, fast=fast, slow=slow)
    else:
        scaling = angle_scaling.linear(factor if kind == "linear" else 1.0, turned)
    if (divisors := _divisors(file, table, FACTORS, turned)) is not None:
        scaling = replace(scaling, factors=tuple(np.multiply(scaling.factors, divisors).tolist()))
    return scaling


def _divisors(file: GgufFile, table: Table, name: str, turned: int) -> np.ndarray | None:
    """Divisors of frequencies that a tensor has; None without it, raises `ModelError` if it does not fit."""
    if name not in file.tensors:
        return None
    values = file.tensor(name).values(os.fspath(file.path))
    if values.shape != (turned // 2,) or not (np.isfinite(values) & (values > 0)).all():
        raise ModelError(f"{table.where}: '{name}' is not one divisor for each pair of a head")
    return values


def _scales(
    table: Table, architecture: Architecture, blocks: int, hidden: int, heads: int
) -> dict[str, float]:
    """Fields of a decoder for its constant factors and caps."""
    default = (heads / hidden) ** 0.5 if blocks == architecture.wide_layers else 0.0
    fields = {"score_scale": table.number("attention.scale", default, zero=default)}
    required = None if architecture.has_softcaps else 0.0
    for name, key in (("score_softcap", "attn_logit"), ("logit_softcap", "final_logit")):
        fields[name] = table.number(f"{key}_softcapping", required, zero=0.0)
    if architecture.scales_embedding:
        fields["embedding_scale"] = math.sqrt(hidden)
    if architecture.has_scales:
        for name in ("embedding_scale", "residual_scale"):
            fields[name] = table.number(name, 1.0, zero=1.0)
        fields["logit_scale"] = 1 / table.number("logit_scale", 1.0, zero=1.0)
    return fields


def _windows(table: Table, architecture: Architecture, blocks: int) -> tuple[int, ...]:
    """The sliding window of each block; empty if there is none."""
    period = architecture.window_period
    if period is None:
        table.require("attention.sliding_window", int, 0)
        return ()
    window = table.size("attention.sliding_window", None if period else 0, minimum=0)
    pattern = "attention.sliding_window_pattern"
    if type(table.file.fields.get(table.prefix + pattern)) is list:
        slides = table.value(pattern, list)
    else:
        period = table.size(pattern, period, minimum=0)
        slides = [not period or layer % period < period - 1 for layer in range(blocks)]
    if len(slides) < blocks or any(type(slide) is not bool for slide in slides):
        raise ModelError(f"{table.where}: {table.prefix}{pattern} does not say for each block if it slides")
    windows = tuple(window if slide else 0 for slide in slides[:blocks])
    return windows if any(windows) else ()


def _blocks_without_rotation(architecture: Architecture, blocks: int) -> frozenset[int]:
    """Blocks that do not rotate queries and keys."""
    period = architecture.unturned_period
    return frozenset(range(period - 1, blocks, period)) if period else frozenset()


def _experts(table: Table, architecture: Architecture, blocks: int) -> Experts | None:
    """The experts of each block; None if there are none."""
    count = table.value("expert_count", int, 0)
    if architecture.has_latent and table.value("leading_dense_block_count", int, 0) >= blocks:
        count = 0
    if architecture.has_experts is False or not count:
        table.require("expert_count", int, 0)
        table.require("expert_used_count", int, 0)
        return None
    table.require("expert_gating_func", int, *architecture.gates)
    shares = table.value("expert_weights_norm", bool, architecture.normalises_shares)
    if not architecture.has_latent and shares is not architecture.normalises_shares:
        raise ModelError(f"{table.where}: {table.prefix}expert_weights_norm is {shares}: not supported")
    more: dict[str, Any] = {}
    if architecture.has_latent:
        more = _routing(table)
    else:
        table.require("expert_shared_count", int, 0)
        table.require("expert_weights_scale", float, 0.0, 1.0)
    return Experts(
        count=table.size("expert_count"), used=table.size("expert_used_count"), normalised=shares, **more
    )


def _routing(table: Table) -> dict[str, Any]:
    """How the routers of DeepSeek choose."""
    groups = table.size("expert_group_count", 1, minimum=0) or 1
    shared = table.value("expert_shared_count", int, 0) or 0
    return {
        "scores": "sigmoid" if table.value("expert_gating_func", int, 1) == _SIGMOID else "softmax",
        "corrected": any(name.endswith(".exp_probs_b.bias") for name in table.file.tensors),
        "groups": groups,
        "used_groups": table.size("expert_group_used_count", 1, minimum=0) or 1,
        "group_best": 2 if groups > 1 else 1,
        "factor": table.number("expert_weights_scale", 1.0, zero=1.0),
        "shared": shared * table.size("expert_feed_forward_length"),
    }


def _latent_fields(table: Table, heads: int) -> dict[str, Any]:
    """Fields of a decoder whose keys and values are made from one vector a token.

    Newer files have the sizes of heads beside those of what is cached.
    """
    rank, turned = table.size("attention.kv_lora_rank"), table.size("rope.dimension_count")
    size, value_size = table.size("attention.key_length"), table.size("attention.value_length")
    if "attention.key_length_mla" in table:
        table.require("attention.key_length", int, rank + turned)
        table.require("attention.value_length", int, rank)
        table.require("attention.head_count_kv", int, 1)
        size = table.size("attention.key_length_mla")
        value_size = table.size("attention.value_length_mla")
    else:
        table.require("attention.head_count_kv", int, heads)
    factor = table.number("rope.scaling.factor", 1.0, zero=1.0)
    share = table.value("rope.scaling.yarn_log_multiplier", float, 0.0)
    scale = share * math.log(factor) + 1
    query_rank = table.size("attention.q_lora_rank", 0, minimum=0)
    return {
        "latent": LatentAttention(rank=rank, value_size=value_size, query_rank=query_rank),
        "head_size": size,
        "kv_heads": 1,
        "score_scale": scale**2 / math.sqrt(size),
        "rotary_size": turned,
        "dense_layers": table.value("leading_dense_block_count", int, 0),
    }


def weight(path: str, name: str) -> np.ndarray:
    """Read a weight by its name in `Decoder.weights`, in fp32."""
    file = open_file(Path(path))
    architecture = ARCHITECTURES[file.fields["general.architecture"]]
    return read_weight(file, read_decoder(Path(path)), name, architecture.pairs_neighbours)
