"""Deep reuse: how far a layer's result may overwrite the consumed part of its operand.

The result begins at address 0 and its operand `lead` elements above it; both grow pixel by pixel, in
row-major order, all channels of a pixel side by side (Deep Fusion, section 3.2 and Figure 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pimflow.core.ranges import RangeMap


def row_lead(
    rows: RangeMap, operand: Sequence[np.ndarray], result: Sequence[np.ndarray], images: np.ndarray
) -> np.ndarray:
    """A sufficient lead for tiles of many sizes at once, at any position in the layer.

    It assumes that a row of results is written before the first row that it reads is free, so it is at most a
    row larger than the smallest lead.

    Parameters
    ----------
    operand, result : sequence of ndarray
        Rows, columns and channels in memory.
    images : ndarray
        Number of images in memory, one after the other.
    """
    (height, width, channels), (oh, ow, filters) = operand, result
    pad = max(0, rows.pad_before)
    lead = np.zeros(np.broadcast(height, width, oh, ow, images).shape, np.int64)
    for row in (0, pad // rows.stride, pad // rows.stride + 1, None):
        row_index = oh - 1 if row is None else np.minimum(row, oh - 1)
        read = np.maximum(0, row_index * rows.stride - pad) * width * channels
        written = (row_index + 1) * ow * filters
        drift = np.maximum(0, (images - 1) * (oh * ow * filters - height * width * channels))
        lead = np.maximum(lead, written - read + drift)
    return lead
