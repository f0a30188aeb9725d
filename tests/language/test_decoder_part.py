"""What the first line of a compiled decoder says."""

from __future__ import annotations

from decoders import DecoderModel

from pimflow import frontend
from pimflow.commands.compile.compile_steps import decoder_part


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
