"""Is the order legal, its peak what it says, and the smallest where it says so?"""

import random
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but
from programs import peak_bytes, programs, smallest_peak, smallest_peak_by_sets, values

from pimflow import memory
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.host import native
from pimflow.memory import validator
from pimflow.memory.reorder import StepGraph, reorder

search = native.get("pimflow.memory.order_search")
FOUND, NONE = 0, 1


def certify(graph, result):
    original = tuple(range(len(graph.steps)))
    assert sorted(result.order) == list(original)
    assert values(graph, result.order) == values(graph, original)
    assert result.original_peak_bytes == peak_bytes(graph, original)
    assert result.peak_bytes == peak_bytes(graph, result.order) <= result.original_peak_bytes
    assert result.lower_bound_bytes <= result.peak_bytes
    if result.peak_bytes == result.original_peak_bytes:
        assert result.order == original, "a change that is worth nothing"


def random_graph(steps, seed, reads=2, reach=None):
    """Steps that read results of up to `reach` steps before; the last one's is the output."""
    draw = random.Random(seed)
    program, size_bytes = [], {"in": 5}
    for index in range(steps):
        names = ["in", *(f"b{i}" for i in range(max(0, index - (reach or index)), index))]
        program.append((draw.sample(names, min(reads, len(names))), [f"b{index}"]))
        size_bytes[f"b{index}"] = draw.choice([1, 2, 3, 5, 9, 20])
    read = {name for reads, _ in program for name in reads}
    loose = [f"b{i}" for i in range(steps) if f"b{i}" not in read]
    program.append((loose, ["out"]))
    return StepGraph(steps=program, size_bytes=size_bytes | {"out": 1}, inputs=("in",), outputs=("out",))


@settings(max_examples=examples(150), deadline=None)
@given(programs(most=8))
def test_against_every_order(graph):
    result = reorder(graph)
    certify(graph, result)
    assert result.optimal
    assert result.peak_bytes == smallest_peak(graph)


