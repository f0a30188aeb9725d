"""Steps over the tokens so far: is each what the whole sequence gives, over caches that stay in place?"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from decoders import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but
from onnx import numpy_helper
from small_system import small

from pimflow import zoo
from pimflow.api import rungs
from pimflow.api.decoding import Runner, verified_inputs
from pimflow.api.generate import generate
from pimflow.api.generation import Charged, Times, smallest
from pimflow.api.language import open_language_model
from pimflow.api.rungs import Rungs, extents
from pimflow.api.search import Question
from pimflow.zoo.language import graph
from pimflow.zoo.language.reference import ReferenceDecoder

ROUNDING = 2e-3  # of what PIM stores in fp16


@given(st.integers(1, 1 << 20), st.data())
def test_extents_hold_every_length_and_are_not_much_longer(context, data):
    found = extents(context)
    assert found == sorted({*found}) and found[-1] == context
    tokens = data.draw(st.integers(1, context))
    extent = smallest(found, tokens)
    assert tokens <= extent <= max(2 * tokens, rungs.LEAST) / rungs.MOST_SHARE
    assert len(found) <= 1 + max(0, (context // rungs.LEAST).bit_length())


def costs(**ns: int) -> SimpleNamespace:
    return SimpleNamespace(
        evaluation=SimpleNamespace(latency_ns=ns["plan"]), baseline=SimpleNamespace(latency_ns=ns["gpu"])
    )


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({"plan": 0, "gpu": 0}, [1024]),
        ({"plan": 1, "gpu": 0}, [128, 1024]),
        ({"plan": 0, "gpu": 1}, [128, 1024]),
        ({"plan": 10, "gpu": 0}, [128, 256, 512, 1024]),
    ],
)
def test_extents_that_save_nothing_are_left_out(saved, expected, monkeypatch):
    """Of the plan's time or of the GPU's alone: `saved` is what halving the tokens does, in thousandths."""
    made = Rungs(lambda _: None, None, 1024, 1)
    halvings = {1024: 0, 512: 4, 256: 8, 128: 12}
    monkeypatch.setattr(
        made,
        "searched",
        lambda extent: costs(
            **{name: 1000 - halvings[extent] * each for name, each in saved.items()},
        ),
    )
    assert made.for_steps(range(1, 1025)) == expected
    assert made.for_steps([1000]) == [1024]


def test_what_was_asked_for_is_charged_by_its_extents():
    """The mean of steps of unlike length, and the last extent whether or not it is reached."""
    times = {extent: Times(ns=extent, ns_gpu_only=2 * extent, pj=8.0, pj_gpu_only=16.0) for extent in (4, 8)}
    charged = Charged(times=times, bounds_ns={4: 1.0, 8: 4.0}, batch=2, further=[3, 4, 5])
    assert [(rung.tokens, rung.steps) for rung in charged.rungs] == [(4, 2), (8, 1)]
    assert charged.mean.tpot_ns == pytest.approx(16 / 3) and charged.mean.tpot_ns_gpu_only == pytest.approx(
        32 / 3
    )
    assert charged.mean.fraction_of_bound == pytest.approx(6 / 16)
    assert charged.mean.energy_per_token_pj == 4 and charged.mean.energy_per_token_pj_gpu_only == 8
    early = Charged(times=times, bounds_ns={4: 1.0, 8: 4.0}, batch=1, further=[2])
    assert [rung.tokens for rung in early.rungs] == [4] and early.mean.tpot_ns == 4
    assert (early.full_cache.tokens, early.full_cache.steps, early.full_cache.tpot_ns) == (8, 0, 8)
    assert early.together([1, 4, 5]).ns == 16


def weights_of(decoder) -> dict[str, np.ndarray]:
    model = zoo.load_model(graph.step_graph(decoder, 4))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def step_of(context: int, tokens: int, batch: int):
    return zoo.load_model(graph.step_graph(SMALL, context, tokens=tokens, batch=batch))


DEVICES = {"newton": ("newton-gddr6", None), "aim": ("aim-gddr6", None), "GPU": ("newton-gddr6", "gpu")}


@functools.cache
def rungs_of(device: str, modes: str | None, context: int) -> Rungs:
    """One for all examples: what a step's plan is does not depend on them."""
    question = Question.of(small(device), **({} if modes is None else {"modes": modes})).checked()
    return Rungs(lambda extent: step_of(extent, 1, 1), question, context, 1)


