"""Verify the logits and tokens of each step against a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pimflow.commands.generate.language import LanguageModel, TokenReference
from pimflow.commands.generate.sampling import Sampler
from pimflow.core.output_error import DEVIATION_MULTIPLE, LARGEST_BOUND, OUTPUT_BOUND, relative_error
from pimflow.errors import VerificationError


@dataclass(frozen=True, kw_only=True)
class _TokenCheck:
    """The logits after one token of a sequence, beside the reference's.

    Attributes
    ----------
    error, largest : float
        The largest error over the reference's largest logit, and that logit.
    new_token : int or None
        The new token that was chosen by the logits; None within the prompt.
    """

    position: int
    error: float
    largest: float
    new_token: int | None


class TokenVerifier:
    """Compares the logits of each step with those of a reference, which has its own cache.

    Errors of a step stay in the cache, so they may accumulate from token to token. If logits exceed the bound
    of the storage type, the reference runs the whole sequence again at the end, with random roundings of what
    PIM stores, as `compiler.conditioning` does for one inference. The bound after a token is then twice the
    largest deviation that these roundings cause after it or an earlier token.

    Attributes
    ----------
    max_error, bound : float
        The largest error over the reference's largest logit, and its bound; final after `verify`.
    certain_tokens : int
        New tokens that all logits within the bound have in common: the largest logit leads by more than twice
        the bound or, where tokens are drawn, the same draw gives the same token. They must be those of the
        reference's logits.
    """

    def __init__(self, language: LanguageModel, dtype: str, sampler: Sampler | None = None) -> None:
        self._language, self._sampler = language, sampler or Sampler()
        self._tokens: list[int] = []
        self._expected: list[np.ndarray] = []
        self._layers: frozenset[str] = frozenset()
        self._checks: list[_TokenCheck] = []
        self._reference: TokenReference | None = None
        self.max_error, self.bound, self.certain_tokens = 0.0, OUTPUT_BOUND[dtype], 0

    def compare(
        self, tokens: Sequence[int], logits: np.ndarray, layers: frozenset[str], *, is_new: bool
    ) -> None:
        """Compare `logits` [copies, vocabulary] after `tokens`, of a step with `layers` on PIM.

        For `is_new` see `_TokenCheck`.

        Raises
        ------
        VerificationError
            If the error exceeds the largest bound that is possible.
        """
        if self._reference is None:  # created at the first use, since its weights take memory
            self._reference = self._language.reference()
            if self._tokens:
                self._reference.step(np.array(self._tokens))
        self._tokens += map(int, tokens)
        self._layers |= layers
        self._expected.append(self._reference.step(np.array(tokens)))
        expected = self._expected[-1][-1]
        error = relative_error(logits, np.broadcast_to(expected, logits.shape))
        number = sum(check.new_token is not None for check in self._checks)
        self._checks.append(
            _TokenCheck(
                position=len(self._tokens) - 1,
                error=error,
                largest=float(np.abs(expected).max()),
                new_token=self._sampler.choose(logits[0], number) if is_new else None,
            )
        )
        self._require(error, LARGEST_BOUND)

    def release_reference(self) -> None:
        """Free the memory of the reference; the next comparison creates it again."""
        self._reference = None

    def verify(self) -> None:
        """Verify all compared logits against their final bounds.

        Raises
        ------
        VerificationError
            If logits exceed their bound.
        """
        dtype_bound = self.bound
        is_exceeded = any(check.error > dtype_bound for check in self._checks)
        bounds = (
            np.maximum(dtype_bound, self._deviations())
            if is_exceeded
            else np.full(len(self._tokens), dtype_bound)
        )
        number = 0
        for check, expected in zip(self._checks, self._expected, strict=True):
            bound = min(LARGEST_BOUND, float(bounds[check.position]))
            self.max_error, self.bound = max(self.max_error, check.error), max(self.bound, bound)
            self._require(check.error, bound)
            if check.new_token is not None:
                self._verify_choice(check, number, expected[-1], bound)
                number += 1
        self._expected.clear()  # it has the size of the vocabulary for each token

    def _verify_choice(self, check: _TokenCheck, number: int, expected: np.ndarray, bound: float) -> None:
        """Count a new token that every choice within the bound has; the reference's is the same."""
        if not self._sampler.is_certain(expected, number, bound * check.largest):
            return
        self.certain_tokens += 1
        if (token := self._sampler.choose(expected, number)) != check.new_token:
            raise VerificationError(
                f"new token {number} is {check.new_token}, and by the reference's logits {token}"
            )

    def _deviations(self) -> np.ndarray:
        """After each token, twice the largest deviation so far that random roundings on PIM cause."""
        tokens, expected = np.array(self._tokens), np.concatenate(self._expected)
        farthest = np.zeros(len(tokens))
        for logits in self._language.perturbed_logits(self._layers, tokens):
            farthest = np.maximum(farthest, np.abs(logits - expected).max(axis=-1))
        return np.maximum.accumulate(DEVIATION_MULTIPLE * farthest / np.abs(expected).max(axis=-1))

    def _require(self, error: float, bound: float) -> None:
        if not error <= bound:
            raise VerificationError(
                f"logits are off by {error:.2e} of the largest, and the bound is {bound:.0e}: they are "
                f"not those of the model{self._language.error_hint}"
            )