@settings(max_examples=examples(100), deadline=None)
@given(st.one_of(programs(most=10), st.builds(random_graph, st.integers(5, 11), st.integers(0, 10**6))))
def test_the_search_decides_every_limit(graph):
    """Without the bound's help, both directions find the smallest peak and prove every smaller one away."""
    smallest = smallest_peak_by_sets(graph)
    order = np.zeros(len(graph.steps), np.int64)
    for backwards in (False, True):
        answer = search(len(graph.steps), *graph.tables, order, smallest, 1 << 17, backwards, 60.0)
        assert (answer["outcome"], answer["bytes"]) == (FOUND, smallest)
        assert values(graph, order.tolist()) == values(graph, range(len(graph.steps)))
        limit = smallest - 1
        while limit >= 0:
            answer = search(len(graph.steps), *graph.tables, order, limit, 1 << 17, backwards, 60.0)
            assert answer["outcome"] == NONE
            assert limit < answer["bytes"] <= smallest
            limit -= max(1, smallest // 4)


def concatenate(blocks):
    """One program out of many, each of which reads the output of the one before."""
    steps, size_bytes = [], {"0/in": 5}
    for number, block in enumerate(blocks):
        names = {name: f"{number}/{name}" for name in block.size_bytes} | {"out": f"{number + 1}/in"}
        for reads, writes in block.steps:
            steps.append(([names[name] for name in reads], [names[name] for name in writes]))
        size_bytes |= {names[name]: size for name, size in block.size_bytes.items() if name != "in"}
        size_bytes[names["in"]] = 5
    size_bytes[f"{len(blocks)}/in"] = 5
    return StepGraph(steps=steps, size_bytes=size_bytes, inputs=("0/in",), outputs=(f"{len(blocks)}/in",))


@pytest.mark.long
@pytest.mark.parametrize("seed", long_but([0], range(2)))
def test_a_network_of_blocks_is_proved_block_by_block(seed):
    blocks = []
    for number in range(25):
        block = random_graph(6, 1000 * seed + number)
        blocks.append(replace(block, size_bytes={**block.size_bytes, "in": 5, "out": 5}))
    graph = concatenate(blocks)
    result = reorder(graph)
    certify(graph, result)
    assert result.optimal and len(graph.steps) == 175
    assert result.peak_bytes == max(smallest_peak_by_sets(block) for block in blocks)
    assert result.sets < 100_000


def test_order_matters():
    """Four large intermediates, each with a small result: one at a time."""
    steps = [(["x"], [f"large{i}"]) for i in range(4)] + [([f"large{i}"], [f"small{i}"]) for i in range(4)]
    steps.append(([f"small{i}" for i in range(4)], ["y"]))
    sizes = {"x": 1, "y": 1} | {f"large{i}": 100 for i in range(4)} | {f"small{i}": 1 for i in range(4)}
    graph = StepGraph(steps=steps, size_bytes=sizes, inputs=("x",), outputs=("y",))
    result = reorder(graph)
    assert (result.original_peak_bytes, result.peak_bytes, result.optimal) == (401, 104, True)
    pools = [memory.plan(graph.lifetimes(order)).pool_bytes for order in (None, result.order)]
    assert pools == [401, 104]


@pytest.mark.parametrize("given", [True, False])
def test_what_costs_nothing_after_another_step_may_cost_less_before_it(given):
    """After `u`, `w` and `v` free more than `u` took; without `u` they free even more, which `m` needs."""
    steps = [
        (["t"], ["a"]),  # u
        (["t"], ["b"]),  # w
        (["b", "d"], ["c"]),  # v
        (["c"], ["work", "e"]),  # m
        (["a", "e"], ["y"]),
    ]
    sizes = {"t": 4, "d": 10, "a": 5, "b": 3, "c": 0, "e": 0, "work": 30, "y": 1}
    if not given:
        steps.insert(0, ([], ["t", "d"]))  # so that less was live before
    result = reorder(StepGraph(steps=steps, size_bytes=sizes, inputs=("t", "d") * given, outputs=("y",)))
    assert (result.original_peak_bytes, result.peak_bytes, result.lower_bound_bytes) == (35, 34, 34)


def test_an_alias_keeps_its_readers_before_it():
    """Relu in place: who reads what it overwrites goes first, though another order would take less."""
    steps = [([], ["a"]), (["a"], ["big"]), (["big"], ["r"]), (["a"], ["b"]), (["b"], ["y"])]
    sizes = {"a": 10, "big": 50, "r": 1, "b": 10, "y": 1}
    free = StepGraph(steps=steps, size_bytes=sizes, outputs=("y", "r"))
    in_place = replace(free, aliases={"a": "place", "b": "place"})
    assert (1, 3) in in_place.dependencies and (1, 3) not in free.dependencies
    certify(in_place, reorder(in_place))
    parts = replace(free, outputs=("y", "r", "a"), aliases={"a": "place", "b": "place"})
    assert (1, 3) not in parts.dependencies, "a outlives b's write: they are different parts"


@settings(max_examples=examples(60), deadline=None)
@given(programs(most=9))
def test_pools_before_and_after(graph):
    result = reorder(graph, seconds=20)
    for order in (tuple(range(len(graph.steps))), result.order):
        plan = memory.plan(graph.lifetimes(order))
        ends = {pool.memory: pool.pool_bytes for pool in plan.pools}
        validator.check(graph.lifetimes(order), plan.offsets_bytes, ends)
        assert plan.pool_bytes >= peak_bytes(graph, order) == graph.peak_bytes(order)
        assert plan.pool_bytes >= result.lower_bound_bytes


def test_regions_are_steps():
    def region(name, *inputs, channels):
        shapes = tuple((1, 4) for _ in inputs)
        sizes = {"input_shapes": shapes, "output_shape": (1, channels)}
        return Region(name=name, operator="fc", operators=("fc",), inputs=inputs, **sizes)

    regions = (
        *(region(f"wide{i}", "%x", channels=100) for i in range(3)),
        *(region(f"thin{i}", f"wide{i}", channels=1) for i in range(3)),
        region("y", "thin0", "thin1", "thin2", channels=4),
    )
    network = RegionGraph(name="n", regions=regions, outputs=("y",))
    graph = StepGraph.from_regions(network, "fp16")
    assert graph.peak_bytes() == network.liveness("fp16").peak_bytes
    result = reorder(graph)
    certify(graph, result)
    changed = replace(network, regions=tuple(regions[step] for step in result.order))
    assert changed.liveness("fp16").peak_bytes == result.peak_bytes < network.liveness("fp16").peak_bytes


@pytest.mark.long
def test_too_large_to_prove():
    graph = random_graph(150, 1, reads=3)
    begin = time.process_time()
    result = reorder(graph, seconds=1)
    assert time.process_time() - begin < 5
    certify(graph, result)
    assert not result.optimal and result.lower_bound_bytes < result.peak_bytes < result.original_peak_bytes
    assert reorder(graph, seconds=0).peak_bytes == result.original_peak_bytes


def test_the_same_order_every_time():
    graph = random_graph(40, 7)
    orders = {reorder(graph).order for _ in range(3)}
    assert len(orders) == 1


def test_the_search_can_be_interrupted():
    graph = random_graph(150, 1, reads=3)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    begin = time.process_time()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            reorder(graph, seconds=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - begin < 10


def test_an_empty_program():
    result = reorder(StepGraph(steps=[], size_bytes={"x": 3}, inputs=("x",)))
    assert result.order == () and result.optimal and result.peak_bytes == 0


def test_a_program_that_is_wrong_is_refused():
    with pytest.raises(ValueError, match="step 0 reads 'ghost' before"):
        StepGraph(steps=[(["ghost"], ["a"])], size_bytes={"ghost": 1, "a": 1})
    with pytest.raises(ValueError, match="output 'y' is never written"):
        StepGraph(steps=[([], ["a"])], size_bytes={"a": 1}, outputs=("y",))
