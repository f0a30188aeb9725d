"""Text as tokens, and back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """What makes tokens of text, and text of tokens as they come."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""

    def decoder(self) -> TokenText:
        """What makes text of tokens, from the first on."""


class TokenText:
    """Text of tokens as they come; what is no UTF-8 becomes a replacement character.

    Parameters
    ----------
    spelled : sequence of bytes
        What each token stands for.
    """

    def __init__(self, spelled: Sequence[bytes]) -> None:
        self._spelled, self._decoder = spelled, codecs.getincrementaldecoder("utf-8")("replace")

    def text(self, token: int, last: bool = False) -> str:
        """What can be printed once `token` is known: characters may need several tokens."""
        return self._decoder.decode(self._spelled[token], last)


class ByteTokens:
    """A token is a byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        """Bytes of a text."""
        return list(text.encode())

    def decoder(self) -> TokenText:
        """Text of bytes as they come."""
        return TokenText([bytes([byte]) for byte in range(256)])


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Text of some tokens."""
    decoder = tokenizer.decoder()
    return "".join(decoder.text(token, index + 1 == len(tokens)) for index, token in enumerate(tokens))
