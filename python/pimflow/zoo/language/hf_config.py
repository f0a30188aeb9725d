"""Configurations in Hugging Face folders: ``config.json`` as fields of a decoder.

Every key has an effect here, is known to have none on inference, or the folder is refused.
"""

from __future__ import annotations

import math
from typing import Any

from pimflow.errors import ModelError, one_line
from pimflow.zoo.language import angle_scaling
from pimflow.zoo.language.angle_scaling import AngleScaling
from pimflow.zoo.language.decoder import CLAMPED_GAIN, CLAMPED_LIMIT
from pimflow.zoo.language.decoder_parts import Experts, LatentAttention
from pimflow.zoo.language.hf_config_file import Config, config_key
from pimflow.zoo.language.hf_types import ModelType

_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_erf",
    "relu": "relu",
}
_SCALES = ("mscale", "mscale_all_dim")
# Keys of the scalings of angles, by their kinds.
_SCALINGS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "truncate", *_SCALES},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}


def norm_epsilon(config: Config, model: ModelType) -> float:
    """What the norms add to a variance."""
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    present = [name for name in names if name in config.tree]
    if present:
        return config.number(present[0])
    return 1e-5 if "ffn_dim" in model.sizes.values() else config.number("rms_norm_eps")


def variant_fields(
    config: Config, kind: str, model: ModelType, hidden: int, head_size: int, layers: int
) -> dict[str, Any]:
    """Fields of a decoder that only some kinds of models have."""
    fields: dict[str, Any] = {"activation": _activation(config, kind, model)}
    if model.has_latent:
        heads = config.size(config_key(model, "num_attention_heads"))
        fields |= _latent_fields(config, model, heads, layers)
    fields["windows"] = _windows(config, model, layers)
    fields["unturned_layers"] = _layers_without_rotation(config, model, layers)
    fields["experts"] = _experts(config, kind, model, layers)
    if model.fields.get("positions", "rotary") == "rotary":
        fields |= _angles(config, kind, model, fields.get("rotary_size", head_size))
    for name in ("embedding_multiplier", "residual_multiplier"):
        if kind == "granite":
            fields[name.replace("multiplier", "scale")] = config.number(name, 1.0)
    if kind == "granite":
        fields["score_scale"] = config.number("attention_multiplier", 1.0)
        fields["logit_scale"] = 1 / config.number("logits_scaling", 1.0)
    if kind.startswith("gemma"):
        fields["embedding_scale"] = math.sqrt(hidden)
    if kind in ("gemma2", "gemma3_text"):
        fields["score_scale"] = config.number("query_pre_attn_scalar", 256.0) ** -0.5
        for name, key, cap in (("score", "attn_logit", 50.0), ("logit", "final_logit", 30.0)):
            key = f"{key}_softcapping"
            default = cap if kind == "gemma2" and key not in config.tree else 0.0
            fields[f"{name}_softcap"] = config.value(key, float, default)
    if kind == "gpt_neox":
        fields["parallel"] = config.value("use_parallel_residual", bool, True)
    if kind == "falcon":
        fields["kv_heads"] = 1
        config.value("num_kv_heads", int)  # of the other kind of Falcon
        config.require("multi_query", True)
        config.require("parallel_attn", True)
        config.require("num_ln_in_parallel_attn", 1)
    for name in ("new_decoder_architecture", "alibi", "apply_residual_connection_post_layernorm"):
        config.require(name, False)
    config.require("use_parallel_residual", False, *([True] if kind == "gpt_neox" else []))
    config.require("scale_attn_weights", True)
    config.require("scale_attn_by_inverse_layer_idx", False)
    config.require("add_cross_attention", False)
    config.require("do_layer_norm_before", True)
    config.require("word_embed_proj_dim", hidden)
    config.require("qk_layernorm", False)
    config.require("use_bidirectional_attention", False)
    for name in ("attention_bias", "mlp_bias", "enable_bias", "use_bias", "use_qkv_bias", "bias"):
        config.value(name, bool)  # tensors say which products have one
    return fields


def _activation(config: Config, kind: str, model: ModelType) -> str:
    """The activation; of models whose feed-forward has a gate, with that."""
    names = ("hidden_activation", "hidden_act", "activation_function", "activation")
    default = {"gemma": "gelu_pytorch_tanh", "opt": "relu", "gpt2": "gelu_new"}
    default |= dict.fromkeys(("gpt_neox", "falcon"), "gelu")
    given = [config.value(name, str) for name in names]
    name = next((value for value in given if value), default.get(kind.split("2")[0].split("3")[0], "silu"))
    if kind == "gemma":
        name = "gelu_pytorch_tanh"  # transformers takes it whatever older configurations say
    if name not in _ACTIVATIONS:
        raise ModelError(f"{config.where}: has the activation '{one_line(name)[:40]}': not supported")
    activation, gated = _ACTIVATIONS[name], "gate" in model.names
    if (fixed := model.fields.get("activation", activation)) != activation:
        config.require("swiglu_alpha", CLAMPED_GAIN)
        config.require("swiglu_limit", CLAMPED_LIMIT)
        return str(fixed)
    if gated and activation == "gelu":
        return "geglu"
    if gated != (activation == "swiglu"):
        raise ModelError(f"{config.where}: has the activation '{name}' in a place where it is not supported")
    return activation


