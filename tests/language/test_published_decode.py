"""Is the second baseline of language models the bytes of a step over the published bandwidth?"""

from dataclasses import replace

import pytest

from pimflow import system, zoo
from pimflow.commands.shared.published_decode import PublishedDecode

LLAMA = zoo.decoder("llama-3-8b")
BLOCK = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)  # weights of a block's products
HEAD = 4096 * 128256


def baseline(decoder=LLAMA, gpu="h100-sxm", **options):
    return PublishedDecode.from_decoder(decoder, system(gpu=gpu), **options)


def test_a_step_is_its_bytes_over_the_share_of_the_peak():
    published = baseline()
    weights_ns = 2 * (32 * BLOCK + HEAD) / (40 * 83.75 * 0.77)
    assert published.step_ns(0) == pytest.approx(weights_ns)
    cache_ns = 4 * 1000 * 32 * 2 * 8 * 128 * 2 / (40 * 83.75 * 0.77)
    assert published.step_ns(1000, 4) == pytest.approx(weights_ns + cache_ns)
    assert "77.0% of the peak bandwidth for 16 bits" in published.source and "vidur" in published.source


def test_narrow_weights_have_a_share_of_their_own():
    published = baseline(LLAMA.with_weights("q4_k"))
    stored = (32 * BLOCK + HEAD) * 144 / 256  # bytes: 128 of values and 16 of scales for 256 weights
    assert published.step_ns(0) == pytest.approx(stored / (40 * 83.75 * 0.32))
    assert "for 4 bits" in published.source and "for 16 bits" in published.source  # caches


def test_a_type_without_a_share_has_that_of_the_next_wider_one():
    int8 = baseline(LLAMA.with_weights("int8"))
    stored = 32 * (BLOCK + 4 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)) + HEAD + 4 * 128256
    assert int8.step_ns(0) == pytest.approx(stored / (40 * 83.75 * 0.77))


def test_windows_bound_what_is_read_of_caches():
    windowed = baseline(replace(LLAMA, windows=(100, 0) * 16))
    full = baseline()
    assert windowed.step_ns(100) == full.step_ns(100)
    full_ns = full.step_ns(1000) - full.step_ns(0)
    assert windowed.step_ns(1000) - windowed.step_ns(0) == pytest.approx(0.55 * full_ns)


def test_there_is_none_without_a_source_or_of_a_small_model():
    assert baseline(gpu="v100") is None
    assert baseline(zoo.decoder("gpt-2")) is None
    assert PublishedDecode.from_decoder(None, system()) is None


def test_a_block_is_one_of_all_without_the_output():
    blocks_ns = baseline().step_ns(512) - 2 * HEAD / (40 * 83.75 * 0.77)
    assert 32 * baseline(block_only=True).step_ns(512) == pytest.approx(blocks_ns)
