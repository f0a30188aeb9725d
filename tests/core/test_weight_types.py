"""Weights in narrow types: the values that remain, against the library gguf; their bytes."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from pimflow.weight_types import WEIGHT_TYPES, WRITTEN_TYPES

OUTPUTS = 7


def random_values(reduction: int, seed: int = 0) -> np.ndarray:
    """Weights of several magnitudes, with a block of zeros and one of a single sign."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(reduction, OUTPUTS)) * 10.0 ** rng.integers(-1, 3, OUTPUTS)
    values[:32, 0], values[:, 1] = 0, np.abs(values[:, 1])
    return values.astype(np.float32)


def in_rows(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.T)


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_blocks_are_those_of_the_library(name):
    values, kind = random_values(512), GGMLQuantizationType[name.upper()]
    expected = quants.dequantize(quants.quantize(in_rows(values), kind), kind)
    np.testing.assert_array_equal(WEIGHT_TYPES[name].round(values), expected.T)


def packed_q4_k(steps, scales, minimums, unit, minimum_unit) -> np.ndarray:
    """A block as ggml-common.h has it: two halves, eight scales and minimums of six bits, nibbles."""
    first = [scales[i] | (scales[i + 4] >> 4) << 6 for i in range(4)]
    second = [minimums[i] | (minimums[i + 4] >> 4) << 6 for i in range(4)]
    third = [scales[i + 4] & 15 | (minimums[i + 4] & 15) << 4 for i in range(4)]
    pairs = steps.reshape(4, 2, 32)
    data = (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8).ravel()
    units = np.array([unit, minimum_unit], np.float16).view(np.uint8)
    return np.concatenate([units, np.array([*first, *second, *third], np.uint8), data])


def test_q4_k_is_what_a_block_of_its_bits_decodes_to():
    """The steps, scales and minimums are found again from the values, packed, and decoded by the library."""
    rng = np.random.default_rng(1)
    unit, minimum_unit = np.float16(0.0123), np.float16(0.0456)
    scales, minimums = rng.integers(1, 64, 8), rng.integers(0, 64, 8)
    scales[0], minimums[1] = 63, 63
    steps = rng.integers(0, 16, (8, 32))
    steps[:, 0], steps[:, 1] = 0, 15
    block = packed_q4_k(steps, scales, minimums, unit, minimum_unit)
    kind = GGMLQuantizationType.Q4_K
    decoded = quants.dequantize(block[None], kind)[0]
    assert decoded.dtype == np.float32 and block.size == GGML_QUANT_SIZES[kind][1]
    np.testing.assert_allclose(WEIGHT_TYPES["q4_k"].round(decoded[:, None])[:, 0], decoded, rtol=0, atol=0.04)


@pytest.mark.long
@pytest.mark.parametrize("name", WRITTEN_TYPES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 32), blocks=st.integers(1, 3))
def test_no_value_is_further_off_than_its_steps_are_apart(name, seed, blocks):
    kind = WEIGHT_TYPES[name]
    values = random_values(blocks * max(kind.block, 64), seed)
    stored = kind.round(values)
    assert stored.dtype == np.float32 and stored.shape == values.shape
    for begin in range(0, len(values), kind.block or len(values)):
        part = values[begin : begin + (kind.block or len(values))]
        error = np.abs(stored[begin : begin + len(part)] - part).max(axis=0)
        # the sign of the largest is kept by q4_0, so that the other end loses a step
        counts = {"int4": 14, "int4_g128": 14, "q4_0": 8, "q4_k": 15 / 2}
        counts |= {"fp8": 28, "bf16": 256, "fp16": 2048}
        steps = counts.get(name, 127)
        assert (error <= np.abs(part).max(axis=0) / steps * 1.07 + 1e-6).all()


@pytest.mark.parametrize("name", ["fp8", "fp16", "bf16", "q8_0"])
def test_what_is_stored_is_stored_again(name):
    kind = WEIGHT_TYPES[name]
    once = kind.round(random_values(64))
    np.testing.assert_allclose(kind.round(once), once, rtol=2e-3, atol=1e-9)


def test_fp8_is_the_nearest_of_all_values_of_e4m3():
    """Seven bits are exponent and fraction, with subnormals; the largest code is no number."""
    codes = np.arange(127)
    exponents, fractions = codes >> 3, codes & 7
    magnitudes = np.where(exponents, (1 + fractions / 8) * 2.0 ** (exponents - 7), fractions / 8 * 2.0**-6)
    assert magnitudes.max() == 448
    grid = np.concatenate([-magnitudes[::-1], magnitudes])
    values = np.append(np.random.default_rng(2).normal(size=999) * 100, 448).astype(np.float32)[:, None]
    values = np.clip(values, -448, 448)
    nearest = np.abs(values - grid).min(axis=1)
    stored = WEIGHT_TYPES["fp8"].round(values)
    np.testing.assert_allclose(np.abs(stored - values)[:, 0], nearest, rtol=1e-4, atol=1e-5)
    assert np.isin(stored, grid).all()


def test_bytes_are_those_of_the_formats():
    for kind, (block, size_bytes) in GGML_QUANT_SIZES.items():
        name = {"F16": "fp16"}.get(kind.name, kind.name.lower())
        if name in WEIGHT_TYPES:
            assert WEIGHT_TYPES[name].stored_bytes(3, 2 * block) == 6 * size_bytes
            assert WEIGHT_TYPES[name].block == block
    assert WEIGHT_TYPES["int8"].stored_bytes(4, 100) == WEIGHT_TYPES["fp8"].stored_bytes(4, 100) == 4 * 104
    assert WEIGHT_TYPES["q4_0"].stored_bytes(1, 40) == 20 + 2 * 2  # the last block is not full
