"""What a fused run of layers computes twice: the pixels that windows of neighbouring tiles have in common."""

from __future__ import annotations

from pimflow.core.region import ConvGeometry

GPU_TILE = 8  # rows and columns of a run's result that a block of threads computes, at most


def recomputed(pooling: ConvGeometry, rows: int, columns: int) -> float:
    """How often the pixels that a pooling reads are computed, for tiles of so many of its results."""
    computed = read = 1.0
    for axis, results in ((pooling.rows, rows), (pooling.columns, columns)):
        total = axis.output_extent
        tiles = [min(results, total - begin) for begin in range(0, total, results)]
        taps = 1 + (axis.window - 1) * axis.dilation
        computed *= sum((each - 1) * axis.stride + taps for each in tiles)
        read *= (total - 1) * axis.stride + taps
    return computed / read
