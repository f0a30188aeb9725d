"""Experts and latent attention in the tables of GGUF files."""

from __future__ import annotations

import math
from typing import Any

from pimflow.errors import ModelError
from pimflow.zoo.language.decoder_parts import Experts, LatentAttention
from pimflow.zoo.language.gguf_architectures import Architecture
from pimflow.zoo.language.gguf_table import Table

_SIGMOID = 2  # of ``expert_gating_func``; 1 is softmax, 3 that over those that are chosen


def experts(table: Table, architecture: Architecture, blocks: int) -> Experts | None:
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


def latent_fields(table: Table, heads: int) -> dict[str, Any]:
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
