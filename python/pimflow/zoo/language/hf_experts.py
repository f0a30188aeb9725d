"""Experts and latent attention in the configurations of Hugging Face folders."""

from __future__ import annotations

import math
from typing import Any

from pimflow.zoo.language.decoder_parts import Experts, LatentAttention
from pimflow.zoo.language.hf_config_file import Config
from pimflow.zoo.language.hf_types import ModelType


def experts(config: Config, kind: str, model: ModelType, layers: int) -> Experts | None:
    """The experts of each layer; raises `ModelError` for a choice of layers that is not supported."""
    if not model.has_experts or dense_layers(config, model, layers) == layers:
        return None
    config.require("decoder_sparse_step", 1)
    config.require("mlp_only_layers", [])
    config.require("clip_qkv")
    if "moe_intermediate_size" in model.sizes.values():
        config.value("intermediate_size", int)  # of layers without experts
    shares = model.normalises_shares
    if shares is None:
        shares = config.value("norm_topk_prob", bool, model.has_latent)
    config.require("norm_topk_prob", shares)
    count = config.value("num_experts", int, config.value("n_routed_experts", int))
    count = config.size("num_local_experts", count)  # transformers 5 writes this name
    more = _routing(config, kind, model) if model.has_latent else {}
    return Experts(count=count, used=config.size("num_experts_per_tok"), normalised=shares, **more)


def dense_layers(config: Config, model: ModelType, layers: int) -> int:
    """How many layers, the first ones, have no experts."""
    return min(config.value("first_k_dense_replace", int, 0), layers) if model.has_latent else 0


def _routing(config: Config, kind: str, model: ModelType) -> dict[str, Any]:
    """How DeepSeek's routers choose."""
    is_third = kind == "deepseek_v3"
    config.require("scoring_func", model.scores)
    config.require("moe_layer_freq", 1)
    method = config.value("topk_method", str, "noaux_tc" if is_third else "greedy")
    config.require("topk_method", *(["noaux_tc"] if is_third else ["greedy", "group_limited_greedy"]))
    groups, used_groups = config.value("n_group", int) or 1, config.value("topk_group", int) or 1
    if method == "greedy":
        groups, used_groups = 1, 1
    shared = config.size("n_shared_experts", 1 if is_third else 2)
    return {
        "scores": model.scores,
        "corrected": is_third,
        "groups": groups,
        "used_groups": used_groups,
        "group_best": 2 if is_third and groups > 1 else 1,
        "factor": config.number("routed_scaling_factor", 2.5 if is_third else 1.0),
        "shared": config.size("moe_intermediate_size") * shared,
    }


def latent_fields(config: Config, model: ModelType, heads: int, layers: int) -> dict[str, Any]:
    """Fields of a decoder whose keys and values are made from one vector a token."""
    config.require("num_key_value_heads", heads)
    still, turned = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    for name in ("head_dim", "qk_head_dim", "num_nextn_predict_layers"):
        config.value(name, int)  # follow from others, or of layers that are left out
    latent = LatentAttention(
        rank=config.size("kv_lora_rank"),
        value_size=config.size("v_head_dim"),
        query_rank=config.value("q_lora_rank", int, 0),
    )
    scaling = {**(config.value("rope_scaling", dict) or {}), **(config.value("rope_parameters", dict) or {})}
    factor, share = scaling.get("factor"), scaling.get("mscale_all_dim")
    scale = 0.1 * float(share) * math.log(float(factor)) + 1 if factor and share else 1.0
    return {
        "latent": latent,
        "head_size": still + turned,
        "kv_heads": 1,
        "rotary_size": turned,
        "score_scale": scale**2 / math.sqrt(still + turned),
        "dense_layers": dense_layers(config, model, layers),
        "dense_feed_forward": config.size("intermediate_size"),
    }
