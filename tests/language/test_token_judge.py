"""What the judge of tokens lets pass, and what it does not."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pimflow.api.token_judge import Judge
from pimflow.errors import VerificationError

LOGITS = np.array([1.0, 10.0, -4.0, 9.0])


def judge_of(deviation: float, dtype: str = "fp16") -> tuple[Judge, SimpleNamespace]:
    """A judge whose reference says `LOGITS` after every token; roundings move the second by so much."""
    asked = SimpleNamespace(layers=None, tokens=None)

    def rounded(layers, tokens):
        asked.layers, asked.tokens = layers, list(tokens)
        for sign in (1, -0.5):
            yield LOGITS + sign * deviation * np.eye(4)[1]

    reference = SimpleNamespace(step=lambda tokens: np.tile(LOGITS, (len(tokens), 1)))
    return Judge(SimpleNamespace(reference=lambda: reference, rounded=rounded), dtype), asked


def step_with(*layers: str) -> SimpleNamespace:
    return SimpleNamespace(layers_on_pim=frozenset(layers))


def off_by(error: float) -> np.ndarray:
    """Logits of two sequences, of which the second is off."""
    return np.stack([LOGITS, LOGITS + error * np.eye(4)[2]])


@pytest.mark.parametrize(("dtype", "bound"), [("fp16", 2e-3), ("fp32", 1e-5)])
def test_within_the_bound_of_the_type_nothing_is_rounded(dtype, bound):
    judge, asked = judge_of(1.0, dtype)
    assert judge.token(np.array([5]), off_by(0.9 * bound * 10), step_with("a"), told=True) == 1
    assert (judge.bound, judge.sure, asked.tokens) == (bound, 1, None)
    assert judge.worst == pytest.approx(0.9 * bound)


def test_beyond_it_twice_what_roundings_do_is_the_bound():
    """Of the whole sequence, and of the layers that any of its steps had on PIM."""
    judge, asked = judge_of(0.03)
    judge.token(np.array([5, 6]), off_by(0.0), step_with("a"), told=False)
    assert judge.token(np.array([7]), off_by(0.05), step_with("b"), told=True) == 1
    assert judge.bound == pytest.approx(2 * 0.03 / 10) and judge.worst == pytest.approx(0.05 / 10)
    assert asked.layers == {"a", "b"} and asked.tokens == [5, 6, 7]
    assert judge.sure == 1  # the prompt's do not count; a lead of 1 is more than 2 * 6e-3 * 10


@pytest.mark.parametrize(
    ("deviation", "logits"),
    [(0.02, off_by(0.05)), (100.0, off_by(1.1)), (100.0, off_by(np.nan)), (0.0, off_by(0.021))],
)
def test_what_roundings_do_not_explain_is_refused(deviation, logits):
    judge, _ = judge_of(deviation)
    with pytest.raises(VerificationError, match="not those of the model"):
        judge.token(np.array([5]), logits, step_with("a"), told=True)


def test_a_token_whose_lead_is_within_the_error_is_not_sure():
    judge, _ = judge_of(1.0)
    assert judge.token(np.array([5]), off_by(0.5), step_with("a"), told=True) == 1
    assert judge.bound == pytest.approx(0.1) and judge.sure == 0
