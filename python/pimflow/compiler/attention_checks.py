"""Checks of attention on PIM against NumPy: entries that a step stores in caches, and both products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from pimflow.compiler.packed_states import PackedStates
from pimflow.compiler.phases import CacheProduct
from pimflow.compiler.region_check import ROUNDED, RegionCheck, error_over_bound
from pimflow.core.attention import SCORES, VALUES
from pimflow.core.program import PimProgram
from pimflow.pim_backend.programs.cached_attention import CachedAttention


class AttentionChecks:
    """Checks of each product of attention when it is computed.

    Parameters
    ----------
    products : mapping of str to CacheProduct
        By the symbol that the executable calls.
    states : PackedStates
        Which inputs are caches in the banks.
    inputs : mapping of str to ndarray
        Inputs of the network.
    """

    def __init__(
        self, products: Mapping[str, CacheProduct], states: PackedStates, inputs: Mapping[str, np.ndarray]
    ):
        self.products = products
        self._at: dict[tuple[str, int], CachedAttention] = {}
        self.before = {id(cache): inputs[name] for name, cache in states.inputs.items()}

    def of(self, symbol: str, operands: list[np.ndarray], y: np.ndarray) -> list[RegionCheck]:
        """Check one call; operands and result are those that `codegen.observed` reports."""
        cached, product, group = self.products[symbol]
        tokens = last_place(operands) + 1
        if tokens != cached.attention.extent and (cached.region, tokens) not in self._at:
            self._at[cached.region, tokens] = cached.at(tokens)
        if product == VALUES:
            return _of_values(cached, group, operands, y)
        return [*self._appended(cached, group, operands), *_of_scores(cached, group, operands, y)]

    def shorter(self) -> Iterator[PimProgram]:
        """Programs of the calls that did not read all places of the cache, for their number of tokens."""
        for cached in self._at.values():
            yield from cached.programs.values()

    def _appended(self, cached: CachedAttention, group: int, operands: list[np.ndarray]) -> list[RegionCheck]:
        """Check that a step changed only the places of its own tokens, and stored these tokens there.

        Groups up to `group` have stored their tokens; later groups still have their old content.
        """
        _, position, *states, new_keys, new_values = operands
        own, checks = cached.groups[group].attention, []
        done = (group + 1) * own.batch * own.kv_heads  # matrices
        for cache, state, new in zip((cached.keys, cached.values), states, (new_keys, new_values)):
            wanted = self.before[id(cache)].astype(ROUNDED[own_dtype(cached)])
            with np.errstate(over="ignore"):
                tokens = new.reshape(-1, wanted.shape[3]).astype(wanted.dtype)
            matrices = wanted.reshape(-1, *wanted.shape[2:])
            for matrix in range(done):
                matrices[matrix, position[matrix // cached.attention.kv_heads]] = tokens[matrix]
            right = np.array_equal(cache.unpacked(state), wanted.astype(np.float32), equal_nan=True)
            checks.append(
                RegionCheck(
                    region=cached.append_part(cache.kind, group),
                    error_over_bound=0.0 if right else float("inf"),
                    in_range=bool(np.isfinite(tokens).all()),
                )
            )
        return checks


def last_place(operands: list[np.ndarray]) -> int:
    """The last place of the cache that a product with these operands reads."""
    return int(operands[1].max())


def own_dtype(cached: CachedAttention) -> str:
    """Storage type of the caches."""
    return cached.keys.first.dtype


def _of_scores(
    cached: CachedAttention, group: int, operands: list[np.ndarray], y: np.ndarray
) -> list[RegionCheck]:
    """Check scores of a group; those of tokens after the last position have to be zero."""
    tokens = last_place(operands) + 1
    keys = cached.keys.unpacked(operands[2])[:, :, :tokens]
    y = y.reshape(-1, cached.attention.extent)
    if y[:, tokens:].any():
        y = np.full_like(y, np.nan)
    own = (_own(cached, group, each) for each in (operands[0], keys))
    return _checks(cached, SCORES, group, *own, y[:, :tokens])


def _of_values(
    cached: CachedAttention, group: int, operands: list[np.ndarray], y: np.ndarray
) -> list[RegionCheck]:
    """Check the weighted sums of values of a group."""
    a = cached.groups[group].attention
    weights = operands[0].reshape(a.batch * a.kv_heads, a.group, a.extent)
    values = _own(cached, group, cached.values.unpacked(operands[2])[:, :, : a.extent])
    return _checks(cached, VALUES, group, weights, values, y)


def _own(cached: CachedAttention, group: int, x: np.ndarray) -> np.ndarray:
    """The part of queries or a cache that is of a group: [matrices, query heads or places, elements]."""
    a = cached.groups[group].attention
    matrices = a.batch * a.kv_heads
    whole = x.reshape(len(cached.groups) * matrices, -1, x.shape[-1])
    return whole[group * matrices : (group + 1) * matrices]


def _checks(
    cached: CachedAttention, product: str, group: int, x: np.ndarray, cache: np.ndarray, y: np.ndarray
) -> list[RegionCheck]:
    """Check the programs of a product: `y` is, or sums up to, `x` times the matrix of each KV head."""
    dtype = own_dtype(cached)
    with np.errstate(over="ignore"):
        x64 = x.astype(ROUNDED[dtype]).astype(np.float64)
    w64 = cache.astype(np.float64)
    if product == SCORES:
        w64 = w64.swapaxes(1, 2)
    error, in_range = float("inf"), bool(np.isfinite(x64).all() and np.isfinite(w64).all())
    if in_range:
        expected, magnitude = x64 @ w64, np.abs(x64) @ np.abs(w64)
        in_range = bool(np.abs(expected).max() < np.finfo(ROUNDED[dtype]).max)
        terms = y.reshape(*expected.shape[:2], -1, expected.shape[2])
        partial = magnitude if terms.shape[2] > 1 else None
        total = terms.sum(axis=2, dtype=np.float64)
        error = error_over_bound(dtype, total, expected, magnitude, x.shape[-1], partial)
    return [
        RegionCheck(region=program.region, error_over_bound=error, in_range=in_range)
        for program in cached.programs_of(product, group).values()
    ]
