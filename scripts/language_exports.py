"""Small decoders of many families, drawn by transformers, in every form in which people have them.

Needs torch, transformers, onnxscript and gguf. GGUF is laid out as by llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

VOCABULARY, PLACES = 320, 32
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HALF = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4 + [1.5] * 4,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 256,
}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# By family: the name of its configuration, and what differs from `SIZES`.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama, llama3": ("Llama", {"rope_theta": 5e5, "rope_scaling": _LLAMA3}),
    "llama, yarn": ("Llama", {"rope_scaling": _YARN}),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, **_HALF}),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "query_pre_attn_scalar": 32, **_HALF}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "phi3": ("Phi3", {}),
    "phi3, longrope": ("Phi3", {"rope_scaling": _LONG, "original_max_position_embeddings": 256}),
    "granite": ("Granite", {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.2}),
    "starcoder2": ("Starcoder2", {"use_bias": True}),
    "olmo2": ("Olmo2", {}),
    "gpt2": ("GPT2", _GPT2),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.25}),
    "opt": ("OPT", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "falcon": ("Falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.25}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**_YARN, "rope_theta": 1e4},
            **_HALF,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, "num_experts": 4, "norm_topk_prob": True, **_EXPERTS}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            **_EXPERTS,
            **_MLA,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {"n_routed_experts": 4, "first_k_dense_replace": 1, **_EXPERTS, **_MLA, "q_lora_rank": None},
    ),
}


def make_model(family: str) -> Any:
    """A model with drawn weights, spread so that the leads of its tokens are clear."""
    name, changes = FAMILIES[family]
    config_class = getattr(transformers, f"{name}Config")
    known = {name for name in SIZES if hasattr(config_class(), name)}
    own = {"vocab_size"} if name in ("GPT2", "Bloom") else known
    config = config_class(
        **{name: SIZES[name] for name in known & (own | {"vocab_size", "hidden_size"})} | changes
    )
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(13 if family == "gemma" else 7)  # 7 has two tokens with one logit
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=draw)
            if parameter.dim() < 2:
                parameter.add_(values * 0.2)
            elif any(part in label for part in ("embed", "wte", "wpe")):
                parameter.copy_(values * (0.05 if "gemma" in family else 0.3))
            else:
                parameter.copy_(values * 1.2 / parameter.shape[-1] ** 0.5)
        for label, buffer in model.named_buffers():
            if label.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn(buffer.shape, generator=draw) * 0.1)
    model.generation_config.eos_token_id = None
    return model


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers generates."""
    ids = torch.tensor([prompt])
    result = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return result[0, len(prompt) :].tolist()


def write_folder(family: str, folder: Path) -> Path:
    """As ``save_pretrained`` does."""
    make_model(family).save_pretrained(folder)
    return folder


