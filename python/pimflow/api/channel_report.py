"""What each number of channels with PIM gives, in figures and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ChannelCount:
    """What a number of channels with PIM gives.

    Attributes
    ----------
    latency_ns, energy_pj : float or None
        Of the best plan; None if no plan keeps to the bounds, or weights do not fit the channels.
    speedup : float or None
        Against the GPU alone, which has all channels.
    """

    pim_channels: int
    latency_ns: float | None
    energy_pj: float | None
    speedup: float | None
    chosen: bool = False


def text(rows: Sequence[ChannelCount]) -> str:
    """What each number gives, in a line."""
    told = [
        f"{row.pim_channels}: {f'{row.speedup:.3f}x' if row.speedup else 'none'}{' (chosen)' * row.chosen}"
        for row in rows
    ]
    return f"channels  with PIM, {', '.join(told)}"
