"""A request to a language model: a prompt, and the tokens that the model appends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pimflow.commands.generate.decoding import CompiledStep
from pimflow.commands.generate.generation import Completion
from pimflow.commands.generate.language import LanguageModel
from pimflow.commands.generate.sampling import Sampler
from pimflow.commands.generate.token_judge import TokenVerifier


class StopText:
    """Ends a text before the first of some texts, and holds back what may become one of them."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.is_found = stops, "", False

    def push(self, piece: str, last: bool) -> str:
        """The text that is certain once `piece` has come, all of it if it is the `last`."""
        self._held += piece
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.is_found = bool(places)
        end = min(places) if places else len(self._held) - (0 if last else self._open_characters())
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _open_characters(self) -> int:
        """Characters at the end that may be the begin of a stop."""
        longest = max(map(len, self._stops), default=1) - 1
        return next(
            (
                count
                for count in range(min(longest, len(self._held)), 0, -1)
                if any(stop.startswith(self._held[-count:]) for stop in self._stops)
            ),
            0,
        )


@dataclass(frozen=True)
class Continuation:
    """How a prompt is continued.

    Attributes
    ----------
    stops : sequence of str
        Texts before which the new text ends.
    """

    n: int
    sampler: Sampler = field(default_factory=Sampler)
    stops: Sequence[str] = ()

    def with_request(self, number: int) -> Continuation:
        """That of the prompt `number`, whose draws are its own."""
        return replace(self, sampler=replace(self.sampler, request=number))


class GenerationRequest:
    """The state of one prompt: its cached tokens, new tokens, and their verification.

    Attributes
    ----------
    past_length : int
        Number of tokens whose keys and values are in the cache.
    pending_tokens : list of int
        Tokens that run next: at first the prompt, then the newest token.
    """

    def __init__(
        self,
        language: LanguageModel,
        ids: Sequence[int],
        dtype: str,
        continuation: Continuation,
        on_text: Callable[[str], None],
    ) -> None:
        self._sampler, self._stop = continuation.sampler, StopText(continuation.stops)
        self.past_length, self.pending_tokens = 0, list(ids)
        self.verifier = TokenVerifier(language, dtype, self._sampler)
        self._prompt, self._n, self._ends = len(ids), continuation.n, language.ends
        self._new: list[int] = []
        self._parts: list[str] = []
        self._unverified: list[tuple[list[int], np.ndarray, frozenset[str], bool]] = []
        self._decoder = language.tokenizer.decoder() if language.tokenizer else None
        self._on_text = on_text

    @property
    def is_done(self) -> bool:
        """Whether it has all its tokens, or one that ends a text, or a text that does."""
        return self._stop.is_found or len(self._new) == self._n or not self._ends.isdisjoint(self._new[-1:])

    def next_tokens(self, count: int) -> list[int]:
        """`count` tokens for a step: the pending ones, and padding that does not affect them."""
        return (self.pending_tokens + self.pending_tokens[-1:] * count)[:count]

    def record_step(self, tokens: Sequence[int], logits: np.ndarray, step: CompiledStep) -> None:
        """Record that `step` ran `tokens`, with `logits` [copies, vocabulary] after the last of them."""
        is_new = len(tokens) == len(self.pending_tokens)
        self._unverified.append((list(tokens), logits, step.layers_on_pim, is_new))
        self.past_length += len(tokens)
        del self.pending_tokens[: len(tokens)]
        if is_new:
            self.pending_tokens = [self._sampler.choose(logits[0], len(self._new))]
            self._emit_token(self.pending_tokens[0])

    def verify(self) -> None:
        """Compare recorded logits with the reference, which needs memory from now on.

        Raises
        ------
        VerificationError
            If logits are not those of the model.
        """
        for tokens, logits, layers, is_new in self._unverified:
            self.verifier.compare(tokens, logits, layers, is_new=is_new)
        self._unverified.clear()

    def _emit_token(self, token: int) -> None:
        self._new.append(token)
        if self._decoder:
            piece = self._decoder.text(token, self.is_done)
            self._parts.append(self._stop.push(piece, self.is_done))
        self._on_text(self._parts[-1] if self._decoder else f"{token} ")

    def completion(self) -> Completion:
        """The new tokens and their text."""
        return Completion(
            prompt_tokens=self._prompt,
            tokens=tuple(self._new),
            text="".join(self._parts) if self._decoder else None,
        )
