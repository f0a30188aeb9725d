"""Does the reference of attention give what its definition says, element by element?"""

import math
from dataclasses import replace

import numpy as np
from attention_values import attend
from hypothesis import given
from hypothesis import strategies as st

from pimflow.core.attention import Attention


@st.composite
def attentions(draw, **fixed):
    sizes = st.integers(1, 4)
    kv_heads, queries, keys = draw(st.integers(1, 3)), draw(sizes), fixed.get("keys", draw(st.integers(1, 7)))
    fields = {
        "batch": draw(st.integers(1, 2)),
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "head_size": draw(sizes),
        "value_size": draw(sizes),
        "queries": queries,
        "keys": keys,
        "read": draw(st.integers(0, keys - 1)),
        "scale": draw(st.sampled_from([1.0, 0.25, 0.7])),
        "causal": draw(st.booleans()),
        "offset": draw(st.integers(-2, 5)),
        "window": draw(st.sampled_from([0, 0, 1, 3])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 2.0])),
        "masked": draw(st.booleans()),
        "sinks": draw(st.booleans()),
    }
    return Attention(**fields | fixed)


def operands(attention, seed=0):
    """Q, K, V, then a mask or None, no position, and sinks or None."""
    rng = np.random.default_rng(seed)
    shapes = (attention.query_shape, attention.key_shape, attention.value_shape)
    mask = np.where(rng.random(attention.score_shape) < 0.3, -np.inf, rng.normal(size=attention.score_shape))
    sinks = rng.normal(size=(1, attention.heads, 1, 1)) if attention.sinks else None
    return [*(rng.normal(size=shape) for shape in shapes), mask if attention.masked else None, None, sinks]


def reference_attention(attention, q, k, v, mask, _, sinks):
    """The same with plain loops."""
    out = np.zeros(attention.output_shape)
    for b, h, i in np.ndindex(attention.batch, attention.heads, attention.queries):
        shared, position, weights = h * attention.kv_heads // attention.heads, attention.offset + i, {}
        for j in range(attention.extent):
            if (attention.causal and j > position) or (attention.window and j <= position - attention.window):
                continue
            score = attention.scale * sum(a * b for a, b in zip(q[b, h, i], k[b, shared, j]))
            if attention.softcap:
                score = attention.softcap * math.tanh(score / attention.softcap)
            weights[j] = math.exp(score + (0.0 if mask is None else mask[b, h, i, j]))
        total = sum(weights.values()) + (0.0 if sinks is None else math.exp(sinks[0, h, 0, 0]))
        for j, weight in weights.items():
            out[b, h, i] += weight / total * v[b, shared, j] if total else 0.0
    return out


@given(attentions(), st.integers(0, 99))
def test_the_reference_is_the_definition(attention, seed):
    values = operands(attention, seed)
    expected = reference_attention(attention, *values)
    np.testing.assert_allclose(attend(attention, *values), expected, atol=1e-12)


@given(attentions(causal=True, masked=False, sinks=False, read=0), st.integers(0, 99))
def test_a_step_with_the_cache_gives_a_row_of_the_whole_sequence(attention, seed):
    attention = replace(attention, queries=attention.keys, offset=0)
    q, k, v, *_ = operands(attention, seed)
    sequence = attend(attention, q, k, v)
    for length in range(1, attention.keys + 1):
        step = replace(attention, queries=1, keys=length, offset=length - 1)
        row = attend(step, q[:, :, length - 1 : length], k[:, :, :length], v[:, :, :length])
        np.testing.assert_allclose(row, sequence[:, :, length - 1 : length], atol=1e-12)


@given(attentions(masked=False, sinks=False, queries=2, keys=8), st.integers(0, 5), st.booleans())
def test_places_that_hold_nothing_yet_do_not_matter(attention, first, causal):
    """Whether or not they are read."""
    read = attention.read if attention.read >= first + 2 else 0
    positioned = replace(attention, positioned=True, causal=causal, read=read)
    fixed = replace(attention, causal=causal, keys=first + 2, offset=first, read=0)
    q, k, v, *_ = operands(positioned)
    position = np.full(attention.batch, first)
    expected = attend(fixed, q, k[:, :, : first + 2], v[:, :, : first + 2])
    k[:, :, first + 2 :], v[:, :, first + 2 :] = 1e6, -1e6
    np.testing.assert_allclose(attend(positioned, q, k, v, position=position), expected, atol=1e-12)


@given(attentions())
def test_it_survives_json(attention):
    assert Attention.from_json(attention.to_json()) == attention
    assert attention.macs == math.prod(attention.score_shape) * (attention.head_size + attention.value_size)
