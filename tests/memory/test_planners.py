"""Does every planner give legal plans, the exact one the smallest, and does it say how sure it is?"""

import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from length import examples
from lifetimes import collide, network, smallest_pool, tables

from pimflow import memory
from pimflow.core.liveness import Lifetime
from pimflow.errors import InfeasibleError, LifetimeError, UnknownNameError, UsageError
from pimflow.memory import csv_form, exact, validator
from pimflow.memory.policies import place
from pimflow.memory.pools import lower_bound_bytes, merge_aliases, pool_end_bytes

DATA = Path(__file__).parent / "data"
CAPACITY_BYTES = 1 << 20
ORDINARY = tuple(name for name in memory.PLANNERS if name != "ortools")


def life(name, begin, end, size_bytes, **fields):
    return Lifetime(name=name, begin=begin, end=end, size_bytes=size_bytes, **fields)


def certify(lifetimes, plan, capacities=None):
    validator.check(lifetimes, plan.offsets_bytes, {p.memory: p.pool_bytes for p in plan.pools}, capacities)


@settings(max_examples=examples(300))
@given(tables())
def test_against_every_plan_there_is(lifetimes):
    assume(not collide(lifetimes))
    smallest = smallest_pool(lifetimes)
    plans = {policy: memory.plan(lifetimes, policy) for policy in ORDINARY}
    for plan in plans.values():
        certify(lifetimes, plan)
        assert plan.lower_bound_bytes <= smallest <= plan.pool_bytes
        assert not plan.optimal or plan.pool_bytes == smallest
    assert plans["exact"].optimal and plans["exact"].pool_bytes == smallest
    assert plans["best"].pool_bytes == min(plans[policy].pool_bytes for policy in memory.POLICIES)
    assert memory.policy_bytes(lifetimes) == {name: plans[name].pool_bytes for name in memory.POLICIES}


@settings(max_examples=examples(100))
@given(tables())
def test_the_decision_form_answers_both_ways(lifetimes):
    assume(not collide(lifetimes))
    smallest = smallest_pool(lifetimes)
    plan = memory.plan(lifetimes, capacity_bytes=smallest)
    certify(lifetimes, plan, {"gpu": smallest})
    assert plan.pool_bytes == smallest
    with pytest.raises(InfeasibleError, match=f"{smallest} B.* above the capacity") as caught:
        memory.plan(lifetimes, capacity_bytes=smallest - 1)
    assert (caught.value.demand, caught.value.bound) == (smallest, smallest - 1)


@settings(max_examples=examples(100))
@given(tables(), st.integers(2, 4))
def test_no_decision_claims_more_than_it_proved(lifetimes, unit):
    """Capacities that no pool can have exactly: all sizes and offsets are multiples of `unit`."""
    assume(not collide(lifetimes))
    smallest = unit * smallest_pool(lifetimes)
    scaled = [
        replace(
            lifetime,
            size_bytes=unit * lifetime.size_bytes,
            alignment_bytes=unit * lifetime.alignment_bytes,
            offset_bytes=lifetime.offset_bytes and unit * lifetime.offset_bytes,
        )
        for lifetime in lifetimes
    ]
    start = max(
        (place(scaled, policy) for policy in memory.POLICIES),
        key=lambda offsets: pool_end_bytes(scaled, offsets),
    )
    for capacity in range(max(1, smallest - unit), smallest + 2):
        solution = exact.solve(scaled, start, 10, capacity)
        assert solution.lower_bound_bytes <= smallest
        assert (solution.pool_bytes <= capacity) == (capacity >= smallest)


@settings(max_examples=examples(40))
@given(tables(most=14, sizes=st.integers(1, 200), alignments=st.sampled_from([1, 4, 6, 64])))
def test_against_ortools(lifetimes):
    pytest.importorskip("ortools")
    assume(not collide(lifetimes))
    plans = [memory.plan(lifetimes, policy, seconds=20) for policy in ("exact", "ortools")]
    for plan in plans:
        certify(lifetimes, plan)
        assert plan.optimal
    assert plans[0].pool_bytes == plans[1].pool_bytes


