"""Are the ranks that a rule finds those that it promises?"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.decomposition import factors
from pimflow.decomposition.factors import METHODS
from pimflow.decomposition.ranks import RankRule, energy_rank, spectrum, vbmf_rank
from pimflow.errors import UsageError

quick = settings(max_examples=examples(40), derandomize=True, deadline=None)


def random_filters(shape, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize(
    ("share", "shape", "expected"),
    [
        ("0.1", (64, 3, 3, 3), (1, 6)),  # 0.3 and 6.4: VGG-16's first layer
        ("0.1", (25, 3, 3, 15), (2, 3)),  # 1.5 and 2.5: halves go up
        ("1", (8, 3, 3, 4), (4, 8)),
        ("0.001", (8, 3, 3, 4), (1, 1)),
    ],
)
def test_a_ratio_is_rounded_and_leaves_at_least_one(share, shape, expected):
    assert factors.ranks("tucker", [random_filters(shape)], RankRule.parse(share)) == expected


@pytest.mark.parametrize(
    ("method", "shape", "expected"),
    [
        ("cp", (20, 3, 3, 10), (10,)),  # of the larger number of channels
        ("cp", (20, 1, 1, 10), (5,)),
        ("tt", (20, 3, 3, 10), (5, 15, 10)),
        ("tt", (20, 1, 3, 10), (5, 10)),
        ("tt", (2, 3, 3, 64), (9, 3, 1)),  # of the rank that a cut can have
        ("tucker", (20, 1, 1, 10), (5,)),
    ],
)
def test_ratios_of_other_forms(method, shape, expected):
    assert factors.ranks(method, [random_filters(shape)], RankRule.parse("0.5")) == expected


@quick
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.floats(0.01, 1))
def test_energy_keeps_enough_with_the_fewest(values, share):
    squares = np.sort(np.array(values, float))[::-1] + 1e-3
    rank = energy_rank(squares, share)
    assert squares[:rank].sum() >= share * squares.sum() * (1 - 1e-12)
    assert squares[: rank - 1].sum() < share * squares.sum()


@quick
@given(st.floats(0.1, 1), st.integers(0, 99))
def test_energy_of_tucker_bounds_what_is_lost(share, seed):
    filters = random_filters((9, 3, 3, 7), seed) * np.geomspace(1, 1e-2, 7)
    rule = RankRule(kind="energy", share=share)
    chain = factors.factorise("tucker", filters, factors.ranks("tucker", [filters], rule))
    lost = ((filters - chain.filters()) ** 2).sum() / (filters**2).sum()
    assert lost <= 2 * (1 - share) + 1e-9  # a share of each of two modes


@pytest.mark.parametrize("rank", [1, 3, 10])
@pytest.mark.parametrize(("rows", "columns"), [(40, 200), (200, 40), (80, 80)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_vbmf_tells_a_low_rank_from_noise(rank, rows, columns, scale):
    signal = random_filters((rows, rank), 1) @ random_filters((rank, columns), 2) * 5
    matrix = scale * (signal + random_filters((rows, columns), 3))
    assert vbmf_rank(spectrum(matrix), matrix.shape) == rank


@pytest.mark.parametrize("shape", [(40, 200), (80, 80), (3, 900), (1, 9)])
def test_vbmf_finds_nothing_in_noise(shape):
    assert vbmf_rank(spectrum(random_filters(shape)), shape) == 0
    assert RankRule.parse("vbmf").rank(shape, lambda: spectrum(random_filters(shape))) == 1


def test_vbmf_of_what_has_no_noise():
    matrix = random_filters((30, 4)) @ random_filters((4, 50), 1)
    assert vbmf_rank(spectrum(matrix), matrix.shape) == 4
    assert vbmf_rank(spectrum(np.zeros((5, 9))), (5, 9)) == 0


def test_the_noise_variance_that_vbmf_takes_is_the_best_of_a_grid():
    """The free energy, spelled out again, has no lower value on a grid than where the rank is read."""
    matrix = random_filters((30, 2), 1) @ random_filters((2, 90), 2) + random_filters((30, 90), 3)
    squares, (short, long) = spectrum(matrix), matrix.shape
    alpha = short / long
    tau = 2.5129 * alpha**0.5
    bound = (1 + tau) * (1 + alpha / tau)

    def energy(variance: float) -> float:
        total = 0.0
        for square in squares:
            x = square / (long * variance)
            if x <= bound:
                total += x - np.log(x)
            else:
                t = ((x - 1 - alpha) + ((x - 1 - alpha) ** 2 - 4 * alpha) ** 0.5) / 2
                total += x - t + np.log((t + 1) / x) + alpha * np.log(t / alpha + 1)
        return total

    best = min(np.geomspace(1e-2, 1e2, 4001), key=energy)
    assert vbmf_rank(squares, matrix.shape) == (squares > long * best * bound).sum() == 2
    assert best == pytest.approx(1, rel=0.1)  # the variance of the noise


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", ["0.4", "energy=0.7", "vbmf"])
@quick
@given(st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(1, 3), st.integers(1, 7)))
def test_every_rule_gives_ranks_that_the_filter_has(method, rule, shape):
    filters = random_filters(shape)
    ranks = factors.ranks(method, [filters], RankRule.parse(rule))
    assert all(1 <= r <= limit for r, limit in zip(ranks, factors.max_ranks(method, shape), strict=True))
    assert factors.factorise(method, filters, ranks).filters().shape == shape


def test_groups_get_the_ranks_of_the_one_that_needs_most():
    plain = np.ones((8, 3, 3, 6))
    rule = RankRule.parse("energy=0.9")
    alone = factors.ranks("tucker", [random_filters((8, 3, 3, 6))], rule)
    assert factors.ranks("tucker", [plain], rule) == (1, 1)
    assert factors.ranks("tucker", [plain, random_filters((8, 3, 3, 6))], rule) == alone


@pytest.mark.parametrize("text", ["", "a", "0", "1.5", "-1", "nan", "energy=", "energy=2", "enrgy=0.5", "64"])
def test_other_texts_are_refused(text):
    with pytest.raises(UsageError, match=f"rank '{text}'"):
        RankRule.parse(text)
