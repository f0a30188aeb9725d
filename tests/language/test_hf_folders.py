"""Decoders in folders of Hugging Face's: weights, values by transformers, ends of texts, refusals."""

import json
import math
import struct

import ml_dtypes
import numpy as np
import pytest
from command_line import error_line
from decoders import greedy

from pimflow import zoo
from pimflow.commands.generate.generate import generate
from pimflow.commands.generate.language import open_language_model
from pimflow.errors import ModelError, UsageError
from pimflow.zoo.language.angle_scaling import RotaryAngles, yarn
from pimflow.zoo.language.decoder_parts import Experts
from pimflow.zoo.language.hf_decoder import read_decoder
from pimflow.zoo.language.reference import ReferenceDecoder

HIDDEN, WIDE, VOCABULARY = 16, 24, 30
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "eos_token_id": [2, 7],
}
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.mlp.gate_proj.weight": (WIDE, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (WIDE, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, WIDE),
}


def write_tensors(path, arrays) -> None:
    """A file as the library safetensors writes it, with values in bf16."""
    table, content = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        values = array.astype(ml_dtypes.bfloat16).tobytes()
        offsets = [len(content), len(content) + len(values)]
        table[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": offsets}
        content += values
    header = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(-8, 8, shape) / 16 for name, shape in SHAPES.items()}
    names = sorted(arrays)
    write_tensors(tmp_path / "model-00001-of-00002.safetensors", {name: arrays[name] for name in names[:5]})
    write_tensors(tmp_path / "model-00002-of-00002.safetensors", {name: arrays[name] for name in names[5:]})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path, arrays


def test_weights_are_those_of_the_files(folder):
    path, arrays = folder
    decoder = read_decoder(path)
    assert (decoder.layers, decoder.heads, decoder.kv_heads, decoder.head_size) == (1, 4, 2, 4)
    assert (decoder.rotary_base, decoder.norm_epsilon, decoder.tied) == (10000.0, 1e-5, False)
    weights = zoo.decoder_weights(decoder)
    assert np.array_equal(weights["tokens.table"], arrays["model.embed_tokens.weight"])
    assert np.array_equal(weights["layers.0.gate.weight"], arrays["model.layers.0.mlp.gate_proj.weight"].T)
    assert np.array_equal(weights["head.weight"], arrays["lm_head.weight"].T)
    model = open_language_model(path)
    assert model.ends == {2, 7} and model.weights == "BF16, widened"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"a_key_of_next_year": 1}, "the key 'a_key_of_next_year', which is not supported"),
        ({"model_type": "rwkv"}, "is a 'rwkv'; of folders, these kinds are supported: llama"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "scales angles by 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "a_key": 4.0}}, "scales angles with 'a_key'"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "its scaling of angles is"),
        ({"model_type": "smollm3", "no_rope_layers": ["1"]}, "no_rope_layers in config.json is no number"),
        ({"hidden_act": "mish"}, "activation 'mish'"),
        ({"hidden_size": "16"}, "a str as hidden_size"),
        ({"rms_norm_eps": None}, "has no rms_norm_eps"),
        ({"sliding_window": 8}, "does not say which layers"),
        ({"intermediate_size": 25}, "mlp.gate_proj.weight' has shape"),
        ({"num_hidden_layers": 2}, "has no tensor 'model.layers.1.input_layernorm.weight'"),
    ],
)
def test_what_is_not_supported_is_said(folder, changes, says, capsys):
    path, _ = folder
    uses = {"use_sliding_window": True} if "sliding_window" in changes else {}
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes, **uses}))
    assert says in error_line(capsys, 3, "generate", path, "--tokens", "1", "-n", "1", "--quiet")


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9)])
def test_damaged_weights_are_said(folder, content):
    path, _ = folder
    (path / "model-00001-of-00002.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="is not a safetensors file, or is damaged"):
        read_decoder(path)


def require_reference_tokens(path, decoder) -> None:
    """Greedy tokens are those of the decoder in NumPy."""
    tokens = greedy(decoder, zoo.decoder_weights(decoder), [3, 1, 4, 1, 5], 6, np.float64)
    generation = generate(path, tokens=[3, 1, 4, 1, 5], n=6)
    assert generation.verified and generation.tokens == tokens and generation.weights.startswith("BF16")


@pytest.mark.long
@pytest.mark.parametrize("normalised", [False, True])
def test_a_folder_with_experts_writes_what_its_weights_say(folder, normalised):
    """All experts at once for the prompt, the chosen ones of five by themselves for a step."""
    path, arrays = folder
    mlp, rng = "model.layers.0.mlp.", np.random.default_rng(1)
    arrays = {name: array for name, array in arrays.items() if not name.startswith(mlp)}
    shapes = {"gate": (WIDE, HIDDEN), "up": (WIDE, HIDDEN), "down": (HIDDEN, WIDE)}
    arrays |= {
        f"{mlp}experts.{expert}.{part}_proj.weight": rng.integers(-8, 8, shape) / 16
        for expert in range(5)
        for part, shape in shapes.items()
    }
    arrays[f"{mlp}gate.weight"] = rng.integers(-8, 8, (5, HIDDEN)) / 4
    for file in path.glob("*.safetensors"):
        file.unlink()
    config = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "head_dim": 4}
    config |= {"moe_intermediate_size": WIDE, "norm_topk_prob": normalised, "eos_token_id": None}
    for part in ("q_norm", "k_norm"):
        arrays[f"model.layers.0.self_attn.{part}.weight"] = rng.integers(4, 8, 4) / 4
    write_tensors(path / "model.safetensors", arrays)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    decoder = read_decoder(path)
    assert decoder.experts == Experts(count=5, used=2, normalised=normalised)
    assert np.array_equal(
        zoo.decoder_weights(decoder)["layers.0.gate.weight"][3], arrays[f"{mlp}experts.3.gate_proj.weight"].T
    )
    require_reference_tokens(path, decoder)


