"""Is each token that a step gives the one of the model, and are its logits?"""

from __future__ import annotations

import functools

import numpy as np

from pimflow.api.decoding import Step
from pimflow.api.language import LanguageModel, TokenReference
from pimflow.core.output_error import DEVIATION_MULTIPLE, LARGEST_BOUND, OUTPUT_BOUND
from pimflow.errors import VerificationError


class Judge:
    """Compares the logits of each step with a reference's, which has a cache of its own.

    Errors of a step stay in the cache, so they may add up from token to token. Where logits are beyond the
    bound of the storage type, the whole sequence so far runs again with random roundings of what PIM stores,
    as `compiler.conditioning` has it for one inference, and logits may be off by twice as much as the
    farthest of these.

    Attributes
    ----------
    worst, bound : float
        The largest error so far over the reference's largest logit, and what it may be.
    sure : int
        New tokens whose lead in the reference was so large that they had to be the same.
    """

    def __init__(self, language: LanguageModel, dtype: str) -> None:
        self._language = language
        self._seen: list[int] = []
        self._layers: frozenset[str] = frozenset()
        self.worst, self.bound, self.sure = 0.0, OUTPUT_BOUND[dtype], 0

    @functools.cached_property
    def _reference(self) -> TokenReference:
        """Made when it is first asked: its weights are not needed before."""
        return self._language.reference()

    def token(self, tokens: np.ndarray, logits: np.ndarray, step: Step, *, told: bool) -> int:
        """The greedy token after `tokens`, for which `step` gave `logits` [batch, vocabulary].

        `told` says that it is a new one, not the prompt's.

        Raises
        ------
        VerificationError
            If logits are beyond the bound, or the token is another though the reference leads by twice that.
        """
        self._seen += map(int, tokens)
        self._layers |= step.layers_on_pim
        expected = self._reference.step(tokens)[-1]
        largest = float(np.abs(expected).max())
        finite = bool(np.isfinite(logits).all())
        error = float(np.abs(logits - expected).max()) / largest if finite else float("inf")
        if finite and error > self.bound:
            self.bound = min(LARGEST_BOUND, max(self.bound, self._rounding(expected, largest)))
        self.worst = max(self.worst, error)
        if not error <= self.bound:
            raise VerificationError(
                f"logits are off by {error:.2e} of the largest, and the bound is {self.bound:.0e}: they are "
                "not those of the model"
            )
        token, right = int(logits[0].argmax()), int(expected.argmax())
        second = np.partition(expected, -2)[-2] if expected.size > 1 else -np.inf
        lead = float(expected[right] - second)
        if lead > 2 * self.bound * largest:
            self.sure += told
            if token != right:
                raise VerificationError(f"token {token} follows, and {right} in the reference by {lead:.3g}")
        return token

    def _rounding(self, expected: np.ndarray, largest: float) -> float:
        """Twice the most that random roundings of layers on PIM move logits of the sequence so far."""
        runs = self._language.rounded(self._layers, np.array(self._seen))
        farthest = max(float(np.abs(logits - expected).max()) for logits in runs)
        return DEVIATION_MULTIPLE * farthest / largest
