"""Are the factors of a filter as good as they can be, by what mathematics and TensorLy say?"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.decomposition import factors
from pimflow.decomposition.factors import METHODS, factorise, leading_vectors, max_ranks

shapes = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 4), st.integers(1, 7))
quick = settings(max_examples=examples(40), derandomize=True, deadline=None)


def random_filters(shape, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def error(filters: np.ndarray, chain: factors.Chain) -> float:
    return float(np.linalg.norm(filters - chain.filters()) / np.linalg.norm(filters))


def rank_lists(method: str, shape) -> list[tuple[int, ...]]:
    """Ranks from 1 to the largest, all growing together."""
    bounds = max_ranks(method, shape)
    return [tuple(min(rank, bound) for bound in bounds) for rank in range(1, max(bounds) + 1)]


@quick
@given(st.sampled_from(METHODS), shapes, st.integers(0, 99))
def test_at_the_largest_ranks_nothing_is_lost(method, shape, seed):
    filters = random_filters(shape, seed)
    chain = factorise(method, filters, max_ranks(method, shape))
    assert error(filters, chain) < 1e-12


@quick
@given(st.sampled_from(("tucker", "tt")), shapes, st.integers(0, 99))
def test_the_error_does_not_grow_with_the_ranks(method, shape, seed):
    filters = random_filters(shape, seed)
    errors = [error(filters, factorise(method, filters, ranks)) for ranks in rank_lists(method, shape)]
    # Neither is a global optimum; what was cut off before bounds how far from one they can be.
    assert all(after <= before * (1 + 1e-2) + 1e-7 for before, after in itertools.pairwise(errors))


@quick
@given(shapes, st.data())
def test_iterating_is_never_worse_than_the_truncated_higher_order_svd(shape, data):
    filters = random_filters(shape, data.draw(st.integers(0, 99)))
    inner, outer = data.draw(st.integers(1, shape[3])), data.draw(st.integers(1, shape[0]))
    begin = factors.tucker2(filters, inner, outer, sweeps=0)
    errors = [error(filters, factors.tucker2(filters, inner, outer, sweeps=n)) for n in (1, 2, 20)]
    assert error(filters, begin) >= errors[0] - 1e-9
    assert errors[0] >= errors[1] - 1e-9 >= errors[2] - 2e-9
    # And that is no worse than sqrt(2) times the best (De Lathauwer et al. 2000, property 10).
    assert error(filters, begin) <= math.sqrt(2) * errors[2] + 1e-7


@quick
@given(shapes, st.integers(1, 8), st.integers(0, 99))
def test_least_squares_never_get_worse_from_sweep_to_sweep(shape, rank, seed):
    assume(shape[1] * shape[2] > 1 and rank < max_ranks("cp", shape)[0])
    filters = random_filters(shape, seed)
    errors = [error(filters, factors.cp(filters, rank, sweeps=n)) for n in (1, 2, 4, 8)]
    assert all(after <= before + 1e-5 for before, after in itertools.pairwise(errors))
    assert errors[-1] < 1


@pytest.mark.parametrize("method", METHODS)
def test_a_filter_of_low_rank_is_found_again(method):
    """Of each method, a filter that it can say exactly."""
    rng = np.random.default_rng(1)
    a, b, c, d = (rng.standard_normal((size, 2)) for size in (12, 3, 5, 10))
    filters = np.einsum("or,yr,xr,cr->oyxc", a, b, c, d)
    ranks = {"tucker": (2, 2), "cp": (2,), "tt": (2, 2, 2)}[method]
    chain = factorise(method, filters, ranks)
    assert error(filters, chain) < (1e-2 if method == "cp" else 1e-7)
    fewer = tuple(max(rank - 1, 1) for rank in ranks)
    assert error(filters, factorise(method, filters, fewer)) > 0.1


@quick
@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_matrix_gets_the_nearest_of_its_rank(oc, c, data):
    rank = data.draw(st.integers(1, min(oc, c)))
    filters = random_filters((oc, 1, 1, c), data.draw(st.integers(0, 99)))
    values = np.linalg.svd(filters.reshape(oc, c), compute_uv=False)
    lost = float(np.linalg.norm(values[rank:]) / np.linalg.norm(values))
    for method in METHODS:
        assert error(filters, factorise(method, filters, (rank,))) == pytest.approx(lost, abs=1e-7)


@quick
@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_leading_vectors_are_orthonormal_and_span_the_largest_part(n, m, data):
    rank = data.draw(st.integers(1, n))
    matrix = random_filters((n, m), data.draw(st.integers(0, 99)))
    basis = leading_vectors(matrix, rank)
    assert np.allclose(basis.T @ basis, np.eye(rank), atol=1e-10)
    values = np.linalg.svd(matrix, compute_uv=False)
    assert np.linalg.norm(basis.T @ matrix) == pytest.approx(np.linalg.norm(values[:rank]), rel=1e-9)


def test_bases_of_a_zero_filter_are_orthonormal_too():
    chain = factorise("tucker", np.zeros((6, 3, 3, 5)), (2, 3))
    assert np.allclose(chain.first @ chain.first.T, np.eye(2)) and not chain.filters().any()


@pytest.mark.parametrize("seed", range(3))
def test_tucker_is_as_good_as_tensorly(seed):
    tensorly = pytest.importorskip("tensorly")
    filters = random_filters((24, 3, 3, 16), seed)
    (core, bases), _ = tensorly.decomposition.partial_tucker(
        filters, rank=[6, 4], modes=[0, 3], n_iter_max=50, tol=1e-8
    )
    approximation = tensorly.tenalg.multi_mode_dot(core, bases, modes=[0, 3])
    expected = np.linalg.norm(filters - approximation) / np.linalg.norm(filters)
    # Theirs iterates longer; noise, which is the hardest, is where that shows.
    assert error(filters, factors.tucker2(filters, 4, 6)) <= expected * 1.005


@pytest.mark.parametrize("seed", range(3))
def test_cp_is_as_good_as_tensorly(seed):
    tensorly = pytest.importorskip("tensorly")
    filters = random_filters((20, 3, 3, 16), seed)
    reference = tensorly.decomposition.parafac(filters, rank=5, n_iter_max=60, init="svd", random_state=0)
    expected = np.linalg.norm(filters - tensorly.cp_to_tensor(reference)) / np.linalg.norm(filters)
    assert error(filters, factors.cp(filters, 5)) <= expected * 1.01


@pytest.mark.parametrize("ranks", [(1, 1, 1), (4, 7, 5), (16, 20, 20)])
def test_tensor_train_is_that_of_tensorly(ranks):
    tensorly = pytest.importorskip("tensorly")
    filters = random_filters((20, 3, 5, 16))
    reference = tensorly.decomposition.tensor_train(filters.transpose(3, 1, 2, 0), rank=[1, *ranks, 1])
    expected = tensorly.tt_to_tensor(reference).transpose(3, 1, 2, 0)
    assert np.allclose(factors.tensor_train(filters, *ranks).filters(), expected, atol=1e-9)