@pytest.mark.parametrize("system_and_modes", long_but(["newton"], DEVICES))
@settings(max_examples=examples(6), deadline=None)
@given(st.sets(st.integers(2, 22), min_size=1, max_size=3), st.integers(0, 99))
def test_decoding_over_extents_is_prefill_of_the_whole_sequence(system_and_modes, shorter, seed):
    """Any extents, and the first step of each verified; caches lie where they lay, byte by byte."""
    device, modes = system_and_modes
    context, kept = 24, [*sorted(shorter), 24]
    made = rungs_of(device, modes, context)
    ids = np.random.default_rng(seed).integers(SMALL.vocabulary, size=(1, context))
    expected = ReferenceDecoder(SMALL, weights_of(SMALL)).step(ids[0])
    runner, extent, caches, bound, lying = None, 0, {}, {}, set()
    for place in range(context):
        held = np.array([place])
        if smallest(kept, place + 1) != extent:
            extent = smallest(kept, place + 1)
            if runner is not None:
                caches, bound = runner.caches(), runner.bound()

            def inputs(network, place=place, held=held, caches=caches):
                return verified_inputs(network, ids[:, place : place + 1], held, caches)

            step = made.compiled(extent, inputs, lambda _: None)
            runner = Runner(step, caches, bound)
            lying.add(str(step.built.states.to_table()))
            assert step.verification.timing_violations == 0
            for name, tensor in bound.items():
                assert runner.bound()[name].same_as(tensor)
        logits = runner(ids[:, place : place + 1], held)[0, 0]
        np.testing.assert_allclose(logits, expected[place], rtol=0, atol=ROUNDING * abs(expected).max())
    assert len(lying) == 1 and (lying == {"{}"}) == (modes == "gpu")
    assert all((cache[:, :, :context].any(axis=(0, 1, 3))).all() for cache in runner.caches().values())


@pytest.mark.parametrize("by_token", long_but([True], [True, False]))
def test_a_text_goes_over_several_extents(by_token, monkeypatch):
    """Requests of any lengths; each step is charged what its tokens take."""
    monkeypatch.setattr(rungs, "LEAST", 4)
    monkeypatch.setattr(rungs, "PAYS", -1)
    weights = weights_of(SMALL)
    prompts = [[3, 4, 5], [7]]
    model = zoo.load_model(graph.step_graph(SMALL, 16))
    language = replace(open_language_model(model), step=step_of, by_token=by_token, fixed_context=None)
    monkeypatch.setattr("pimflow.api.generate.open_language_model", lambda _: language)
    said: list[str] = []
    found = generate("small", tokens=prompts, n=7, context=16, modes="gpu", progress=said.append)
    for request, prompt in zip(found.requests, prompts):
        tokens = list(prompt)
        for _ in range(7):
            tokens.append(int(ReferenceDecoder(SMALL, weights).step(np.array(tokens))[-1].argmax()))
        assert list(request.tokens) == tokens[len(prompt) :]
    assert [each.split(",")[1] for each in said if "token's step" in each] == [
        f" {extent} tokens long" for extent in (4, 8, 16)
    ]
    assert [(rung.tokens, rung.steps) for rung in found.rungs] == [(4, 1), (8, 4), (16, 1)]
    assert found.tpot_ns == pytest.approx(sum(r.tpot_ns * r.steps for r in found.rungs) / 6)
    assert found.rungs[0].tpot_ns < found.full_cache.tpot_ns == found.rungs[-1].tpot_ns
    if by_token:
        assert found.ttft_ns == pytest.approx(3 * found.rungs[0].tpot_ns)
