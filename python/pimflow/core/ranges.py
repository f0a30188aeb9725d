"""Range algebra: the range of an input axis that a range of an output axis reads, exact at the borders."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Range:
    """Half-open range of an input axis, and the padding that is read beyond the axis on either side."""

    begin: int
    end: int
    pad_before: int = 0
    pad_after: int = 0

    def __len__(self) -> int:
        return max(0, self.end - self.begin)


@dataclass(frozen=True, kw_only=True)
class RangeMap:
    """Affine window along one axis: output index ``i`` reads inputs
    ``i//repeat*stride - pad_before + d*dilation`` for ``d`` in ``[0, window)``.

    It describes every operator on every axis (Deep Fusion, section 3.1): the window of a convolution or a
    pooling; `pad` for padding; `same` for elementwise operators; `blocks` for channels that a group of
    outputs reads, `whole` for channels that every output reads; `concat_operand` for operands of a
    concatenation.

    Attributes
    ----------
    window, stride, dilation : int
        Window taps, step between windows, step between taps.
    pad_before, pad_after : int
        Zero padding on either side; negative for a crop.
    repeat : int
        Number of consecutive outputs that read the same window.
    """

    extent: int
    window: int = 1
    stride: int = 1
    dilation: int = 1
    pad_before: int = 0
    pad_after: int = 0
    repeat: int = 1

    @classmethod
    def same(cls, extent: int) -> RangeMap:
        """Output index ``i`` reads input ``i``."""
        return cls(extent=extent)

    @classmethod
    def pad(cls, extent: int, before: int, after: int) -> RangeMap:
        """Zeros around the axis, or a crop where negative."""
        return cls(extent=extent, pad_before=before, pad_after=after)

    @classmethod
    def concat_operand(cls, extent: int, begin: int, total: int) -> RangeMap:
        """The operand of a concatenation that begins at output `begin` of `total`."""
        return cls.pad(extent, begin, total - begin - extent)

    @classmethod
    def blocks(cls, extent: int, outputs: int, groups: int) -> RangeMap:
        """`groups` equal ranges of outputs, each of which reads its own range of inputs."""
        size = extent // groups
        return cls(extent=extent, window=size, stride=size, repeat=outputs // groups)

    @classmethod
    def whole(cls, extent: int, outputs: int) -> RangeMap:
        """Every output reads every input."""
        return cls.blocks(extent, outputs, 1)

    @functools.cached_property
    def output_extent(self) -> int:
        """Length of the output axis."""
        reach = (self.window - 1) * self.dilation + 1
        return (
            max(0, (self.extent + self.pad_before + self.pad_after - reach) // self.stride + 1) * self.repeat
        )

    def inputs(self, begin: int, end: int) -> Range:
        """The inputs that outputs ``[begin, end)`` read; an empty range if every tap lies in padding.

        Raises
        ------
        ValueError
            If ``[begin, end)`` is empty or outside the output axis.
        """
        if not 0 <= begin < end <= self.output_extent:
            raise ValueError(f"outputs [{begin}, {end}) are not within [0, {self.output_extent})")
        first = begin // self.repeat * self.stride - self.pad_before
        last = (end - 1) // self.repeat * self.stride - self.pad_before
        last += (self.window - 1) * self.dilation + 1
        clipped_begin, clipped_end = min(max(first, 0), self.extent), max(min(last, self.extent), 0)
        clipped_end = max(clipped_begin, clipped_end)
        reach = last - first
        return Range(
            begin=clipped_begin,
            end=clipped_end,
            pad_before=min(max(0, -first), reach),
            pad_after=min(max(0, last - self.extent), reach),
        )

    def spans(self, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`inputs` of many ranges at once, as (begins, ends); an empty range reads an empty range."""
        first = begins // self.repeat * self.stride - self.pad_before
        last = (
            (ends - 1) // self.repeat * self.stride - self.pad_before + (self.window - 1) * self.dilation + 1
        )
        lo = np.minimum(np.maximum(first, 0), self.extent)
        hi = np.maximum(np.minimum(last, self.extent), lo)
        return lo, np.where(ends > begins, hi, lo)

    def output_part(self, begin: int, end: int) -> RangeMap:
        """The map of only the outputs ``[begin, end)``, over only the inputs that they read.

        Raises
        ------
        ValueError
            If ``[begin, end)`` divides outputs that read the same window.
        """
        if begin % self.repeat or end % self.repeat:
            raise ValueError(f"outputs [{begin}, {end}) are no whole runs of {self.repeat}")
        part = self.inputs(begin, end)
        return RangeMap(
            extent=len(part),
            window=self.window,
            stride=self.stride,
            dilation=self.dilation,
            pad_before=part.pad_before,
            pad_after=part.pad_after,
            repeat=self.repeat,
        )

    def split_obstacle(self, boundary: int) -> str:
        """Why outputs cannot be computed in two parts, ``[0, at)`` and ``[at, end)``; empty if they can."""
        total = self.output_extent
        if not 0 < boundary < total:
            return f"a split needs 1 to {total - 1} of {total} rows on the GPU, not {boundary}"
        for begin, end in ((0, boundary), (boundary, total)):
            if not len(self.inputs(begin, end)):
                return f"output rows {begin}..{end - 1} read only padding"
        return ""
