"""Decoders with a cache as exporters write them, in ONNX or as programs of PyTorch, and their reference."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx

from pimflow.frontend.reference import Run
from pimflow.frontend.torch_program import TorchProgram

if TYPE_CHECKING:
    Source: TypeAlias = str | os.PathLike[str] | onnx.ModelProto | TorchProgram

Shape = tuple[int, ...]
TOKENS, MASK, PLACES, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
UNREAD = "unread"


@dataclass(frozen=True, kw_only=True)
class ExportedDecoder(ABC):
    """A decoder with its cache, with the properties that its file gives.

    Attributes
    ----------
    model : path, ModelProto or TorchProgram
        In fp32: ONNX models of another floating-point type are widened, so that the reference does not round.
    cache_dims : dict of str to (int, int)
        By input that is a cache: its heads, and the elements of each.
    presents : dict of str to str
        By input that is a cache, the output with the tokens of the step in it.
    roles : dict of str to str
        By other input: `TOKENS`, `MASK`, `PLACES`, or `UNREAD` for one that no operator reads.
    uses : int
        Query heads that share a key head, from attributes of operators or shapes before a Softmax; else 1.
    tokens, context : int or None
        Tokens of a step, and tokens that its last one attends to, if the file fixes them.
    counted : bool
        Whether tokens are in the first places of a cache, as many as the mask has ones: so for
        GroupQueryAttention, and where a cache does not grow. Else they are at the places of the mask. If
        `counted`, a step is one token: with several, unused places would have to be after them.
    grows : bool
        Whether a step appends its tokens to the caches; else caches have all places from the start.
    max_batch : int or None
        Largest number of sequences; None if any.
    """

    model: Source
    name: str
    cache_dims: dict[str, tuple[int, int]]
    presents: dict[str, str]
    roles: dict[str, str]
    vocabulary: int
    uses: int
    tokens: int | None
    context: int | None
    counted: bool
    grows: bool
    kinds: dict[str, np.dtype]
    ranks: dict[str, int]
    outputs: tuple[str, ...]
    logits: str = LOGITS
    max_batch: int | None = None

    @property
    def kv_elements(self) -> int:
        """Elements of a token in the caches."""
        return sum(heads * size for heads, size in self.cache_dims.values())

    @abstractmethod
    def step(self, context: int, tokens: int, batch: int) -> onnx.ModelProto | TorchProgram:
        """The model of a step of `tokens` tokens whose last one attends to `context`."""

    @abstractmethod
    def run(self) -> Run:
        """A function that runs the file, with its own shapes."""

    @abstractmethod
    def reference_with_roundings(
        self, tokens: int, layers: frozenset[str]
    ) -> Callable[[], ExportedReference]:
        """Gives references for this number of tokens that round results of `layers` at random."""


class ExportedReference:
    """A reference on the file: logits of one sequence, token by token.

    Keys and values are stored in a list; they are passed without padding if the file leaves the length open.

    Parameters
    ----------
    run : callable
        `ExportedDecoder.run`, or a replacement, such as one with random roundings.
    """

    def __init__(self, decoder: ExportedDecoder, run: Run) -> None:
        self._decoder = decoder
        self._cache: dict[str, list[np.ndarray]] = {}
        self._length = 0
        self.run = run

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Logits of some further tokens, [n] to [n, vocabulary]."""
        if self._decoder.tokens is None:
            return self._step(tokens)
        return np.concatenate([self._step(token) for token in tokens.reshape(-1, 1)])

    def _step(self, tokens: np.ndarray) -> np.ndarray:
        decoder, count = self._decoder, len(tokens)
        past_length = self._length if decoder.context is None else decoder.context - count
        free = past_length - self._length
        begin = 0 if decoder.counted else free
        end = begin + self._length
        places = np.arange(past_length + count)
        values = {
            TOKENS: tokens[None],
            MASK: ((places >= begin) & (places < end + count))[None],
            PLACES: self._length + np.arange(count)[None],
            UNREAD: np.zeros(1),
        }
        feeds = {name: self._fit_rank(name, values[role]) for name, role in decoder.roles.items()}
        beyond = free - begin + (0 if decoder.grows else count)
        for name, (heads, size) in decoder.cache_dims.items():
            before, behind = (np.zeros((1, heads, n, size)) for n in (begin, beyond))
            feeds[name] = np.concatenate([before, *self._cache.get(name, []), behind], axis=2)
        outputs = self.run({name: feeds[name].astype(kind) for name, kind in decoder.kinds.items()})
        results: Mapping[str, np.ndarray] = dict(zip(decoder.outputs, outputs, strict=True))
        for past, present in decoder.presents.items():
            self._cache.setdefault(past, []).append(results[present][:, :, end : end + count])
        self._length += count
        return np.asarray(results[decoder.logits][0], np.float32)

    def _fit_rank(self, name: str, value: np.ndarray) -> np.ndarray:
        """A value without its first dimensions, of size 1, as an input has it."""
        rank = self._decoder.ranks[name]
        return value.reshape(value.shape[value.ndim - rank :]) if value.ndim > rank else value
