"""Kinds of models in Hugging Face folders: their weights, and what configurations leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_LLAMA = {
    "tokens": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "block": "model.layers.{}.",
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GEMMA2 = {
    **_LLAMA,
    "attention_result_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_result_norm": "post_feedforward_layernorm",
}
_PHI3 = {
    **_LLAMA,
    **dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj"),
    **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
}
_UNGATED = {part: name for part, name in _LLAMA.items() if part != "gate"}
_PHI = {
    **_UNGATED,
    "norm": "model.final_layernorm",
    "attention": "self_attn.dense",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
_STARCODER2 = {**_UNGATED, "up": "mlp.c_fc", "down": "mlp.c_proj"}
_GPT2 = {
    "tokens": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "block": "transformer.h.{}.",
    "attention_norm": "ln_1",
    **dict.fromkeys(("query", "key", "value"), "attn.c_attn"),
    "attention": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_NEOX = {
    "tokens": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
    "block": "gpt_neox.layers.{}.",
    "attention_norm": "input_layernorm",
    **dict.fromkeys(("query", "key", "value"), "attention.query_key_value"),
    "attention": "attention.dense",
    "feed_forward_norm": "post_attention_layernorm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
_BLOOM = {
    **_NEOX,
    "tokens": "transformer.word_embeddings",
    "tokens_norm": "transformer.word_embeddings_layernorm",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "block": "transformer.h.{}.",
    **dict.fromkeys(("query", "key", "value"), "self_attention.query_key_value"),
    "attention": "self_attention.dense",
}
_OPT = {
    "tokens": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
    "block": "model.decoder.layers.{}.",
    "attention_norm": "self_attn_layer_norm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention": "self_attn.out_proj",
    "feed_forward_norm": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}


# Tensors of experts have a number for the expert.
_MIXTRAL = {
    **_LLAMA,
    "router": "block_sparse_moe.gate",
    "gate": "block_sparse_moe.experts.{}.w1",
    "up": "block_sparse_moe.experts.{}.w3",
    "down": "block_sparse_moe.experts.{}.w2",
}
_EXPERTS = {
    **_LLAMA,
    "router": "mlp.gate",
    "gate": "mlp.experts.{}.gate_proj",
    "up": "mlp.experts.{}.up_proj",
    "down": "mlp.experts.{}.down_proj",
}
_DEEPSEEK = {
    **{part: name for part, name in _EXPERTS.items() if part not in ("key", "value")},
    "query_latent": "self_attn.q_a_proj",
    "query_latent_norm": "self_attn.q_a_layernorm",
    "query": "self_attn.q_b_proj",
    "whole_query": "self_attn.q_proj",
    "latent": "self_attn.kv_a_proj_with_mqa",
    "latent_norm": "self_attn.kv_a_layernorm",
    "key_heads": "self_attn.kv_b_proj",
    "value_heads": "self_attn.kv_b_proj",
    "router_correction": "mlp.gate.e_score_correction_bias",
    **{f"dense_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_GPT_OSS = {
    **_LLAMA,
    "sinks": "self_attn.sinks",
    "router": "mlp.router",
    "gate": "mlp.experts.gate_up_proj",
    "up": "mlp.experts.gate_up_proj",
    "down": "mlp.experts.down_proj",
}


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """What a ``model_type`` says, beside the configuration.

    Attributes
    ----------
    names : mapping of str to str
        Names of the weights in the files; of those of a block without the prefix ``block``.
    fields : mapping of str to object
        Fields of `Decoder` that it fixes.
    sizes : mapping of str to str
        Keys of the configuration that have other names than Llama's.
    scale_offset : float
        What is added to the scales of norms.
    transposed : bool
        Whether products are stored as [inputs, outputs].
    by_head : bool
        Whether queries, keys and values of each head follow one another in their one product.
    rotation_share : float
        Share of a head that is rotated, if the configuration does not say it.
    tied : bool
        Whether the output is tied if the configuration does not say it.
    max_context : int, optional
        Tokens of the longest context if the configuration does not say it.
    window : str
        Which layers have the sliding window that the configuration gives: ``all``, none if empty, or those
        that ``pattern`` or the key ``layer_types`` says.
    unturned_period : int
        n if each n-th layer rotates nothing unless the configuration says which layers do; else 0.
    normalises_shares : bool, optional
        Whether the shares of chosen experts sum to 1; None if the configuration says it.
    joins_experts : bool
        Whether a layer has one tensor of all experts, [experts, inputs, outputs], in which gate and up take
        turns.
    pairs_neighbours : bool
        Whether rotary positions turn neighbouring elements, not halves.
    has_latent : bool
        Whether keys and values are made from one vector, and the first layers may have no experts.
    scores : str
        How a router's shares are made (`Experts`).
    """

    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    fields: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    scale_offset: float = 0.0
    transposed: bool = False
    by_head: bool = False
    rotation_share: float = 1.0
    tied: bool = False
    max_context: int | None = None
    window: str = ""
    pattern: int = 0
    unturned_period: int = 0
    has_experts: bool = False
    normalises_shares: bool | None = None
    joins_experts: bool = False
    pairs_neighbours: bool = False
    has_latent: bool = False
    scores: str = "softmax"


_GEMMA = {"scale_offset": 1.0, "tied": True}
_MOE_SIZES = {"intermediate_size": "moe_intermediate_size"}
_LAYER = {"norm": "layer"}
MODEL_TYPES = {
    "llama": ModelType(),
    "mistral": ModelType(window="all"),
    "mixtral": ModelType(names=_MIXTRAL, window="all", has_experts=True, normalises_shares=True),
    "granite": ModelType(),
    "smollm3": ModelType(window="pattern", unturned_period=4),
    "qwen2": ModelType(window="pattern"),
    "qwen3": ModelType(fields={"query_norm": "heads"}, window="pattern"),
    "qwen3_moe": ModelType(
        names=_EXPERTS, fields={"query_norm": "heads"}, sizes=_MOE_SIZES, window="pattern", has_experts=True
    ),
    "olmoe": ModelType(names=_EXPERTS, fields={"query_norm": "whole"}, has_experts=True),
    "deepseek_v2": ModelType(
        names=_DEEPSEEK, sizes=_MOE_SIZES, has_experts=True, normalises_shares=False, has_latent=True
    ),
    "deepseek_v3": ModelType(
        names=_DEEPSEEK, sizes=_MOE_SIZES, has_experts=True, has_latent=True, scores="sigmoid"
    ),
    "gpt_oss": ModelType(
        names=_GPT_OSS,
        fields={"activation": "clamped_swiglu", "sinks": True},
        window="pattern",
        pattern=2,
        has_experts=True,
        normalises_shares=True,
        joins_experts=True,
    ),
    "gemma": ModelType(**_GEMMA),
    "gemma2": ModelType(names=_GEMMA2, fields={"result_norms": True}, window="pattern", pattern=2, **_GEMMA),
    "gemma3_text": ModelType(
        names=_GEMMA2,
        fields={"result_norms": True, "query_norm": "heads"},
        window="pattern",
        pattern=6,
        **_GEMMA,
    ),
    "phi3": ModelType(names=_PHI3, window="all"),
    "olmo2": ModelType(
        names=_GEMMA2, fields={"query_norm": "whole", "input_norms": False, "result_norms": True}
    ),
    "starcoder2": ModelType(names=_STARCODER2, fields=_LAYER, window="all"),
    "stablelm": ModelType(fields=_LAYER, rotation_share=0.25),
    "phi": ModelType(
        names=_PHI, fields={**_LAYER, "parallel": True, "shares_norm": True}, rotation_share=0.5
    ),
    "gpt2": ModelType(
        names=_GPT2,
        fields={**_LAYER, "positions": "learned"},
        sizes={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
        },
        transposed=True,
        tied=True,
    ),
    "gpt_neox": ModelType(names=_NEOX, fields=_LAYER, by_head=True, rotation_share=0.25),
    "bloom": ModelType(
        names=_BLOOM,
        fields={**_LAYER, "positions": "alibi", "embedding_norm": True, "activation": "gelu"},
        sizes={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "seq_length",
        },
        by_head=True,
        tied=True,
        max_context=2048,
    ),
    "falcon": ModelType(
        names=_BLOOM,
        fields={**_LAYER, "parallel": True, "shares_norm": True},
        sizes={"intermediate_size": "ffn_hidden_size"},
        tied=True,
        max_context=2048,
    ),
    "opt": ModelType(
        names=_OPT,
        fields={**_LAYER, "positions": "learned", "position_offset": 2},
        sizes={"intermediate_size": "ffn_dim"},
        tied=True,
    ),
}
