"""One step for every length: is it what the whole sequence gives, and charged as one of just that length?"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from decoders import SMALL, greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but
from onnx import numpy_helper
from scipy.optimize import linprog
from small_system import small

from pimflow import zoo
from pimflow.commands.generate import generation
from pimflow.commands.generate.decode_step import DecodeStep
from pimflow.commands.generate.decoding import CompiledStep, StepRunner, verification_inputs
from pimflow.commands.generate.generate import generate
from pimflow.commands.generate.generation import DecodeCostModel, StepCosts, length_weights
from pimflow.commands.generate.language import open_language_model
from pimflow.commands.generate.step_bound import ReadTimes, shared_bound_ns
from pimflow.commands.shared.search import SearchRequest
from pimflow.core.graph_by_length import GraphByLength
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.zoo.language import graph
from pimflow.zoo.language.reference import ReferenceDecoder

ROUNDING = 2e-3  # of what PIM stores in fp16


@given(st.lists(st.integers(1, 500), min_size=1), st.integers(2, 40))
def test_the_lengths_that_are_timed_stand_for_all(tokens, max_lengths):
    """Of a straight line, the mean is that of all lengths; few lengths stand for themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "MAX_TIMED_LENGTHS", max_lengths)
        counts = length_weights(tokens)
    assert list(counts) == sorted(counts) and counts.keys() <= set(tokens) and len(counts) <= max_lengths
    assert {min(tokens), max(tokens)} <= counts.keys()
    assert sum(counts.values()) == pytest.approx(len(tokens))
    assert sum(length * count for length, count in counts.items()) == pytest.approx(sum(tokens))
    if len(set(tokens)) <= max_lengths:
        assert counts == pytest.approx({length: tokens.count(length) for length in tokens})


def test_what_was_asked_for_is_charged_by_its_lengths():
    """The mean of steps of unlike length, and a full cache whether or not it is reached."""

    def times(tokens: int) -> StepCosts:
        return StepCosts(ns=tokens, ns_gpu_only=2 * tokens, pj=8.0, pj_gpu_only=16.0)

    charged = DecodeCostModel(
        step_costs=times, bound_ns=lambda n: n / 4, published=None, context=8, batch=2, step_lengths=[3, 4, 5]
    )
    assert [step.tokens for step in charged.lengths] == [3, 4, 5]
    assert charged.mean.tpot_ns == pytest.approx(4) and charged.mean.tpot_ns_gpu_only == pytest.approx(8)
    assert charged.mean.fraction_of_bound == pytest.approx(1 / 4)
    assert charged.mean.energy_per_token_pj == 4 and charged.mean.energy_per_token_pj_gpu_only == 8
    full = charged.full_step(8)
    assert (full.tokens, full.tpot_ns) == (8, 8)
    assert charged.total([1, 4, 5]).ns == pytest.approx(10)


def test_sizes_that_are_no_line_are_said_to_be_none():
    def regions(*shape: int) -> RegionGraph:
        shapes = {"input_shapes": (shape,), "output_shape": shape}
        region = Region(name="r", operator="add", operators=("add",), inputs=("%x",), **shapes)
        return RegionGraph(name="g", regions=(region,), outputs=("r",))

    by_length = GraphByLength(places=9, longer=(9, regions(1, 18)), shorter=(4, regions(1, 8)))
    assert by_length.graph_of_length(5) == regions(1, 10)
    for odd in (regions(1, 9), regions(8)):
        with pytest.raises(ValueError, match="over more tokens"):
            GraphByLength(places=9, longer=(9, regions(1, 18)), shorter=(4, odd)).graph_of_length(5)


def weights_of(decoder) -> dict[str, np.ndarray]:
    model = zoo.load_model(graph.step_graph(decoder, 4))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def step_of(attended: int, tokens: int, batch: int):
    return zoo.load_model(graph.step_graph(SMALL, attended, tokens=tokens, batch=batch))


DEVICES = {"newton": ("newton-gddr6", None), "aim": ("aim-gddr6", None), "GPU": ("newton-gddr6", "gpu")}


@functools.cache
def decode_of(device: str, modes: str | None, context: int) -> DecodeStep:
    """One for all examples: what a step's plan is does not depend on them."""
    options = {} if modes is None else {"modes": modes}
    question = SearchRequest.from_arguments(small(device), **options).validate()
    return DecodeStep(lambda attended: step_of(attended, 1, 1), question, context, 1)


@functools.cache
def compile_step(device: str, modes: str | None, context: int) -> CompiledStep:
    tokens, past_lengths = np.full((1, 1), 7), np.array([0])
    return decode_of(device, modes, context).compile(
        lambda network: verification_inputs(network, tokens, past_lengths, {}), lambda _: None
    )


CONTEXT = 70


