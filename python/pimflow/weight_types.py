"""The types in which weights are stored: their bytes, and the values that remain of an array.

A value takes some bits, and the values of a block share scales. Blocks lie along the reduction of a product,
which is the first axis of the arrays here. Formats of blocks are those of GGUF (ggml-common.h,
gguf-py/gguf/quants.py); ``int4``, ``int8`` and ``fp8`` have one scale in fp32 for each output, as
compressed-tensors, and ``int4_g128`` one in fp16 for 128 values of it, as symmetric GPTQ and AWQ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

VALUES_AT_ONCE = 1 << 18  # of an array that is rounded: intermediate results stay in the CPU's cache
Rounding: TypeAlias = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class WeightType:
    """How the weights of a product are stored.

    Attributes
    ----------
    bits : int
        Bits of a value, without its share of scales.
    block : int
        Values that share scales; 0 for all values of an output, 1 for none.
    rounding : callable, optional
        Gives the fp32 values, [values, columns], that are stored for fp32 values of whole blocks; None for
        a type that is read, but not written.
    """

    name: str
    bits: int
    block: int = 1
    scale_bytes: int = 0
    rounding: Rounding | None = None

    def stored_bytes(self, outputs: int, reduction: int) -> int:
        """Bytes of the weights of so many outputs; the last block of each may have fewer values."""
        return outputs * (-(-reduction * self.bits // 8) + self.output_scale_bytes(reduction))

    def output_scale_bytes(self, reduction: int) -> int:
        """Bytes of the scales of an output."""
        return self.scale_bytes * (-(-reduction // self.block) if self.block else 1)

    def column_values(self, column_bytes: int) -> int:
        """Whole values in so many bytes, without their scales."""
        return column_bytes * 8 // self.bits

    def holds(self, reduction: int) -> bool:
        """Whether a reduction is of whole blocks."""
        return reduction % max(self.block, 1) == 0

    def round(self, values: np.ndarray) -> np.ndarray:
        """What is stored of an array, [reduction, outputs], in fp32; the reduction is of whole blocks."""
        assert self.rounding is not None and self.holds(len(values)), "not a type and shape that is written"
        stored = np.empty(values.shape, np.float32)
        rows = self.block or len(values)
        columns = max(1, VALUES_AT_ONCE // rows)
        for row in range(0, len(values), rows):
            for column in range(0, values.shape[1], columns):
                part = (slice(row, row + rows), slice(column, column + columns))
                stored[part] = self.rounding(values[part])
        return stored

    def integers(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Small integers, int8 [outputs, reduction], and a scale of each output, in fp32, of stored values.

        It is for types with one scale an output, by which the largest magnitude is the largest integer.
        """
        assert not self.block and self.name in INTEGERS, "a type of integers with a scale an output"
        largest = np.float32((1 << (self.bits - 1)) - 1)
        scales = np.abs(stored).max(axis=1).astype(np.float32) / largest
        return np.rint(_ratios(stored.T, scales).T).astype(np.int8), scales


def _half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest bf16 values, ties to even."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    words = words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))
    return (words & np.uint32(0xFFFF0000)).view(np.float32)


_FP8_MAX, _FP8_MIN_EXPONENT, _FP8_FRACTION_BITS = 448.0, -6, 3  # OCP 8-bit floating point, E4M3


def _fp8(values: np.ndarray) -> np.ndarray:
    scale = np.abs(values).max(axis=0) / np.float32(_FP8_MAX)
    ratios = np.clip(_ratios(values, scale), -_FP8_MAX, _FP8_MAX)
    exponents = np.maximum(np.frexp(ratios)[1] - 1, _FP8_MIN_EXPONENT) - _FP8_FRACTION_BITS
    return np.ldexp(np.rint(np.ldexp(ratios, -exponents)), exponents) * scale


def _int8(values: np.ndarray) -> np.ndarray:
    scale = np.abs(values).max(axis=0) / np.float32(127)
    return np.clip(np.rint(_ratios(values, scale)), -127, 127) * scale


_INT4_MAX = 7


def _int4(values: np.ndarray) -> np.ndarray:
    scale = np.abs(values).max(axis=0) / np.float32(_INT4_MAX)
    return np.clip(np.rint(_ratios(values, scale)), -_INT4_MAX, _INT4_MAX) * scale


def _int4_group(values: np.ndarray) -> np.ndarray:
    scale = np.abs(values).max(axis=0) / np.float32(_INT4_MAX)
    return np.clip(np.rint(_ratios(values, scale)), -_INT4_MAX - 1, _INT4_MAX) * _half(scale)


def _q8_0(values: np.ndarray) -> np.ndarray:
    scale = np.abs(values).max(axis=0) / np.float32(127)
    return _round_away(_ratios(values, scale)) * _half(scale)


def _q4_0(values: np.ndarray) -> np.ndarray:
    """Sixteen steps from the value of the largest magnitude, which is stored as -8."""
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=0)[None], axis=0)[0]
    scale = largest / np.float32(-8)
    steps = np.clip(np.trunc(_ratios(values, scale) + np.float32(8.5)), 0, 15)
    return (steps - 8) * _half(scale)


_Q4_K_PART, _Q4_K_STEPS, _SIX_BITS = 32, 15, 63