def write_onnx(family: str, folder: Path, attention: str = "sdpa") -> Path:
    """By ``torch.onnx.export``, with every length open and Optimum's names."""
    model = make_model(family)
    model.set_attn_implementation(attention)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("batched_mm")  # its default one is no operator of ONNX
    caches = _cache_shapes(model)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Any) -> Any:
            """Logits, and the caches with the tokens of the step."""
            result = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=transformers.DynamicCache(past),
                use_cache=True,
            )
            return result.logits, [(layer.keys, layer.values) for layer in result.past_key_values.layers]

    batch, tokens, before = 2, 3, 5
    past = [tuple(torch.zeros(batch, h, before, d) for h, d in layer) for layer in caches]
    auto = torch.export.Dim.AUTO
    both = {0: auto, 1: auto}
    names = [f"{layer}.{part}" for layer in range(len(caches)) for part in ("key", "value")]
    arguments = (
        torch.ones(batch, tokens, dtype=torch.int64),
        torch.ones(batch, tokens + before, dtype=torch.int64),
        torch.arange(before, before + tokens)[None].repeat(batch, 1),
        past,
    )
    torch.onnx.export(
        Step(),
        arguments,
        folder / "model.onnx",
        input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{n}" for n in names)],
        output_names=["logits", *(f"present.{n}" for n in names)],
        dynamic_shapes=(both, both, both, [({0: auto, 2: auto},) * 2 for _ in past]),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    return folder / "model.onnx"


def _cache_shapes(model: Any) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """By layer, heads and size of keys, and of values."""
    with torch.no_grad():
        cache = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    return [tuple((x.shape[1], x.shape[3]) for x in (layer.keys, layer.values)) for layer in cache.layers]


def write_static(family: str, folder: Path) -> Path:
    """A program with transformers' static cache, whose buffers it writes to."""
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    model = make_model(family)
    cache = {"batch_size": 1, "max_cache_len": PLACES}
    model.generation_config = transformers.GenerationConfig(
        use_cache=True, cache_implementation="static", max_length=PLACES, cache_config=cache
    )
    module = TorchExportableModuleForDecoderOnlyLM(model, **cache)
    program = module.export(input_ids=torch.tensor([[5]]), cache_position=torch.tensor([3]))
    torch.export.save(program, folder / "static.pt2")
    return folder / "static.pt2"


def write_dynamic(family: str, folder: Path) -> Path:
    """The program of a decoding step with a dynamic cache, by transformers' own exporter."""
    from transformers.exporters import DynamoConfig, DynamoExporter

    ids = torch.tensor([[5, 17, 200, 43, 9]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    exported = DynamoExporter().export_for_generation(make_model(family), inputs, DynamoConfig(dynamic=True))
    exported.save_pretrained(folder)
    return folder / "decode.pt2"


_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "phi": "phi2",
    "gpt_neox": "gptneox",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
}


def write_gguf(family: str, folder: Path) -> Path:
    """As llama.cpp's convert_hf_to_gguf.py lays out keys and tensors."""
    write_folder(family, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    kind = config["model_type"]
    name = _ARCHITECTURES.get(kind, kind)
    by_name = {text: architecture for architecture, text in gguf.MODEL_ARCH_NAMES.items()}
    if name not in by_name:
        raise NotImplementedError(f"GGUF has no architecture for {kind}")
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, name)
    _write_keys(writer, name, config)
    names = gguf.get_tensor_name_map(by_name[name], _first(config, "num_hidden_layers", "n_layer"))
    for label, values in _gguf_tensors(name, config, tensors).items():
        stored = label if label.startswith("rope_") else names.get_name(label, (".weight", ".bias"))
        if stored is None:
            raise NotImplementedError(f"GGUF has no name for {label}")
        writer.add_tensor(stored, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _first(config: dict[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _write_keys(writer: Any, name: str, config: dict[str, Any]) -> None:
    """The table of a file."""
    hidden, heads = _first(config, "hidden_size", "n_embd"), _first(config, "num_attention_heads", "n_head")
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head_size = config.get("head_dim") or hidden // heads
    writer.add_context_length(_first(config, "max_position_embeddings", "n_positions") or 512)
    writer.add_embedding_length(hidden)
    writer.add_block_count(_first(config, "num_hidden_layers", "n_layer"))
    writer.add_feed_forward_length(_first(config, "intermediate_size", "n_inner") or 4 * hidden)
    writer.add_head_count(heads)
    shared = 1 if name in ("deepseek2", "falcon") else _first(config, "num_key_value_heads") or heads
    writer.add_head_count_kv(shared)
    if config.get("rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    epsilon = _first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    if epsilon:
        writer.add_layer_norm_eps(epsilon)
    if rope.get("rope_theta"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("head_dim") and name != "deepseek2":
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    share = rope.get("partial_rotary_factor") or config.get("rotary_pct")
    if name in ("llama", "granite") or share:
        writer.add_rope_dimension_count(int(head_size * (share or 1)))
    if config.get("sliding_window") and name in ("gemma2", "gemma3", "phi3", "llama", "gpt-oss"):
        writer.add_sliding_window(config["sliding_window"])
    if name == "gemma3":
        writer.add_array(f"{name}.attention.sliding_window_pattern", [True, False])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if name == "gptneox":
        writer.add_parallel_residual(config.get("use_parallel_residual", True))
    if name == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if name == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if name == "deepseek2":
        _write_latent_keys(writer, config)
    if name == "stablelm":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if rope.get("rope_type") == "longrope":
        original = rope["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _write_latent_keys(writer: Any, config: dict[str, Any]) -> None:
    """What DeepSeek's files have beside the keys of all: sizes of cached vectors, and how routers choose."""
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    is_third = config["model_type"] == "deepseek_v3"
    writer.add_expert_weights_norm(is_third)
    kinds = gguf.constants.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if is_third else kinds.SOFTMAX)
    if is_third:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _latent_parts(label: str, values: np.ndarray, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The products of keys and values with a head's own weights, which newer files have apart."""
    heads = values.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
    keys, rest = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
    return {label.replace("kv_b", "k_b"): keys.swapaxes(1, 2), label.replace("kv_b", "v_b"): rest}


def _joined_experts(label: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Tensors of gpt-oss's experts: gate and up apart, [experts, outputs, inputs]."""
    suffix = "bias" if label.endswith("_bias") else "weight"
    values = values if suffix == "bias" else values.swapaxes(1, 2)
    before = label.partition(".experts.")[0]
    if ".down_proj" in label:
        return {f"{before}.experts.down_proj.{suffix}": values}
    return {
        f"{before}.experts.{part}_proj.{suffix}": values[:, k::2] for k, part in enumerate(("gate", "up"))
    }


def _gguf_tensors(name: str, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as the converter changes them, by their names in transformers."""
    heads = _first(config, "num_attention_heads", "n_head")
    shared = _first(config, "num_key_value_heads") or heads
    results: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for label, values in tensors.items():
        if name.startswith("gemma") and label.endswith("norm.weight"):
            values = values + 1
        for part, count in (("q_proj", heads), ("k_proj", shared)):
            if name in ("llama", "granite", "smollm3") and label.endswith((f"{part}.weight", f"{part}.bias")):
                values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if name == "gpt2" and label.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
            values = values.T
        if name == "bloom":
            label = label.removeprefix("transformer.")
        if name in ("gptneox", "bloom") and "query_key_value" in label:
            values = values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
        if "kv_b_proj" in label:
            results |= _latent_parts(label, values, config)
        elif name == "gpt-oss" and ".experts." in label:
            results |= _joined_experts(label, values)
        elif ".experts." in label:
            before, _, after = label.partition(".experts.")
            number, _, part = after.partition(".")
            if not number.isdecimal():
                raise NotImplementedError("its experts are one tensor, which the converter cuts")
            experts.setdefault(f"{before}.experts.{part}", {})[int(number)] = values
        elif label.endswith(("sinks", "e_score_correction_bias")):
            results[f"{label}.weight" if label.endswith("sinks") else label.replace("_bias", ".bias")] = (
                values
            )
        elif not (config.get("tie_word_embeddings") and label == "lm_head.weight"):
            results[label] = values
    for label, parts in experts.items():
        results[label] = np.stack([parts[number] for number in sorted(parts)])
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        results["rope_freqs.weight"] = _llama3_factors(rope, config)
    for length in ("short", "long") if rope.get("rope_type") == "longrope" else ():
        results[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
    return results


def _llama3_factors(rope: dict[str, Any], config: dict[str, Any]) -> np.ndarray:
    """Divisors of the frequencies, one for each pair of a head."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high, length = (
        rope[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    factors = []
    for exponent in range(0, size, 2):
        waves = length / (2 * np.pi * rope["rope_theta"] ** (exponent / size))
        smooth = (waves - low) / (high - low)
        blend = (1 - smooth) / rope["factor"] + smooth
        factors.append(1.0 if waves > high else rope["factor"] if waves < low else 1 / blend)
    return np.array(factors, np.float32)


FORMS: dict[str, Callable[[str, Path], Path]] = {
    "ONNX, sdpa": write_onnx,
    "ONNX, eager": lambda family, folder: write_onnx(family, folder, "eager"),
    ".pt2, static": write_static,
    ".pt2, dynamic": write_dynamic,
    "GGUF": write_gguf,
    "folder": write_folder,
}


def write_form(family: str, form: str, folder: Path) -> Path:
    """Write a family in a form, quietly; raises whatever its exporter does."""
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return FORMS[form](family, folder)