@pytest.mark.parametrize("system_and_modes", long_but(["newton"], DEVICES))
@settings(max_examples=examples(12), deadline=None)
@given(st.integers(2, CONTEXT))
def test_a_length_is_charged_what_a_step_of_just_that_length_is(system_and_modes, tokens):
    """Sizes, times and energies, of the plan and of the GPU alone, are those of a graph of that length."""
    decode = decode_of(*system_and_modes, CONTEXT)
    request = decode.request(tokens)
    regions = request.regions()
    assert decode.regions(tokens) == regions and decode.regions(tokens).digest == regions.digest
    plan = replace(decode.search_result.plan, model=regions.digest)
    planned = replace(request, search_request=request.search_request.with_changes(plan=plan))
    _, _, exact = planned.place()
    charges = decode.charges(tokens)
    for actual, expected in ((charges.evaluation, exact.evaluation), (charges.baseline, exact.baseline)):
        assert actual.latency_ns == expected.latency_ns and actual.energy_pj == expected.energy_pj


@pytest.mark.long
def test_few_tokens_are_charged_less_than_many():
    for device, modes in (DEVICES["newton"], DEVICES["GPU"]):
        decode = decode_of(device, modes, CONTEXT)
        few, many = (StepCosts.from_search(decode.charges(tokens)) for tokens in (3, CONTEXT))
        assert few.ns < many.ns and few.ns_gpu_only < many.ns_gpu_only and few.pj < many.pj


@pytest.mark.long
@pytest.mark.parametrize("system_and_modes", long_but(["newton"], DEVICES))
@settings(max_examples=examples(6), deadline=None)
@given(st.integers(0, 99))
def test_decoding_with_one_step_is_prefill_of_the_whole_sequence(system_and_modes, seed):
    """At every length, over rows, chunks and channels; caches lie where they lay, byte by byte."""
    device, modes = system_and_modes
    step = compile_step(device, modes, CONTEXT)
    assert step.verification.timing_violations == 0
    assert bool(step.search_result.attention()) == (modes != "gpu")
    ids = np.random.default_rng(seed).integers(SMALL.vocabulary, size=(1, CONTEXT))
    expected = ReferenceDecoder(SMALL, weights_of(SMALL)).step(ids[0])
    runner = StepRunner(step)
    lying = {name: runner._executor["get_input"](name) for name in (state.name for state in step.states)}
    for place in range(CONTEXT):
        logits = runner(ids[:, place : place + 1], np.array([place]))[0, 0]
        np.testing.assert_allclose(logits, expected[place], rtol=0, atol=ROUNDING * abs(expected).max())
    for name, tensor in lying.items():
        assert runner._executor["get_input"](name).same_as(tensor)


@pytest.mark.long
@pytest.mark.parametrize("by_token", long_but([True], [True, False]))
def test_a_text_is_charged_the_tokens_that_there_are(by_token, monkeypatch):
    """Requests of any lengths; the step is compiled once."""
    weights_ = weights_of(SMALL)
    prompts = [[3, 4, 5], [7]]
    model = zoo.load_model(graph.step_graph(SMALL, 16))
    language = replace(open_language_model(model), step=step_of, by_token=by_token, fixed_context=None)
    monkeypatch.setattr("pimflow.commands.generate.generate.open_language_model", lambda *_: language)
    said: list[str] = []
    result = generate("small", tokens=prompts, n=7, context=16, modes="gpu", progress=said.append)
    for request, prompt in zip(result.requests, prompts):
        assert request.tokens == greedy(SMALL, weights_, prompt, 7)
    assert said.count("compiling the step of a token") == 1
    assert [step.tokens for step in result.lengths] == list(range(4, 10))
    assert result.tpot_ns == pytest.approx(sum(step.tpot_ns for step in result.lengths) / 6)
    assert result.lengths[0].tpot_ns < result.full_cache.tpot_ns and result.full_cache.tokens == 16
    if by_token:
        assert result.ttft_ns == pytest.approx(3 * result.lengths[0].tpot_ns, rel=1e-3)


@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), max_size=5), st.sampled_from([0.25, 0.5, 1])
)
def test_no_division_of_products_between_two_devices_is_below_the_bound(times, pim_share):
    """SciPy's linear program: the share of each part that PIM does, and the time of the slower device.

    While PIM computes in its share of the channels, the GPU does not read with them.
    """
    parts = [ReadTimes(pim_ns=pim_ns, gpu_ns=gpu_ns) for pim_ns, gpu_ns in times]
    pim = [*(part.pim_ns for part in parts), -1.0]
    gpu = [*(pim_share * part.pim_ns - part.gpu_ns for part in parts), -1.0]
    limits = [0.0, -sum(part.gpu_ns for part in parts)]
    bounds = [*[(0, 1)] * len(parts), (0, None)]
    least = linprog([*[0.0] * len(parts), 1.0], A_ub=[pim, gpu], b_ub=limits, bounds=bounds)
    assert shared_bound_ns(parts, pim_share) == pytest.approx(least.fun, abs=1e-9)
