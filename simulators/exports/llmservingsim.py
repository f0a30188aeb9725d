"""Attention in PIM for LLMServingSim: a line over tokens, as its table of devices has it.

Its time of a layer's attention for one request is ``(slope * L + intercept) / channel_split``, in ns, over L
tokens. The table has both for 32 query heads on 8 of keys, 128 each; of another model the slope is scaled by
its query heads a head of keys, and the intercept by the elements of its queries. ``channel_split`` is the
number of PIM channels, or of heads of keys if these are fewer.

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
    """Times of one layer's attention for one request, and the line through them.

    Attributes
    ----------
    slope_ns, intercept_ns : float
        A token, and of none.
    points : dict of int to float
        By tokens, the time in ns that the line is of.
    """

    slope_ns: float
    intercept_ns: float
    points: dict[int, float]

    @classmethod
    def through(cls, points: Mapping[int, float]) -> AttentionLine:
        """The line whose errors, each over its time, have the least sum of squares."""
        tokens, times = (np.array([*each], float) for each in (points, points.values()))
        # Each row over its time: errors of short caches count as much as those of long ones.
        rows = np.stack([tokens, np.ones(tokens.size)], axis=1) / times[:, None]
        (slope, intercept), *_ = np.linalg.lstsq(rows, np.ones(tokens.size), rcond=None)
        return cls(slope_ns=float(slope), intercept_ns=float(intercept), points=dict(points))

    def at(self, tokens: int) -> float:
        """The time over so many tokens."""
        return self.slope_ns * tokens + self.intercept_ns

    @property
    def residual(self) -> float:
        """The largest error of the line at one of its points, over its time."""
        return max(abs(self.at(tokens) / time - 1) for tokens, time in self.points.items())

    def coefficients(self, heads: int, kv_heads: int, head_size: int, split: int) -> dict[str, float]:
        """What the simulator's table has to hold for its scaling to give this line on `split` channels."""
        group = (heads / kv_heads) / (_HEADS / _KV_HEADS)
        size = (heads * head_size) / (_HEADS * _HEAD_SIZE)
        return {"slope": self.slope_ns * split / group, "intercept": self.intercept_ns * split / size}
