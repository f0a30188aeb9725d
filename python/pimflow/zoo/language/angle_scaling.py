"""Scalings of the angles of rotary positions, for contexts longer than a model was first trained for.

Each gives divisors of the frequencies, one for each pair of a head, and a factor of cosines and sines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class AngleScaling:
    """Scaled angles.

    Attributes
    ----------
    factors : tuple of float
        Divisors of the frequencies; empty if all are 1.
    scale : float
        Factor of cosines and sines.
    max_context : int
        Tokens beyond which other angles hold; 0 for none.
    """

    factors: tuple[float, ...] = ()
    scale: float = 1.0
    max_context: int = 0

    def fields(self) -> dict[str, object]:
        """Fields of a decoder."""
        fields: dict[str, object] = {"rotary_scale": self.scale} if self.scale != 1 else {}
        if any(factor != 1 for factor in self.factors):
            fields["rotary_factors"] = self.factors
        return fields | ({"max_context": self.max_context} if self.max_context else {})


@dataclass(frozen=True, kw_only=True)
class RotaryAngles:
    """Angles as a model was first trained with them.

    Attributes
    ----------
    base : float
        The ratio of speeds of the first pair of a head and of the one after the last.
    turned : int
        Elements of a head that are turned, two a pair.
    length : float
        Tokens of the context.
    """

    base: float
    turned: int
    length: float

    @property
    def turns(self) -> np.ndarray:
        """By pair, its turns over the context."""
        speeds: np.ndarray = self.base ** (-np.arange(0, self.turned, 2) / self.turned)
        turns: np.ndarray = self.length * speeds / (2 * np.pi)
        return turns

    def pair(self, turns: float) -> float:
        """The number of the pair, a fraction, that makes so many turns over the context."""
        return self.turned * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(self.base))


def linear(factor: float, turned: int) -> AngleScaling:
    """All angles of a head of `turned` elements divided by a factor."""
    return AngleScaling(factors=(factor,) * (turned // 2))


def llama3(angles: RotaryAngles, *, factor: float, low: float, high: float) -> AngleScaling:
    """Slow angles divided by a factor, fast ones kept: by their turns over the first context."""
    share = np.clip((angles.turns - low) / (high - low), 0, 1)
    return AngleScaling(factors=tuple(map(float, 1 / ((1 - share) / factor + share))))


def yarn(
    angles: RotaryAngles,
    *,
    factor: float,
    scale: float | None = None,
    fast: float = 32.0,
    slow: float = 1.0,
    truncate: bool = True,
) -> AngleScaling:
    """YaRN (arXiv 2309.00071): angles between `fast` and `slow` turns are blended by a ramp."""
    low, high = angles.pair(fast), angles.pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, angles.turned - 1)
    ramp = np.clip((np.arange(angles.turned // 2) - low) / (high - low or 0.001), 0, 1)
    factors = 1 / (ramp / factor + (1 - ramp))
    scale = (0.1 * math.log(factor) + 1 if factor > 1 else 1.0) if scale is None else scale
    return AngleScaling(factors=tuple(map(float, factors)), scale=scale)


def longrope(
    short: Sequence[float], length: int, *, factor: float, scale: float | None = None
) -> AngleScaling:
    """LongRoPE (arXiv 2402.13753) within the original `length`; beyond, other divisors hold."""
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    return AngleScaling(
        factors=tuple(map(float, short)), scale=scale, max_context=length if factor > 1 else 0
    )
