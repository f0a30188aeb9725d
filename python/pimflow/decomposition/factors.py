"""Filters as products of smaller ones: truncated SVD, Tucker-2, CP, tensor train.

Filters are [OC, KH, KW, C], one group. Each function returns a `Chain`: filters of convolutions that run one
after another. Leading subspaces come from Gram matrices. Squaring loses digits of small singular values only,
and these are cut off. Results are projections on orthonormal bases, without a division.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pimflow.decomposition.ranks import RankRule, spectrum

METHODS = ("tucker", "cp", "tt")
HOOI_SWEEPS = 20
ALS_SWEEPS = 60
# Sweeps end when one changes the kept share of the norm by less than this.
_HOOI_CHANGE = 1e-4
_ALS_CHANGE = 1e-5
# Share of the mean diagonal of a Gram matrix: with it, two equal components have a finite solution.
_RIDGE = 1e-10


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Filters of one group, first to last, whose composition approximates a filter.

    Attributes
    ----------
    first : ndarray, [R, C]
        Filters of the 1x1 convolution at the beginning.
    cores : tuple of ndarray
        [RO, KH, KW, RI], or [R, KH, KW] if depthwise; each axis of the window belongs to one core.
    last : ndarray, [OC, R]
        Filters of the 1x1 convolution at the end.
    """

    first: np.ndarray
    cores: tuple[np.ndarray, ...]
    last: np.ndarray
    ranks: tuple[int, ...]

    def filters(self) -> np.ndarray:
        """The filter that the chain computes, [OC, KH, KW, C]."""
        product = self.first[:, None, None, :]
        for core in self.cores:
            if core.ndim == 3:
                spread_product = np.einsum("ryx,rYXc->ryYxXc", core, product)
            else:
                spread_product = np.tensordot(core, product, axes=1).transpose(0, 1, 3, 2, 4, 5)
            o, y0, y1, x0, x1, c = spread_product.shape
            product = spread_product.reshape(o, y0 * y1, x0 * x1, c)
        return np.tensordot(self.last, product, axes=1)


def leading_vectors(matrix: np.ndarray, rank: int) -> np.ndarray:
    """Orthonormal columns that span the `rank` leading left singular vectors of `matrix`.

    Parameters
    ----------
    matrix : ndarray, [n, m]
    rank : int
        At most n. Beyond m, the columns are arbitrary ones that complete the basis.

    Returns
    -------
    ndarray, [n, rank]
    """
    n, m = matrix.shape
    if rank == n:
        return np.eye(n)
    if rank <= m < n:
        q, r = np.linalg.qr(matrix)
        return q @ leading_vectors(r, rank)
    from scipy.linalg import eigh  # slow to import, and needed only here

    vectors = eigh(matrix @ matrix.T, subset_by_index=[n - rank, n - 1])[1][:, ::-1]
    signs = np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(rank)])
    return vectors * signs


def unfold(filters: np.ndarray, mode: int) -> np.ndarray:
    """Unfold a tensor along a mode: a row for each index of the mode."""
    return np.moveaxis(filters, mode, 0).reshape(filters.shape[mode], -1)


