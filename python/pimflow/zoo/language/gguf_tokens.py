"""The tokenizer of a GGUF file: the library `tokenizers`, with the tables of the file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pimflow.errors import ModelError
from pimflow.zoo.language.gguf_file import open_file
from pimflow.zoo.language.tokens import LibraryTokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How text is split into words before bytes are merged, by the file's name for it. Other names mean other
# rules: they are not supported, since wrong rules would give wrong tokens without an error.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens that are matched before text is split into words
_SPACE = "\u2581"
BYTE_PAIRS = ("default", "gpt-2", "smollm", "llama-bpe", "qwen2")
_SPLITS = {"llama-bpe": _LLAMA_3, "qwen2": _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")}
# Bytes as characters in GPT-2's vocabulary: printable ones are themselves, others are mapped to 256 and
# above.
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_SHOWN = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + number): byte for number, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))
}


def end_tokens(path: Path, vocabulary: int) -> frozenset[int]:
    """The tokens that end a text, a turn or a message; raises `ModelError` for one that does not exist."""
    file = open_file(path)
    ends = (file.field(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom"))
    return frozenset(_existing(path, end, vocabulary) for end in ends if end is not None)


def _existing(path: Path, token: int, vocabulary: int) -> int:
    """`token`; raises `ModelError` if it is none of the `vocabulary`."""
    if not 0 <= token < vocabulary:
        raise ModelError(f"'{path}': token {token}, which begins or ends a text, does not exist")
    return token


def read_tokens(path: Path) -> LibraryTokens | None:
    """Read the tokenizer of a file; None if it is not supported, or the library is missing.

    Raises
    ------
    ModelError
        If its tables do not match one another.
    """
    try:
        from tokenizers import AddedToken
    except ImportError:
        return None
    file = open_file(path)
    kind, words = file.field("tokenizer.ggml.model", str), file.field("tokenizer.ggml.pre", str, "default")
    tokens = file.array("tokenizer.ggml.tokens", str)
    appends = any(file.field(f"tokenizer.ggml.add_{name}_token", bool) for name in ("eos", "sep"))
    if not tokens or kind not in ("gpt2", "llama") or (kind == "gpt2" and words not in BYTE_PAIRS) or appends:
        return None
    try:
        if kind == "gpt2":
            tokenizer = _byte_pairs(tokens, file.array("tokenizer.ggml.merges", str), words)
        else:
            prefix = file.field("tokenizer.ggml.add_space_prefix", bool, True)
            tokenizer = _pieces(tokens, file.array("tokenizer.ggml.scores", float), prefix)
    except Exception as error:  # the library has no error class
        raise ModelError(f"'{path}': its tables of tokens do not belong together: {error}") from None
    spelled = [token_bytes(token, kind == "llama") for token in tokens]
    added_tokens = []
    for index, (token, token_kind) in enumerate(zip(tokens, file.array("tokenizer.ggml.token_type", int))):
        if token_kind in (_CONTROL, _USER_DEFINED):
            spelled[index] = b"" if token_kind == _CONTROL else token.encode()
            added_tokens.append(AddedToken(token, special=token_kind == _CONTROL, normalized=False))
    tokenizer.add_tokens(added_tokens)
    begin = file.field("tokenizer.ggml.bos_token_id", int)
    begins = file.field("tokenizer.ggml.add_bos_token", bool, kind == "llama" or words == "llama-bpe")
    if begin is None or not begins:
        return LibraryTokens(tokenizer, spelled)
    return LibraryTokens(tokenizer, spelled, _existing(path, begin, len(tokens)))


def token_bytes(token: str, piece: bool) -> bytes:
    """The bytes of a token."""
    if not piece:
        return bytes(map(_SHOWN.__getitem__, token)) if _SHOWN.keys() >= {*token} else token.encode()
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE, " ").encode()


def _byte_pairs(tokens: Sequence[str], merges: Sequence[str], words: str) -> Tokenizer:
    """A tokenizer as of GPT-2: bytes are merged within words, in the order of `merges`."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3 takes a word that is a token as it is, whatever its merges give.
    whole = {"ignore_merges": words == "llama-bpe"}
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs, **whole))
    before = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words not in _SPLITS)]
    if words == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if words == "smollm":
        before.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif words in _SPLITS:
        before.insert(0, pre_tokenizers.Split(Regex(_SPLITS[words]), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)
    return tokenizer


def _pieces(tokens: Sequence[str], scores: Sequence[float], prefix: bool) -> Tokenizer:
    """A tokenizer as of SentencePiece: neighbours whose merged piece has the highest score are merged first.

    Characters that are in no piece become bytes.
    """
    from tokenizers import Tokenizer, models, normalizers

    places = {token: index for index, token in enumerate(tokens)}
    scored_pairs = [
        (-score, places[token], token[:cut], token[cut:])
        for token, score in zip(tokens, scores)
        for cut in range(1, len(token))
        if token[:cut] in places and token[cut:] in places
    ]
    pairs = [(left_piece, right_piece) for _, _, left_piece, right_piece in sorted(scored_pairs)]
    tokenizer = Tokenizer(models.BPE(places, pairs, byte_fallback=True, fuse_unk=True, unk_token=tokens[0]))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces] if prefix else [spaces])
    return tokenizer
