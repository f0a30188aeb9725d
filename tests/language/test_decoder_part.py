"""What the first line of a compiled decoder says."""

from types import SimpleNamespace

import pytest
from decoders import DecoderModel

from pimflow import frontend, system, zoo
from pimflow.commands.compile.compile_steps import decoder_part
from pimflow.commands.shared.published_decode import PublishedDecode


@pytest.mark.long
def test_a_block_is_said_to_be_one_of_several():
    """And a cache to be copied, unless there is a context."""
    one_block = "one block of 12, and no output layer: all figures are of one block"
    copied = "each step copies the cache; --context N keeps one of N tokens in place"
    assert decoder_part("gpt-2", frontend.load("gpt-2")) == f"{one_block}; {copied}"
    assert decoder_part("gpt-2", frontend.load("gpt-2", context=16)) == one_block
    model = DecoderModel(mask="given").model()
    assert decoder_part(model, frontend.load(model)) == copied
    assert decoder_part("tiny-lm", frontend.load("tiny-lm", context=16)) is None
    assert decoder_part("toy", frontend.load("toy")) is None


def test_a_large_block_is_compared_with_the_best_published_gpu():
    """In the words that the report prints; a small model is not."""
    target = system()
    evaluation, graph = SimpleNamespace(latency_ns=1e5), SimpleNamespace(regions=())
    result = SimpleNamespace(system=target, evaluation=evaluation, graph=graph)
    network = SimpleNamespace(states=(), inputs={})
    step_ns = PublishedDecode.from_decoder(zoo.decoder("llama-3-8b"), target, block_only=True).step_ns(512)
    part = decoder_part("llama-3-8b", network, result, 512)
    assert f"takes {step_ns / 1e6:.4f} ms, of which the plan is {step_ns / 1e5:.3f}x: bytes at 93.0%" in part
    assert step_ns / 1e5 == pytest.approx(5.27, rel=0.05)
    assert "published" not in decoder_part("gpt-2", network, result, 512)
