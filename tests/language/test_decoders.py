"""Language models as data: their sizes, their graphs against a decoder in NumPy, their tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from calibration.latency_bound import row_limited_ns
from decoders import greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from onnx import numpy_helper

from pimflow import zoo
from pimflow.errors import ModelError
from pimflow.hardware import PimSpec
from pimflow.simulators.pim.bound import min_read_ns
from pimflow.zoo.language import graph
from pimflow.zoo.language.decoder import BLOCK_PRODUCTS, Decoder
from pimflow.zoo.language.decoder_parts import Experts, LatentAttention
from pimflow.zoo.language.reference import ReferenceDecoder
from pimflow.zoo.language.tokens import ByteTokens

# Parameters as published with the models; elements of the cache of a token.
PUBLISHED = {
    "gpt-2": (124_439_808, 2 * 12 * 768),
    "llama-2-7b": (6_738_415_616, 2 * 32 * 4096),
    "llama-3-8b": (8_030_261_248, 2 * 32 * 1024),
    "opt-6.7b": (6_658_473_984, 2 * 32 * 4096),
}


def small(**changes: object) -> Decoder:
    sizes = dict(layers=2, hidden=24, heads=4, kv_heads=2, head_size=6, feed_forward=20, vocabulary=31)
    return Decoder(**{"name": "small", **sizes, "max_context": 40, "source": "a test", **changes})


def decode(tokens: list[int]) -> str:
    """The text of bytes."""
    decoder = ByteTokens().decoder()
    return "".join(decoder.text(token, index + 1 == len(tokens)) for index, token in enumerate(tokens))


def test_sizes_are_the_published_ones():
    assert set(zoo.decoder_names()) == {*PUBLISHED, "tiny-lm"}
    for name, (parameters, elements) in PUBLISHED.items():
        decoder = zoo.decoder(name)
        assert (decoder.parameters, decoder.kv_bytes_per_token(2)) == (parameters, 2 * elements)


def test_the_table_of_the_documentation_is_true():
    page = (Path(__file__).parents[2] / "docs/zoo.md").read_text(encoding="utf-8")
    text = page.partition("\n## Language models\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    for name, row in zip(zoo.decoder_names(), rows[2:], strict=True):
        d = zoo.decoder(name)
        sizes = (d.layers, d.hidden, d.heads, d.kv_heads, d.feed_forward, d.vocabulary, d.parameters)
        assert [entry.replace(",", "") for entry in row[:-1]] == [name, *map(str, sizes)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"norm": "batch"}, "norm is 'batch'; one of rms, layer"),
        ({"heads": 5}, "5 heads cannot share 2 heads of keys"),
        ({"head_size": 5}, "a head of 5 has no halves"),
        ({"experts": Experts(count=2, used=3)}, "cannot go through 3 of 2 experts"),
        ({"experts": Experts(count=6, used=3, groups=3)}, "cannot be chosen from 1 of 3 groups"),
        ({"experts": Experts(count=6, used=1, groups=3, group_best=3)}, "fewer than 3 experts"),
        ({"experts": Experts(count=2, used=1, scores="tanh")}, "shares by tanh"),
        ({"latent": LatentAttention(rank=4, value_size=4)}, "not made of a latent vector"),
    ],
)
def test_what_no_decoder_is_made_of_is_refused(changes, says):
    with pytest.raises(ModelError, match=says):
        small(**changes)


def with_latent(latent: LatentAttention | None, **changes: object) -> Decoder:
    """A small decoder; one with latent vectors has no norms of queries, and rotates in all layers."""
    if latent is not None:
        changes |= {"kv_heads": 1, "positions": "rotary", "rotary_size": 4, "query_norm": ""}
        changes["unturned_layers"] = frozenset()
    return small(latent=latent, **changes)


EXPERTS = [
    Experts(count=3, used=2),
    Experts(count=5, used=1, normalised=False),
    Experts(count=6, used=2, scores="sigmoid", corrected=True, groups=3, used_groups=2, group_best=2),
    Experts(count=4, used=1, factor=2.5, shared=6),
]
DECODERS = st.builds(
    with_latent,
    latent=st.sampled_from(
        [None, LatentAttention(rank=6, value_size=5), LatentAttention(rank=3, value_size=4, query_rank=7)]
    ),
    experts=st.sampled_from([None, *EXPERTS]),
    dense_layers=st.sampled_from([0, 1]),
    dense_feed_forward=st.just(10),
    sinks=st.booleans(),
    layers=st.integers(1, 2),
    kv_heads=st.sampled_from([1, 2, 4]),
    norm=st.sampled_from(["rms", "layer"]),
    positions=st.sampled_from(["rotary", "learned", "alibi"]),
    position_offset=st.sampled_from([0, 2]),
    activation=st.sampled_from(["swiglu", "geglu", "clamped_swiglu", "gelu", "gelu_erf", "relu"]),
    biases=st.sampled_from([frozenset(), frozenset(BLOCK_PRODUCTS), frozenset({"query", "value", "head"})]),
    tied=st.booleans(),
    unturned_layers=st.sampled_from([frozenset(), frozenset({1}), frozenset({0, 1})]),
    rotary_size=st.sampled_from([0, 4]),
    query_norm=st.sampled_from(["", "heads", "whole"]),
    embedding_norm=st.booleans(),
    input_norms=st.booleans(),
    result_norms=st.booleans(),
    parallel=st.booleans(),
    local_rotary_base=st.sampled_from([0.0, 100.0]),
    score_scale=st.sampled_from([0.0, 0.3]),
    score_softcap=st.sampled_from([0.0, 2.0]),
    logit_softcap=st.sampled_from([0.0, 3.0]),
    embedding_scale=st.sampled_from([1.0, 4.0]),
    residual_scale=st.sampled_from([1.0, 0.5]),
    logit_scale=st.sampled_from([1.0, 0.25]),
)


class DecoderSession:
    """A step by ONNX Runtime, whose cache grows by what each step gives back."""

    def __init__(self, decoder: Decoder, context: int, tokens: int) -> None:
        self.model = graph.step_graph(decoder, context, tokens=tokens)
        onnx.checker.check_model(self.model, full_check=True)
        self.model = zoo.load_model(self.model)
        self.context, self.tokens = context, tokens
        self.session = onnxruntime.InferenceSession(self.model.SerializeToString())
        self.layers = range(decoder.layers)

    def weights(self) -> dict[str, np.ndarray]:
        return {tensor.name: numpy_helper.to_array(tensor) for tensor in self.model.graph.initializer}

    def __call__(self, tokens: np.ndarray, seen: int, past: dict[str, np.ndarray]) -> np.ndarray:
        """Logits; `past` has keys and values of `seen` tokens, and then those of these tokens too."""
        mask = np.zeros((1, self.context), np.int64)
        mask[:, self.context - seen - self.tokens :] = 1
        places = np.arange(seen, seen + self.tokens)
        values = {"input_ids": tokens[None], "attention_mask": mask, "position_ids": places[None]}
        rng = np.random.default_rng(0)
        for value in self.session.get_inputs():
            if value.name not in values:
                unused = rng.normal(size=(*value.shape[:2], value.shape[2] - seen, value.shape[3]))
                cached = [past[value.name]] if seen else []
                values[value.name] = np.concatenate([unused.astype(np.float32), *cached], axis=2)
        input_names = {value.name for value in self.session.get_inputs()}
        results = self.session.run(None, {n: a for n, a in values.items() if n in input_names})
        for value, name in zip(results[1:], [output.name for output in self.session.get_outputs()][1:]):
            past["past_key_values." + name.removeprefix("present.")] = value[:, :, -seen - self.tokens :]
        return results[0][0]


@pytest.mark.long
@settings(max_examples=examples(40))
@given(
    decoder=DECODERS,
    windows=st.sampled_from([(), (3, 0), (0, 5)]),
    factors=st.booleans(),
    tokens=st.lists(st.integers(0, 30), min_size=2, max_size=12),
    first=st.integers(1, 11),
    room=st.integers(0, 3),
)
def test_steps_with_a_cache_are_the_whole_sequence(decoder, windows, factors, tokens, first, room):
    """Of the graph and of the decoder in NumPy, by each other; what is masked is of no account."""
    divisors = tuple(np.linspace(1, 4, decoder.rotation_size // 2)) if factors else ()
    decoder = replace(decoder, windows=windows[: decoder.layers], rotary_factors=divisors)
    tokens, first = np.array(tokens), min(first, len(tokens) - 1)
    prompt, token = (
        DecoderSession(decoder, first + room, first),
        DecoderSession(decoder, len(tokens) + room, 1),
    )
    weights = {name: value for name, value in prompt.weights().items() if name in decoder.weights()}
    assert {name: value.shape for name, value in weights.items()} == decoder.weights()
    sequence = ReferenceDecoder(decoder, weights, np.float64).step(tokens)
    reference = ReferenceDecoder(decoder, weights)
    past: dict[str, np.ndarray] = {}
    graph_logits = [prompt(tokens[:first], 0, past)]
    reference_logits = [reference.step(tokens[:first])]
    for place in range(first, len(tokens)):
        graph_logits.append(token(tokens[place : place + 1], place, past))
        reference_logits.append(reference.step(tokens[place : place + 1]))
    scale = np.abs(sequence).max()
    assert np.abs(np.concatenate(graph_logits) - sequence).max() < 1e-4 * scale
    assert np.abs(np.concatenate(reference_logits) - sequence).max() < 1e-4 * scale


def test_weights_of_the_zoo_are_those_of_its_graph():
    decoder = zoo.decoder("tiny-lm")
    ours = zoo.decoder_weights(decoder)
    model = zoo.load_model("tiny-lm")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert all(np.array_equal(stored[name], value) for name, value in ours.items())


def test_tiny_lm_writes_english_of_the_manual_that_it_was_trained_on():
    """Most of its words are words of that, and it does not repeat one; untrained weights have hardly any."""
    from pydoc_data.topics import topics

    vocabulary = {word for text in topics.values() for word in text.lower().split()}

    def share(decoder: Decoder) -> tuple[float, int]:
        tokens = ByteTokens().encode("The statement is executed when ")
        words = decode(greedy(decoder, zoo.decoder_weights(decoder), tokens, 160)).lower().split()[:-1]
        return sum(word in vocabulary for word in words) / max(len(words), 1), len(set(words))

    right, different = share(zoo.decoder("tiny-lm"))
    assert right > 0.8 and different >= 6
    drawn = replace(zoo.decoder("tiny-lm"), trained=False)
    assert share(drawn)[0] < 0.5


def test_bytes_become_text_when_a_character_is_whole():
    tokens = ByteTokens().encode("a€b")
    decoder = ByteTokens().decoder()
    assert [decoder.text(token) for token in tokens] == ["a", "", "", "€", "b"]
    assert decode(tokens[:2]) == "a\ufffd"


def test_the_bound_of_rows_is_the_share_that_was_worked_out_by_hand():
    """newton-gddr6: 32 columns of 2 cycles, 75 cycles to change rows, 350 of 1900 cycles in refresh."""
    pim = PimSpec.load("newton-gddr6")
    row_bytes = 16 * 32 * 32
    alone = row_limited_ns(row_bytes, 1, pim, 1)
    assert alone == pytest.approx((64 + 75) / (1 - 350 / 1900) * 1.142857142857143)
    elements = row_bytes // 2
    assert min_read_ns(elements, 1, pim, "fp16", 1) == pytest.approx((64 + 75) * 1.142857142857143)
    assert min_read_ns(8 * elements, 4, pim, "fp16", 8) == pytest.approx((256 + 75) * 1.142857142857143)
    assert row_limited_ns(8 * row_bytes, 4, pim, 8) == pytest.approx(alone * (4 * 64 + 75) / (64 + 75))
