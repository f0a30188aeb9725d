"""What the judge of tokens lets pass, and what it does not."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from pimflow.commands.generate.language import open_language_model
from pimflow.commands.generate.requests import Continuation, GenerationRequest
from pimflow.commands.generate.token_judge import TokenVerifier
from pimflow.errors import VerificationError
from pimflow.zoo.language.tokens import TokenText

LOGITS = np.array([1.0, 10.0, -4.0, 9.0])


def judge_of(deviation: float, dtype: str = "fp16") -> tuple[TokenVerifier, SimpleNamespace]:
    """A judge whose reference says `LOGITS` after every token; roundings move the last one's so much."""
    request = SimpleNamespace(layers=None, tokens=None)

    def logits_with_rounding(layers, tokens):
        request.layers, request.tokens = layers, list(tokens)
        for sign in (1, -0.5):
            logits = np.tile(LOGITS, (len(tokens), 1))
            logits[-1, 1] += sign * deviation
            yield logits

    reference = SimpleNamespace(step=lambda tokens: np.tile(LOGITS, (len(tokens), 1)))
    language = SimpleNamespace(
        reference=lambda: reference, perturbed_logits=logits_with_rounding, error_hint="; or"
    )
    return TokenVerifier(language, dtype), request


def off_by(error: float) -> np.ndarray:
    """Logits of two sequences, of which the second is off."""
    return np.stack([LOGITS, LOGITS + error * np.eye(4)[2]])


def judge_after(judge: TokenVerifier, *steps: tuple[list[int], float, str, bool]) -> TokenVerifier:
    """After steps: tokens, error, what is on PIM, and whether a new token follows."""
    for tokens, error, layer, told in steps:
        judge.compare(tokens, off_by(error), frozenset({layer}), is_new=told)
    judge.verify()
    return judge


@pytest.mark.parametrize(("dtype", "bound"), [("fp16", 2e-3), ("fp32", 1e-5)])
def test_within_the_bound_of_the_type_nothing_is_rounded(dtype, bound):
    judge, asked = judge_of(1.0, dtype)
    judge_after(judge, ([5], 0.9 * bound * 10, "a", True))
    assert (judge.bound, judge.certain_tokens, asked.tokens) == (bound, 1, None)
    assert judge.max_error == pytest.approx(0.9 * bound)


def test_beyond_it_twice_what_roundings_do_is_the_bound():
    """Of the whole sequence, once, and of the layers that any of its steps had on PIM."""
    judge, asked = judge_of(0.03)
    judge_after(judge, ([5, 6], 0.0, "a", False), ([7], 0.05, "b", True))
    assert judge.bound == pytest.approx(2 * 0.03 / 10) and judge.max_error == pytest.approx(0.05 / 10)
    assert asked.layers == {"a", "b"} and asked.tokens == [5, 6, 7]
    assert judge.certain_tokens == 1  # the prompt's do not count; a lead of 1 is more than 2 * 6e-3 * 10


def test_what_roundings_do_later_is_no_excuse():
    judge, _ = judge_of(0.03)
    with pytest.raises(VerificationError, match=r"not those of the model; or$"):
        judge_after(judge, ([5], 0.05, "a", True), ([6], 0.0, "a", True))


@pytest.mark.parametrize(("deviation", "error"), [(0.02, 0.05), (100.0, 1.1), (100.0, np.nan), (0.0, 0.021)])
def test_what_roundings_do_not_explain_is_refused(deviation, error):
    judge, _ = judge_of(deviation)
    with pytest.raises(VerificationError, match="not those of the model"):
        judge_after(judge, ([5], error, "a", True))


def test_a_token_whose_lead_is_within_the_error_is_not_sure():
    judge, _ = judge_of(1.0)
    judge_after(judge, ([5], 0.5, "a", True))
    assert judge.bound == pytest.approx(0.1) and judge.certain_tokens == 0


def test_logits_of_zeros_are_right_where_the_reference_has_them():
    reference = SimpleNamespace(step=lambda tokens: np.zeros((len(tokens), 4)))
    judge = TokenVerifier(SimpleNamespace(reference=lambda: reference, perturbed_logits=None), "fp16")
    judge.compare([5], np.zeros((1, 4)), frozenset(), is_new=True)
    judge.verify()
    assert (judge.max_error, judge.certain_tokens) == (0, 0)


def test_what_is_no_character_yet_is_told_when_a_text_ends():
    """By its number of tokens or by the one that ends it, which is token 1 here."""
    for n, logits, ended in ((1, [[1, 0]], 1), (3, [[1, 0], [0, 1]], 2)):
        told = []
        tokenizer = SimpleNamespace(decoder=lambda: TokenText([b"\xc3", b""]))
        language = SimpleNamespace(tokenizer=tokenizer, ends=frozenset({1}))
        request = GenerationRequest(language, [0], "fp16", Continuation(n), told.append)
        for step_logits in logits:
            network = SimpleNamespace(layers_on_pim=frozenset())
            request.record_step(request.pending_tokens[:], np.array([step_logits]), network)
        assert request.is_done and len(told) == ended and "".join(told) == "\N{REPLACEMENT CHARACTER}"


def test_references_share_their_weights_and_give_them_back():
    """They take as much memory as a build: nobody holds them once the last request is done."""
    language = open_language_model("tiny-lm")
    first, second = language.reference(), language.reference()
    assert all(second.weights[name] is value for name, value in first.weights.items())
    judge, gone = TokenVerifier(language, "fp16"), weakref.ref(first.weights["norm.scale"])
    judge.compare([5], first.step(np.array([5])), frozenset(), is_new=True)
    del first, second
    assert gone() is not None
    judge.release_reference()
    assert gone() is None
    judge.verify()
    assert judge.max_error == 0
