"""Does the validator refuse every illegal plan, and only those?"""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from length import examples
from lifetimes import bytes_of, collide, live_together, tables

from pimflow import memory
from pimflow.core.liveness import Lifetime
from pimflow.errors import VerificationError
from pimflow.memory import validator


def is_legal(lifetimes, offsets, pool):
    """The definition, a byte at a time."""
    for index, life in enumerate(lifetimes):
        offset = offsets[life.name]
        if offset % life.alignment_bytes or life.offset_bytes not in (None, offset):
            return False
        if not bytes_of(life, offset) <= set(range(pool)):
            return False
        for earlier in lifetimes[:index]:
            shared = bytes_of(life, offset) & bytes_of(earlier, offsets[earlier.name])
            if shared and live_together(life, earlier):
                return False
    return True


def accepts(lifetimes, offsets, pool):
    try:
        validator.check(lifetimes, offsets, {"gpu": pool})
    except VerificationError:
        return False
    return True


@settings(max_examples=examples(400))
@given(tables(), st.data())
def test_a_moved_buffer_is_seen(lifetimes, data):
    assume(not collide(lifetimes))
    plan = memory.plan(lifetimes)
    moved = data.draw(st.sampled_from(lifetimes))
    offset = data.draw(st.integers(0, plan.pool_bytes))
    offsets = plan.offsets_bytes | {moved.name: offset}
    assert accepts(lifetimes, plan.offsets_bytes, plan.pool_bytes)
    assert accepts(lifetimes, offsets, plan.pool_bytes) == is_legal(lifetimes, offsets, plan.pool_bytes)
    assert not accepts(lifetimes, plan.offsets_bytes, plan.pool_bytes - 1)


def life(name, **fields):
    return Lifetime(**{"name": name, "begin": 0, "end": 2, "size_bytes": 4, **fields})


@pytest.mark.parametrize(
    ("lifetimes", "offsets", "message"),
    [
        ([life("a")], {}, "'a' has no offset"),
        ([life("a")], {"a": 0, "b": 0}, "'b', which is no buffer"),
        ([life("a", memory="pim")], {"a": 0}, "'pim', which has no pool"),
        ([life("a")], {"a": -1}, "takes bytes -1 to 3, outside of its pool of 8 B"),
        ([life("a")], {"a": 5}, "outside of its pool"),
        ([life("a", alignment_bytes=4)], {"a": 2}, "no multiple of 4 B"),
        ([life("a", offset_bytes=4)], {"a": 0}, "has to lie at 4 B"),
        ([life("a"), life("b", begin=1)], {"a": 0, "b": 3}, "both live in step 1 and share byte 3"),
        (
            [life("a", alias="s"), life("b", alias="s")],
            {"a": 0, "b": 4},
            "share their bytes and lie at 0 and 4",
        ),
        (
            [life("a", alias="s"), life("b", alias="s", within_bytes=4)],
            {"a": 0, "b": 0},
            "0 and 0 B, 0 and not 4 B apart",
        ),
    ],
)
def test_what_is_wrong_is_named(lifetimes, offsets, message):
    with pytest.raises(VerificationError, match=message):
        validator.check(lifetimes, offsets, {"gpu": 8})


def test_a_pool_above_its_capacity_is_refused():
    with pytest.raises(VerificationError, match="takes 8 B, its capacity is 7 B"):
        validator.check([life("a")], {"a": 0}, {"gpu": 8}, {"gpu": 7})


def test_what_may_share_bytes():
    after = life("after", begin=2, end=3)
    other_region = life("other", memory="pim")
    same_class = [life("x", alias="s"), life("y", alias="s")]
    empty = life("empty", size_bytes=0)
    lifetimes = [*same_class, after, other_region, empty]
    validator.check(lifetimes, dict.fromkeys(["x", "y", "after", "other", "empty"], 0), {"gpu": 4, "pim": 4})


def test_a_class_of_that_name_in_another_region_is_another():
    lifetimes = [life("x", alias="s"), life("y", alias="s", memory="pim")]
    validator.check(lifetimes, {"x": 0, "y": 4}, {"gpu": 4, "pim": 8})


@settings(max_examples=examples(100))
@given(tables(), st.data())
def test_regions_of_one_pool_are_certified_and_a_moved_buffer_is_seen(lifetimes, data):
    assume(not collide(lifetimes))
    regions = st.sampled_from(("left", "all", "pim"))
    by_class = {}  # buffers that share bytes lie in one region, and none has to lie anywhere
    spread = [
        replace(
            lifetime,
            memory=by_class.setdefault(lifetime.alias or lifetime.name, data.draw(regions)),
            offset_bytes=None,
        )
        for lifetime in lifetimes
    ]
    separate = memory.plan(spread)
    plan = memory.merge_pools(separate)
    ranges = {pool.memory: (pool.begin_bytes, pool.end_bytes) for pool in plan.pools}
    assert {p.memory: p.pool_bytes for p in plan.pools} == {p.memory: p.pool_bytes for p in separate.pools}
    region_bytes = [byte for begin, end in ranges.values() for byte in range(begin, end)]
    assert len(region_bytes) == len({*region_bytes}) and all(byte < plan.pool_bytes for byte in region_bytes)

    def is_inside(offsets):
        return all(bytes_of(t, offsets[t.name]) <= {*range(*ranges[t.memory])} for t in spread)

    moved, offset = data.draw(st.sampled_from(spread)), data.draw(st.integers(0, plan.pool_bytes))
    offsets = plan.offsets_bytes | {moved.name: offset}
    for places in (plan.offsets_bytes, offsets):
        try:
            validator.check_ranges(spread, places, ranges, plan.pool_bytes)
            accepted = True
        except VerificationError:
            accepted = False
        assert accepted == (is_legal(spread, places, plan.pool_bytes) and is_inside(places))


@pytest.mark.parametrize(
    ("ranges", "offsets", "message"),
    [
        ({"left": (0, 8), "all": (4, 12)}, {"a": 0, "b": 8}, "'left' and memory 'all' share byte 4"),
        ({"left": (0, 8), "all": (8, 20)}, {"a": 0, "b": 8}, "'all' takes bytes 8 to 20, outside of the"),
        (
            {"left": (0, 8), "all": (8, 16)},
            {"a": 6, "b": 8},
            "'a' takes bytes 6 to 10, outside of memory 'left'",
        ),
        ({"left": (0, 8)}, {"a": 0, "b": 8}, "'b' lies in memory 'all', which has no range"),
        ({"left": (0, 8), "all": (8, 16)}, {"a": 0}, "'b' has no offset"),
    ],
)
def test_regions_that_are_refused(ranges, offsets, message):
    with pytest.raises(VerificationError, match=re.escape(message)):
        validator.check_ranges([life("a", memory="left"), life("b", memory="all")], offsets, ranges, 16)
