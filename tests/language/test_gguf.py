"""Decoders in GGUF files that the tests write: weights, tokens, text, refusals."""

import numpy as np
import pytest
from command_line import error_line
from decoders import decode_tokens, greedy

pytest.importorskip("gguf")

from dataclasses import replace

from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, RopeScalingType, quants

from pimflow import zoo
from pimflow.commands.generate.generate import generate
from pimflow.commands.generate.language import open_language_model
from pimflow.commands.generate.requests import Continuation, GenerationRequest
from pimflow.errors import ModelError
from pimflow.zoo.language.decoder_parts import Experts
from pimflow.zoo.language.gguf_decoder import read_decoder
from pimflow.zoo.language.gguf_tokens import read_tokens

HIDDEN, HEADS, KV_HEADS, WIDE, LAYERS = 64, 4, 2, 96, 1
SIZE = HIDDEN // HEADS
# Bytes as characters, in the order in which GPT-2's vocabulary begins.
SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = [chr(byte) for byte in SHOWN] + [chr(256 + index) for index in range(256 - len(SHOWN))]
TOKENS = [*BYTES, "<end>", "th", "the", "Ġthe"]
END = 256


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a product as GGUF has them: first of a head's first half, first of its second, and so on."""
    return np.concatenate(
        [head[[i + d for i in range(SIZE // 2) for d in (0, SIZE // 2)]] for head in np.split(rows, heads)]
    )


def draw(tied: bool, experts: int = 0) -> dict[str, np.ndarray]:
    """Weights by the names of `Decoder.weights`."""
    rng = np.random.default_rng(0)
    shapes = {"tokens.table": (len(TOKENS), HIDDEN), "norm.scale": (HIDDEN,)}
    if not tied:
        shapes["head.weight"] = (HIDDEN, len(TOKENS))
    for layer in range(LAYERS):
        block = {
            "query.weight": (HIDDEN, HIDDEN),
            "key.weight": (HIDDEN, KV_HEADS * SIZE),
            "value.weight": (HIDDEN, KV_HEADS * SIZE),
            "attention.weight": (HIDDEN, HIDDEN),
            "gate.weight": (HIDDEN, WIDE),
            "up.weight": (HIDDEN, WIDE),
            "down.weight": (WIDE, HIDDEN),
            "attention_norm.scale": (HIDDEN,),
            "feed_forward_norm.scale": (HIDDEN,),
        }
        if experts:
            block |= {f"{p}.weight": (experts, *block[f"{p}.weight"]) for p in ("gate", "up", "down")}
            block["router.weight"] = (HIDDEN, experts)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    return {name: rng.normal(0.1, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


FILE_NAMES = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "attention": "attn_output",
    "attention_norm": "attn_norm",
    "feed_forward_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
EXPERT_NAMES = {part: f"ffn_{part}_exps" for part in ("gate", "up", "down")} | {"router": "ffn_gate_inp"}
OTHER_NAMES = {"tokens": "token_embd", "norm": "output_norm", "head": "output"}


def write(
    path,
    weights,
    kind=Kind.F32,
    family="llama",
    words="smollm",
    without="",
    extra=None,
    heads=HEADS,
    merges=("t h", "th e", "Ġ the"),
    kind_of_end=3,
    epsilon=1e-5,
):
    """A file as converters write it: products as [outputs, inputs], norms in fp32."""
    writer = GGUFWriter(path, family)
    writer.add_block_count(LAYERS)
    writer.add_context_length(48)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(heads)
    writer.add_head_count_kv(KV_HEADS)
    if epsilon:
        writer.add_layer_norm_rms_eps(epsilon)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list(TOKENS)
    writer.add_token_types([kind_of_end if token == "<end>" else 1 for token in TOKENS])
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(END)
    if extra:
        extra(writer)
    for name, value in weights.items():
        parts = name.split(".")
        names = FILE_NAMES | (EXPERT_NAMES if any(name.endswith("router.weight") for name in weights) else {})
        file_name = OTHER_NAMES.get(parts[0]) or f"blk.{parts[1]}.{names[parts[2]]}"
        if file_name == without:
            continue
        stored = value.swapaxes(-1, -2) if name.endswith(".weight") else value
        for part, heads in (("query", HEADS), ("key", KV_HEADS)):
            if part in parts:
                stored = neighbours(stored, heads)
        stored = np.ascontiguousarray(stored)
        if stored.ndim > 1 and kind != Kind.F32:
            writer.add_tensor(f"{file_name}.weight", quants.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{file_name}.weight", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer, key, kind, value):
    """Add a key that the library has no function for."""
    getattr(writer, f"add_{kind}")(key, value)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_that_were_written(tmp_path, tied):
    weights = draw(tied)
    decoder = read_decoder(write(tmp_path / "small.gguf", weights))
    sizes = (decoder.layers, decoder.heads, decoder.kv_heads, decoder.head_size)
    assert sizes == (LAYERS, HEADS, KV_HEADS, SIZE)
    assert (decoder.rotary_base, decoder.max_context, decoder.tied) == (100000.0, 48, tied)
    stored = zoo.decoder_weights(decoder)
    assert stored.keys() == weights.keys()
    assert all(np.array_equal(stored[name], weights[name]) for name in weights)


def test_experts_are_those_that_were_written(tmp_path):
    weights = draw(True, experts=3)

    def add_experts(writer):
        writer.add_expert_count(3)
        writer.add_expert_used_count(2)

    decoder = read_decoder(write(tmp_path / "small.gguf", weights, extra=add_experts))
    assert decoder.experts == Experts(count=3, used=2, normalised=True)
    stored = zoo.decoder_weights(decoder)
    assert stored.keys() == weights.keys()
    assert all(np.array_equal(stored[name], weights[name]) for name in weights)


@pytest.mark.parametrize(("kind", "bits"), [(Kind.Q8_0, 8), (Kind.Q4_1, 4), (Kind.Q4_0, 4), (Kind.F16, 11)])
def test_blocks_of_few_bits_keep_their_type(tmp_path, kind, bits):
    """Each weight is off by no more than a step of its block of 32."""
    weights = draw(True)
    model = open_language_model(write(tmp_path / "small.gguf", weights, kind))
    narrow = kind != Kind.F16
    assert model.weights == f"{kind.name}, F32" + ("" if narrow else ", widened")
    assert set(model.decoder.weight_types.values()) == ({kind.name.lower()} if narrow else set())
    stored = zoo.decoder_weights(model.decoder)
    for name, value in weights.items():
        step = np.ptp(value) / 2 ** (bits - 1) if value.ndim == 2 else 0
        assert np.abs(stored[name] - value).max() <= step


def test_text_becomes_tokens_and_text_again(tmp_path):
    tokens = read_tokens(write(tmp_path / "small.gguf", draw(True)))
    text = "the 12 thé"
    ids = tokens.encode(text)
    assert [TOKENS[token] for token in ids[:1]] == ["the"] and "1" in [TOKENS[token] for token in ids]
    assert decode_tokens(tokens, ids) == text
    assert [TOKENS[token] for token in tokens.encode("in the")] == ["i", "n", "Ġthe"]
    assert decode_tokens(tokens, [END]) == ""
    begun = tokens.encode("é")[:1]
    assert decode_tokens(tokens, begun) == decode_tokens(tokens, [*begun, END]) == "\N{REPLACEMENT CHARACTER}"
    assert read_tokens(write(tmp_path / "other.gguf", draw(True), words="deepseek-coder")) is None


@pytest.mark.parametrize(("kind", "text"), [(3, "th"), (4, "t<end>h")])
def test_tokens_of_users_are_found_in_a_text(tmp_path, kind, text):
    """As those that control are, which have no text of their own."""
    tokens = read_tokens(write(tmp_path / "small.gguf", draw(True), kind_of_end=kind))
    ids = tokens.encode("t<end>h")
    assert len(ids) == 3 and ids[1] == END and decode_tokens(tokens, ids) == text


@pytest.mark.parametrize("merges", [["the"], ["t h", "th no"]])
def test_tables_of_tokens_that_do_not_belong_together_are_refused(tmp_path, merges):
    with pytest.raises(ModelError, match="tables of tokens do not belong together"):
        read_tokens(write(tmp_path / "small.gguf", draw(True), merges=merges))


def test_pieces_join_by_their_scores_and_bytes_spell_the_rest(tmp_path):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = {"\u2581": -9.0, "t": -8.0, "h": -8.5, "e": -7.0}
    scores |= {"th": -2.0, "he": -1.0, "\u2581t": -3.0, "\u2581the": -1.5}
    scores["the"] = -1.2
    path = tmp_path / "pieces.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*pieces, *scores])
    writer.add_token_scores([0.0] * len(pieces) + list(scores.values()))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(scores))
    writer.add_bos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokens = read_tokens(path)
    vocabulary = [*pieces, *scores]
    assert [vocabulary[token] for token in tokens.encode("the t")] == ["<s>", "\u2581the", "\u2581t"]
    # "he" has the highest score of all pairs, so "the" is never reached through "th"
    assert [vocabulary[token] for token in tokens.encode("he")] == ["<s>", "\u2581", "he"]
    spelled = tokens.encode("é")
    assert [vocabulary[token] for token in spelled] == ["<s>", "\u2581", "<0xC3>", "<0xA9>"]
    assert decode_tokens(tokens, tokens.encode("the té")[1:]) == " the té"
    # Bytes that make no character, some of them printed before: the library's own stream gives up there.
    line, *odd = (vocabulary.index(f"<0x{byte:02X}>") for byte in (10, 0xF0, 0x9F))
    assert decode_tokens(tokens, [line, *odd, vocabulary.index("he")]) == "\n\N{REPLACEMENT CHARACTER}he"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_tokens(path) is None


@pytest.mark.long
def test_it_writes_what_its_weights_say(tmp_path, capsys):
    """Against the decoder in NumPy on weights that went through the same blocks, but through no file."""
    weights = draw(True)
    path = write(tmp_path / "small.gguf", weights, Kind.Q8_0)
    generation = generate(path, prompt="t", n=4)
    widened = dict(weights)
    for name, value in weights.items():
        if value.ndim == 2:
            rows = value.T if name.endswith(".weight") else value
            rows = quants.dequantize(quants.quantize(np.ascontiguousarray(rows), Kind.Q8_0), Kind.Q8_0)
            widened[name] = rows.T if name.endswith(".weight") else rows
    tokens = greedy(read_decoder(path), widened, [TOKENS.index("t")], len(generation.tokens))
    assert generation.tokens == tokens and (len(tokens) == 4 or tokens[-1] == END)
    assert generation.weights == "Q8_0, F32" and generation.verified
    assert generation.weights_in_pim == "PIM stores q8_0 widened to fp16, which its multipliers take"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"family": "mamba"},
            "is a 'mamba'; of GGUF files, those of these architectures are supported: llama",
        ),
        ({"without": "blk.0.ffn_up"}, "has no tensor 'blk.0.ffn_up.weight'"),
        ({"extra": lambda writer: writer.add_rope_scaling_type(RopeScalingType.LONGROPE)}, "by 'longrope'"),
        ({"extra": lambda writer: writer.add_expert_count(4)}, "has no llama.expert_used_count"),
        ({"extra": lambda writer: writer.add_expert_shared_count(1)}, "llama.expert_shared_count"),
        (
            {"extra": lambda writer: writer.add_tensor("blk.0.attn_x.bias", np.zeros(HIDDEN, np.float32))},
            "has a tensor 'blk.0.attn_x.bias', which is not supported",
        ),
        *(
            ({"extra": lambda w, key=key, kind=kind, value=value: add_key(w, key, kind, value)}, key)
            for key, kind, value in (
                ("llama.attention.clamp_kqv", "float32", 8.0),
                ("llama.attention.causal", "bool", False),
                ("llama.use_parallel_residual", "bool", True),
                ("llama.logit_scale", "float32", 8.0),
                ("llama.embedding_scale", "float32", 12.0),
                ("llama.residual_scale", "float32", 0.22),
                ("llama.attention.value_length", "uint32", 32),
                ("llama.a_key_of_next_year", "string", "x"),
                ("llama.rope.scaling.factor", "string", "four"),
            )
        ),
        ({"epsilon": None}, "has no llama.attention.layer_norm_rms_epsilon"),
        ({"heads": 0}, "has no llama.attention.head_count"),
    ],
)
def test_what_is_not_supported_is_said(tmp_path, changes, says):
    with pytest.raises(ModelError, match=says):
        read_decoder(write(tmp_path / "small.gguf", draw(True), **changes))


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ({"rope.scale_linear": 4.0}, {"rotary_factors": (4.0,) * (SIZE // 2)}),
        ({"rope.scaling.factor": 4.0}, {"rotary_factors": (4.0,) * (SIZE // 2)}),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, {"rotary_factors": ()}),
        ({"attention.sliding_window": 8}, {"windows": (8,) * LAYERS}),
        ({"attention.scale": 0.5}, {"score_scale": 0.5}),
        ({"final_logit_softcapping": 30.0}, {"logit_softcap": 30.0}),
        ({"attn_logit_softcapping": 50.0}, {"score_softcap": 50.0}),
        ({"expert_count": 0, "attention.causal": True}, {}),
    ],
)
def test_keys_have_their_effect(tmp_path, keys, fields):
    """As llama.cpp reads them; `test_decoders.py` has what the fields mean."""
    kinds = {float: "float32", int: "uint32", str: "string", bool: "bool"}

    def add(writer):
        for key, value in keys.items():
            add_key(writer, f"llama.{key}", kinds[type(value)], value)

    decoder = read_decoder(write(tmp_path / "small.gguf", draw(True), extra=add))
    assert {name: getattr(decoder, name) for name in fields} == fields


def test_tokens_that_end_a_turn_end_a_text(tmp_path):
    path = write(tmp_path / "small.gguf", draw(True), extra=lambda writer: writer.add_eot_token_id(7))
    model = open_language_model(path)
    assert model.ends == {END, 7}
    request = GenerationRequest(
        replace(model, ends=frozenset({7})), [1], "fp16", Continuation(9), lambda _: None
    )
    request._emit_token(8)
    assert not request.is_done
    request._emit_token(7)
    assert request.is_done


def test_a_file_that_is_none_is_refused_in_a_line(tmp_path, capsys):
    path = tmp_path / "small.gguf"
    for content, says in (
        (b"", "is not a GGUF file"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 40, "is not a GGUF file"),
    ):
        path.write_bytes(content)
        assert says in error_line(capsys, 3, "generate", path, "--tokens", "1", "-n", "1", "--quiet")
    path.unlink()
    assert "cannot be read" in error_line(capsys, 3, "generate", path, "--tokens", "1", "-n", "1", "--quiet")
