"""Decoders with narrow weights: values, bytes on both devices, and tokens of an independent decoder."""

from dataclasses import replace

import numpy as np
import pytest
from calibration.pim_device import PimDevice
from decoders import SMALL, greedy

import pimflow
from pimflow import zoo
from pimflow.commands.generate.decoding import Lengths, StepRequest
from pimflow.commands.shared.search import SearchRequest
from pimflow.core.kernel import ConvGeometry
from pimflow.core.program import PimProgram
from pimflow.core.split import Split
from pimflow.errors import UsageError
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.layout import memory_image
from pimflow.pim_backend.programs.lowering import ProgramRequest
from pimflow.placement.costs.pim_runs import PimTarget
from pimflow.simulators.pim.coverage import program_coverage
from pimflow.simulators.pim.legality import program_violations_by_rule
from pimflow.simulators.profiler import BuiltIn
from pimflow.weight_types import WEIGHT_TYPES
from pimflow.zoo.language import graph

NARROW = ("newton-gddr6-narrow", "hbm-pim-narrow")
PROMPT = "The statement is"


def test_weights_are_quantised_once_along_their_inputs():
    small = replace(SMALL, feed_forward=64)
    plain, narrow = (zoo.decoder_weights(decoder) for decoder in (small, small.with_weights("q8_0")))
    kind = WEIGHT_TYPES["q8_0"]
    np.testing.assert_array_equal(narrow["layers.0.up.weight"], kind.round(plain["layers.0.up.weight"]))
    np.testing.assert_array_equal(narrow["tokens.table"], kind.round(plain["tokens.table"].T).T)
    np.testing.assert_array_equal(narrow["norm.scale"], plain["norm.scale"])


def test_a_type_whose_blocks_do_not_fit_is_refused():
    with pytest.raises(UsageError, match=r"'tokens\.table' has 192 inputs, no whole blocks of the 256"):
        pimflow.generate("tiny-lm", prompt="a", n=1, weight_type="q4_k")


def test_a_file_keeps_its_types(tmp_path):
    with pytest.raises(UsageError, match="--weight-type q8_0: a file keeps its own types"):
        pimflow.generate(tmp_path / "small.gguf", prompt="a", n=1, weight_type="q8_0")


def greedy_tokens(kind: str, n: int, activations: str = "") -> tuple[int, ...]:
    """Tokens of the decoder in NumPy on weights that are quantised here, not by the zoo."""
    decoder = replace(zoo.decoder("tiny-lm"), activations=activations)
    weights = zoo.decoder_weights(decoder)
    for name, value in weights.items():
        if value.ndim == 2:
            is_table = name.endswith(".table")
            rounded = WEIGHT_TYPES[kind].round(value.T if is_table else value)
            weights[name] = rounded.T if is_table else rounded
    return greedy(decoder, weights, list(PROMPT.encode()), n)


@pytest.mark.parametrize(
    ("pim", "kind"),
    [
        ("newton-gddr6-narrow", "q4_0"),
        pytest.param("newton-gddr6", "q4_0", marks=pytest.mark.long),
        pytest.param("newton-gddr6-narrow", "fp8", marks=pytest.mark.long),
        pytest.param("newton-gddr6-narrow", "int8", marks=pytest.mark.long),
        pytest.param("hbm-pim-narrow", "q8_0", marks=pytest.mark.long),
    ],
)
def test_tokens_are_those_of_numpy_on_the_same_weights(pim, kind):
    system = pimflow.system(pim=pim)
    generation = pimflow.generate("tiny-lm", prompt=PROMPT, n=6, weight_type=kind, system=system)
    assert generation.verified and generation.timing_violations == 0 and generation.regions_on_pim
    assert generation.tokens == greedy_tokens(kind, 6)
    widened = "widened to fp16" in generation.weights_in_pim
    assert widened == (pim not in NARROW) and kind in generation.weights


@pytest.mark.parametrize(
    ("pim", "weights", "activations"),
    [
        ("lpddr5x-pim", "int8", "int8"),
        pytest.param("lpddr5x-pim", "int4", "int8", marks=pytest.mark.long),
        pytest.param("newton-gddr6", "int8", "int8", marks=pytest.mark.long),
    ],
)
def test_tokens_of_integers_are_those_of_numpy(pim, weights, activations):
    """W8A8 and W4A8: products of integers on PIM that takes them; on others, of the same integers in fp16."""
    types = {"weight_type": weights, "activation_type": activations}
    system = pimflow.system(pim=pim)
    generation = pimflow.generate("tiny-lm", prompt=PROMPT, n=3, system=system, **types)
    assert generation.verified and generation.timing_violations == 0 and generation.regions_on_pim
    assert generation.tokens == greedy_tokens(weights, 3, activations)
    assert generation.weights == f"trained, {weights} times {activations}"
    assert ("widened to fp16" in generation.weights_in_pim) == (pim == "newton-gddr6")
    assert 0 < generation.fraction_of_bound <= 1


