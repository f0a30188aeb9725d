"""Times of attention in PIM for LLMServingSim: a linear function of tokens, as in its table of devices.

There, a layer's attention for one request over L tokens takes ``(slope * L + intercept) / channel_split`` ns.
The table has slope and intercept for 32 query heads and 8 KV heads of 128 elements. For another model, the
slope is scaled by the number of query heads for each KV head, and the intercept by the number of elements of
its queries. ``channel_split`` is the number of PIM channels, or of KV heads if these are fewer.

Source: github.com/casys-kaist/LLMServingSim, ``serving/core/pim_model.py`` (`estimate_with_linear`) and
``serving/core/trace_generator.py`` (``channel_split``), read 2026-11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_HEADS, _KV_HEADS, _HEAD_SIZE = 32, 8, 128  # of the model that the table is for


@dataclass(frozen=True, kw_only=True)
class AttentionLine:
    """Times of a layer's attention for one request, and a line fitted to them.

    Attributes
    ----------
    slope_ns, intercept_ns : float
        Time for each token, and time without tokens.
    points : dict of int to float
        By number of tokens, the times in ns that the line was fitted to.
    """

    slope_ns: float
    intercept_ns: float
    points: dict[int, float]

    @classmethod
    def fit(cls, points: Mapping[int, float]) -> AttentionLine:
        """The line with the least sum of squared relative errors."""
        tokens, times = (np.array([*values], float) for values in (points, points.values()))
        # Divided by the times, errors of short caches count as much as those of long ones.
        rows = np.stack([tokens, np.ones(tokens.size)], axis=1) / times[:, None]
        (slope, intercept), *_ = np.linalg.lstsq(rows, np.ones(tokens.size), rcond=None)
        return cls(slope_ns=float(slope), intercept_ns=float(intercept), points=dict(points))

    def time_ns(self, tokens: int) -> float:
        """Time in ns over so many tokens."""
        return self.slope_ns * tokens + self.intercept_ns

    @property
    def residual(self) -> float:
        """The largest relative error of the line at its points."""
        return max(abs(self.time_ns(tokens) / time - 1) for tokens, time in self.points.items())

    def coefficients(self, heads: int, kv_heads: int, head_size: int, split: int) -> dict[str, float]:
        """Entries of the simulator's table for which its scaling gives this line on `split` channels."""
        group = (heads / kv_heads) / (_HEADS / _KV_HEADS)
        size = (heads * head_size) / (_HEADS * _HEAD_SIZE)
        return {"slope": self.slope_ns * split / group, "intercept": self.intercept_ns * split / size}
