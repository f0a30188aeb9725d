"""Are groups over branches the best there are? Every way to run the layers in groups is tried."""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_graphs import graphs
from length import examples
from replay import replay

from pimflow.core.ranges import RangeMap
from pimflow.fusion import FusionRules, LayerGraph, convex, fuse_layers
from pimflow.fusion.accelerator import Accelerator
from pimflow.fusion.convex import ConvexCover, convex_sets
from pimflow.fusion.layers import Layer, elementwise_maps
from pimflow.fusion.run_costs import Objective, RunCosts
from pimflow.fusion.search import OBJECTIVES

PROPERTY = settings(derandomize=True, deadline=None, max_examples=examples(15))


def smallest_objective(costs):
    """Least objective over all sequences of groups in which every layer runs after those that it reads."""
    sources, all_positions = costs.graph.sources, frozenset(range(len(costs)))

    def is_runnable(done, group):
        return all(sources[position] <= done | set(group) for position in group)

    @functools.cache
    def objective(done):
        remaining = sorted(all_positions - done)
        return min(
            (
                group_cost.objective + objective(done | set(group))
                for size in range(1, len(remaining) + 1)
                for group in itertools.combinations(remaining, size)
                if is_runnable(done, group) and (group_cost := costs.best_group(group))
            ),
            default=0.0,
        )

    return objective(frozenset())


@PROPERTY
@given(graphs(), st.integers(40, 400), st.sampled_from(OBJECTIVES), st.sampled_from(["lifetime", "deep"]))
def test_no_way_to_group_the_layers_is_better(drawn, on_chip, objective, reuse):
    measure = Objective(Accelerator(on_chip_bytes=4 * on_chip), objective)
    costs = RunCosts(drawn.graph, measure, reuse, "retain", lambda share: None)
    groups = ConvexCover(costs).best(costs)
    order = [position for group in groups for position in group.positions]
    assert sorted(order) == list(range(len(costs)))
    for index, position in enumerate(order):
        assert drawn.graph.sources[position] <= set(order[:index])
    assert sum(group.objective for group in groups) == pytest.approx(smallest_objective(costs))


@PROPERTY
@given(graphs(most=7))
def test_the_sets_are_those_that_no_path_leaves_and_enters(drawn):
    graph = drawn.graph
    count = len(graph.layers)
    sets, complete = convex_sets(graph, tuple((position,) for position in range(count)))
    assert complete and len(set(sets)) == len(sets)
    for size in range(1, count + 1):
        for group in itertools.combinations(range(count), size):
            outside = {p for p in range(count) if p not in group and graph.ancestors([p]) & set(group)}
            assert (group in sets) == (not outside & graph.ancestors(group))


def inception(branches=3, deep=2):
    """Branches of convolutions over one tensor, joined by a concatenation."""
    shape = (1, 6, 6, 4)
    window = RangeMap(extent=6, window=3, pad_before=1, pad_after=1)
    maps = (RangeMap.same(1), window, window, RangeMap.whole(4, 4))
    layers, shapes, ends = [], {"x": shape}, []
    for branch in range(branches):
        source = "x"
        for index in range(deep):
            name = f"b{branch}.{index}"
            layers.append(
                Layer(
                    name=name, kind="convolution", inputs=(source,), maps=(maps,), weight_elements=144,
                    filters=4, macs=36 * 144, operations=72 * 144,
                )
            )  # fmt: skip
            layers.append(Layer(name=f"{name}.relu", kind="relu", inputs=(name,), operations=144,
                                maps=(elementwise_maps(shape),), is_in_place=True))  # fmt: skip
            shapes |= {name: shape, f"{name}.relu": shape}
            source = f"{name}.relu"
        ends.append(source)
    parts = [
        (*map(RangeMap.same, shape[:3]), RangeMap.concat_operand(4, 4 * i, 4 * branches))
        for i in range(branches)
    ]
    layers.append(Layer(name="joined", kind="concat", inputs=tuple(ends), maps=tuple(parts)))
    shapes["joined"] = (1, 6, 6, 4 * branches)
    return LayerGraph(name="i", layers=tuple(layers), shapes=shapes, outputs=("joined",))


def test_a_group_may_leave_out_what_stands_between(monkeypatch):
    """Layers of both branches in one group, and not all between them."""
    graph, accelerator = inception(branches=2), Accelerator(on_chip_bytes=4 * 275)
    runs = fuse_layers(graph, accelerator, FusionRules(search="runs"))
    for max_sets in (convex.MAX_SETS, 50):  # all sets of layers; some of links
        monkeypatch.setattr(convex, "MAX_SETS", max_sets)
        best = fuse_layers(graph, accelerator)
        assert best.dram_bytes < runs.dram_bytes
        assert [layer.name for layer in best.graph.layers] != [layer.name for layer in graph.layers]
        for group, placed in zip(best.groups, best.placements):
            if placed:
                ran = replay(group, placed, 4)
                assert ran.loaded + ran.stored == group.traffic_elements


def test_groups_that_wait_for_one_another_are_no_cover():
    """Both crossed pairs are convex and cheapest; together they cannot run."""
    shape = (1, 1, 1, 4)
    unary = dict(kind="relu", maps=(elementwise_maps(shape),), operations=4, is_in_place=True)
    layers = (
        Layer(name="a", inputs=("x",), **unary),
        Layer(name="b", inputs=("y",), **unary),
        Layer(name="c", inputs=("b",), **unary),
        Layer(name="d", inputs=("a",), **unary),
    )
    graph = LayerGraph(name="g", layers=layers, shapes=dict.fromkeys("xyabcd", shape), outputs=("c", "d"))
    costs = RunCosts(graph, Objective(Accelerator(), "traffic"), "deep", "recompute", lambda share: None)
    pairs = [costs.single_layers[p] for p in range(4)]
    crossed = [convex.CostedGroup(positions=p, objective=1.0) for p in ((0, 2), (1, 3))]
    cover = convex._cover(pairs + crossed, costs)
    assert sorted(len(group.positions) for group in cover) == [1, 1, 2]
