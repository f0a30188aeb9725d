"""Does a chain of convolutions compute what the layer did, whatever its geometry?"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.compiler.verification import convolve
from pimflow.core.chains import is_decomposable
from pimflow.core.kernel import ConvGeometry
from pimflow.core.region import ROLES
from pimflow.decomposition.factorisation import check_ranks, decompose
from pimflow.decomposition.factors import METHODS, max_ranks
from pimflow.decomposition.ranks import RankRule
from pimflow.errors import DecompositionError


@st.composite
def geometries(draw):
    def pair(low, high):
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    groups = draw(st.sampled_from([1, 1, 2, 3]))
    h, w = pair(3, 8)
    kh, kw = pair(1, 4)
    g = ConvGeometry(
        n=draw(st.integers(1, 2)),
        h=h,
        w=w,
        c=groups * draw(st.integers(1, 5)),
        oc=groups * draw(st.integers(1, 5)),
        kh=kh,
        kw=kw,
        stride=pair(1, 3),
        dilation=pair(1, 2),
        padding=(*pair(0, 2), *pair(0, 2)),
        groups=groups,
    )
    assume(g.oh > 0 and g.ow > 0 and is_decomposable(g))
    return g


def convolve_groups(x: np.ndarray, filters: np.ndarray, g: ConvGeometry) -> np.ndarray:
    """A convolution group by group, [n, oh, ow, oc]."""
    part = replace(g, c=g.c // g.groups, oc=g.oc // g.groups, groups=1)
    shares = zip(np.split(x, g.groups, axis=3), np.split(filters, g.groups))
    results = [convolve(a, f.reshape(part.oc, -1), part) for a, f in shares]
    return np.concatenate(results, axis=1).reshape(g.n, g.oh, g.ow, g.oc)


def through(x: np.ndarray, links) -> np.ndarray:
    for link in links:
        assert x.shape == (link.geometry.n, link.geometry.h, link.geometry.w, link.geometry.c)
        assert link.filters.dtype == np.float32
        x = convolve_groups(x, link.filters.astype(np.float64), link.geometry)
    return x


def layer(g: ConvGeometry, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    filters = rng.standard_normal((g.oc, g.kh, g.kw, g.c // g.groups)).astype(np.float32)
    return rng.standard_normal((g.n, g.h, g.w, g.c)), filters


@settings(max_examples=examples(120), derandomize=True, deadline=None)
@given(geometries(), st.sampled_from(METHODS))
def test_at_full_rank_it_is_the_layer_up_to_rounding(g, method):
    x, filters = layer(g)
    shape = (g.oc // g.groups, *filters.shape[1:])
    rule = RankRule(kind="ranks", ranks=max_ranks(method, shape))
    decomposition = decompose("a", filters, g, method, rule)
    expected = convolve_groups(x, filters.astype(np.float64), g)
    assert np.abs(through(x, decomposition.links) - expected).max() <= 1e-5 * np.abs(expected).max() + 1e-6
    assert decomposition.relative_error < 1e-6


@settings(max_examples=examples(60), derandomize=True, deadline=None)
@given(geometries(), st.sampled_from(METHODS))
def test_the_error_that_is_reported_is_that_of_the_filters_it_computes(g, method):
    """The chain, fed with an impulse in every input channel of an unstrided layer, shows its filters."""
    _, filters = layer(g)
    decomposition = decompose("a", filters, g, method, RankRule.parse("0.5"))
    plain = replace(g, n=g.c, h=g.kh, w=g.kw, stride=(1, 1), dilation=(1, 1))
    plain = replace(plain, padding=(g.kh - 1, g.kw - 1) * 2)
    unstrided = decompose("a", filters, plain, method, RankRule.parse("0.5"))
    impulses = np.zeros((g.c, g.kh, g.kw, g.c))
    impulses[range(g.c), 0, 0, range(g.c)] = 1
    shown = through(impulses, unstrided.links)[:, : g.kh, : g.kw][:, ::-1, ::-1]
    expected = convolve_groups(impulses, filters.astype(np.float64), plain)[:, : g.kh, : g.kw][:, ::-1, ::-1]
    error = np.linalg.norm(shown - expected) / np.linalg.norm(expected)
    assert decomposition.relative_error == pytest.approx(error, abs=1e-6)


@settings(max_examples=examples(60), derandomize=True, deadline=None)
@given(geometries(), st.sampled_from(METHODS))
def test_roles_names_and_counts(g, method):
    _, filters = layer(g)
    decomposition = decompose("a", filters, g, method, RankRule.parse("0.3"))
    roles = [link.role for link in decomposition.links]
    assert roles[0] == "fconv" and roles[-1] == "lconv" and set(roles[1:-1]) <= {"core"}
    assert set(roles) <= set(ROLES) and len({link.name for link in decomposition.links}) == len(roles)
    assert ("core" in roles) == (g.kh * g.kw > 1) == (decomposition.method == method)
    geometries = [link.geometry for link in decomposition.links]
    assert decomposition.weight_elements == sum(g.oc * g.reduction for g in geometries)
    last = decomposition.links[-1].geometry
    assert (last.n, last.oh, last.ow, last.oc) == (g.n, g.oh, g.ow, g.oc)


def test_depthwise_layers_have_no_channels_to_decompose():
    g = ConvGeometry(n=1, h=4, w=4, c=8, oc=8, kh=3, kw=3, groups=8)
    assert not is_decomposable(g)
    assert is_decomposable(replace(g, groups=4)) and is_decomposable(replace(g, c=1, oc=8, groups=1))


def test_a_zero_filter_has_no_error():
    g = ConvGeometry(n=1, h=4, w=4, c=4, oc=4, kh=3, kw=3)
    chain = decompose("a", np.zeros((4, 3, 3, 4), np.float32), g, "cp", RankRule.parse("0.5"))
    assert chain.relative_error == 0 and all(np.isfinite(link.filters).all() for link in chain.links)


@pytest.mark.parametrize(
    ("method", "ranks", "message"),
    [
        ("tucker", (4, 9), "rank 9 of layer 'a': its ranks are 1 to 8"),
        ("tucker", (5, 8), "rank 5 of layer 'a': its ranks are 1 to 4"),
        ("tucker", (4,), "layer 'a' takes 2 ranks, not 1"),
        ("cp", (37 * 9,), "its ranks are 1 to 36"),
        ("tt", (4, 13, 8), "rank 13 of layer 'a': its ranks are 1 to 12"),
        ("tt", (1, 12, 8), r"ranks \[1, 12, 8\] of layer 'a': together they can be at most \[1, 3, 8\]"),
    ],
)
def test_ranks_that_the_layer_does_not_have(method, ranks, message):
    g = ConvGeometry(n=1, h=4, w=4, c=4, oc=8, kh=3, kw=3)
    with pytest.raises(DecompositionError, match=message):
        check_ranks("a", method, g, RankRule(kind="ranks", ranks=ranks))
