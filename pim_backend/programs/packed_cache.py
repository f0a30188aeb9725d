"""Caches in the layout of the banks (packed) and in that of networks (unpacked)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pimflow.core.attention import Attention
from pimflow.errors import UsageError
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout
from pimflow.pim_backend.programs.cache_schedule import cache_device
from pimflow.pim_backend.programs.layout import NUMPY_DTYPE

SIZES = ("batch", "heads", "kv_heads", "head_size", "value_size", "queries", "keys")  # of an attention
MAX_SIZE = 1 << 20  # channels, tokens, rows: beyond any
LAYOUTS = {layout.kind: layout for layout in (KeyLayout, ValueLayout)}


@dataclass(frozen=True, kw_only=True)
class PackedCache:
    """Keys or values of one attention in the banks.

    Attributes
    ----------
    groups : tuple of KeyLayout or ValueLayout
        Layouts of the groups of matrices (requests and KV heads), one after the other in the banks.
    """

    attention: Attention
    groups: tuple[KeyLayout | ValueLayout, ...]

    @property
    def first_layout(self) -> KeyLayout | ValueLayout:
        """Layout of the first group; the others differ only in their matrices and first row."""
        return self.groups[0]

    @property
    def kind(self) -> str:
        """Key of its layout in `LAYOUTS`: ``keys`` or ``values``."""
        return self.first_layout.kind

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """Shape of the unpacked cache: [batch, kv_heads, places, size]."""
        return self.attention.key_shape if self.kind == "keys" else self.attention.value_shape

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of the packed cache: [groups, channels, rows, elements of a row, banks]."""
        layout = self.first_layout
        row = layout.pim.columns_per_row * layout.elements
        return (len(self.groups), layout.channels, layout.rows, row, layout.banks)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The storage type."""
        dtype: np.dtype[Any] = np.dtype(NUMPY_DTYPE[self.first_layout.dtype])
        return dtype

    def page_table(self, group: int) -> np.ndarray:
        """Page of each row of a group, int32 [channels, rows]."""
        _, channels, rows, *_ = self.shape
        pages = np.arange(channels * rows, dtype=np.int32).reshape(channels, rows)
        return pages + np.int32(group * channels * rows)

    def pack(self, cache: np.ndarray) -> np.ndarray:
        """`cache` [batch, kv_heads, places, size] in the layout of the banks.

        Raises
        ------
        UsageError
            If it is of another shape.
        """
        shape = self.cache_shape
        if cache.shape != shape:
            raise UsageError(f"a cache of shape {shape} is packed, not one of {cache.shape}")
        state = np.zeros(self.shape, self.dtype)
        matrices = cache.reshape(-1, *shape[2:])
        with np.errstate(over="ignore"):  # becomes infinity, which verification finds
            for matrix, flat, places in self._matrix_places(state):
                flat[places] = matrices[matrix]
        return state

    def unpack(self, state: np.ndarray) -> np.ndarray:
        """The inverse of `pack`: [batch, kv_heads, places, size], float32.

        Raises
        ------
        UsageError
            If `state` is of another shape.
        """
        if state.shape != self.shape:
            raise UsageError(f"a packed cache has shape {self.shape}, not {state.shape}")
        dims = self.cache_shape
        cache = np.empty((dims[0] * dims[1], *dims[2:]), np.float32)
        for matrix, flat, places in self._matrix_places(state):
            cache[matrix] = flat[places]
        return cache.reshape(dims)

    def _matrix_places(self, state: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For each matrix: its index, the flat part of `state` of its group, and its places in that part."""
        for group, layout in enumerate(self.groups):
            flat = state[group].reshape(-1)
            for matrix in range(layout.matrices):
                yield group * layout.matrices + matrix, flat, element_places(layout, matrix)

    def to_table(self) -> dict[str, Any]:
        """A table that `from_table` reads; it does not hold the device."""
        layout = self.first_layout
        return {
            "kind": self.kind,
            "shape": self.shape,
            "attention": self.attention.to_json(),
            "groups": [[e.attention.batch, e.attention.kv_heads, e.row_begin] for e in self.groups],
            "dtype": layout.dtype,
            "channels": layout.channels,
            "spread": layout.spread,
            "lanes": layout.lanes,
        }

    @classmethod
    def from_table(cls, table: Mapping[str, Any], pim: PimSpec) -> PackedCache:
        """The inverse of `to_table`, for the device `pim`.

        Raises
        ------
        LookupError, TypeError, ValueError
            If `page_table` is not one that `to_table` returns.
        """
        options = {name: table[name] for name in ("dtype", "channels", "spread", "lanes")}
        sizes = [*table["shape"], *(table["attention"][name] for name in SIZES)]
        sizes += [options[name] for name in ("channels", "spread", "lanes")]
        sizes += [size for *group, _ in table["groups"] for size in group]
        firsts = [row_begin + 1 for *_, row_begin in table["groups"]]
        if not all(type(size) is int and 0 < size < MAX_SIZE for size in (*sizes, *firsts)):
            raise ValueError("a size of a packed cache is none")
        if type(read := table["attention"]["read"]) is not int or not 0 <= read < table["attention"]["keys"]:
            raise ValueError("a packed cache is read where it has no places")
        uneven = (
            table["attention"]["heads"] % table["attention"]["kv_heads"],
            options["channels"] % options["spread"],
        )
        if any(uneven):
            raise ValueError("heads or channels of a packed cache are not dealt evenly")
        attention = Attention.from_json(table["attention"])
        pim = cache_device(pim, attention, options["dtype"])
        if pim.elements_per_column(options["dtype"]) % options["lanes"]:
            raise ValueError("lanes of a packed cache are not dealt evenly")
        groups = tuple(
            LAYOUTS[table["kind"]](
                attention=attention.with_batch_and_heads(batch, kv_heads),
                pim=pim,
                row_begin=row_begin,
                **options,
            )
            for batch, kv_heads, row_begin in table["groups"]
        )
        cache = cls(attention=attention, groups=groups)
        if sum(layout.matrices for layout in groups) != attention.batch * attention.kv_heads:
            raise ValueError("groups of a packed cache are not those of its attention")
        shape = cache.shape
        if list(shape) != list(table["shape"]):
            raise ValueError(f"a cache is packed as {shape}, not as {table['shape']}")
        return cache


def element_places(layout: KeyLayout | ValueLayout, matrix: int) -> np.ndarray:
    """Index of each element of each token of a matrix in a packed group: int64 [places, size]."""
    groups = layout.channels // layout.spread
    group = next(g for g in range(groups) if matrix in layout.channel_matrices(g * layout.spread))
    local = matrix - layout.channel_matrices(group * layout.spread).start
    token = np.arange(layout.attention.keys)[:, None]
    if isinstance(layout, KeyLayout):
        share, part, tile = layout.token_place(token)
        column, within = np.divmod(np.arange(layout.attention.head_size), layout.elements)
        chunk, column = np.divmod(column, layout.buffer_columns)
        row, first = layout.chunk_place(local * layout.parts + part, tile, chunk)
        bank = token % layout.banks
    else:
        share, chunk, column, within = layout.token_place(token)
        tile, bank = np.divmod(np.arange(layout.attention.value_size), layout.banks)
        row, first = layout.chunk_place(local, chunk, tile)
    elements = layout.pim.columns_per_row * layout.elements
    element = (first + column) * layout.elements + within
    page = (group * layout.spread + share) * layout.rows + row - layout.first_row
    places: np.ndarray = (page * elements + element) * layout.banks + bank
    return places
