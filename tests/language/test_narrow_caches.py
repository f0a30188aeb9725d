"""Caches of 8 and 4 bits: integers exactly, products by value, and tokens of NumPy on the same cache."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from calibration.pim_device import PimDevice, empty_image
from decoders import SMALL, greedy
from length import long_but
from onnx import numpy_helper

import pimflow
from pimflow import frontend, zoo
from pimflow.commands.generate.decode_step import DecodeStep
from pimflow.commands.generate.decoding import CompiledStep, StepRunner, verification_inputs
from pimflow.commands.shared.search import SearchRequest
from pimflow.compiler import build
from pimflow.core.attention import Attention
from pimflow.errors import InfeasibleError, UsageError
from pimflow.hardware import PimSpec, System
from pimflow.pim_backend.programs import attention as programs
from pimflow.pim_backend.programs.cache_appends import append_keys, append_values
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout
from pimflow.pim_backend.programs.cache_schedule import ProductSchedule
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.relay_passes.regions.kernel_groups import kernel_groups
from pimflow.simulators.pim.coverage import product_coverage
from pimflow.simulators.pim.legality import program_violations_by_rule
from pimflow.simulators.pim.store_coverage import store_coverage
from pimflow.zoo import weights
from pimflow.zoo.language import graph
from pimflow.zoo.language.decoder_parts import LatentAttention
from pimflow.zoo.language.reference import ReferenceDecoder

CONTEXT = 24
LARGEST = {"int8": 127, "int4": 7}
TYPES = tuple(LARGEST)
ROUNDING = 2e-3  # of what PIM stores in fp16


def small_system(name: str) -> System:
    """Few channels of four banks with short rows, so that a cache of tens of tokens takes several.

    All channels of the phone have PIM.
    """
    base = pimflow.system("phone") if name == "phone" else pimflow.system(pim=name)
    spec = base.pim
    whole = spec.comp_starts_at_row  # then a buffer holds a row
    operands = tuple(replace(o, buffer_elements=8 * o.multiplications if whole else 0) for o in spec.operands)
    pim = replace(
        spec,
        name="small",
        banks_per_gang=4 // spec.gangs,
        columns_per_row=8,
        buffer_columns=8 if whole else 4,
        operands=operands,
    )
    return replace(base, pim=pim, pim_channels=base.pim_channels if name == "phone" else 2)


def cache_layouts(name: str, cache_type: str) -> tuple[KeyLayout, ValueLayout]:
    attention = Attention(
        batch=1, heads=4, kv_heads=2, head_size=96, value_size=40, queries=1, keys=150, scale=1.0,
        cache_type=cache_type or None,
    )  # fmt: skip
    schedule = ProductSchedule(order="vector", spread=2)
    pim = small_system(name).pim
    return tuple(schedule.layout(kind, attention, pim, "fp16", 2) for kind in (KeyLayout, ValueLayout))


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("name", ["lpddr5x-pim", "newton-gddr6-narrow", "hbm-pim-narrow"])
def test_products_with_integers_are_exact(name, cache_type):
    """Appended integers times few whole numbers: no sum is rounded, and every command is legal."""
    draw, largest = np.random.default_rng(3), LARGEST[cache_type]
    pim = small_system(name).pim
    for layout in cache_layouts(name, cache_type):
        a, is_keys = layout.attention, isinstance(layout, KeyLayout)
        size = a.head_size if is_keys else a.value_size
        cache = draw.integers(-largest, largest + 1, (a.keys, layout.matrices, size)).astype(np.float32)
        image = empty_image(layout)
        append = (append_keys if is_keys else append_values)(layout, 0, a.keys)
        product = programs.scores(layout, a.keys) if is_keys else programs.mix(layout, a.keys)
        for program in (append, *product.programs):
            assert program.geometry.weights == f"plain_{cache_type}" and pim.is_target_of(program)
            assert not any(program_violations_by_rule(program, pim).values())
        assert store_coverage(append).exact and all(product_coverage(p).exact for p in product.programs)
        PimDevice(append, image).run(cache.reshape(-1, 1, 1, size))
        x = draw.integers(-1, 2, (1, a.heads, a.head_size if is_keys else a.keys)).astype(np.float32)
        x[..., 16:-1] = 0  # sums below 2048, which fp16 has exactly
        steps = zip(product.programs, product.operands(x), strict=True)
        y = product.result([PimDevice(program, image).run(operand) for program, operand in steps])
        matrices = cache.transpose(1, 0, 2).repeat(a.group, axis=0)
        expected = np.einsum("hk,htk->ht" if is_keys else "ht,htk->hk", x[0], matrices)
        np.testing.assert_array_equal(y[0], expected)


def test_narrow_caches_take_fewer_rows_and_commands():
    for name in ("lpddr5x-pim", "newton-gddr6-narrow"):
        rows, comps = {}, {}
        for cache_type in ("", *TYPES):
            layouts = cache_layouts(name, cache_type)
            rows[cache_type] = sum(layout.rows for layout in layouts)
            comps[cache_type] = [layout.elements for layout in layouts]
        assert rows["int4"] < rows["int8"] < rows[""]
        assert comps == {"": [16, 16], "int8": [32, 32], "int4": [64, 64]}


def test_a_device_without_integers_widens_them():
    narrow, wide = cache_layouts("newton-gddr6", "int4"), cache_layouts("newton-gddr6", "")
    assert [layout.rows for layout in narrow] == [layout.rows for layout in wide]
    assert narrow[0].pim.weights == ""


class CacheReader(ReferenceDecoder):
    """The decoder in NumPy, whose attention reads given caches in place of its own."""

    caches: dict[str, np.ndarray] = {}

    def _append(self, layer, key, value):
        appended = super()._append(layer, key, value)
        name, length = f"past_key_values.{layer}.", appended[0].shape[1]
        return tuple(
            (self.caches[name + part][0] * self.caches[f"{name}{part}_scale"][0])[:, :length]
            for part in ("key", "value")
        )


@functools.cache
def compiled_step(name: str, modes: str | None, cache_type: str) -> CompiledStep:
    decoder = SMALL.with_cache(cache_type)
    request = SearchRequest.from_arguments(small_system(name), **({"modes": modes} if modes else {}))
    step = DecodeStep(
        lambda attended: zoo.load_model(graph.step_graph(decoder, attended)), request.validate(), CONTEXT, 1
    )
    tokens, past_lengths = np.full((1, 1), 7), np.array([0])
    return step.compile(lambda net: verification_inputs(net, tokens, past_lengths, {}), lambda _: None)


DEVICES = (("lpddr5x-pim", None), ("phone", None), ("newton-gddr6", None), ("lpddr5x-pim", "gpu"))
CASES = [(name, modes, cache_type) for cache_type in TYPES for name, modes in DEVICES]


@pytest.mark.parametrize("case", long_but(CASES[:1], CASES))
def test_steps_are_those_of_numpy_on_the_same_cache(case):
    """At every length: caches are integers with scales, and logits those of attention over just these."""
    name, modes, cache_type = case
    step = compiled_step(name, modes, cache_type)
    assert step.verification.timing_violations == 0
    assert bool(step.search_result.attention()) == (modes != "gpu")
    decoder = SMALL.with_cache(cache_type)
    model = zoo.load_model(graph.step_graph(decoder, 4))
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    reference, runner = CacheReader(decoder, values), StepRunner(step)
    ids = np.random.default_rng(4).integers(SMALL.vocabulary, size=(1, CONTEXT))
    for place in range(CONTEXT):
        logits = runner(ids[:, place : place + 1], np.array([place]))[0, 0]
        reference.caches = runner.caches()
        expected = reference.step(ids[0, place : place + 1])[0]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=ROUNDING * abs(expected).max())
    for kind, cache in reference.caches.items():
        if kind.endswith("scale"):
            assert (cache > 0).all()
            continue
        np.testing.assert_array_equal(cache, np.rint(cache))
        assert (np.abs(cache).max(axis=-1) == LARGEST[cache_type]).all()


@pytest.mark.long
@pytest.mark.parametrize("kinds", [("fp16", "fp16"), ("int8", "int8")])
def test_tokens_are_those_of_numpy(kinds):
    """W8A8 too: with caches of 8 bits roundings move logits by so little that tokens are certain."""
    types = {"weight_type": kinds[0], "activation_type": kinds[1], "kv_cache_dtype": "int8"}
    system = pimflow.system(pim="lpddr5x-pim")
    generation = pimflow.generate("tiny-lm", prompt="The statement is", n=4, system=system, **types)
    decoder = zoo.decoder("tiny-lm").with_types(*types.values())
    tokens = greedy(decoder, zoo.decoder_weights(decoder), list(b"The statement is"), 4)
    assert generation.tokens == tokens and generation.sure_tokens
    assert (generation.cache, generation.cache_in_pim) == ("int8", "PIM stores int8 as it is")
    assert 0 < generation.fraction_of_bound <= 1


def test_a_token_takes_its_integers_and_scales():
    decoder = zoo.decoder("llama-3-8b")
    count, vectors = 2 * 32 * 8 * 128, 2 * 32 * 8
    sizes = {kind: decoder.with_types(kv_cache_dtype=kind).kv_bytes_per_token(2) for kind in ("fp16", *TYPES)}
    assert sizes == {"fp16": 2 * count, "int8": count + 2 * vectors, "int4": count // 2 + 2 * vectors}


@pytest.mark.parametrize(
    ("model", "says"),
    [("step.onnx", "an exported decoder keeps its caches"), ("mobilenet-v2", "give a language")],
)
def test_other_caches_are_refused(model, says):
    with pytest.raises(UsageError, match=says):
        pimflow.generate(model, tokens=[1], n=1, kv_cache_dtype="int4")


@pytest.mark.long
def test_a_shape_without_room_is_refused_before_weights_are_drawn(monkeypatch):
    drawn, draw = [], weights._draw_chunks

    def count(name, rule, elements, seed):
        drawn.append(elements)
        return draw(name, rule, elements, seed)

    monkeypatch.setattr(weights, "_draw_chunks", count)
    spec = PimSpec.load("newton-gddr6")
    pim = replace(spec, rows_per_bank=spec.row_base + 64)
    with pytest.raises(InfeasibleError, match="weights and caches of all blocks of 'gpt-2'"):
        pimflow.generate("gpt-2", tokens=[1, 2], n=2, system=replace(pimflow.system(), pim=pim))
    assert max(drawn) <= 4 * 768  # norms and biases


def test_latent_caches_are_refused():
    latent = LatentAttention(rank=6, value_size=5)
    decoder = replace(SMALL, latent=latent, rotary_size=4)
    with pytest.raises(UsageError, match="caches a latent vector"):
        decoder.with_types(kv_cache_dtype="int8")


@pytest.mark.long
def test_kernels_between_the_products_are_those_that_are_charged():
    """One multiplies scores by scales of keys, and one has the softmax and the scales of values."""
    network = frontend.load(graph.step_graph(SMALL.with_cache("int4"), CONTEXT), context=CONTEXT)
    result = compiled_step("lpddr5x-pim", None, "int4").search_result
    kernels = kernel_groups(build.apply_search_result(network.module, result))
    (region,) = result.attention()
    charged = [task for task in result.candidate_by_region[region].tasks if task.resource == "gpu"]
    between = [group for group in kernels if group.title.name.startswith(region.replace(".", "_"))]
    assert len(charged) == sum(group.fusible for group in between) == 2
    (attention,) = [r for r in extract_regions(network.module).regions if r.attention is not None]
    assert len(attention.kernel.parts) == 3  # the GPU's: two products and the softmax
