"""Tokens of a GGUF file, by the library `tokenizers` from the file's own tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pimflow.zoo.language.gguf_file import field, opened
from pimflow.zoo.language.tokens import TokenText

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How text falls into words before bytes are joined, by the file's name for it. Those of others differ, and
# would give other tokens without a word.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_PAIRS = ("default", "gpt-2", "smollm", "llama-bpe")


class GgufTokens:
    """Byte pairs as the file has them.

    Attributes
    ----------
    end : int or None
        The token that ends a text.
    """

    def __init__(self, tokenizer: Tokenizer, begin: int | None, end: int | None) -> None:
        self._tokenizer, self._begin, self.end = tokenizer, begin, end

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, behind the one that begins one where the file wants that."""
        found = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found if self._begin is None else [self._begin, *found]

    def decoder(self) -> TokenText:
        """Text of tokens as they come."""
        return _Stream(self._tokenizer)


class _Stream:
    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)

    def text(self, token: int, last: bool = False) -> str:
        return self._stream.step(self._tokenizer, token) or ""


def read_tokens(path: Path) -> GgufTokens | None:
    """The tokenizer of a file; None if it is of a kind that is not supported, or the library is missing."""
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        return None
    reader = opened(path)
    kind, words = field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre", "default")
    if kind != "gpt2" or words not in BYTE_PAIRS:
        return None
    tokens: Sequence[str] = field(reader, "tokenizer.ggml.tokens", ())
    merges = [tuple(merge.split(" ", 1)) for merge in field(reader, "tokenizer.ggml.merges", ())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words != "llama-bpe")
    if words == "smollm":
        before = [pre_tokenizers.Digits(individual_digits=True), bytes_of_words]
    elif words == "llama-bpe":
        before = [pre_tokenizers.Split(Regex(_LLAMA_3), "isolated"), bytes_of_words]
    else:
        before = [bytes_of_words]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # in the file's list of kinds of tokens
    kinds = field(reader, "tokenizer.ggml.token_type", ())
    special = [AddedToken(token, special=True) for token, each in zip(tokens, kinds) if each == control]
    tokenizer.add_special_tokens(special)
    begin = field(reader, "tokenizer.ggml.bos_token_id")
    wanted = field(reader, "tokenizer.ggml.add_bos_token", False)
    return GgufTokens(tokenizer, begin if wanted else None, field(reader, "tokenizer.ggml.eos_token_id"))