def test_ortools_decides_too():
    pytest.importorskip("ortools")
    lifetimes = csv_form.read(DATA / "input.12.csv")
    assert memory.plan(lifetimes, "ortools", capacity_bytes=12).pool_bytes == 12


@settings(max_examples=examples(60))
@given(tables(most=5), tables(most=5))
def test_regions_are_planned_apart(here, there):
    assume(not collide(here) and not collide(there))
    there = [replace(lifetime, name=f"p{lifetime.name}", memory="pim") for lifetime in there]
    joint = memory.plan([*here, *there])
    separate = [memory.plan(here), memory.plan(there)]
    assert [pool.memory for pool in joint.pools] == ["gpu", "pim"]
    assert [pool.pool_bytes for pool in joint.pools] == [plan.pool_bytes for plan in separate]
    assert joint.offsets_bytes == separate[0].offsets_bytes | separate[1].offsets_bytes
    assert joint.pool_bytes == sum(plan.pool_bytes for plan in separate)


def test_a_region_has_its_own_capacity():
    lifetimes = [life("a", 0, 1, 10), life("b", 0, 1, 20, memory="pim")]
    plan = memory.plan(lifetimes, capacity_bytes={"pim": 20})
    assert plan.offsets_bytes == {"a": 0, "b": 0}
    with pytest.raises(InfeasibleError, match="memory 'pim'"):
        memory.plan(lifetimes, capacity_bytes={"pim": 19})
    with pytest.raises(UnknownNameError, match=r"'pin'.*did you mean pim"):
        memory.plan(lifetimes, capacity_bytes={"pin": 20})


def test_the_four_policies_by_hand():
    """Holes of 6 bytes at 0 and of 4 at 12 are left when the next buffer comes: each policy takes another."""
    lifetimes = [
        life("hole6", 0, 1, 6),
        life("x", 0, 9, 6),
        life("hole4", 0, 1, 4),
        life("y", 0, 9, 1),
        life("new", 1, 3, 4),
        life("big", 2, 3, 6),
    ]

    def offsets(policy):
        return list(memory.plan(lifetimes, policy).offsets_bytes.values())

    assert offsets("first-fit") == [0, 6, 12, 16, 0, 17]
    assert offsets("best-fit") == [0, 6, 12, 16, 12, 0]
    # x, y, new, then those of one step in the order of their definition
    assert offsets("longer-first") == [7, 0, 13, 6, 7, 11]
    # hole6, x, big, then hole4 before new, y last
    assert offsets("bigger-first") == [0, 6, 12, 16, 12, 0]


@pytest.mark.parametrize("policy", ORDINARY)
def test_parts_lie_inside_what_they_make(policy):
    """Halves of `whole`, one written before the other, stay 8 bytes apart; `apart` is live beside both."""
    lifetimes = [
        life("upper", 0, 2, 8, alias="whole"),
        life("lower", 1, 2, 4, alias="whole", within_bytes=8),
        life("whole", 2, 4, 12, alias="whole"),
        life("apart", 0, 3, 5),
    ]
    plan = memory.plan(lifetimes, policy)
    offsets = plan.offsets_bytes
    assert (offsets["lower"], offsets["whole"]) == (offsets["upper"] + 8, offsets["upper"])
    assert plan.pool_bytes == 17


def test_nothing_to_plan():
    assert memory.plan([]).pools == ()
    plan = memory.plan([life("empty", 0, 1, 0), life("there", 0, 1, 0, offset_bytes=8)])
    assert (plan.pool_bytes, plan.optimal) == (0, True)
    assert plan.offsets_bytes == {"empty": 0, "there": 8}


