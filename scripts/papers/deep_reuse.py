"""Deep reuse of one layer: how far its result may overwrite the consumed part of its operand, pixel by pixel.

The result begins at address 0 and its operand `lead` elements above it; both grow in row-major order, all
channels of a pixel side by side (Deep Fusion, section 3.2 and Figure 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pimflow.core.ranges import RangeMap


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Operand and result of one layer in the same memory; sizes in elements.

    Attributes
    ----------
    lead : int
        Address of the operand; the result begins at 0.
    """

    lead: int
    operand: int
    result: int

    @property
    def size(self) -> int:
        """Elements that operand and result occupy together."""
        return max(self.lead + self.operand, self.result)

    @property
    def saving(self) -> float:
        """Saved share of the memory that both take without overlap."""
        return 1 - self.size / (self.operand + self.result)


def overlap(
    rows: RangeMap, columns: RangeMap, channels: int, filters: int, *, strict: bool = True
) -> Overlap:
    """The smallest lead with which no pixel overwrites operands that it or a later pixel reads.

    Parameters
    ----------
    rows, columns : RangeMap
        Input rows and columns that the window reads.
    strict : bool
        Whether a pixel's channels are written while its window is still read; else, as in the paper, they are
        written when all of them are computed.
    """
    first = _first_needed(rows, columns, channels)
    written = (np.arange(first.size, dtype=np.int64) + 1) * filters
    # a pixel that writes all its channels at the end no longer reads its window then
    needed = first if strict else np.append(first[1:], written[-1])
    return Overlap(
        lead=max(0, int((written - needed).max())),
        operand=rows.extent * columns.extent * channels,
        result=first.size * filters,
    )


def _first_needed(rows: RangeMap, columns: RangeMap, channels: int) -> np.ndarray:
    """For each output pixel in order, the first operand element that it or a later pixel reads."""
    r, c = np.arange(rows.output_extent), np.arange(columns.output_extent)
    (first_row, end_row), (first_column, end_column) = rows.spans(r, r + 1), columns.spans(c, c + 1)
    first = (first_row[:, None] * columns.extent + first_column[None, :]) * channels
    empty = (end_row == first_row)[:, None] | (end_column == first_column)[None, :]
    first = np.where(empty, np.iinfo(np.int64).max, first).ravel()  # padding reads nothing
    return np.minimum.accumulate(first[::-1])[::-1]
