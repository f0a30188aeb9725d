"""The language models of the zoo."""

from __future__ import annotations

from pimflow.errors import UnknownNameError
from pimflow.zoo.language.decoder import BLOCK_PRODUCTS, Decoder

TINY = Decoder(
    name="tiny-lm",
    layers=3,
    hidden=192,
    heads=6,
    kv_heads=2,
    head_size=32,
    feed_forward=448,
    vocabulary=256,
    max_context=1024,
    tied=True,
    trained=True,
    text="bytes",
    source="scripts/train_tiny_lm.py",
)
DECODERS = (
    Decoder(
        name="gpt-2",
        layers=12,
        hidden=768,
        heads=12,
        kv_heads=12,
        head_size=64,
        feed_forward=3072,
        vocabulary=50257,
        norm="layer",
        positions="learned",
        max_context=1024,
        activation="gelu",
        biases=frozenset(BLOCK_PRODUCTS),
        tied=True,
        source="Radford et al. 2019, the smallest model as released",
    ),
    Decoder(
        name="llama-2-7b",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=32,
        head_size=128,
        feed_forward=11008,
        vocabulary=32000,
        max_context=4096,
        source="arXiv 2307.09288",
    ),
    Decoder(
        name="llama-3-8b",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_size=128,
        feed_forward=14336,
        vocabulary=128256,
        rotary_base=500000.0,
        max_context=8192,
        source="arXiv 2407.21783, table 3; vocabulary and base as released",
    ),
    Decoder(
        name="opt-6.7b",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=32,
        head_size=128,
        feed_forward=16384,
        vocabulary=50272,
        norm="layer",
        positions="learned",
        max_context=2048,
        position_offset=2,
        activation="relu",
        biases=frozenset(BLOCK_PRODUCTS),
        tied=True,
        source="arXiv 2205.01068, table 1",
    ),
    TINY,
)
_BY_NAME = {decoder.name: decoder for decoder in DECODERS}


def names() -> list[str]:
    """List the language models of the zoo, sorted."""
    return sorted(_BY_NAME)


def decoder(name: str) -> Decoder:
    """A language model of the zoo; raises `UnknownNameError` if there is none of that name."""
    if name not in _BY_NAME:
        raise UnknownNameError("language model", name, names())
    return _BY_NAME[name]
