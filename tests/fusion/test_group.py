"""Are a group's traffic and memory what running it, element by element, shows?"""

import dataclasses
import itertools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layer_graphs import graphs
from length import examples
from replay import replay

from pimflow.commands.fuse.fusion_report import FusionReport
from pimflow.core.liveness import Liveness
from pimflow.core.ranges import RangeMap
from pimflow.errors import InfeasibleError, VerificationError
from pimflow.fusion.accelerator import Accelerator
from pimflow.fusion.channels import SUM_BYTES, fitting_runs, possible_runs
from pimflow.fusion.group import Group, place
from pimflow.fusion.layers import Layer, LayerGraph, elementwise_maps
from pimflow.fusion.search import HALOS, SEARCHES, FusionRules, fuse_layers
from pimflow.fusion.tiling import GroupTiling

PROPERTY = settings(derandomize=True, deadline=None, max_examples=examples(36))
REUSES = ("none", "lifetime", "deep")


@st.composite
def groups(draw, reuse=None):
    graph = draw(graphs()).graph
    end = draw(st.integers(1, len(graph.layers)))
    begin = draw(st.integers(0, end - 1))
    retain = draw(st.booleans())
    tiling = GroupTiling(
        n=draw(st.integers(1, 2)), h=draw(st.integers(1, 4)), w=draw(st.integers(1, 2)), retain=retain
    )
    weighted = [layer.name for layer in graph.layers[begin:end] if layer.weight_elements]
    resident = frozenset(name for name in weighted if draw(st.booleans()))
    reuse = reuse or draw(st.sampled_from(REUSES))
    if reuse == "none":
        resident = frozenset(weighted)
    return Group(graph=graph, begin=begin, end=end, tiling=tiling, reuse=reuse, resident=resident)


@st.composite
def channel_groups(draw):
    """A group with some of the runs that it can go channel by channel in."""
    group = draw(groups(reuse=draw(st.sampled_from(REUSES[1:]))))
    assume(not group.is_single and any(possible_runs(group.layers, sums=True)))
    tiling = dataclasses.replace(group.tiling, retain=False)
    runs = []
    for run in draw(st.permutations(list(possible_runs(group.layers, sums=True)))):
        if all(run.end <= chosen_run.begin or run.begin >= chosen_run.end for chosen_run in runs):
            runs.append(run)
    runs = tuple(sorted(runs))
    inside = {group.layers[step].name for run in runs for step in range(run.begin, run.end)}
    resident = group.resident - inside
    return dataclasses.replace(group, channel_runs=runs, resident=resident, tiling=tiling)


def smallest(group):
    """The placement in the smallest memory that this planner finds, by bisection."""
    low, high, best = 0, place(group, 4, 10**9).on_chip_bytes, place(group, 4, 10**9)
    while low < high:
        middle = (low + high) // 2
        try:
            best = place(group, 4, middle)
            high = min(middle, best.on_chip_bytes)
        except InfeasibleError:
            low = middle + 1
    return best


@PROPERTY
@given(groups() | channel_groups())
def test_nothing_live_is_overwritten_and_traffic_is_what_moves(group):
    ran = replay(group, smallest(group), 4)
    if not group.is_single:
        assert ran.loaded + ran.stored == group.traffic_elements
    for layer in group.layers:
        assert ran.computed[layer.name] == group.elements_over_tiles(layer.name)


@PROPERTY
@given(groups(reuse="deep"))
def test_deeper_reuse_takes_no_more_memory(group):
    others = [dataclasses.replace(group, reuse=reuse) for reuse in ("lifetime", "none")]
    sizes = [smallest(variant).on_chip_bytes for variant in (group, *others)]
    assert sizes == sorted(sizes)


def residual():
    """Two 3x3 convolutions with a shortcut around them, 4 x 4 x 2."""
    window = RangeMap(extent=4, window=3, pad_before=1, pad_after=1)
    maps = (RangeMap.same(1), window, window, RangeMap.whole(2, 2))
    conv = dict(kind="convolution", maps=(maps,), weight_elements=36, filters=2, macs=576, operations=1152)
    shape = (1, 4, 4, 2)
    layers = (
        Layer(name="a", inputs=("x",), **conv),
        Layer(name="b", inputs=("a",), **conv),
        Layer(
            name="sum",
            kind="eltwise",
            inputs=("b", "x"),
            maps=(elementwise_maps(shape),) * 2,
            is_in_place=True,
        ),
    )
    return LayerGraph(
        name="r", layers=layers, shapes=dict.fromkeys(("x", "a", "b", "sum"), shape), outputs=("sum",)
    )


@pytest.mark.parametrize("moved", ["a", "b", "a.weights", "b.weights"])
def test_a_tile_moved_onto_another_that_is_alive_is_seen(moved):
    group = Group(graph=residual(), begin=0, end=3, reuse="lifetime", resident=frozenset("ab"))
    placed = place(group, 4, 10**6)
    replay(group, placed, 4)
    wrong = {**placed.offsets_bytes, moved: placed.offsets_bytes["x"]}
    with pytest.raises(VerificationError, match="overwritten"):
        replay(group, dataclasses.replace(placed, offsets_bytes=wrong), 4)


def test_a_residual_block_by_hand():
    """x and the sum move once, weights once; with two tiles of rows, x has 2 rows more."""
    block = Group(graph=residual(), begin=0, end=3)
    assert block.traffic_elements == 32 + 32 + 72 and block.macs == 2 * 576
    halves = dataclasses.replace(block, tiling=GroupTiling(h=2), resident=frozenset("ab"))
    assert halves.traffic_elements == 2 * 4 * 8 + 32 + 72  # each tile's x is all 4 rows
    assert halves.macs == 576 + 576 * 6 // 4
    retained = dataclasses.replace(halves, tiling=GroupTiling(h=2, retain=True))
    assert (retained.traffic_elements, retained.macs) == (block.traffic_elements, block.macs)


