"""Conversion of text to tokens and back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tokenizers


class Tokenizer(Protocol):
    """Converts text to tokens, and tokens to text, one by one."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text, with those that are put before and after it if `special`."""

    def decoder(self) -> TokenText:
        """A new incremental decoder of tokens to text."""


class TokenText:
    """Incremental decoder of tokens to text; invalid UTF-8 becomes a replacement character."""

    def __init__(self, spelled: Sequence[bytes]) -> None:
        self._spelled, self._decoder = spelled, codecs.getincrementaldecoder("utf-8")("replace")

    def text(self, token: int, last: bool = False) -> str:
        """The text that is complete after `token`: a character may need several tokens."""
        return self._decoder.decode(self._spelled[token], last)


class LibraryTokens:
    """A tokenizer of the library `tokenizers`.

    Parameters
    ----------
    tokenizer : Tokenizer
        Of the library; it may put tokens around a text by itself.
    begin : int, optional
        The token before a text, if the tokenizer puts none there.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, spelled: Sequence[bytes], begin: int | None = None
    ) -> None:
        self._tokenizer, self._spelled, self._begin = tokenizer, spelled, begin

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text, with those that are put before and after it if `special`."""
        ids = list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        return ids if self._begin is None or not special else [self._begin, *ids]

    def decoder(self) -> TokenText:
        """A new incremental decoder of tokens to text."""
        return TokenText(self._spelled)


class ByteTokens:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def decoder(self) -> TokenText:
        """A new incremental decoder of bytes to text."""
        return TokenText([bytes([byte]) for byte in range(256)])
