"""Attention in PIM against NumPy: what a step stored in its caches, and both products."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pimflow.compiler.packed_states import PackedStates
from pimflow.compiler.region_check import ROUNDED, RegionCheck, error_over_bound
from pimflow.core.attention import SCORES, VALUES
from pimflow.core.stages import part_name
from pimflow.pim_backend.programs.cached_attention import CachedAttention
from pimflow.pim_backend.programs.packed_cache import cache_shape, packed_shape, unpacked


class AttentionChecks:
    """Checks of the products of attention as they are computed.

    Parameters
    ----------
    products : mapping of str to (CachedAttention, str)
        By the symbol that an executable calls, which product of which attention it is.
    states : PackedStates
        Which inputs their caches are.
    inputs : mapping of str to ndarray
        Of the network.
    """

    def __init__(
        self,
        products: Mapping[str, tuple[CachedAttention, str]],
        states: PackedStates,
        inputs: Mapping[str, np.ndarray],
    ):
        self.products = products
        self.before = {id(layout): inputs[name] for name, layout in states.inputs.items()}

    def of(self, symbol: str, operands: list[np.ndarray], y: np.ndarray) -> list[RegionCheck]:
        """What came of a call; operands and result as `codegen.observed` has them."""
        cached, product = self.products[symbol]
        if product == VALUES:
            return _of_values(cached, operands, y)
        return [*self._appended(cached, operands), *_of_scores(cached, operands, y)]

    def _appended(self, cached: CachedAttention, operands: list[np.ndarray]) -> list[RegionCheck]:
        """Whether just the places of the step's tokens hold something else than before, and hold these."""
        _, position, *states, new_keys, new_values = operands
        checks = []
        for part, layout, state, new in (
            ("new_keys", cached.keys, states[0], new_keys),
            ("new_values", cached.values, states[1], new_values),
        ):
            before = self.before[id(layout)]
            if before.shape == packed_shape(layout) != cache_shape(layout):
                before = unpacked(layout, before)
            with np.errstate(over="ignore"):
                wanted = before.astype(ROUNDED[layout.dtype])
                tokens = new.reshape(*wanted.shape[:2], wanted.shape[3]).astype(wanted.dtype)
            for request, place in enumerate(position):
                wanted[request, :, place] = tokens[request]
            right = np.array_equal(unpacked(layout, state), wanted.astype(np.float32), equal_nan=True)
            checks.append(
                RegionCheck(
                    region=part_name(cached.region, part),
                    error_over_bound=0.0 if right else float("inf"),
                    in_range=bool(np.isfinite(tokens).all()),
                )
            )
        return checks


def _of_scores(cached: CachedAttention, operands: list[np.ndarray], y: np.ndarray) -> list[RegionCheck]:
    a = cached.keys.attention
    keys = unpacked(cached.keys, operands[2]).swapaxes(2, 3)
    q = operands[0].reshape(a.query_shape)
    return _checks(cached, SCORES, q, keys, y.reshape(1, *a.score_shape))


def _of_values(cached: CachedAttention, operands: list[np.ndarray], y: np.ndarray) -> list[RegionCheck]:
    a = cached.values.attention
    weights = operands[0].reshape(a.score_shape)
    return _checks(
        cached, VALUES, weights, unpacked(cached.values, operands[2]), y.reshape(-1, *a.output_shape)
    )


def _checks(
    cached: CachedAttention, product: str, x: np.ndarray, matrices: np.ndarray, terms: np.ndarray
) -> list[RegionCheck]:
    """Of the programs of a product: `terms` add up to `x` times the matrix of each KV head."""
    dtype, group = cached.keys.dtype, cached.keys.attention.group
    with np.errstate(over="ignore"):
        x64 = x.astype(ROUNDED[dtype]).astype(np.float64)
    w64 = np.repeat(matrices.astype(np.float64), group, axis=1)
    error, in_range = float("inf"), bool(np.isfinite(x64).all() and np.isfinite(w64).all())
    if in_range:
        expected, magnitude = x64 @ w64, np.abs(x64) @ np.abs(w64)
        in_range = bool(np.abs(expected).max() < np.finfo(ROUNDED[dtype]).max)
        partial = magnitude if len(terms) > 1 else None
        y = terms.sum(axis=0, dtype=np.float64)
        error = error_over_bound(dtype, y, expected, magnitude, x.shape[-1], partial)
    return [
        RegionCheck(region=program.region, error_over_bound=error, in_range=in_range)
        for program in cached.programs_of(product).values()
    ]