def test_a_search_of_a_language_model_takes_narrow_weights():
    """As `compile` does; other models are refused."""
    results = {kind: pimflow.search("tiny-lm", context=8, weight_type=kind) for kind in ("fp16", "q4_0")}
    geometries = {kind: [r.geometry for r in result.graph.regions] for kind, result in results.items()}
    products = {kind: {g.weights for g in of_kind if g} for kind, of_kind in geometries.items()}
    assert products == {"fp16": {None}, "q4_0": {"q4_0"}}
    assert results["q4_0"].baseline.latency_ns < results["fp16"].baseline.latency_ns
    with pytest.raises(UsageError, match="only language models of the zoo are quantised"):
        pimflow.search("mobilenet-v2", weight_type="q4_0")


def test_integers_and_scales_are_found_again():
    draw = np.random.default_rng(2)
    for kind in (WEIGHT_TYPES["int4"], WEIGHT_TYPES["int8"]):
        stored = kind.round(draw.normal(size=(96, 7)).astype(np.float32)).T
        stored[3] = 0
        integers, scales = kind.integers(stored)
        geometry = ConvGeometry(n=1, h=1, w=1, c=96, oc=7, weights=kind.name, activations="int8")
        assert "one scale" in Split("reduction", 32).obstacle(geometry)
        assert not Split("channels", 3).obstacle(geometry)
        assert integers.dtype == np.int8 and np.abs(integers).max() == (1 << (kind.bits - 1)) - 1
        np.testing.assert_allclose(integers * scales[:, None], stored, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "types", "says"),
    [
        ("tiny-lm", {"weight_type": "q4_0"}, "weights of q4_0 are no integers with one scale an output"),
        ("tiny-lm", {}, "weights of fp16 are no integers"),
        ("small.gguf", {}, "a file keeps its own types"),
    ],
)
def test_integers_need_weights_of_integers(model, types, says):
    with pytest.raises(UsageError, match=f"--activation-type int8: {says}"):
        pimflow.generate(model, prompt="a", n=1, activation_type="int8", **types)


def head_result(pim: str, kind: str | None):
    """The search result of the output layer of tiny-lm."""
    decoder = zoo.decoder("tiny-lm")
    decoder = decoder.with_weights(kind) if kind else decoder
    request = SearchRequest.from_arguments(pimflow.system(pim=pim)).validate()
    return StepRequest(graph.head_graph(decoder), request, Lengths(attended=1)).place()[2]


def test_both_devices_count_the_bytes_of_a_type():
    results = {(p, k): head_result(p, k) for p in (NARROW[0], "newton-gddr6") for k in (None, "q4_0")}
    for (_, kind), result in results.items():
        head = result.graph.region("head")
        elements = 192 * 256
        expected = elements * 2 if kind is None else elements // 32 * 18
        assert head.geometry.weights == kind and head.geometry.filter_bytes("fp16") == expected
    gpu_only = {kind: results["newton-gddr6", kind].baseline.latency_ns for kind in (None, "q4_0")}
    assert gpu_only["q4_0"] < gpu_only[None]
    assert results[NARROW[0], "q4_0"].baseline.latency_ns == gpu_only["q4_0"]


@pytest.mark.long
@pytest.mark.parametrize("name", NARROW)
def test_programs_of_narrow_weights_are_legal_exact_and_right(name):
    """On each operand: values by execution, all products once, commands by the checker, text of programs."""
    pim = PimSpec.load(name)
    rng = np.random.default_rng(3)
    for operand in pim.operands:
        kind = operand.weight_type
        geometry = ConvGeometry(n=1, h=1, w=1, c=768, oc=70, weights=operand.weights)
        target = PimTarget(pim=pim, channels=3, dtype="fp16", profiler=BuiltIn())
        weights = rng.normal(size=(70, 768)).astype(np.float32)
        if kind.rounding:
            weights = kind.round(weights.T).T
        x = rng.normal(size=(1, 1, 1, 768)).astype(np.float32)
        order = target.rank_schedules(geometry, "layer")[0]
        program = target.program(ProgramRequest("layer", geometry, order))
        assert program.geometry.weights == operand.weights
        assert PimProgram.from_json(program.to_json()) == program and pim.is_target_of(program)
        assert program_coverage(program).exact and not any(program_violations_by_rule(program, pim).values())
        y = PimDevice(program, memory_image(program, weights)).run(x)[0]
        half_x, half_w = (a.astype(np.float16).astype(np.float64) for a in (x.ravel(), weights))
        bound = np.abs(half_w) @ np.abs(half_x) * 768 * 2.0**-24 + np.abs(half_w @ half_x) * 2.0**-10
        assert (np.abs(y - half_w @ half_x) <= bound + 1e-6).all()


def test_a_column_of_narrow_weights_takes_more_bursts_of_the_vector():
    pim = PimSpec.load(NARROW[0])
    target = PimTarget(pim=pim, channels=1, dtype="fp16", profiler=BuiltIn())
    wide = ConvGeometry(n=1, h=1, w=1, c=512, oc=16)
    bursts = {}
    for weights in (None, "q8_0", "q4_0"):
        geometry = replace(wide, weights=weights)
        cost = target.whole_layer_costs(geometry, "layer")[0]
        bursts[weights] = cost.gwrite_bursts
        assert cost.commands["COMP"] == 512 // target.device(geometry).elements_per_column("fp16")
    assert bursts == {None: 32, "q8_0": 32, "q4_0": 32}  # 512 elements of fp16 over the bus
