"""Deep reuse: how far a layer's result may lie over the part of its operand that was consumed.

The result begins at address 0 and its operand `lead` elements above it; both grow pixel by pixel, in
row-major order, all channels of a pixel side by side (Deep Fusion, section 3.2 and Figure 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pimflow.core.ranges import RangeMap


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Placement of the operand and the result of one layer in the same memory, in elements.

    Attributes
    ----------
    lead : int
        Where the operand begins; the result begins at 0.
    operand, result : int
        Their sizes.
    """

    lead: int
    operand: int
    result: int

    @property
    def size(self) -> int:
        """Elements that operand and result take together."""
        return max(self.lead + self.operand, self.result)

    @property
    def saving(self) -> float:
        """Share of the memory of both, side by side, that is saved."""
        return 1 - self.size / (self.operand + self.result)


def overlap(
    rows: RangeMap, columns: RangeMap, channels: int, filters: int, *, strict: bool = True
) -> Overlap:
    """The smallest lead with which no pixel overwrites an operand that it or a later one reads.

    Parameters
    ----------
    rows, columns : RangeMap
        Input rows and columns that the window reads.
    channels, filters : int
        Channels of operand and result.
    strict : bool
        A pixel's channels are written while its window is still being read; else, as in the paper, only once
        all of them are computed.
    """
    first = _first_needed(rows, columns, channels)
    written = (np.arange(first.size, dtype=np.int64) + 1) * filters
    # a pixel that holds back its channels needs its window no more when it writes them
    needed = first if strict else np.append(first[1:], written[-1])
    return Overlap(
        lead=max(0, int((written - needed).max())),
        operand=rows.extent * columns.extent * channels,
        result=first.size * filters,
    )


def _first_needed(rows: RangeMap, columns: RangeMap, channels: int) -> np.ndarray:
    """For each output pixel in order, the first operand element that it or a later one reads."""
    r, c = np.arange(rows.output_extent), np.arange(columns.output_extent)
    (top, bottom), (left, right) = rows.spans(r, r + 1), columns.spans(c, c + 1)
    first = (top[:, None] * columns.extent + left[None, :]) * channels
    empty = (bottom == top)[:, None] | (right == left)[None, :]
    first = np.where(empty, np.iinfo(np.int64).max, first).ravel()  # padding needs nothing
    return np.minimum.accumulate(first[::-1])[::-1]


def row_lead(
    rows: RangeMap, height: np.ndarray, width: np.ndarray, channels: int, oh: np.ndarray, ow: np.ndarray,
    filters: int, images: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """A lead that is enough for tiles of many sizes at once, whichever part of the layer they are.

    A row of results is written before the first row that it reads is given up, so it is at most a row above
    `overlap`'s.

    Parameters
    ----------
    height, width, oh, ow : ndarray
        Rows and columns of operand and result in memory.
    images : ndarray
        How many lie behind one another.
    """
    pad = max(0, rows.pad_before)
    lead = np.zeros(np.broadcast(height, width, oh, ow, images).shape, np.int64)
    for row in (0, pad // rows.stride, pad // rows.stride + 1, None):
        at = oh - 1 if row is None else np.minimum(row, oh - 1)
        read = np.maximum(0, at * rows.stride - pad) * width * channels
        written = (at + 1) * ow * filters
        drift = np.maximum(0, (images - 1) * (oh * ow * filters - height * width * channels))
        lead = np.maximum(lead, written - read + drift)
    return lead
