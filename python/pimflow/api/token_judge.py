"""Is each token that a step gives the one of the model, and are its logits?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pimflow.api.language import LanguageModel, TokenReference
from pimflow.core.output_error import DEVIATION_MULTIPLE, LARGEST_BOUND, OUTPUT_BOUND, relative_error
from pimflow.errors import VerificationError


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """The logits after one token of a sequence, beside the reference's.

    Attributes
    ----------
    place : int
        Of the token in the sequence.
    error, lead : float
        The largest error, and by how much the reference's first token leads, both over its largest logit.
    told : bool
        Whether what follows is a new token, not the prompt's.
    """

    place: int
    error: float
    lead: float
    told: bool


class Judge:
    """Compares the logits of each step with a reference's, which has a cache of its own.

    Errors of a step stay in the cache, so they may add up from token to token. Where logits are beyond the
    bound of the storage type, the whole sequence runs again in the end with random roundings of what PIM
    stores, as `compiler.conditioning` has it for one inference, and logits after a token may be off by twice
    as much as the farthest of these after it or one before.

    Attributes
    ----------
    worst, bound : float
        The largest error over the reference's largest logit, and what it may be: after `settle`.
    sure : int
        New tokens whose lead in the reference was so large that they had to be the same.
    """

    def __init__(self, language: LanguageModel, dtype: str) -> None:
        self._language = language
        self._seen: list[int] = []
        self._expected: list[np.ndarray] = []
        self._layers: frozenset[str] = frozenset()
        self._compared: list[_Compared] = []
        self._reference: TokenReference | None = None
        self.worst, self.bound, self.sure = 0.0, OUTPUT_BOUND[dtype], 0

    def compare(
        self, tokens: Sequence[int], logits: np.ndarray, layers: frozenset[str], *, told: bool
    ) -> None:
        """`logits` [copies, vocabulary] after `tokens`, of a step with `layers` on PIM.

        `told` is as `_Compared` has it.

        Raises
        ------
        VerificationError
            If they are further off than any may be.
        """
        if self._reference is None:  # begun when it is asked: its weights are not needed before
            self._reference = self._language.reference()
            if self._seen:
                self._reference.step(np.array(self._seen))
        self._seen += map(int, tokens)
        self._layers |= layers
        self._expected.append(self._reference.step(np.array(tokens)))
        expected = self._expected[-1][-1]
        error = relative_error(logits, np.broadcast_to(expected, logits.shape))
        first, second = np.partition(expected, -2)[[-1, -2]] if expected.size > 1 else (np.inf, 0.0)
        lead = float(first - second) / (float(np.abs(expected).max()) or 1.0)
        self._compared.append(_Compared(place=len(self._seen) - 1, error=error, lead=lead, told=told))
        self._require(error, LARGEST_BOUND)

    def rest(self) -> None:
        """Nothing is compared for a while: the reference gives back its memory, and begins anew then."""
        self._reference = None

    def settle(self) -> None:
        """Judge all that was compared.

        Raises
        ------
        VerificationError
            If logits are beyond their bound.
        """
        floor = self.bound
        beyond = any(each.error > floor for each in self._compared)
        bounds = np.maximum(floor, self._deviations()) if beyond else np.full(len(self._seen), floor)
        for each in self._compared:
            bound = min(LARGEST_BOUND, float(bounds[each.place]))
            self.worst, self.bound = max(self.worst, each.error), max(self.bound, bound)
            self._require(each.error, bound)
            # Logits within the bound leave no other token ahead of one that leads by twice that.
            self.sure += each.told and each.lead > 2 * bound
        self._expected.clear()  # each token's are as large as the vocabulary

    def _deviations(self) -> np.ndarray:
        """After each token, twice the most that random roundings of layers on PIM move logits up to there."""
        tokens, expected = np.array(self._seen), np.concatenate(self._expected)
        farthest = np.zeros(len(tokens))
        for logits in self._language.rounded(self._layers, tokens):
            farthest = np.maximum(farthest, np.abs(logits - expected).max(axis=-1))
        return np.maximum.accumulate(DEVIATION_MULTIPLE * farthest / np.abs(expected).max(axis=-1))

    def _require(self, error: float, bound: float) -> None:
        if not error <= bound:
            raise VerificationError(
                f"logits are off by {error:.2e} of the largest, and the bound is {bound:.0e}: they are "
                f"not those of the model{self._language.doubt}"
            )
