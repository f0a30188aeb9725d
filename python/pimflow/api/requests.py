"""A request to a language model: a prompt, and the tokens that the model appends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pimflow.api.decoding import Step
from pimflow.api.generation import Written
from pimflow.api.language import LanguageModel
from pimflow.api.token_judge import Judge


class Request:
    """The state of one prompt: its cached tokens, new tokens, and their verification.

    Attributes
    ----------
    held : int
        Number of tokens whose keys and values are in the cache.
    pending : list of int
        Tokens that run next: at first the prompt, then the newest token.
    judge : Judge
    """

    def __init__(
        self, language: LanguageModel, ids: Sequence[int], dtype: str, n: int, on_text: Callable[[str], None]
    ) -> None:
        self.held, self.pending, self.judge = 0, list(ids), Judge(language, dtype)
        self._prompt, self._n, self._end = len(ids), n, language.end
        self._new: list[int] = []
        self._parts: list[str] = []
        self._unjudged: list[tuple[list[int], np.ndarray, frozenset[str], bool]] = []
        self._decoder = language.tokenizer.decoder() if language.tokenizer else None
        self._on_text = on_text

    @property
    def done(self) -> bool:
        """Whether it has all its tokens, or the token that ends a text."""
        return len(self._new) == self._n or self._new[-1:] == [self._end]

    def padded(self, count: int) -> list[int]:
        """`count` tokens for a step: the pending ones, and padding that does not affect them."""
        return (self.pending + self.pending[-1:] * count)[:count]

    def take(self, tokens: Sequence[int], logits: np.ndarray, step: Step) -> None:
        """Record that `step` ran `tokens`, with `logits` [copies, vocabulary] after the last of them."""
        told = len(tokens) == len(self.pending)
        self._unjudged.append((list(tokens), logits, step.layers_on_pim, told))
        self.held += len(tokens)
        del self.pending[: len(tokens)]
        if told:
            self.pending = [int(logits[0].argmax())]
            self._tell(self.pending[0])

    def compare(self) -> None:
        """Compare recorded logits with the reference, which needs memory from now on.

        Raises
        ------
        VerificationError
            If logits are not those of the model.
        """
        for tokens, logits, layers, told in self._unjudged:
            self.judge.compare(tokens, logits, layers, told=told)
        self._unjudged.clear()

    def _tell(self, token: int) -> None:
        self._new.append(token)
        if self._decoder:
            self._parts.append(self._decoder.text(token, self.done))
        self._on_text(self._parts[-1] if self._decoder else f"{token} ")

    def written(self) -> Written:
        """The new tokens and their text."""
        return Written(
            prompt_tokens=self._prompt,
            tokens=tuple(self._new),
            text="".join(self._parts) if self._decoder else None,
        )