def test_a_folder_writes_what_its_weights_say(folder):
    """Gemma 2's caps, norms of results and sliding window, which prompt and steps go beyond."""
    path, arrays = folder
    block = "model.layers.0."
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
        arrays[f"{block}{name}.weight"] = arrays[f"{block}input_layernorm.weight"]
    for file in path.glob("*.safetensors"):
        file.unlink()
    write_tensors(path / "model.safetensors", {n: a for n, a in arrays.items() if n != "lm_head.weight"})
    config = {"model_type": "gemma2", "sliding_window": 3, "query_pre_attn_scalar": 4, "eos_token_id": None}
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    decoder = read_decoder(path)
    assert (decoder.windows, decoder.score_softcap, decoder.logit_softcap) == ((3,), 50.0, 30.0)
    assert decoder.tied and decoder.result_norms and decoder.embedding_scale == 4.0
    require_reference_tokens(path, decoder)


def test_yarn_turns_fast_pairs_as_before_and_slow_ones_less(folder):
    """By the ramp of the paper, between 32 turns and one over the first context."""
    path, _ = folder
    scale = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    scaled = yarn(RotaryAngles(base=1e4, turned=64, length=4096), factor=4.0)
    low, high = (32 * math.log(4096 / (turns * 2 * math.pi)) / math.log(1e4) for turns in (32, 1))
    ramp = np.clip((np.arange(32) - math.floor(low)) / (math.ceil(high) - math.floor(low)), 0, 1)
    assert np.allclose(1 / np.array(scaled.factors), ramp / 4 + 1 - ramp)
    assert scaled.factors[0] == 1 and scaled.factors[-1] == 4
    assert scaled.scale == pytest.approx(0.1 * math.log(4) + 1)
    config = {**CONFIG, "rope_scaling": {**scale, "attention_factor": 1.5}, "max_position_embeddings": 16384}
    (path / "config.json").write_text(json.dumps(config))
    assert read_decoder(path).rotary_scale == 1.5


@pytest.mark.long
def test_longrope_holds_within_the_first_context(folder):
    """Beyond it other angles hold, so that no longer context is taken."""
    path, _ = folder
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 3.0], "long_factor": [2.0, 9.0]}
    config = {**CONFIG, "rope_scaling": scaling, "original_max_position_embeddings": 16}
    (path / "config.json").write_text(json.dumps(config))
    decoder = read_decoder(path)
    assert (decoder.rotary_factors, decoder.max_context) == ((1.0, 3.0), 16)
    assert decoder.rotary_scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))
    generation = generate(path, tokens=[3, 1, 4], n=3, modes="gpu")
    assert generation.tokens == greedy(decoder, zoo.decoder_weights(decoder), [3, 1, 4], 3, np.float64)
    with pytest.raises(UsageError, match="was made for 16 tokens, not for 17"):
        generate(path, tokens=[3, 1, 4], n=3, context=17)


SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS = {
    "Llama": {"num_key_value_heads": 2, "rope_scaling": SCALED},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 4},
    "Qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4},
    "Phi3": {"num_key_value_heads": 2},
    "GPTNeoX": {"rotary_pct": 0.5},
    "Olmo2": {"num_key_value_heads": 2},
    "Granite": {"num_key_value_heads": 2, "logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "Phi": {"partial_rotary_factor": 0.5},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 40},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind, tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{kind}Config")
    sizes = {name: size for name, size in SIZES.items() if hasattr(config_class(), name)}
    config = config_class(**({} if kind == "GPT2" else sizes) | KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    decoder = read_decoder(tmp_path)
    tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    ours = ReferenceDecoder(decoder, zoo.decoder_weights(decoder), np.float64).step(tokens)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)[None]).logits[0].numpy()
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