def _layers_without_rotation(config: Config, model: ModelType, layers: int) -> frozenset[int]:
    """Layers that do not rotate queries and keys."""
    if not model.unturned_period:
        return frozenset()
    period = config.size("no_rope_layer_interval", model.unturned_period)
    turns = config.value("no_rope_layers", list)  # in spite of its name: 1 for a layer that rotates
    turns = turns or [(layer + 1) % period for layer in range(layers)]
    if len(turns) < layers or any(type(turn) is not int for turn in turns):
        raise ModelError(f"{config.where}: no_rope_layers in config.json is no number for each layer")
    return frozenset(layer for layer in range(layers) if not turns[layer])


def _windows(config: Config, model: ModelType, layers: int) -> tuple[int, ...]:
    """The sliding window of each layer; empty if there is none."""
    window = config.value("sliding_window", int, 0)
    kinds = config.value("layer_types", list)
    period = config.value("_sliding_window_pattern", int, model.pattern)
    period = config.value("sliding_window_pattern", int, period)
    uses = config.value("use_sliding_window", bool, bool(model.pattern) or model.window == "all")
    if not window or not uses:
        return ()
    if kinds is not None:
        if len(kinds) < layers or not {*kinds} <= {"sliding_attention", "full_attention"}:
            raise ModelError(f"{config.where}: config.json has layer_types that are not supported")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])
    if model.window == "all":
        return (window,) * layers
    if not period:
        raise ModelError(f"{config.where}: config.json does not say which layers have the sliding window")
    return tuple(window if (layer + 1) % period else 0 for layer in range(layers))


def _angles(config: Config, kind: str, model: ModelType, head_size: int) -> dict[str, Any]:
    """Fields of a decoder for the angles of rotary positions; raises `ModelError` for unknown scalings."""
    new = config.value("rope_parameters", dict) or {}
    old = config.value("rope_scaling", dict) or {}
    base = config.number("rope_theta", 1e6 if kind == "gemma3_text" else 10000.0)
    base = config.number("rotary_emb_base", base)
    local = config.number("rope_local_base_freq", 10000.0)
    share = config.value("partial_rotary_factor", float, model.rotation_share)
    share = config.value("rotary_pct", float, share)
    fields: dict[str, Any] = {}
    if "full_attention" in new:
        sliding, new = new.get("sliding_attention") or {}, new["full_attention"]
        if sliding.get("rope_type", "default") != "default":
            raise ModelError(f"{config.where}: scales the angles of layers with a window: not supported")
        local = float(sliding.get("rope_theta", local))
    if kind == "gemma3_text":
        fields["local_rotary_base"] = local
    scaling = {**old, **new}
    base = float(scaling.pop("rope_theta", base))
    share = float(scaling.pop("partial_rotary_factor", share))
    turned = int(head_size * share)
    fields |= {"rotary_base": base, "rotary_size": turned}
    return fields | _scaling(config, scaling, base, turned).fields()


def _scaling(config: Config, scaling: dict[str, Any], base: float, turned: int) -> AngleScaling:
    """The scaling of angles; raises `ModelError` for a kind or a key that is not supported."""
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    scaling = {name: value for name, value in scaling.items() if value is not None}
    known = {"default": set(), **_SCALINGS}
    if kind not in known:
        raise ModelError(f"{config.where}: scales angles by '{one_line(str(kind))[:40]}': not supported")
    if unread := scaling.keys() - known[kind] - {"original_max_position_embeddings", "finetuned"}:
        raise ModelError(f"{config.where}: scales angles with '{one_line(min(unread))[:40]}': not supported")
    try:
        return _scaled_angles(config, kind, scaling, base, turned)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise ModelError(f"{config.where}: its scaling of angles is incomplete") from None


def _scaled_angles(
    config: Config, kind: str, scaling: dict[str, Any], base: float, turned: int
) -> AngleScaling:
    """The scaling of a known kind; raises the errors of missing and wrong values."""
    if kind == "default":
        return AngleScaling()
    if kind == "linear":
        return angle_scaling.linear(float(scaling["factor"]), turned)
    longest = config.size("max_position_embeddings")
    original = config.value("original_max_position_embeddings", int, longest)
    length = float(scaling.get("original_max_position_embeddings", original))
    angles = angle_scaling.RotaryAngles(base=base, turned=turned, length=length)
    if kind == "llama3":
        low, high = (float(scaling[f"{end}_freq_factor"]) for end in ("low", "high"))
        factor = float(scaling["factor"])
        return angle_scaling.llama3(angles, factor=factor, low=low, high=high)
    factor = float(scaling.get("factor", longest / length))
    scale = scaling.get("attention_factor")
    if kind == "longrope":
        short = scaling["short_factor"]
        if len(short) != turned // 2:
            raise ValueError
        return angle_scaling.longrope(short, int(length), factor=factor, scale=scale)
    if scale is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        above, below = (0.1 * float(scaling[name]) * math.log(factor) + 1 for name in _SCALES)
        scale = above / below if factor > 1 else 1.0
    return angle_scaling.yarn(
        angles,
        factor=factor,
        scale=scale,
        fast=float(scaling.get("beta_fast") or 32),
        slow=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
    )


def _experts(config: Config, kind: str, model: ModelType, layers: int) -> Experts | None:
    """The experts of each layer; raises `ModelError` for a choice of layers that is not supported."""
    if not model.has_experts or _dense_layers(config, model, layers) == layers:
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


def _dense_layers(config: Config, model: ModelType, layers: int) -> int:
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


def _latent_fields(config: Config, model: ModelType, heads: int, layers: int) -> dict[str, Any]:
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
        "dense_layers": _dense_layers(config, model, layers),
        "dense_feed_forward": config.size("intermediate_size"),
    }
