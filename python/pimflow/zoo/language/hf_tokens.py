"""The tokenizer of a Hugging Face folder: the library `tokenizers` with its ``tokenizer.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pimflow.errors import ModelError, one_line
from pimflow.zoo.language.gguf_tokens import token_bytes
from pimflow.zoo.language.tokens import LibraryTokens

FILE = "tokenizer.json"


def read_tokens(path: Path, vocabulary: int) -> LibraryTokens | None:
    """Read a ``tokenizer.json``; None if there is no such file, or the library is missing.

    Raises
    ------
    ModelError
        If the file is damaged, or has tokens that the model does not have.
    """
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
        is_byte_level = '"ByteLevel"' in json.dumps(json.loads(path.read_bytes()).get("decoder"))
    except Exception as error:  # the library has no error class
        raise ModelError(f"'{path}': is no tokenizer, or is damaged: {one_line(str(error))[:100]}") from None
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    if max(tokens.values(), default=0) >= vocabulary:
        raise ModelError(f"'{path}': has more tokens than the {vocabulary} of the model")
    spelled = [b""] * vocabulary
    for token, index in tokens.items():
        spelled[index] = token_bytes(token, not is_byte_level)
    for index, token in tokenizer.get_added_tokens_decoder().items():
        spelled[index] = b"" if token.special else token.content.encode()
    return LibraryTokens(tokenizer, spelled)


def end_tokens(folder: Path, vocabulary: int) -> frozenset[int]:
    """The tokens that end a text, by ``generation_config.json`` or else ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            tree: Any = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"'{path}': is no JSON: {one_line(str(error))[:100]}") from None
        ends = tree.get("eos_token_id") if isinstance(tree, dict) else None
        if ends is None:
            continue
        ends = ends if isinstance(ends, list) else [ends]
        if any(type(end) is not int or not 0 <= end < vocabulary for end in ends):
            raise ModelError(f"'{path}': eos_token_id is {one_line(str(ends))[:60]}: there is no such token")
        return frozenset(ends)
    return frozenset()