def max_ranks(method: str, shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """The largest ranks that a filter [OC, KH, KW, C] can have, in the order of `RankRule.ranks`.

    A 1x1 filter is a matrix and has one rank. Tucker: ranks of the input and the output channels. CP: the
    number of components that is enough for every filter. Tensor train: ranks of the cuts, from the input on.
    """
    oc, kh, kw, c = shape
    if kh * kw == 1:
        return (min(c, oc),)
    if method == "tucker":
        return (c, oc)
    if method == "cp":
        return (math.prod(shape) // max(shape),)
    sizes = (c, *(k for k in (kh, kw) if k > 1), oc)
    return tuple(min(math.prod(sizes[:i]), math.prod(sizes[i:])) for i in range(1, len(sizes)))


def ranks(method: str, groups: list[np.ndarray], rule: RankRule) -> tuple[int, ...]:
    """Ranks of filters, the same for all `groups`: the largest that the rule gives for one of them.

    CP has no spectrum to read. It takes the larger of the ranks of input and output channels: with fewer
    components it cannot keep what Tucker keeps.
    """
    if rule.ranks:
        return rule.ranks
    ranks_by_group = [_filter_ranks(method, filters, rule) for filters in groups]
    return tuple(max(group_ranks) for group_ranks in zip(*ranks_by_group))


def _filter_ranks(method: str, filters: np.ndarray, rule: RankRule) -> tuple[int, ...]:
    oc, kh, kw, c = filters.shape
    if kh * kw == 1:
        matrix = filters.reshape(oc, c)
        return (rule.rank(matrix.shape, lambda: spectrum(matrix)),)
    if method == "tt":
        tensor = _drop_unit_axes(filters)
        row_counts = [math.prod(tensor.shape[:i]) for i in range(1, tensor.ndim)]
        matrices = [tensor.reshape(rows, -1) for rows in row_counts]
        ranks = [rule.rank(m.shape, lambda m=m: spectrum(m)) for m in matrices]
        return consistent_ranks(ranks, tensor.shape)
    modes = [unfold(filters, mode) for mode in (3, 0)]
    if rule.kind == "ratio":  # of the channels, however few the rest of the filter has
        ranks = [rule.rank((len(m), len(m)), lambda m=m: spectrum(m)) for m in modes]
    else:
        ranks = [rule.rank(m.shape, lambda m=m: spectrum(m)) for m in modes]
    return tuple(ranks) if method == "tucker" else (min(max(ranks), *max_ranks("cp", filters.shape)),)


def consistent_ranks(ranks: Sequence[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks of cuts, each reduced to what its neighbours and the modes between them allow."""
    ranks = [1, *ranks, 1]
    for i in range(1, len(ranks) - 1):
        ranks[i] = min(ranks[i], ranks[i - 1] * sizes[i - 1])
    for i in range(len(ranks) - 2, 0, -1):
        ranks[i] = min(ranks[i], ranks[i + 1] * sizes[i])
    return tuple(ranks[1:-1])


def factorise(method: str, filters: np.ndarray, ranks: tuple[int, ...]) -> Chain:
    """Factorise `filters` by `method`; 1x1 filters, which are matrices, by truncated SVD.

    Parameters
    ----------
    filters : ndarray, [OC, KH, KW, C]
    ranks : tuple of int
        None above `max_ranks`.
    """
    filters = filters.astype(np.float64, copy=False)
    oc, kh, kw, c = filters.shape
    if kh * kw == 1:
        return low_rank_svd(filters.reshape(oc, c), ranks[0])
    return {"tucker": tucker2, "cp": cp, "tt": tensor_train}[method](filters, *ranks)


def low_rank_svd(matrix: np.ndarray, rank: int) -> Chain:
    """The nearest matrix [OC, C] of `rank`, on a basis of its shorter side."""
    if matrix.shape[0] <= matrix.shape[1]:
        basis = leading_vectors(matrix, rank)
        return Chain(first=basis.T @ matrix, cores=(), last=basis, ranks=(rank,))
    basis = leading_vectors(matrix.T, rank)
    return Chain(first=basis.T, cores=(), last=matrix @ basis, ranks=(rank,))


def tucker2(filters: np.ndarray, inner: int, outer: int, sweeps: int = HOOI_SWEEPS) -> Chain:
    """Tucker decomposition of both channel modes by higher-order orthogonal iteration.

    Parameters
    ----------
    inner, outer : int
        Ranks of the input and the output channels.
    sweeps : int
        Maximum number of sweeps; 0 gives the truncated higher-order SVD.
    """
    v, u = leading_vectors(unfold(filters, 3), inner), leading_vectors(unfold(filters, 0), outer)
    total_energy, kept_energy = float((filters**2).sum()), 0.0
    for _ in range(sweeps):
        u = leading_vectors(unfold(filters @ v, 0), outer)
        reduced = np.tensordot(u.T, filters, axes=1)
        v = leading_vectors(unfold(reduced, 3), inner)
        previous_energy, kept_energy = kept_energy, float(((reduced @ v) ** 2).sum())
        if kept_energy - previous_energy <= _HOOI_CHANGE * total_energy:
            break
    core = np.tensordot(u.T, filters, axes=1) @ v
    return Chain(first=v.T, cores=(core,), last=u, ranks=(inner, outer))


def tensor_train(filters: np.ndarray, *ranks: int) -> Chain:
    """Tensor train from the input channels over the rows and columns of the window to the output channels,
    by successive truncated SVDs (Oseledets 2011, algorithm 1)."""
    _, kh, kw, _ = filters.shape
    rest = _drop_unit_axes(filters)
    sizes = rest.shape
    train_cores, left_rank = [], 1
    for size, rank in zip(sizes, ranks):
        rest = rest.reshape(left_rank * size, -1)
        basis = leading_vectors(rest, rank)
        train_cores.append(basis.reshape(left_rank, size, rank))
        rest, left_rank = basis.T @ rest, rank
    axes = [axis for axis, extent in enumerate((kh, kw)) if extent > 1]
    cores = tuple(
        np.expand_dims(train_core.transpose(2, 1, 0), 2 - axis)
        for axis, train_core in zip(axes, train_cores[1:])
    )
    return Chain(first=train_cores[0][0].T, cores=cores, last=rest.T, ranks=ranks)


def _drop_unit_axes(filters: np.ndarray) -> np.ndarray:
    """Transpose to [C, KH, KW, OC] and drop axes of the window that have extent 1."""
    transposed = filters.transpose(3, 1, 2, 0)
    return transposed.reshape([s for i, s in enumerate(transposed.shape) if s > 1 or i in (0, 3)])


def cp(filters: np.ndarray, rank: int, sweeps: int = ALS_SWEEPS) -> Chain:
    """Sum of `rank` products of vectors, by alternating least squares from the higher-order SVD.

    At the rank that is enough for every filter of the shape, the sum is exact.
    """
    _, kh, kw, _ = filters.shape
    tensor = filters.reshape([s for i, s in enumerate(filters.shape) if s > 1 or i in (0, 3)])
    if rank >= max_ranks("cp", filters.shape)[0]:
        factors = _exact_factors(tensor)
    else:
        factors = _als(tensor, rank, sweeps)
    axes = [axis for axis, extent in enumerate((kh, kw)) if extent > 1]
    cores = tuple(np.expand_dims(factor.T, 2 - axis) for axis, factor in zip(axes, factors[1:-1]))
    return Chain(first=factors[-1].T, cores=cores, last=factors[0], ranks=(rank,))


def _exact_factors(tensor: np.ndarray) -> list[np.ndarray]:
    """Exact factors: a component for every fibre of the longest mode."""
    longest = int(np.argmax(tensor.shape))
    other_sizes = [s for mode, s in enumerate(tensor.shape) if mode != longest]
    indices = np.array(list(itertools.product(*map(range, other_sizes)))).T
    factors = [np.eye(size)[:, index] for size, index in zip(other_sizes, indices)]
    factors.insert(longest, unfold(tensor, longest))
    return factors


def _als(tensor: np.ndarray, rank: int, sweeps: int) -> list[np.ndarray]:
    """Factors [size, rank] of every mode, by alternating least squares."""
    rng = np.random.default_rng(0)
    factors = []
    for mode, size in enumerate(tensor.shape):
        basis = leading_vectors(unfold(tensor, mode), min(rank, size))
        random_columns = rng.standard_normal((size, rank - basis.shape[1])) / math.sqrt(size)
        factors.append(np.hstack([basis, random_columns]))
    total_energy, kept_energy = float((tensor**2).sum()), -math.inf
    for _ in range(sweeps):
        # The contraction over the last mode is shared by the updates of all other modes.
        last = tensor @ factors[-1]
        for mode in range(tensor.ndim - 1):
            factors[mode] = _solve_factor(_contract(last, factors[:-1], mode), factors, mode)
        # The last mode: contract over all other modes at once, as one product of matrices.
        products = factors[0]
        for factor in factors[1:-1]:
            products = (products[:, None, :] * factor[None]).reshape(-1, rank)
        right_side = tensor.reshape(-1, tensor.shape[-1]).T @ products
        factors[-1] = _solve_factor(right_side, factors, tensor.ndim - 1)
        gram = np.prod([f.T @ f for f in factors], axis=0)
        previous_energy = kept_energy
        kept_energy = 2 * float((right_side * factors[-1]).sum()) - float(gram.sum())
        if kept_energy - previous_energy <= _ALS_CHANGE * total_energy:
            break
        _balance(factors)
    return factors


def _contract(products: np.ndarray, factors: list[np.ndarray], mode: int) -> np.ndarray:
    """Contract every mode of `products` [.., rank] but `mode` with its factor, component by component."""
    for other_mode in reversed(range(len(factors))):
        if other_mode != mode:
            products = (np.moveaxis(products, other_mode, -2) * factors[other_mode]).sum(axis=-2)
    return products


def _solve_factor(right_side: np.ndarray, factors: list[np.ndarray], mode: int) -> np.ndarray:
    """Solve for the factor of `mode` that fits best while the other factors stay fixed."""
    gram = np.prod([f.T @ f for other_mode, f in enumerate(factors) if other_mode != mode], axis=0)
    ridge = _RIDGE * np.trace(gram) / len(gram) + np.finfo(float).tiny  # a zero filter has no Gram matrix
    return np.linalg.solve(gram + ridge * np.eye(len(gram)), right_side.T).T


def _balance(factors: list[np.ndarray]) -> None:
    """Scale factors in place so that every mode has the same norm for each component."""
    norms = [np.maximum(np.linalg.norm(f, axis=0), np.finfo(float).tiny) for f in factors]
    mean = np.exp(np.mean(np.log(norms), axis=0))
    for mode, norm in enumerate(norms):
        factors[mode] = factors[mode] * (mean / norm)
