"""Attention over a cache of keys and values: what one operator computes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pimflow.core.json_form import OMITTED, fields_form

SCORES, VALUES = "scores", "values"  # the two products: queries times keys, probabilities times values


@dataclass(frozen=True, kw_only=True)
class Attention:
    """``softmax(scale * Q K^T + mask) V`` for all heads, where groups of heads share keys and values.

    Operands are Q [batch, heads, queries, head_size], K [batch, kv_heads, keys, head_size] and
    V [batch, kv_heads, keys, value_size]; the result is [batch, heads, queries, value_size]. Query head h
    reads KV head ``h // group``. A query that sees no key gives zeros.

    Attributes
    ----------
    batch, heads, kv_heads : int
        `heads` is a multiple of `kv_heads`.
    head_size, value_size : int
        Elements of a key, and of a value.
    queries : int
        Query tokens: 1 in a decode step.
    keys : int
        Positions of the cache, those of this step included; with `positioned`, its capacity.
    read : int
        Number of positions, from the first on, that are read; no query sees a later one. 0 for all; fewer in
        an early step, whose later positions are still empty.
    scale : float
        Factor of the products of queries and keys.
    causal : bool
        Whether query i sees no key after its own position, which is ``offset + i``.
    offset : int
        Position of the first query among the keys; may be negative. Unused if `positioned`.
    positioned : bool
        Whether the position of the first query is an operand, int64 [batch]. Keys from that position plus
        `queries` on are empty, and no query sees them.
    window : int
        Maximum number of keys that a query sees: its own position, and those just before it; 0 for all.
    softcap : float
        If not 0, scores x become ``softcap * tanh(x / softcap)`` before the mask is added.
    masked : bool
        Whether a mask that is added to the scores is an operand; it broadcasts to
        [batch, heads, queries, extent].
    sinks : bool
        Whether each head has a score, an operand [1, heads, 1, 1], that softmax goes over as if it were one
        key more, whose value is zeros (arXiv 2309.17453).
    cache_type : str, optional
        Type of the integers that keys and values are (`weight_types.CACHE_TYPES`), each token and head with a
        scale: then scales of keys and of values, [batch, kv_heads, keys, 1], are operands, of scores and of
        probabilities. None if keys and values are of the network's type.
    """

    batch: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    queries: int
    keys: int
    scale: float
    causal: bool = False
    offset: int = 0
    positioned: bool = False
    window: int = 0
    softcap: float = 0.0
    masked: bool = False
    read: int = 0
    sinks: bool = False
    cache_type: str | None = field(default=None, metadata=OMITTED)

    def __repr__(self) -> str:
        """What digests are made of: all fields, but the type of a cache only where it has one."""
        return f"Attention({', '.join(f'{name}={value!r}' for name, value in self.to_json().items())})"

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, "query heads are dealt evenly to KV heads"
        assert 0 <= self.read < self.keys, "fewer places are read than there are, or all"

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def extent(self) -> int:
        """Positions of the cache that are read."""
        return self.read or self.keys

    @property
    def query_shape(self) -> tuple[int, int, int, int]:
        """Shape of Q."""
        return (self.batch, self.heads, self.queries, self.head_size)

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        """Shape of K."""
        return (self.batch, self.kv_heads, self.keys, self.head_size)

    @property
    def value_shape(self) -> tuple[int, int, int, int]:
        """Shape of V."""
        return (self.batch, self.kv_heads, self.keys, self.value_size)

    @property
    def scale_shape(self) -> tuple[int, int, int, int]:
        """Shape of the scales of keys, and of those of values, of a cache with a type of its own."""
        return (self.batch, self.kv_heads, self.keys, 1)

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """Shape of the result."""
        return (self.batch, self.heads, self.queries, self.value_size)

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        """Shape of the scores."""
        return (self.batch, self.heads, self.queries, self.extent)

    @property
    def cache_elements(self) -> int:
        """Elements of K and V, whether or not they are read."""
        return self.batch * self.kv_heads * self.keys * (self.head_size + self.value_size)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of both products, masked ones included."""
        return self.batch * self.heads * self.queries * self.extent * (self.head_size + self.value_size)

    def visible_keys(self, position: np.ndarray | None = None) -> np.ndarray:
        """Which keys a query sees before a mask is applied: bool, [batch, queries, extent].

        Parameters
        ----------
        position : ndarray, optional
            Position of the first query, int [batch]; if `positioned`.
        """
        assert (position is None) != self.positioned
        first_position = np.full(self.batch, self.offset) if position is None else np.asarray(position)
        query_position = first_position.reshape(self.batch, 1, 1) + np.arange(self.queries)[:, None]
        key_position = np.arange(self.extent)
        visible = np.ones((self.batch, self.queries, self.extent), bool)
        if self.causal:
            visible &= key_position <= query_position
        if self.positioned:
            visible &= key_position < first_position.reshape(self.batch, 1, 1) + self.queries
        if self.window:
            visible &= key_position > query_position - self.window
        return visible

    def with_batch_and_heads(self, batch: int, kv_heads: int) -> Attention:
        """The attention of `batch` requests and `kv_heads` KV heads with their query heads."""
        return replace(self, batch=batch, kv_heads=kv_heads, heads=kv_heads * self.group)

    def with_full_cache(self) -> Attention:
        """The same attention, reading all positions of its cache."""
        return replace(self, read=0)

    def to_json(self) -> dict[str, Any]:
        """All fields as a JSON object, but the type of a cache only where it has one."""
        return fields_form(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Attention:
        """The inverse of `to_json`."""
        return cls(**tree)
