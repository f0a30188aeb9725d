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
from pimflow.weight_types import WEIGHT_TYPES
from pimflow.zoo.language import angle_scaling
from pimflow.zoo.language.angle_scaling import AngleScaling
from pimflow.zoo.language.decoder import BLOCK_PRODUCTS, Decoder, Experts, Shape
from pimflow.zoo.language.gguf_architectures import ARCHITECTURES, Architecture
from pimflow.zoo.language.gguf_file import GgufFile, open_file

# Names in a file of the weights of a block, and of all others.
_BLOCK = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
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
    "gate": "ffn_gate_exps",
    "up": "ffn_up_exps",
    "down": "ffn_down_exps",
}
_OTHER = {"tokens": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output"}
_FUSED_ATTENTION, _FACTORS = "attn_qkv", "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
# Keys that have no effect on the values of a model.
_WITHOUT_EFFECT = (
    "rope.scaling.attn_factor",  # without rotary positions; else it is read
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
)


class _Table:
    """The keys of an architecture in the table of a file; those that are not read are refused."""

    def __init__(self, file: GgufFile, family: str) -> None:
        self.file, self.prefix, self.where = file, f"{family}.", f"'{file.path}'"
        self._read: set[str] = set(_WITHOUT_EFFECT)

    def value(self, name: str, kind: type, default: Any = None) -> Any:
        """A value, or `default`; raises `ModelError` if it is of another type."""
        self._read.add(name)
        return self.file.field(self.prefix + name, kind, default)

    def size(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """A size, also as an array of equal ones, one for each block; raises `ModelError` if it is none."""
        self._read.add(name)
        key = self.prefix + name
        sizes = self.file.fields.get(key)
        if type(sizes) is list and sizes:
            if any(type(size) is not int or size != sizes[0] for size in sizes):
                raise ModelError(f"{self.where}: {key} differs between blocks, which is not supported")
            value: int | None = sizes[0]
        else:
            value = self.file.field(key, int, default)
        if value is None or value < minimum:
            raise ModelError(f"{self.where}: has no {key}, a number from {minimum} on; it is incomplete")
        return value

    def number(self, name: str, default: float | None = None, *, zero: float | None = None) -> float:
        """A positive number, or `zero` in place of 0; raises `ModelError` if it is none."""
        value = self.value(name, float, default)
        if value == 0 and zero is not None:
            return zero
        if value is None:
            raise ModelError(f"{self.where}: has no {self.prefix}{name}; it is incomplete")
        if not 0 < value < math.inf:
            raise ModelError(f"{self.where}: {self.prefix}{name} is {value}, no finite number above zero")
        return float(value)

    def require(self, name: str, kind: type, *neutral: object) -> None:
        """Raise `ModelError` if there is a value other than the `neutral` ones, which change nothing."""
        value = self.value(name, kind)
        if value is not None and value not in neutral:
            raise ModelError(f"{self.where}: {self.prefix}{name} is {value}, which is not supported")

    def require_all_read(self) -> None:
        """Raise `ModelError` if there is a key that nothing has read."""
        names = {name.removeprefix(self.prefix) for name in self.file.fields if name.startswith(self.prefix)}
        if unread := sorted(names - self._read):
            raise ModelError(
                f"{self.where}: has the key '{one_line(self.prefix + unread[0])[:80]}', which is not "
                "supported but may change the results"
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
    table, architecture = _Table(file, family), ARCHITECTURES[family]
    blocks = table.size("block_count")
    if blocks > len(file.tensors):
        raise ModelError(f"{where}: has too few tensors for {blocks} blocks; it is incomplete")
    heads, hidden = table.size("attention.head_count"), table.size("embedding_length")
    head_size = table.size("attention.key_length", hidden // heads)
    table.require("attention.value_length", int, head_size)
    rows = math.prod(file.tensor("token_embd.weight").shape[1:])
    vocabulary = len(file.array("tokenizer.ggml.tokens", str)) or rows
    table.require("vocab_size", int, vocabulary)
    _require_neutral(table)
    feed_forward, experts = table.size("feed_forward_length"), _experts(table, architecture)
    fields: dict[str, Any] = {
        **architecture.fields,
        "norm_epsilon": _epsilon(table, architecture),
        **_angles(file, table, architecture, head_size),
        **_scales(table, architecture, blocks, hidden, heads),
        "windows": _windows(table, architecture, blocks),
        "unturned_layers": _blocks_without_rotation(architecture, blocks),
        "biases": _products_with_bias(file),
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
        kv_heads=table.size("attention.head_count_kv", heads),
        head_size=head_size,
        feed_forward=table.size("expert_feed_forward_length", feed_forward) if experts else feed_forward,
        experts=experts,
        vocabulary=vocabulary,
        max_context=fields.pop("max_context", table.size("context_length")),
        tied="output.weight" not in file.tensors,
        file=os.fspath(path.resolve()),
        source=where,
        **fields,
    )
    table.require_all_read()
    _require_tensors(file, decoder)
    return replace(decoder, weight_types=_weight_types(file, decoder))


def _require_whole_model(file: GgufFile, family: str, where: str) -> None:
    """Raise `ModelError` for other architectures, and for parts of models."""
    if family not in ARCHITECTURES:
        raise ModelError(
            f"{where}: is a '{family}'; of GGUF files, those of these architectures are supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if file.field("general.type", str, "model") != "model" or (file.field("split.count", int) or 1) > 1:
        raise ModelError(f"{where}: is not a whole model, but a part of one")


def _require_neutral(table: _Table) -> None:
    """Raise `ModelError` for features that are switched on, and that no decoder here has."""
    table.require("attention.causal", bool, True)
    table.require("attention.clamp_kqv", float, 0.0)
    table.require("attention.max_alibi_bias", float, 0.0)
    table.require("pooling_type", int, 0)
    table.require("tensor_data_layout", str, "Meta AI original pth")


def _experts(table: _Table, architecture: Architecture) -> Experts | None:
    """The experts of each block; None if there are none."""
    if architecture.normalises_shares is None or not table.value("expert_count", int, 0):
        table.require("expert_count", int, 0)
        table.require("expert_used_count", int, 0)
        return None
    table.require("expert_shared_count", int, 0)
    table.require("expert_gating_func", int, 0, 1)  # 1 is softmax
    table.require("expert_weights_scale", float, 0.0, 1.0)
    shares = table.value("expert_weights_norm", bool, architecture.normalises_shares)
    if shares is not architecture.normalises_shares:
        raise ModelError(f"{table.where}: {table.prefix}expert_weights_norm is {shares}: not supported")
    return Experts(count=table.size("expert_count"), used=table.size("expert_used_count"), normalised=shares)


def _epsilon(table: _Table, architecture: Architecture) -> float:
    """What the norms add to a variance."""
    kind = "layer_norm" if architecture.fields.get("norm") == "layer" else "layer_norm_rms"
    return table.number(f"attention.{kind}_epsilon")


def _angles(file: GgufFile, table: _Table, architecture: Architecture, head_size: int) -> dict[str, Any]:
    """Fields of a decoder for the angles of rotary positions; raises `ModelError` for other scalings."""
    if architecture.fields.get("positions") == "learned":
        return {}
    turned = table.size("rope.dimension_count", head_size)
    base = None if "local_rotary_base" in architecture.fields else 10000.0
    fields: dict[str, Any] = {"rotary_base": table.number("rope.freq_base", base), "rotary_size": turned}
    if "local_rotary_base" in architecture.fields:
        local = architecture.fields["local_rotary_base"]
        fields["local_rotary_base"] = table.number("rope.freq_base_swa", local)
    return fields | _scaling(file, table, fields["rotary_base"], turned).fields()


def _scaling(file: GgufFile, table: _Table, base: float, turned: int) -> AngleScaling:
    """The scaling of angles; raises `ModelError` for a kind that is not supported."""
    kind = table.value("rope.scaling.type", str, "linear")
    longest = table.size("context_length")
    length = table.size("rope.scaling.original_context_length", longest)
    old = table.number("rope.scale_linear", 1.0, zero=1.0)
    factor = table.number("rope.scaling.factor", old, zero=old)
    scale = table.number("rope.scaling.attn_factor", 1.0)
    if (short := _divisors(file, table, _SHORT_FACTORS, turned)) is not None:
        _divisors(file, table, _LONG_FACTORS, turned)
        if kind not in ("none", "linear", "longrope") or factor != 1:
            raise ModelError(f"{table.where}: scales angles in two ways: not supported")
        return angle_scaling.longrope(short, length, factor=longest / length, scale=scale)
    if kind not in ("none", "linear", "yarn") or (scale != 1 and kind != "none"):
        raise ModelError(f"{table.where}: scales angles of positions by '{one_line(kind)}': not supported")
    if kind == "yarn":
        fast = table.number("rope.scaling.yarn_beta_fast", 32.0)
        slow = table.number("rope.scaling.yarn_beta_slow", 1.0)
        scaling = angle_scaling.yarn(base, turned, length, factor=factor, fast=fast, slow=slow)
    else:
        scaling = angle_scaling.linear(factor if kind == "linear" else 1.0, turned)
    if (divisors := _divisors(file, table, _FACTORS, turned)) is not None:
        scaling = replace(scaling, factors=tuple(np.multiply(scaling.factors, divisors).tolist()))
    return scaling


def _divisors(file: GgufFile, table: _Table, name: str, turned: int) -> np.ndarray | None:
    """Divisors of frequencies that a tensor has; None without it, raises `ModelError` if it does not fit."""
    if name not in file.tensors:
        return None
    values = file.tensor(name).values(os.fspath(file.path))
    if values.shape != (turned // 2,) or not (np.isfinite(values) & (values > 0)).all():
        raise ModelError(f"{table.where}: '{name}' is not one divisor for each pair of a head")
    return values


def _scales(
    table: _Table, architecture: Architecture, blocks: int, hidden: int, heads: int
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


def _windows(table: _Table, architecture: Architecture, blocks: int) -> tuple[int, ...]:
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


def _products_with_bias(file: GgufFile) -> frozenset[str]:
    """Products with a bias, by the tensors of the first block and of the output."""
    biased = {name for name in BLOCK_PRODUCTS if f"blk.0.{_BLOCK[name]}.bias" in file.tensors}
    if f"blk.0.{_FUSED_ATTENTION}.bias" in file.tensors:
        biased |= {"query", "key", "value"}
    return frozenset(biased | ({"head"} if "output.bias" in file.tensors else set()))


def _require_tensors(file: GgufFile, decoder: Decoder) -> None:
    """Raise `ModelError` unless the tensors of `file` are the weights of `decoder`."""
    where, expected = decoder.source, {}
    read = {_FACTORS, _SHORT_FACTORS, _LONG_FACTORS} if decoder.positions == "rotary" else set()
    for name, shape in decoder.weights().items():
        *inner, rows = _stored_axes(name, shape)
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


def _stored_axes(name: str, shape: Shape) -> Shape:
    """The axes of a weight in a file, the fastest first: inputs of a product or values of a row."""
    if name.endswith(".table"):
        return shape[::-1]
    return (*shape[1:], shape[0]) if len(shape) == 3 else shape


def _place(file: GgufFile, decoder: Decoder, name: str) -> tuple[str, int]:
    """The tensor of a weight, and its first row there: some files have several products in one."""
    *block, part, kind = name.split(".")
    suffix = "bias" if kind == "bias" else "weight"
    if not block:
        return f"{_OTHER[part]}.{suffix}", 0
    prefix, begin = f"blk.{block[1]}.", 0
    if decoder.experts and part in _EXPERTS:
        return f"{prefix}{_EXPERTS[part]}.{suffix}", 0
    stored = _BLOCK[part]
    if part in ("query", "key", "value") and f"{prefix}{_FUSED_ATTENTION}.weight" in file.tensors:
        stored = _FUSED_ATTENTION
        queries, keys = decoder.heads * decoder.head_size, decoder.kv_heads * decoder.head_size
        begin = {"query": 0, "key": queries, "value": queries + keys}[part]
    elif part in ("gate", "up") and f"{prefix}ffn_gate.weight" not in file.tensors:
        gated = f"layers.{block[1]}.gate.weight" in decoder.block_weights(int(block[1]))
        stored, begin = "ffn_up", decoder.feed_forward if gated and part == "up" else 0
    return f"{prefix}{stored}.{suffix}", begin


def _weight_types(file: GgufFile, decoder: Decoder) -> dict[str, str]:
    """Types of the matrices that are stored in blocks; others are widened, or as wide as the device's."""
    kinds = {
        name: file.tensor(_place(file, decoder, name)[0]).kind.name.lower()
        for name, shape in decoder.weights().items()
        if len(shape) == 2
    }
    return {
        name: kind for name, kind in kinds.items() if kind in WEIGHT_TYPES and WEIGHT_TYPES[kind].block > 1
    }


def weight(path: str, name: str) -> np.ndarray:
    """Read a weight by its name in `Decoder.weights`, in fp32."""
    file, decoder = open_file(Path(path)), read_decoder(Path(path))
    tensor, begin = _place(file, decoder, name)
    *_, rows = _stored_axes(name, decoder.weights()[name])
    values = file.tensor(tensor).values(path, begin, rows)
    architecture = ARCHITECTURES[file.fields["general.architecture"]]
    if architecture.pairs_neighbours and name.split(".")[-2] in ("query", "key"):
        values = _halves(values, decoder)
    return np.ascontiguousarray(values.swapaxes(-1, -2) if name.endswith(".weight") else values)


def _halves(values: np.ndarray, decoder: Decoder) -> np.ndarray:
    """Rows of heads whose pairs are the halves of what is rotated, from rows whose pairs are neighbours."""
    size, turned = decoder.head_size, decoder.turned_size
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, size)]
    heads = values.reshape(-1, size, *values.shape[1:])
    return heads[:, order].reshape(values.shape)
