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
from pimflow.zoo.language.gguf_architectures import ARCHITECTURES, Architecture
from pimflow.zoo.language.gguf_experts import experts, latent_fields
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
    feed_forward, mixture = table.size("feed_forward_length"), experts(table, architecture, blocks)
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
        return latent_fields(table, heads)
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


def weight(path: str, name: str) -> np.ndarray:
    """Read a weight by its name in `Decoder.weights`, in fp32."""
    file = open_file(Path(path))
    architecture = ARCHITECTURES[file.fields["general.architecture"]]
    return read_weight(file, read_decoder(Path(path)), name, architecture.pairs_neighbours)
