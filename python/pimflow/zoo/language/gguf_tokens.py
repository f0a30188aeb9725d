"""Tokens of a GGUF file, by the library `tokenizers` from the file's own tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pimflow.zoo.language.gguf_file import opened
from pimflow.zoo.language.tokens import TokenText

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How text falls into words before bytes are joined, by the file's name for it. Those of others differ, and
# would give other tokens without a word.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL = 3  # in the file's list of kinds of tokens
_SPACE = "\u2581"
BYTE_PAIRS = ("default", "gpt-2", "smollm", "llama-bpe")


class GgufTokens:
    """Byte pairs or pieces as the file has them.

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
        from tokenizers import AddedToken
    except ImportError:
        return None
    file = opened(path)
    kind, words = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "default")
    tokens: Sequence[str] = file.field("tokenizer.ggml.tokens", ())
    if kind == "gpt2" and words in BYTE_PAIRS:
        tokenizer = _byte_pairs(tokens, file.field("tokenizer.ggml.merges", ()), words)
    elif kind == "llama":
        prefix = file.field("tokenizer.ggml.add_space_prefix", True)
        tokenizer = _pieces(tokens, file.field("tokenizer.ggml.scores", ()), prefix)
    else:
        return None
    kinds = file.field("tokenizer.ggml.token_type", ())
    special = [AddedToken(token, special=True) for token, each in zip(tokens, kinds) if each == _CONTROL]
    tokenizer.add_special_tokens(special)
    begin = file.field("tokenizer.ggml.bos_token_id")
    wanted = file.field("tokenizer.ggml.add_bos_token", kind == "llama")
    return GgufTokens(tokenizer, begin if wanted else None, file.field("tokenizer.ggml.eos_token_id"))


def _byte_pairs(tokens: Sequence[str], merges: Sequence[str], words: str) -> Tokenizer:
    """Of GPT-2's kind: bytes, joined within words in the order of `merges`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    before = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words != "llama-bpe")]
    if words == "smollm":
        before.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif words == "llama-bpe":
        before.insert(0, pre_tokenizers.Split(Regex(_LLAMA_3), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(tokens: Sequence[str], scores: Sequence[float], prefix: bool) -> Tokenizer:
    """Of SentencePiece's kind: the neighbours join first whose piece has the highest score.

    What no piece has is spelled in bytes.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    places = {token: index for index, token in enumerate(tokens)}
    joined = [
        (-score, places[token], token[:cut], token[cut:])
        for token, score in zip(tokens, scores)
        for cut in range(1, len(token))
        if token[:cut] in places and token[cut:] in places
    ]
    pairs = [(left, right) for _, _, left, right in sorted(joined)]
    tokenizer = Tokenizer(models.BPE(places, pairs, byte_fallback=True, fuse_unk=True, unk_token=tokens[0]))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces] if prefix else [spaces])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer
