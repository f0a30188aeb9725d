"""Is a product over the tokens that there are what a program for just so many is, command by command?"""

import itertools
from dataclasses import replace

import numpy as np
import tvm
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from test_attention_programs import DEVICES, ROUNDING, cases, check_program, flat, layouts

from pimflow.core.attention import SCORES, VALUES, Attention
from pimflow.core.command_forms import decode
from pimflow.core.commands import Comp, Gwrite, Readres
from pimflow.core.program import PimProgram
from pimflow.pim_backend.programs import attention as programs
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout
from pimflow.pim_backend.programs.cache_schedule import CacheSchedule, ProductSchedule
from pimflow.pim_backend.programs.cached_attention import CachedAttention
from pimflow.pim_backend.programs.dynamic_product import DynamicProduct
from pimflow.pim_backend.runtime import codegen
from pimflow.simulators.pim.timing import time_program


def lengths(places: int, *periods: int):
    """Numbers of tokens: any, and those to either side of a boundary."""
    near = {n * period + d for period in periods for n in range(places // period + 1) for d in (0, 1)}
    return st.integers(1, places) | st.sampled_from(sorted({n for n in near if 1 <= n <= places} | {places}))


def streams(growing: DynamicProduct, tokens: int) -> list[list]:
    """The commands of each channel that an executable issues for so many tokens."""
    words, offsets = growing.commands(tokens)
    return [decode(words[begin:end].tolist()) for begin, end in itertools.pairwise(offsets)]


def renumber(layout: ValueLayout, program: PimProgram, chunk: int, full_program: PimProgram) -> list[list]:
    """Commands of a program for chunks from `chunk` on, as one for all chunks numbers the same vectors."""
    M, all_of = program.matrices, full_program.matrices
    before = chunk * layout.spread * layout.matrices

    def renumber_node(node):
        if not isinstance(node, (Gwrite, Readres)):
            return node
        member, pixel = divmod(node.pixel.base, M)
        return replace(node, pixel=node.pixel._replace(base=member * all_of + before + pixel))

    return [[renumber_node(node) for node in flat(nodes)] for nodes in program.channels]


@settings(max_examples=examples(60), deadline=None)
@given(cases(), st.data())
def test_commands_are_those_of_programs_for_just_so_many_tokens(case, data):
    keys, values = layouts(case)
    places = keys.attention.keys
    order = data.draw(st.sampled_from(programs.ORDERS))
    accumulate = programs.can_accumulate(values) and data.draw(st.booleans())
    by_tile = keys.banks * keys.spread
    by_column = values.elements * values.spread
    tokens = data.draw(
        lengths(places, keys.banks, by_tile, by_tile * keys.places_per_row, by_column * values.buffer_columns)
    )
    plain = ProductSchedule(order=order, spread=1, accumulate=accumulate)

    growing = DynamicProduct.from_layout(keys, plain, places)
    (fixed,) = programs.scores(keys, tokens, order).programs
    issued = streams(growing, tokens)
    assert issued == [flat(nodes) for nodes in fixed.channels]
    cut = replace(growing.program, channels=tuple(map(tuple, issued)))
    assert time_program(check_program(cut, keys.pim), keys.pim).cycles == time_program(fixed, keys.pim).cycles

    growing = DynamicProduct.from_layout(values, plain, places)
    full = 0 if accumulate else values.columns(tokens) // values.buffer_columns
    expected: list[list] = [[] for _ in range(values.channels)]
    programs_of = programs.mix(values, tokens, order, accumulate).programs
    for program, chunk in zip(programs_of, [0, full] if full else [full], strict=False):
        for channel, nodes in enumerate(renumber(values, program, chunk, growing.program)):
            expected[channel] += nodes
    issued = streams(growing, tokens)
    assert issued == expected
    cut = replace(growing.program, channels=tuple(map(tuple, issued)))
    cycles = time_program(check_program(cut, values.pim), values.pim).cycles
    apart = sum(time_program(program, values.pim).cycles for program in programs_of)
    timing = values.pim.timing
    # Costs count an incomplete chunk as a program of its own: they may differ by about one change of rows and
    # one refresh.
    apart_by = (values.pim.row_switch_cycles + timing.get("nRFC", 0)) * (len(programs_of) - 1)
    assert abs(cycles - apart) <= apart_by


def attention_of(case: dict) -> CachedAttention | None:
    """Both products of a case in one module, where a device deals its matrices to channels evenly."""
    pim, shape = DEVICES[case["device"]], case["shape"]
    keys, values = case["places"]
    channels = keys["channels"]
    if pim.has_single_host and shape["batch"] * shape["kv_heads"] % (channels // keys["spread"]):
        return None
    schedules = {
        name: ProductSchedule(order="vector", spread=keys["spread"], lanes=part.get("lanes", 1))
        for name, part in (("keys", keys), ("values", values))
    }
    a = Attention(**shape, queries=1, scale=1.0, positioned=True)
    schedule = CacheSchedule(**schedules)
    return CachedAttention.from_layouts("r", a, schedule, schedule.layouts(a, pim, "fp16", channels))


@settings(max_examples=examples(30), deadline=None)
@given(cases(), st.data())
def test_what_runs_over_the_tokens_so_far_is_numpy_over_them(case, data):
    """By the module that an executable has: tokens go in at their positions, behind them all is zero."""
    cached = attention_of(case)
    if cached is None:
        return
    a = cached.attention
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    module = codegen._create_module()
    for product in (SCORES, VALUES):
        codegen.add_cache_product(module, product, cached, product)

    def random_tensor(*dims: int) -> np.ndarray:
        return rng.standard_normal(dims).astype(np.float16).astype(np.float32)

    k, v = random_tensor(*a.key_shape), random_tensor(*a.value_shape)
    layout_k, layout_v = cached.keys.first_layout, cached.values.first_layout
    near = (layout_k.banks * layout_k.spread, layout_v.elements * layout_v.spread * layout_v.buffer_columns)
    for tokens in sorted(data.draw(st.lists(lengths(a.keys, *near), min_size=1, max_size=3))):
        caches = [np.where(np.arange(a.keys)[:, None] < tokens - 1, tensor, 0) for tensor in (k, v)]
        state = [tvm.runtime.tensor(cache.pack(x)) for cache, x in zip((cached.keys, cached.values), caches)]
        new = [np.ascontiguousarray(tensor[:, :, tokens - 1]) for tensor in (k, v)]
        # Requests of a batch may be at other positions; the furthest decides.
        position = np.minimum(tokens - 1, np.arange(a.batch)[::-1] + tokens - a.batch).clip(0)
        position[0] = tokens - 1
        for request in range(a.batch):
            for tensor, cache in zip(new, (k, v)):
                tensor[request] = cache[request, :, position[request]]
        q, scores = random_tensor(*a.query_shape), np.empty(a.score_shape, np.float32)
        module.get_function(SCORES)(
            *map(tvm_ffi.from_dlpack, (q, position.astype(np.int64))),
            *state,
            *map(tvm_ffi.from_dlpack, (*new, scores)),
        )
        seen = [cache.unpack(tensor.numpy()) for cache, tensor in zip((cached.keys, cached.values), state)]
        for request in range(a.batch):
            np.testing.assert_array_equal(seen[0][request, :, position[request]], new[0][request])
            np.testing.assert_array_equal(seen[1][request, :, position[request]], new[1][request])
        by_head = [np.repeat(tensor[:, :, :tokens], a.group, axis=1) for tensor in seen]
        expected = np.einsum("bhqd,bhtd->bhqt", q, by_head[0])
        bound = np.einsum("bhqd,bhtd->bhqt", abs(q), abs(by_head[0])) + 1e-3
        assert (abs(scores[..., :tokens] - expected) <= 2 * ROUNDING * bound).all()
        assert not scores[..., tokens:].any()
        weights = random_tensor(*a.score_shape)
        weights[..., tokens:] = 0
        sums = np.empty((a.batch, a.heads, cached.terms, a.value_size), np.float32)
        module.get_function(VALUES)(
            *map(tvm_ffi.from_dlpack, (weights, position.astype(np.int64))),
            state[1],
            tvm_ffi.from_dlpack(sums),
        )
        expected = np.einsum("bhqt,bhtd->bhd", weights[..., :tokens], by_head[1])
        bound = np.einsum("bhqt,bhtd->bhd", abs(weights[..., :tokens]), abs(by_head[1])) + 1e-3
        assert (abs(sums.sum(axis=2) - expected) <= 2 * ROUNDING * bound).all()


def test_few_tokens_take_few_commands():
    """A step over an early part of a long cache does not go over the rest."""
    pim = DEVICES["newton-gddr6"]
    a = Attention(batch=1, heads=4, kv_heads=2, head_size=32, value_size=32, queries=1, keys=400, scale=1.0)
    plain = ProductSchedule(order="vector", spread=2)
    for kind in (KeyLayout, ValueLayout):
        layout = plain.layout(kind, a, pim, "fp16", 4)
        growing = DynamicProduct.from_layout(layout, plain, 400)
        comps = [
            sum(node.count for nodes in streams(growing, tokens) for node in nodes if isinstance(node, Comp))
            for tokens in (40, 200, 400)
        ]
        assert 0 < comps[0] < comps[1] < comps[2] and comps[0] <= comps[2] / 4
