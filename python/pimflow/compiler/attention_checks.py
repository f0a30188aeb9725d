"""Checks of attention on PIM against NumPy: entries that a step stores in caches, and both products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from pimflow.compiler.packed_states import PackedStates
from pimflow.compiler.phases import CacheProduct
from pimflow.compiler.region_check import STORAGE_TYPES, ReferenceSums, RegionCheck
from pimflow.core.attention import SCORES, VALUES
from pimflow.core.program import PimProgram
from pimflow.pim_backend.programs.cached_attention import CachedAttention


class AttentionChecks:
    """Checks of each product of attention when it is computed.

    Parameters
    ----------
    products : mapping of str to CacheProduct
        By the symbol that the executable calls.
    """

    def __init__(
        self, products: Mapping[str, CacheProduct], states: PackedStates, inputs: Mapping[str, np.ndarray]
    ):
        self.products = products
        self._by_tokens: dict[tuple[str, int], CachedAttention] = {}
        self.initial_caches = {id(cache): inputs[name] for name, cache in states.inputs.items()}

    def check_call(self, symbol: str, operands: list[np.ndarray], y: np.ndarray) -> list[RegionCheck]:
        """Check one call; operands and result are those that `codegen.observe_regions` reports."""
        cached, product, group = self.products[symbol]
        tokens = last_position(operands) + 1
        if tokens != cached.attention.extent and (cached.region, tokens) not in self._by_tokens:
            self._by_tokens[cached.region, tokens] = cached.with_tokens(tokens)
        if product == VALUES:
            return _check_values(cached, group, operands, y)
        return [*self._check_append(cached, group, operands), *_check_scores(cached, group, operands, y)]

    def shorter_programs(self) -> Iterator[PimProgram]:
        """Programs of the calls that did not read all places of the cache, for their number of tokens."""
        for cached in self._by_tokens.values():
            yield from cached.programs.values()

    def _check_append(
        self, cached: CachedAttention, group: int, operands: list[np.ndarray]
    ) -> list[RegionCheck]:
        """Check that a step changed only the places of its own tokens, and stored these tokens there.

        Groups up to `group` have stored their tokens; later groups still have their old content.
        """
        _, position, *states, new_keys, new_values = operands
        group_attention, checks = cached.groups[group].attention, []
        written_matrices = (group + 1) * group_attention.batch * group_attention.kv_heads  # matrices
        for cache, state, new_tokens in zip((cached.keys, cached.values), states, (new_keys, new_values)):
            expected = self.initial_caches[id(cache)].astype(STORAGE_TYPES[storage_dtype(cached)])
            with np.errstate(over="ignore"):
                tokens = new_tokens.reshape(-1, expected.shape[3]).astype(expected.dtype)
            matrices = expected.reshape(-1, *expected.shape[2:])
            for matrix in range(written_matrices):
                matrices[matrix, position[matrix // cached.attention.kv_heads]] = tokens[matrix]
            matches = np.array_equal(cache.unpack(state), expected.astype(np.float32), equal_nan=True)
            checks.append(
                RegionCheck(
                    region=cached.append_part(cache.kind, group),
                    error_over_bound=0.0 if matches else float("inf"),
                    in_range=bool(np.isfinite(tokens).all()),
                )
            )
        return checks


def last_position(operands: list[np.ndarray]) -> int:
    """The last place of the cache that a product with these operands reads."""
    return int(operands[1].max())


def storage_dtype(cached: CachedAttention) -> str:
    """Storage type of the caches."""
    return cached.keys.first_layout.dtype


def _check_scores(
    cached: CachedAttention, group: int, operands: list[np.ndarray], y: np.ndarray
) -> list[RegionCheck]:
    """Check scores of a group; those of tokens after the last position have to be zero."""
    tokens = last_position(operands) + 1
    keys = cached.keys.unpack(operands[2])[:, :, :tokens]
    y = y.reshape(-1, cached.attention.extent)
    if y[:, tokens:].any():
        y = np.full_like(y, np.nan)
    queries, keys = (_group_slice(cached, group, operand) for operand in (operands[0], keys))
    return _check_product(cached, SCORES, group, queries, keys, y[:, :tokens])


def _check_values(
    cached: CachedAttention, group: int, operands: list[np.ndarray], y: np.ndarray
) -> list[RegionCheck]:
    """Check the weighted sums of values of a group."""
    attention = cached.groups[group].attention
    weights = operands[0].reshape(attention.batch * attention.kv_heads, attention.group, attention.extent)
    values = _group_slice(cached, group, cached.values.unpack(operands[2])[:, :, : attention.extent])
    return _check_product(cached, VALUES, group, weights, values, y)


def _group_slice(cached: CachedAttention, group: int, x: np.ndarray) -> np.ndarray:
    """The part of queries or a cache that is of a group: [matrices, query heads or places, elements]."""
    attention = cached.groups[group].attention
    matrices = attention.batch * attention.kv_heads
    stacked = x.reshape(len(cached.groups) * matrices, -1, x.shape[-1])
    return stacked[group * matrices : (group + 1) * matrices]


def _check_product(
    cached: CachedAttention, product: str, group: int, x: np.ndarray, cache: np.ndarray, y: np.ndarray
) -> list[RegionCheck]:
    """Check the programs of a product: `y` is, or sums up to, `x` times the matrix of each KV head."""
    dtype = storage_dtype(cached)
    with np.errstate(over="ignore"):
        x64 = x.astype(STORAGE_TYPES[dtype]).astype(np.float64)
    w64 = cache.astype(np.float64)
    if product == SCORES:
        w64 = w64.swapaxes(1, 2)
    error, in_range = float("inf"), bool(np.isfinite(x64).all() and np.isfinite(w64).all())
    if in_range:
        expected, magnitude = x64 @ w64, np.abs(x64) @ np.abs(w64)
        in_range = bool(np.abs(expected).max() < np.finfo(STORAGE_TYPES[dtype]).max)
        terms = y.reshape(*expected.shape[:2], -1, expected.shape[2])
        sums = ReferenceSums(
            dtype=dtype,
            expected=expected,
            magnitude=magnitude,
            products=x.shape[-1],
            partial=magnitude if terms.shape[2] > 1 else None,
        )
        error = sums.error_over_bound(terms.sum(axis=2, dtype=np.float64))
    return [
        RegionCheck(region=program.region, error_over_bound=error, in_range=in_range)
        for program in cached.product_programs(product, group).values()
    ]
