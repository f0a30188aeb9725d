"""The choice of the next token: the most likely one, or one that is drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pimflow.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Chooses the next token of a request by its logits.

    At a temperature above 0, token i is drawn with the probability ``softmax(logits / temperature)[i]``,
    among the `top_k` largest and of these the fewest whose probabilities sum to `top_p`: by the largest sum
    of scaled logit and Gumbel noise, which follows from seed, request and number of the token alone. So the
    same draws on other logits, such as those of a reference, give the same token unless two sums are close.

    Attributes
    ----------
    temperature : float
        0 for the largest logit.
    top_k, seed, request : int
        `top_k` is 0 for all tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    request: int = 0

    @classmethod
    def from_options(
        cls, temperature: float, top_k: int | None, top_p: float | None, seed: int | None
    ) -> Sampler:
        """A sampler of the first request; raises `UsageError` for values out of range or without effect."""
        if not 0 <= temperature < math.inf:
            raise UsageError(f"--temperature {temperature}: give 0 or a number above")
        if top_k is not None and top_k < 1:
            raise UsageError(f"--top-k {top_k}: give 1 or more")
        if top_p is not None and not 0 < top_p <= 1:
            raise UsageError(f"--top-p {top_p}: give a number above 0, and 1 at most")
        if seed is not None and seed < 0:
            raise UsageError(f"--seed {seed}: give 0 or more")
        given = {"--top-k": top_k, "--top-p": top_p, "--seed": seed}
        flags = [flag for flag, value in given.items() if value is not None]
        if flags and not temperature:
            raise UsageError(f"{flags[0]}: give --temperature too; without it the largest logit is taken")
        return cls(temperature=float(temperature), top_k=top_k or 0, top_p=top_p or 1.0, seed=seed or 0)

    def choose(self, logits: np.ndarray, number: int) -> int:
        """The new token of this number, from 0 on, by its logits [vocabulary]."""
        if not self.temperature:
            return int(logits.argmax())
        scaled = logits.astype(np.float64) / self.temperature
        candidates = np.argsort(-scaled, kind="stable")[: self.top_k or None]
        shares = _softmax(scaled[candidates])
        candidates = candidates[np.cumsum(shares) - shares < self.top_p]
        return int(candidates[(scaled + self._noise(number, scaled.size))[candidates].argmax()])

    def is_certain(self, logits: np.ndarray, number: int, error: float) -> bool:
        """Whether all logits that differ from these by at most `error` have the same choice."""
        if not self.temperature:
            first, second = np.partition(logits, -2)[[-1, -2]] if logits.size > 1 else (np.inf, 0.0)
            return bool(first - second > 2 * error)
        scaled, margin = logits.astype(np.float64) / self.temperature, 2 * error / self.temperature
        winner, scores = self.choose(logits, number), scaled + self._noise(number, scaled.size)
        always, possible = self._candidates(scaled, margin)
        possible[winner] = False
        return bool(always[winner] and (scores[winner] - scores[possible] > margin).all())

    def _noise(self, number: int, size: int) -> np.ndarray:
        return np.random.default_rng([self.seed, self.request, number]).gumbel(size=size)

    def _candidates(self, scaled: np.ndarray, margin: float) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that may be drawn for all scaled logits within half of `margin`, and for some."""
        rising = np.sort(scaled)
        ahead = scaled.size - np.searchsorted(rising, scaled - margin) - 1  # at most so many are larger
        surely_ahead = scaled.size - np.searchsorted(rising, scaled + margin, "right")
        limit = self.top_k or scaled.size
        always, possible = ahead < limit, surely_ahead < limit
        if self.top_p < 1 and always.any():
            mass = _mass_above(scaled, scaled - margin, always) - _softmax(np.where(always, scaled, -np.inf))
            always &= np.exp(margin) * mass < self.top_p
            bounds = np.nextafter(scaled + margin, np.inf)  # those that are surely larger
            possible &= np.exp(-margin) * _mass_above(scaled, bounds, possible) < self.top_p
        return always, possible


def _softmax(x: np.ndarray) -> np.ndarray:
    shares = np.exp(x - x.max())
    result: np.ndarray = shares / shares.sum()
    return result


def _mass_above(scaled: np.ndarray, bounds: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """For each bound, the probability of the tokens at or above it, among candidates."""
    order = np.argsort(scaled)
    shares = _softmax(np.where(candidates, scaled, -np.inf))[order]
    below = np.concatenate([[0.0], np.cumsum(shares)])
    result: np.ndarray = 1 - below[np.searchsorted(scaled[order], bounds)]
    return result
