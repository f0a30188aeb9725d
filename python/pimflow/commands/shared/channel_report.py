"""Figures for each number of PIM channels, and their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ChannelCount:
    """Figures of the best plan for a number of PIM channels.

    Attributes
    ----------
    latency_ns, energy_pj : float or None
        Of the best plan; None if no plan is within the bounds, or weights do not fit the channels.
    speedup : float or None
        Over the GPU alone with all channels.
    """

    pim_channels: int
    latency_ns: float | None = None
    energy_pj: float | None = None
    speedup: float | None = None
    chosen: bool = False


def text(rows: Sequence[ChannelCount]) -> str:
    """The speed-up for each number, in a line."""
    parts = [
        f"{row.pim_channels}: {f'{row.speedup:.3f}x' if row.speedup else 'none'}{' (chosen)' * row.chosen}"
        for row in rows
    ]
    return f"channels  with PIM, {', '.join(parts)}"
