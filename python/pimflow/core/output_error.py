"""How far results may be from a reference, and how far they are."""

from __future__ import annotations

import numpy as np

OUTPUT_BOUND = {"fp16": 2e-3, "fp32": 1e-5}  # of `relative_error`, by storage type


def relative_error(result: np.ndarray, reference: np.ndarray) -> float:
    """Largest error over the largest magnitude of the reference; infinity for other shapes and no numbers."""
    if result.shape != reference.shape or not np.isfinite(result).all():
        return float("inf")
    if not result.size:
        return 0.0
    scale = float(np.abs(reference).max())
    error = float(np.abs(result.astype(np.float64) - reference).max())
    return error / scale if scale else error