@pytest.mark.long
@pytest.mark.parametrize("name", ["A", "D", "F", "I"])
def test_minimalloc_instances_fit(name):
    lifetimes = csv_form.read(DATA / f"{name}.1048576.csv")
    with pytest.raises(InfeasibleError, match="the best plan found"):
        memory.plan(lifetimes, "best", capacity_bytes=CAPACITY_BYTES)
    plan = memory.plan(lifetimes, capacity_bytes=CAPACITY_BYTES, seconds=60)
    certify(lifetimes, plan, {csv_form.DEFAULT_MEMORY: CAPACITY_BYTES})


@pytest.mark.long
@pytest.mark.parametrize("layers", [40, 150, 400])
def test_networks_are_proved(layers):
    for seed in range(3):
        lifetimes = network(layers, random.Random(seed))
        plan = memory.plan(lifetimes, seconds=20)
        certify(lifetimes, plan)
        assert plan.optimal
        assert plan == replace(memory.plan(lifetimes, seconds=20), seconds=plan.seconds)


def test_the_time_limit_leaves_a_plan_and_its_gap():
    lifetimes = csv_form.read(DATA / "D.1048576.csv")
    plan = memory.plan(lifetimes, seconds=0.3)
    certify(lifetimes, plan)
    assert not plan.optimal and plan.pools[0].gap > 0
    assert plan.pool_bytes <= min(memory.policy_bytes(lifetimes).values())


def test_the_search_can_be_interrupted():
    lifetimes = csv_form.read(DATA / "D.1048576.csv")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    begin = time.process_time()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            memory.plan(lifetimes, seconds=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - begin < 10


def test_alignment_counts_in_the_bound():
    """Three buffers of 65 bytes each at multiples of 64: the topmost alone needs no rounding up."""
    lifetimes = [life(str(i), 0, 1, 65, alignment_bytes=64) for i in range(3)]
    assert lower_bound_bytes(merge_aliases(lifetimes)) == memory.plan(lifetimes).pool_bytes == 128 + 128 + 65


@pytest.mark.parametrize(
    ("lifetimes", "message"),
    [
        ([life("a", 0, 1, 1), life("a", 1, 2, 1)], "'a' occurs twice"),
        ([life("a", 3, 3, 1)], "ends at step 3"),
        ([life("a", 0, 1, -1)], "size -1 B is negative"),
        ([life("a", 0, 1, 1, alignment_bytes=0)], "alignment 0 B"),
        ([life("a", 0, 1, 1, offset_bytes=3, alignment_bytes=2)], "required offset 3 B"),
        ([life("a", 0, 1, 4, offset_bytes=0), life("b", 0, 1, 4, offset_bytes=2)], "make them overlap"),
        (
            [life("a", 0, 1, 4, offset_bytes=0, alias="s"), life("b", 1, 2, 4, offset_bytes=4, alias="s")],
            "give one offset",
        ),
        ([life("a", 0, 1, 4, within_bytes=8, offset_bytes=4)], "begin before the pool"),
        ([life("a", 0, 1, 4, within_bytes=-1)], "begins -1 B into"),
        ([life("a", 0, 1, 4, within_bytes=3, alignment_bytes=2)], "begins 3 B into"),
    ],
)
def test_lifetimes_without_sense_are_refused(lifetimes, message):
    with pytest.raises(LifetimeError, match=message):
        memory.plan(lifetimes)


def test_more_bytes_than_addresses_are_refused():
    with pytest.raises(InfeasibleError, match="side by side"):
        memory.plan([life(str(i), i, i + 1, 2**62) for i in range(2)])


def test_an_unknown_policy_is_refused():
    with pytest.raises(UnknownNameError, match="did you mean first-fit"):
        memory.plan([], "firstfit")


def test_without_ortools_the_message_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    lifetimes = csv_form.read(DATA / "A.1048576.csv")
    with pytest.raises(UsageError, match=r"pimflow\[ortools\]"):
        memory.plan(lifetimes, "ortools")
