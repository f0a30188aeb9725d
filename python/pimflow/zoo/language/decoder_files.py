"""Decoders in files of several forms: GGUF, and folders of Hugging Face's transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pimflow.zoo.language import gguf_decoder, gguf_file, gguf_tokens, hf_decoder, hf_tokens
from pimflow.zoo.language.chat_template import ChatTemplate, folder_template, gguf_template
from pimflow.zoo.language.decoder import Decoder
from pimflow.zoo.language.tokens import Tokenizer


def is_decoder_file(path: Path) -> bool:
    """Whether a path is one that `read_decoder` takes."""
    return path.suffix == ".gguf" or (path / "config.json").is_file()


def read_decoder(path: Path) -> Decoder:
    """Read the decoder in a GGUF file or a folder, without its weights; raises `ModelError`."""
    return hf_decoder.read_decoder(path) if path.is_dir() else gguf_decoder.read_decoder(path)


def weight(path: str, name: str) -> np.ndarray:
    """Read a weight by its name in `Decoder.weights`, in fp32; raises `ModelError`."""
    return hf_decoder.weight(path, name) if Path(path).is_dir() else gguf_decoder.weight(path, name)


def storage_types(path: str) -> str:
    """Types in which weights are stored, the most frequent first; raises `ModelError`."""
    return hf_decoder.storage_types(path) if Path(path).is_dir() else gguf_file.storage_types(path)


def read_tokenizer(
    path: Path, vocabulary: int
) -> tuple[Tokenizer | None, frozenset[int], ChatTemplate | None]:
    """The tokenizer, None if it is not supported; the tokens that end a text; the chat template, if any.

    Raises `ModelError`.
    """
    if path.is_dir():
        ends = hf_tokens.end_tokens(path, vocabulary)
        return hf_tokens.read_tokens(path / hf_tokens.FILE, vocabulary), ends, folder_template(path)
    return gguf_tokens.read_tokens(path), gguf_tokens.end_tokens(path, vocabulary), gguf_template(path)
