"""Decoders that PyTorch exports with every length open, as Optimum does: GPT-2's kind, and multi-query."""

import io
import math
import warnings

import numpy as np
import onnx
import pytest

pytest.importorskip("torch")

import torch

from pimflow import frontend
from pimflow.commands.generate.generate import generate
from pimflow.commands.generate.language import open_language_model
from pimflow.errors import VerificationError
from pimflow.hardware import system

pytestmark = pytest.mark.torch

LAYERS = 1
TOKENS = 10
NAMES = [f"past_key_values.{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]


class TorchDecoder(torch.nn.Module):
    """Learned positions, layer norms and GELU; the mask is worked out from lengths, keys are repeated."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = 4, kv_heads, 8
        self.tokens, self.places = torch.nn.Embedding(61, 32), torch.nn.Embedding(40, 32)
        self.blocks = torch.nn.ModuleList(self.block() for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(32)

    def block(self) -> torch.nn.ModuleDict:
        keys, linear = self.kv_heads * self.size, torch.nn.Linear
        parts = {"query": linear(32, 32), "key": linear(32, keys)}
        parts |= {"value": linear(32, keys), "out": linear(32, 32)}
        parts |= {"up": linear(32, 64), "down": linear(64, 32)}
        return torch.nn.ModuleDict(parts | {name: torch.nn.LayerNorm(32) for name in ("first", "second")})

    def forward(self, tokens, mask, places, past):
        batch, new = tokens.shape
        total = mask.shape[1]
        later = torch.arange(total)[None] > torch.arange(total - new, total)[:, None]
        hidden = later[None, None] | (mask[:, None, None] == 0)
        added = torch.zeros(hidden.shape, dtype=self.tokens.weight.dtype).masked_fill(hidden, -1e4)
        x, present = self.tokens(tokens) + self.places(places), []

        def split(y, heads):
            return y.view(batch, new, heads, self.size).transpose(1, 2)

        def shared(y):
            group = self.heads // self.kv_heads
            wide = y[:, :, None].expand(batch, self.kv_heads, group, y.shape[2], self.size)
            return wide.reshape(batch, self.heads, y.shape[2], self.size)

        for layer, block in enumerate(self.blocks):
            h = block["first"](x)
            key = torch.cat([past[2 * layer], split(block["key"](h), self.kv_heads)], 2)
            value = torch.cat([past[2 * layer + 1], split(block["value"](h), self.kv_heads)], 2)
            present += [key, value]
            scores = split(block["query"](h), self.heads) @ shared(key).transpose(2, 3)
            shares = torch.softmax(scores / math.sqrt(self.size) + added, -1)
            x = x + block["out"]((shares @ shared(value)).transpose(1, 2).reshape(batch, new, -1))
            x = x + block["down"](torch.nn.functional.gelu(block["up"](block["second"](x))))
        return (self.norm(x) @ self.tokens.weight.T, *present)


class PlacedByLengths(TorchDecoder):
    """The same, with positions behind what is in the cache, as older exports have it."""

    def forward(self, tokens, mask, past):
        first = past[0].shape[2]
        return super().forward(tokens, mask, torch.arange(first, first + tokens.shape[1])[None], past)


def export_decoder(
    kv_heads: int, dtype: torch.dtype = torch.float32, kind: type[TorchDecoder] = TorchDecoder
) -> tuple[TorchDecoder, onnx.ModelProto]:
    torch.manual_seed(0)
    decoder, file = kind(kv_heads).eval().to(dtype), io.BytesIO()
    past = [torch.zeros(1, kv_heads, 3, 8, dtype=dtype) for _ in NAMES]
    outputs = ["logits", *(name.replace("past_key_values", "present") for name in NAMES)]
    step = {0: "batch_size", 1: "sequence_length"}
    axes = {"input_ids": step, "position_ids": step, "logits": step}
    axes["attention_mask"] = {0: "batch_size", 1: "total"}
    axes |= {name: {0: "batch_size", 2: "past_sequence_length"} for name in NAMES}
    axes |= {name: {0: "batch_size", 2: "total"} for name in outputs[1:]}
    names = ["input_ids", "attention_mask", "position_ids"][: 3 if kind is TorchDecoder else 2]
    numbers = [torch.zeros(1, n, dtype=torch.long) for n in (2, 5, 2)[: len(names)]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            decoder,
            (*numbers, past),
            file,
            dynamo=False,
            opset_version=17,
            input_names=[*names, *NAMES],
            output_names=outputs,
            dynamic_axes=axes,
        )
    return decoder, onnx.load_from_string(file.getvalue())


def greedy(decoder: TorchDecoder, tokens: list[int], n: int) -> tuple[int, ...]:
    """Without a cache, by PyTorch itself."""
    sequence = list(tokens)
    empty = [torch.zeros(1, decoder.kv_heads, 0, 8) for _ in NAMES]
    while len(sequence) < len(tokens) + n:
        ids = torch.tensor([sequence])
        with torch.no_grad():
            logits = decoder(ids, torch.ones_like(ids), torch.arange(len(sequence))[None], empty)[0]
        sequence.append(int(logits[0, -1].argmax()))
    return tuple(sequence[len(tokens) :])


@pytest.mark.long
@pytest.mark.parametrize(("kv_heads", "batch"), [(4, 1), (1, 2)])
def test_it_writes_what_pytorch_does_without_a_cache(kv_heads, batch):
    decoder, model = export_decoder(kv_heads)
    generation = generate(model, tokens=[3, 4, 5], n=TOKENS, batch=batch)
    assert generation.tokens == greedy(decoder, [3, 4, 5], TOKENS) and generation.sure_tokens > 0
    assert generation.verified and generation.regions_on_pim > 0 and generation.timing_violations == 0
    assert (generation.context, generation.batch) == (3 + TOKENS, batch)
    assert generation.kv_bytes_per_token == 2 * LAYERS * kv_heads * 8 * 2
    assert generation.tokens_per_s == pytest.approx(batch * 1e9 / generation.tpot_ns)
    if batch == 1:
        on_gpu = generate(model, tokens=[3, 4, 5], n=TOKENS, batch=batch, modes="gpu")
        assert on_gpu.verified and on_gpu.tokens == generation.tokens and on_gpu.regions_on_pim == 0


@pytest.mark.long
def test_a_file_of_fp16_is_widened():
    """Its reference too, which would round after every operator; its caches stay where they are."""
    decoder, model = export_decoder(2, torch.float16)
    generation = generate(model, tokens=[3, 4, 5], n=3, modes="gpu", system=system(dtype="fp32"))
    assert generation.tokens == greedy(decoder.float(), [3, 4, 5], 3)
    assert generation.max_relative_error <= generation.bound == 1e-5 and generation.sure_tokens == 3
    network = frontend.load(model, context=8)
    state_types = {state.name: network.module["main"].ret_ty.fields[state.result] for state in network.states}
    assert list(state_types) == NAMES and {str(t.dtype) for t in state_types.values()} == {"float32"}


@pytest.mark.long
def test_positions_that_follow_from_lengths_are_named_as_a_reason():
    """Caches have a place for each token from the start, so that their lengths say nothing."""
    _, model = export_decoder(1, kind=PlacedByLengths)
    with pytest.raises(VerificationError, match=r"logits are off .*; if .*, export it with 'position_ids'"):
        generate(model, tokens=[3, 4, 5], n=3, modes="gpu")


@pytest.mark.long
def test_prompts_go_token_by_token_where_a_step_is_one_token():
    """Also where the cache has any length, by value and in what roundings do."""
    decoder, model = export_decoder(1)
    for value in model.graph.input:
        if value.name in ("input_ids", "position_ids"):
            value.type.tensor_type.shape.dim[1].dim_value = 1
    generation = generate(model, tokens=[3, 4, 5], n=3, modes="gpu")
    assert generation.tokens == greedy(decoder, [3, 4, 5], 3)
    # Earlier steps have fewer tokens to read.
    assert 0.99 < generation.ttft_ns / (3 * generation.tpot_ns) < 1
    language, tokens = open_language_model(model), np.array([3, 4, 5, 6])
    right = language.reference().step(tokens)
    (*_, rounded) = language.perturbed_logits(frozenset(), tokens)
    assert np.abs(rounded - right).max() < 1e-4


def test_an_open_decoder_says_what_it_is_made_of_and_how_roundings_move_it():
    decoder, model = export_decoder(2)
    language = open_language_model(model)
    assert (language.vocabulary, language.kv_elements, language.uses) == (61, 2 * LAYERS * 2 * 8, 2)
    assert language.fixed_context is None and language.min_cache == 1
    tokens = np.array([3, 4, 5, 6])
    right = language.reference().step(tokens)[-1]
    with torch.no_grad():
        empty = [torch.zeros(1, 2, 0, 8) for _ in NAMES]
        ids = torch.tensor(tokens)[None]
        torch_logits = decoder(ids, torch.ones_like(ids), torch.arange(4)[None], empty)[0][0, -1].numpy()
    assert np.abs(right - torch_logits).max() < 1e-4
    step = language.step(5, 4, 1)
    products = frozenset(node.name for node in step.graph.node if node.op_type in ("MatMul", "Gemm"))
    moved = [np.abs(logits[-1] - right).max() for logits in language.perturbed_logits(products, tokens)]
    assert len(set(moved)) > 1 and 1e-5 < max(moved) < 1e-1
    rounded = language.perturbed_logits(frozenset(), tokens)
    assert max(np.abs(logits[-1] - right).max() for logits in rounded) < 1e-5
