"""Caches as they lie in the banks, and as networks know them: packed and unpacked."""

from __future__ import annotations

import numpy as np

from pimflow.errors import UsageError
from pimflow.pim_backend.programs.cache_layout import CacheLayout, KeyLayout, ValueLayout
from pimflow.pim_backend.programs.layout import NUMPY_DTYPE


def cache_shape(layout: CacheLayout) -> tuple[int, int, int, int]:
    """[batch, kv_heads, places, size]."""
    return layout.attention.key_shape if isinstance(layout, KeyLayout) else layout.attention.value_shape


def packed_shape(layout: CacheLayout) -> tuple[int, int, int, int]:
    """[channels, rows, elements of a row, banks]: as the executor reads rows."""
    return (layout.channels, layout.rows, layout.pim.columns_per_row * layout.elements, layout.banks)


def packed(layout: KeyLayout | ValueLayout, cache: np.ndarray) -> np.ndarray:
    """`cache` [batch, kv_heads, places, size] in the storage type as it lies in the banks.

    Raises
    ------
    UsageError
        If it is of another shape.
    """
    wanted = cache_shape(layout)
    if cache.shape != wanted:
        raise UsageError(f"a cache of shape {wanted} is packed, not one of {cache.shape}")
    dims = packed_shape(layout)
    state = np.zeros(dims, NUMPY_DTYPE[layout.dtype])
    flat, matrices = state.reshape(-1), cache.reshape(-1, *wanted[2:])
    with np.errstate(over="ignore"):  # becomes infinity, which verification finds
        for matrix, values in enumerate(matrices):
            flat[_places(layout, matrix)] = values
    return state


def unpacked(layout: KeyLayout | ValueLayout, state: np.ndarray) -> np.ndarray:
    """The inverse of `packed`, float32.

    Raises
    ------
    UsageError
        If `state` is of another shape.
    """
    if state.shape != packed_shape(layout):
        raise UsageError(f"a packed cache has shape {packed_shape(layout)}, not {state.shape}")
    dims = cache_shape(layout)
    cache = np.empty((dims[0] * dims[1], *dims[2:]), np.float32)
    flat = state.reshape(-1)
    for matrix in range(len(cache)):
        cache[matrix] = flat[_places(layout, matrix)]
    return cache.reshape(dims)


def _places(layout: KeyLayout | ValueLayout, matrix: int) -> np.ndarray:
    """Where each element of each token of a matrix lies: int64 [places, size], into the packed cache."""
    groups = layout.channels // layout.spread
    group = next(g for g in range(groups) if matrix in layout.held(g * layout.spread))
    local = matrix - layout.held(group * layout.spread).start
    token = np.arange(layout.attention.keys)[:, None]
    if isinstance(layout, KeyLayout):
        share, part, tile = layout.share(token)
        column, within = np.divmod(np.arange(layout.attention.head_size), layout.elements)
        chunk, column = np.divmod(column, layout.buffer_columns)
        row, first = layout.place(local * layout.parts + part, tile, chunk)
        bank = token % layout.banks
    else:
        share, chunk, column, within = layout.share(token)
        tile, bank = np.divmod(np.arange(layout.attention.value_size), layout.banks)
        row, first = layout.place(local, chunk, tile)
    _, rows, elements, banks = packed_shape(layout)
    element = (first + column) * layout.elements + within
    channel = group * layout.spread + share
    places: np.ndarray = ((channel * rows + row - layout.first_row) * elements + element) * banks + bank
    return places
