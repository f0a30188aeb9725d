"""GPTQ and AWQ folders: weights packed here by the layouts of their libraries, values, tokens, refusals."""

import json
import struct

import numpy as np
import pytest
from command_line import error_line
from decoders import greedy

import pimflow
from pimflow import zoo
from pimflow.commands.generate.generate import generate
from pimflow.weight_types import WEIGHT_TYPES, group_type
from pimflow.zoo.language.hf_decoder import read_decoder

HIDDEN, WIDE, VOCABULARY = 128, 256, 32
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
PRODUCTS = {
    **{f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"},
    "mlp.gate_proj": (HIDDEN, WIDE),
    "mlp.up_proj": (HIDDEN, WIDE),
    "mlp.down_proj": (WIDE, HIDDEN),
}
NAMES = {"self_attn.q_proj": "query", "mlp.down_proj": "down", "mlp.gate_proj": "gate"}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
TYPES = {"int32": "I32", "float16": "F16", "float32": "F32"}


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Small integers packed along the last axis into int32, one word after the other."""
    *lead, count = values.shape
    packed = np.zeros((*lead, count * bits // 32), np.int64)
    for place in range(count):
        packed[..., place * bits // 32] |= values[..., place].astype(np.int64) << (place * bits % 32)
    return packed.astype(np.uint32).view(np.int32)


def awq_words(values: np.ndarray) -> np.ndarray:
    """Nibbles along the last axis, eight a word, in AWQ's order."""
    return words(values.reshape(*values.shape[:-1], -1, 8)[..., AWQ_ORDER].reshape(values.shape), 4)


def quantise(rng, shape, method, bits, group, *, zeros=True, order=None, offset=1):
    """Tensors of a product in a file, and the values that they stand for, [inputs, outputs]."""
    inputs, outputs = shape
    steps = rng.integers(0, 1 << bits, shape)
    middle = 1 << (bits - 1)
    zero = np.full((inputs // group, outputs), middle)
    if zeros:
        zero = rng.integers(1, 1 << bits, zero.shape)
    scales = (rng.integers(1, 5, zero.shape) / 64).astype(np.float16)
    group_of = np.arange(inputs) // group if order is None else order
    values = (steps - zero[group_of]) * scales[group_of].astype(np.float64)
    if method == "awq":
        return {"qweight": awq_words(steps), "qzeros": awq_words(zero), "scales": scales}, values
    parts = {"qweight": words(steps.T, bits).T, "qzeros": words(zero - offset, bits), "scales": scales}
    return {**parts, "g_idx": group_of.astype(np.int32)}, values


def write_folder(path, config, *, turned=False, **form):
    """A folder of a decoder of one block; returns the values of its products, [inputs, outputs]."""
    rng, block = np.random.default_rng(5), "model.layers.0."
    method, arrays, expected = config["quant_method"], {}, {}
    for name, shape in PRODUCTS.items():
        order = rng.permutation(np.arange(shape[0]) // form["group"]) if turned else None
        parts, expected[name] = quantise(rng, shape, method, config["bits"], order=order, **form)
        arrays |= {f"{block}{name}.{part}": array for part, array in parts.items()}
    for name in ("model.norm", f"{block}input_layernorm", f"{block}post_attention_layernorm"):
        arrays[f"{name}.weight"] = np.ones(HIDDEN, np.float32)
    for name in ("model.embed_tokens", "lm_head"):
        arrays[f"{name}.weight"] = rng.normal(size=(VOCABULARY, HIDDEN)).astype(np.float16)
    table, content = {}, b""
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        offsets = [len(content), len(content) + len(data)]
        kind = TYPES[str(array.dtype)]
        table[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        content += data
    header = json.dumps(table).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + content)
    (path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": config}))
    return expected


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
CASES = {
    "gptq": (GPTQ | {"sym": False}, {"group": 128}, "uint4_g128"),
    "act-order": (
        GPTQ | {"sym": False, "desc_act": True, "group_size": 32},
        {"group": 32, "turned": True},
        "uint4_g32",
    ),
    "v2": (GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, {"group": 128, "offset": 0}, "uint4_g128"),
    "symmetric": (GPTQ | {"sym": True}, {"group": 128, "zeros": False}, "int4_g128"),
    "symmetric-v2-said-v1": (GPTQ | {"sym": True}, {"group": 128, "zeros": False, "offset": 0}, "int4_g128"),
    "eight": (GPTQ | {"bits": 8, "sym": False, "group_size": 64}, {"group": 64}, "uint8_g64"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, {"group": 128}, "uint4_g128"),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_that_the_words_stand_for(case, tmp_path):
    config, form, kind = CASES[case]
    expected = write_folder(tmp_path, config, **form)
    decoder = read_decoder(tmp_path)
    weights = zoo.decoder_weights(decoder)
    for name, part in NAMES.items():
        np.testing.assert_array_equal(weights[f"layers.0.{part}.weight"], expected[name])
        assert decoder.weight_types[f"layers.0.{part}.weight"] == kind
    assert "head.weight" not in decoder.weight_types
    assert WEIGHT_TYPES[kind].stored_bytes(1, 256) == 256 * config["bits"] // 8 + 256 // form["group"] * (
        3 if kind.startswith("u") else 2
    )


def test_tokens_are_those_of_the_weights_on_pim_as_they_are_stored(tmp_path):
    write_folder(tmp_path, CASES["awq"][0], group=128)
    decoder = read_decoder(tmp_path)
    system = pimflow.system(pim="hbm-pim-narrow")
    generation = generate(tmp_path, tokens=[3, 1, 4], n=3, system=system)
    tokens = greedy(decoder, zoo.decoder_weights(decoder), [3, 1, 4], 3, np.float64)
    assert generation.verified and generation.tokens == tokens
    assert generation.weights == "awq uint4_g128, F16, F32"
    assert generation.weights_in_pim == "PIM stores uint4_g128 as they are"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "has the method 'bitsandbytes'; of folders, gptq and awq are"),
        ({"bits": 3}, "gptq of 3 bits is not supported"),
        ({"group_size": 0}, "has 0 as group_size, which is no size"),
        ({"checkpoint_format": "marlin"}, "has marlin as checkpoint_format, which is not supported"),
        ({"sym": True}, "q_proj.qzeros' is not that of symmetric weights"),
        ({"group_size": 64}, "q_proj.scales' has shape (1, 128), not (2, 128)"),
    ],
)
def test_other_forms_are_refused(changes, says, tmp_path, capsys):
    config, form, _ = CASES["gptq"]
    write_folder(tmp_path, config, **form)
    changed = {**CONFIG, "quantization_config": config | changes}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    assert says in error_line(capsys, 3, "generate", tmp_path, "--tokens", "1", "-n", "1", "--quiet")


def test_groups_of_other_sizes_have_a_type():
    sizes = {(4, 4096): "int4_g128", (4, 96): "int4_g32", (8, 192): "int8_g64"}
    assert {key: group_type(*key, zeros=False) for key in sizes} == sizes