def _q4_k(values: np.ndarray) -> np.ndarray:
    """Parts of 32 values from a minimum on; scales and minimums are of six bits, in units of the block."""
    parts = values.reshape(-1, _Q4_K_PART, values.shape[1])
    minimums = np.maximum(-parts.min(axis=1), 0)
    scales = (parts.max(axis=1) + minimums) / np.float32(_Q4_K_STEPS)
    scales = np.maximum(scales, 0)
    scale_unit, minimum_unit = (
        _half(part.max(axis=0) / np.float32(_SIX_BITS)) for part in (scales, minimums)
    )
    scales = np.minimum(np.rint(_ratios(scales, scale_unit)), _SIX_BITS) * scale_unit
    minimums = np.minimum(np.rint(_ratios(minimums, minimum_unit)), _SIX_BITS) * minimum_unit
    scales, minimums = scales[:, None], minimums[:, None]
    steps = np.clip(np.rint(_ratios(parts + minimums, scales)), 0, _Q4_K_STEPS)
    return (scales * steps - minimums).reshape(values.shape)


def _ratios(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values over their scales; 0 where a scale is 0."""
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    return values * inverse


def _round_away(values: np.ndarray) -> np.ndarray:
    """The nearest integers; halves away from zero."""
    return np.trunc(values + np.copysign(np.float32(0.5), values))


CACHE_TYPES = ("int8", "int4")  # of the integers in which keys and values may be stored
CACHE_SCALE_BYTES = 2  # of the scale of a key or value, one a token and head, in fp16
GROUPS = (32, 64, 128)  # inputs that share a scale in GPTQ's and AWQ's files
_TYPES = (
    WeightType(name="fp16", bits=16, rounding=_half),
    WeightType(name="bf16", bits=16, rounding=_bfloat16),
    WeightType(name="fp8", bits=8, block=0, scale_bytes=4, rounding=_fp8),
    WeightType(name="int8", bits=8, block=0, scale_bytes=4, rounding=_int8),
    WeightType(name="int4", bits=4, block=0, scale_bytes=4, rounding=_int4),
    WeightType(name="int4_g128", bits=4, block=128, scale_bytes=2, rounding=_int4_group),
    WeightType(name="q8_0", bits=8, block=32, scale_bytes=2, rounding=_q8_0),
    WeightType(name="q4_0", bits=4, block=32, scale_bytes=2, rounding=_q4_0),
    WeightType(name="q4_k", bits=4, block=256, scale_bytes=16, rounding=_q4_k),
    # integers alone, of caches: their scales lie apart, and are applied to vectors and results
    *(WeightType(name=f"plain_{name}", bits=bits) for name, bits in (("int8", 8), ("int4", 4))),
    # read in GGUF files, by the library gguf
    WeightType(name="q4_1", bits=4, block=32, scale_bytes=4),
    WeightType(name="q5_0", bits=5, block=32, scale_bytes=2),
    WeightType(name="q5_1", bits=5, block=32, scale_bytes=4),
    WeightType(name="q2_k", bits=2, block=256, scale_bytes=20),
    WeightType(name="q3_k", bits=3, block=256, scale_bytes=14),
    WeightType(name="q5_k", bits=5, block=256, scale_bytes=16),
    WeightType(name="q6_k", bits=6, block=256, scale_bytes=18),
    WeightType(name="iq4_nl", bits=4, block=32, scale_bytes=2),
    WeightType(name="iq4_xs", bits=4, block=256, scale_bytes=8),
    WeightType(name="mxfp4", bits=4, block=32, scale_bytes=1),
    # read in folders: GPTQ's and AWQ's, symmetric or with a zero for each group, which counts as a byte
    *(
        WeightType(name=f"{sign}int{bits}_g{group}", bits=bits, block=group, scale_bytes=2 + bool(sign))
        for bits in (4, 8)
        for group in GROUPS
        for sign in ("", "u")
        if (sign, bits, group) != ("", 4, 128)
    ),
)
WEIGHT_TYPES = {weight_type.name: weight_type for weight_type in _TYPES}
# Those that drawn and trained weights of the zoo can be stored in.
INTEGERS = ("int4", "int8")  # those of activations too: integers with one scale an output, or a token
WRITTEN_TYPES = tuple(weight_type.name for weight_type in _TYPES if weight_type.rounding)


def plain_type(cache_type: str | None) -> str | None:
    """The type, of `WEIGHT_TYPES`, of the integers of a cache of one of `CACHE_TYPES`; None for none."""
    return f"plain_{cache_type}" if cache_type else None


def cache_bytes(cache_type: str, elements: int, vectors: int, element_bytes: int) -> int:
    """Bytes of keys and values of so many elements, in so many vectors of a token and head.

    Those of a network whose caches have no type of their own take `element_bytes` an element.
    """
    if not cache_type:
        return elements * element_bytes
    return elements * WEIGHT_TYPES[cache_type].bits // 8 + vectors * CACHE_SCALE_BYTES


def group_type(bits: int, group: int, *, zeros: bool) -> str:
    """The name of the type of weights of so many bits, whose scale, and zero, are those of a group.

    A group of another size than `GROUPS` is stored, in memory, as the next smaller ones, or the smallest.
    """
    stored_group = max((size for size in GROUPS if group % size == 0), default=min(GROUPS))
    return f"{'u' * zeros}int{bits}_g{stored_group}"


@functools.lru_cache(maxsize=1 << 12)  # every price of a layer asks
def stored_bytes(name: str, outputs: int, reduction: int) -> int:
    """`WeightType.stored_bytes` of the type of that name."""
    return WEIGHT_TYPES[name].stored_bytes(outputs, reduction)
