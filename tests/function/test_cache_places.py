"""Is a token of a cache in PIM written where products read it, whichever position it has?"""

import json

import numpy as np
import pytest
from calibration.pim_device import PimDevice, empty_image
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import expand_program
from length import examples
from test_attention_programs import cases, layouts

from pimflow.core.attention import Attention
from pimflow.hardware import PimSpec
from pimflow.host import native
from pimflow.pim_backend.programs.cache_appends import append_keys, append_values
from pimflow.pim_backend.programs.cache_layout import KeyLayout
from pimflow.pim_backend.programs.cache_places import all_places_program, place_count
from pimflow.pim_backend.programs.cache_schedule import CacheSchedule
from pimflow.pim_backend.programs.cached_attention import CachedAttention
from pimflow.pim_backend.programs.packed_cache import PackedCache
from pimflow.simulators.pim.store_coverage import store_coverage


@pytest.mark.long
@settings(max_examples=examples(40), deadline=None)
@given(cases(), st.data())
def test_every_place_is_written_once_and_is_where_a_packed_cache_has_it(case, data):
    for layout in layouts(case):
        program = all_places_program(layout)
        program.validate()
        assert store_coverage(program).exact
        packed_cache = PackedCache(attention=layout.attention, groups=(layout,))
        dims = packed_cache.cache_shape
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        cache = rng.standard_normal(dims).astype(np.float16).astype(np.float32)
        state = packed_cache.pack(cache)
        np.testing.assert_array_equal(packed_cache.unpack(state), cache)
        tokens = np.zeros((place_count(layout), layout.matrices, dims[3]), np.float32)
        tokens[: dims[2]] = cache.reshape(layout.matrices, *dims[2:]).swapaxes(0, 1)
        image = empty_image(layout)
        PimDevice(program, image).run(tokens.reshape(-1, 1, 1, dims[3]))
        np.testing.assert_array_equal(image.lane_bits.reshape(packed_cache.shape), state.view(np.uint16))


@settings(max_examples=examples(40), deadline=None)
@given(cases(), st.data())
def test_a_step_issues_the_commands_of_its_position(case, data):
    """What the runtime chooses is the program that was timed and checked."""
    select_writes = native.get("pimflow.simulators.step_writes")
    import tvm_ffi

    for layout in layouts(case):
        position = data.draw(st.integers(0, layout.attention.keys - 1))
        positions = np.full(layout.attention.batch, position, np.int64)
        arrays = (*all_places_program(layout).program_words(), positions)
        streams = select_writes(*map(tvm_ffi.from_dlpack, arrays), layout.matrices)
        append = append_keys if isinstance(layout, KeyLayout) else append_values
        program = append(layout, position)
        plain = expand_program(program)
        for actual, expected in zip(streams, plain.program_words(), strict=True):
            np.testing.assert_array_equal(np.from_dlpack(actual), expected)


def test_what_a_directory_says_of_a_packed_cache_makes_it_again():
    sizes = {"head_size": 16, "value_size": 8, "queries": 1, "keys": 30}
    attention = Attention(batch=2, heads=4, kv_heads=2, scale=0.25, positioned=True, **sizes)
    schedule = CacheSchedule.parse(
        "keys vector-stationary, spread 2; values vector-stationary, spread 1; 4 parts"
    )
    pim = PimSpec.load("newton-gddr6")
    layouts = schedule.layouts(attention, pim, "fp16", channels=2, row_begin=3)
    cached = CachedAttention.from_layouts("layer", attention, schedule, layouts)
    text = cached.to_json()
    assert CachedAttention.from_json(text) is cached
    rows = [(group.keys.row_begin, group.values.row_begin) for group in cached.groups]
    for cache in (cached.keys, cached.values):
        table = json.loads(json.dumps(cache.to_table()))
        assert PackedCache.from_table(table, pim) == cache
        with pytest.raises(ValueError, match="a cache is packed as"):
            PackedCache.from_table(table | {"channels": 4}, pim)
        for spread in (0, 1.0, 1 << 63):
            with pytest.raises(ValueError, match="a size of a packed cache is none"):
                PackedCache.from_table(table | {"spread": spread}, pim)
        for read in (-1, 30, 1 << 63, 1.0, None):
            with pytest.raises(ValueError, match="read where it has no places"):
                PackedCache.from_table(table | {"attention": table["attention"] | {"read": read}}, pim)
        for fields in ({"attention": table["attention"] | {"kv_heads": 1000}}, {"lanes": 101}):
            with pytest.raises(ValueError, match="not dealt evenly"):
                PackedCache.from_table(table | fields, pim)
        with pytest.raises(ValueError, match="groups of a packed cache"):
            PackedCache.from_table(table | {"groups": table["groups"] * 2}, pim)
    del cached, cache
    reread = CachedAttention.from_json(text)  # in another process
    assert [(group.keys.row_begin, group.values.row_begin) for group in reread.groups] == rows
    assert reread.to_json() == text