@settings(PROPERTY, max_examples=examples(24))
@given(groups(reuse="lifetime"), st.booleans(), st.integers(10, 600))
def test_runs_are_found_where_any_fit(group, sums, capacity):
    """All ways to choose runs, with the memory of each by its lifetimes, of elements as large as sums."""
    assume(not group.is_single)
    group = dataclasses.replace(group, tiling=GroupTiling(), resident=frozenset())

    def peak(runs):
        lives = dataclasses.replace(group, channel_runs=runs).lifetimes(SUM_BYTES)
        return Liveness(steps=len(group.layers), lifetimes=lives).peak_bytes // SUM_BYTES

    all_runs = sorted(possible_runs(group.layers, sums))
    combinations = [
        runs
        for count in range(len(group.layers) + 1)
        for runs in itertools.combinations(all_runs, count)
        if all(first.end <= second.begin for first, second in itertools.pairwise(runs))
    ]
    elements = {name: math.prod(group.tile(name)) for name in group.spans[0]}
    solution = fitting_runs(group.layers, elements, lambda name: group.graph.shapes[name][3], capacity, sums)
    fitting = [runs for runs in combinations if peak(runs) <= capacity]
    assert (solution is not None) == bool(fitting)
    if solution:
        assert peak(solution[0]) == solution[1] <= capacity
        assert len(solution[0]) == min(map(len, fitting))


def bottleneck():
    """1x1 convolutions 64 to 4 to 64 with the shortcut, 4 x 4, and the next one's first."""
    wide, few = (1, 4, 4, 64), (1, 4, 4, 4)
    axes = (RangeMap.same(1), RangeMap.same(4), RangeMap.same(4))
    count = dict(kind="convolution", weight_elements=256, macs=4096, operations=8192)
    down = dict(count, maps=((*axes, RangeMap.whole(64, 4)),), filters=4)
    layers = (
        Layer(name="a", inputs=("x",), **down),
        Layer(name="b", inputs=("a",), maps=((*axes, RangeMap.whole(4, 64)),), filters=64, **count),
        Layer(
            name="sum",
            kind="eltwise",
            inputs=("b", "y"),
            maps=(elementwise_maps(wide),) * 2,
            is_in_place=True,
        ),
        Layer(name="c", inputs=("sum",), **down),
    )
    shapes = {"x": wide, "y": wide, "a": few, "b": wide, "sum": wide, "c": few}
    return LayerGraph(name="b", layers=layers, shapes=shapes, outputs=("sum", "c"))


@pytest.mark.long
def test_wide_maps_go_channel_by_channel():
    """768 elements hold neither wide map (1024) nor all weights (256 each); all moves once."""
    accelerator = Accelerator(on_chip_bytes=4 * 220)
    (group,) = (plan := fuse_layers(bottleneck(), accelerator)).groups
    assert group.tiling == GroupTiling() and group.traffic_elements == 3 * 1024 + 64 + 3 * 256
    assert FusionReport.from_plan(plan).groups[0].by_channel == (("a",), ("b", "sum", "c"))
    assert {"x", "y", "b", "sum"} <= set(group.channels_on_chip) and not {"a", "c"} & set(
        group.channels_on_chip
    )
    ran = replay(group, plan.placements[0], 4)
    assert ran.loaded + ran.stored == group.traffic_elements
    half = Accelerator(on_chip_bytes=2 * 220, dtype="fp16")  # where sums have no room to wait
    assert not any(run.sums for g in fuse_layers(bottleneck(), half).groups for run in g.channel_runs)


@pytest.mark.long
@pytest.mark.parametrize("moved", ["a", "c", "b", "b.weights", "c.weights"])
def test_what_is_laid_over_a_run_is_seen(moved):
    plan = fuse_layers(bottleneck(), Accelerator(on_chip_bytes=4 * 220))
    (group,), (placed,) = plan.groups, plan.placements
    target = "a" if moved == "c" else "c"
    wrong = {**placed.offsets_bytes, moved: placed.offsets_bytes[target]}
    with pytest.raises(VerificationError, match="overwritten"):
        replay(group, dataclasses.replace(placed, offsets_bytes=wrong), 4)


@pytest.mark.long
@PROPERTY
@given(graphs(most=8), st.integers(40, 2000), st.sampled_from(REUSES), st.sampled_from(HALOS))
def test_plans_fit_run_and_never_lose(graph, on_chip, reuse, halo):
    graph = graph.graph
    accelerator = Accelerator(on_chip_bytes=4 * on_chip)
    try:
        greedy = fuse_layers(graph, accelerator, FusionRules(reuse=reuse, halo=halo, search="greedy"))
    except InfeasibleError as error:
        assert error.demand > accelerator.on_chip_bytes
        return
    runs, best = (
        fuse_layers(graph, accelerator, FusionRules(reuse=reuse, halo=halo, search=s)) for s in SEARCHES[1:]
    )
    assert best.dram_bytes <= runs.dram_bytes <= greedy.dram_bytes <= best.dram_bytes_unfused
    for plan in (greedy, runs, best):
        assert plan.time_overlapped_ns <= plan.layer_by_layer.time_overlapped_ns * (1 + 1e-12)
        assert [g.begin for g in plan.groups] == [0, *(g.end for g in plan.groups[:-1])]
        for group, placed in zip(plan.groups, plan.placements):
            if placed is not None:
                assert placed.on_chip_bytes <= accelerator.on_chip_bytes
                ran = replay(group, placed, 4)
                assert ran.loaded + ran.stored == group.traffic_elements
