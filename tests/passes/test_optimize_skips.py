"""Do skip connections wait in their reduced form, copied where it pays, and compute the same?"""

from dataclasses import replace

import numpy as np
import pytest
import tvm
from by_numpy import evaluate_by_numpy
from graphs import as_module, conv2d_nhwc, inputs, names
from hypothesis import given, settings
from length import examples
from skip_graphs import SkipGraph, networks
from tvm import relax
from tvm.script import relax as R

from pimflow.relay_passes.decomposition.optimize_skips import COPY_SOURCES, copy_skips, skips
from pimflow.relay_passes.flat import LAYER_ROLES, main_bindings
from pimflow.relay_passes.regions.extract_regions import extract_regions


def optimize(mod, names=None, **options):
    """`mod` with copies of these skip links, or of those that the paper's test passes."""
    links = skips(mod, **options)
    return copy_skips(mod, [s for s in links if (s.is_profitable() if names is None else s.name in names)])


def hourglass(*, role: str = "lconv", branch: int = 8):
    """One long skip connection over two layers, added at the end."""
    graph = SkipGraph(3)
    skip = graph.layer(graph.x, branch, "a")
    y = graph.layer(graph.layer(skip, 8, "b"), branch, "c")
    mod = graph.module(graph.emit(relax.op.nn.relu(graph.add(skip, y, "sum")), "result"))
    current_roles = LAYER_ROLES.read(mod)
    return LAYER_ROLES.attach(mod, current_roles | {"a.lconv": role}) if role != "lconv" else mod


def test_a_copy_is_made_right_before_the_distant_use():
    @as_module
    def skip_copy_before(x: R.Tensor((1, 2, 2, 1), "float32")):
        R.func_attr({"pimflow.layer_names": {"lv": "a.lconv"}, "pimflow.roles": {"a.lconv": "lconv"}})
        lv = conv2d_nhwc(x, [[[[1.0]]], [[[2.0]]]])
        v = R.nn.relu(lv)
        a = R.sigmoid(v)
        b = R.negative(a)
        c = R.sigmoid(b)
        y = R.add(v, c)
        return y

    @as_module
    def skip_copy_expected(x: R.Tensor((1, 2, 2, 1), "float32")):
        R.func_attr(
            {
                "pimflow.layer_names": {"lv": "a.lconv", "lv_copy": "a.lconv.copy", "v_copy": "v.copy"},
                "pimflow.restored": {"a.lconv.copy": "a.lconv", "v.copy": "v"},
                "pimflow.roles": {"a.lconv": "lconv", "a.lconv.copy": "lconv"},
            }
        )
        lv = conv2d_nhwc(x, [[[[1.0]]], [[[2.0]]]])
        v = R.nn.relu(lv)
        a = R.sigmoid(v)
        b = R.negative(a)
        c = R.sigmoid(b)
        lv_copy = conv2d_nhwc(x, [[[[1.0]]], [[[2.0]]]])
        v_copy = R.nn.relu(lv_copy)
        y = R.add(v_copy, c)
        return y

    after = optimize(skip_copy_before, ["v"], distance=2)
    tvm.ir.assert_structural_equal(after, skip_copy_expected)
    # three after the use before
    tvm.ir.assert_structural_equal(optimize(skip_copy_before, ["v"], distance=3), skip_copy_before)


@settings(max_examples=examples(24), derandomize=True, deadline=None)
@given(networks())
def test_any_network_computes_the_same_bits(before):
    connections = skips(before)
    after = copy_skips(before, connections)
    (x,) = inputs(before)
    assert np.array_equal(evaluate_by_numpy(before, x), evaluate_by_numpy(after, x))
    assert skips(after) == ()
    extract_regions(after)  # names are unique
    copies = COPY_SOURCES.read(after)
    assert {
        LAYER_ROLES.read(after).get(copy, "") for copy in copies if LAYER_ROLES.read(before).get(copies[copy])
    } <= {"lconv"}
    for skip in connections:
        assert len(set(skip.restores)) == len(skip.restores)
        assert not set(skip.reduced) & set(skip.restores)


def test_what_is_live_between_is_the_reduced_tensor_alone():
    before = hourglass()
    (skip,) = skips(before)
    assert (skip.name, skip.uses, skip.reduced) == ("a_out", ("sum",), ("a_core",))
    assert skip.restores == ("a_lconv", "a_bias", "a_out")
    bindings = main_bindings(copy_skips(before, [skip]))
    steps = {b.var.name: step for step, b in enumerate(bindings)}
    last = {v.name: step for step, b in enumerate(bindings) for v in relax.analysis.free_vars(b.value)}
    assert last["a_out"] == steps["b_fconv"] and last["a_core"] == steps["a_lconv_copy"] == steps["sum"] - 3


def test_costs_of_a_copy_by_hand():
    (skip,) = skips(hourglass(), original_flops={"a.lconv": 1000})
    pixels, full, reduced = 16, 8, 2
    assert skip.flops == 2 * pixels * full * reduced and skip.flops_original == 1000
    assert skip.size_bytes == 4 * pixels * full
    # The bias is added out of place here: its operand and result, and the reduced tensor before them.
    assert skip.peak_bytes == 4 * pixels * 2 * full
    assert skip.operands_bytes == 4 * pixels * 2 * full
    assert skip.is_profitable() and not replace(skip, flops_original=skip.flops - 1).is_profitable()
    assert not skips(hourglass(), original_flops={"a.lconv": 1})[0].is_profitable()


def test_the_paper_refuses_what_takes_more_memory_than_making_it():
    """The sum of two restored tensors takes three maps, with one more to restore; here each is restored."""
    graph = SkipGraph(3)
    first = graph.layer(graph.x, 8, "a")
    skip = graph.emit(relax.op.nn.relu(graph.add(first, graph.layer(graph.x, 8, "b"), "both")), "skip")
    y = graph.layer(graph.layer(skip, 8, "c"), 8, "d")
    mod = graph.module(graph.add(skip, y, "sum"))
    by_name = {connection.name: connection for connection in skips(mod)}
    assert by_name["skip"].peak_bytes > by_name["skip"].operands_bytes
    assert not by_name["skip"].is_profitable()


def test_shared_predecessors_are_restored_once():
    graph = SkipGraph(3)
    base = graph.layer(graph.x, 8, "a")
    left = graph.emit(relax.op.sigmoid(base), "left")
    right = graph.emit(relax.op.negative(base), "right")
    skip = graph.add(left, right, "skip")
    y = graph.layer(graph.layer(skip, 8, "b"), 8, "c")
    mod = graph.module(graph.emit(relax.op.nn.relu(graph.add(skip, y, "sum")), "result"))
    (connection,) = (s for s in skips(mod) if s.name == "skip")
    assert sorted(connection.restores) == sorted(["a_lconv", "a_bias", "a_out", "left", "right", "skip"])
    after = copy_skips(mod, [connection])
    assert sum("lconv_copy" in name for name in names(after, "nn.conv2d")) == 1
    (x,) = inputs(mod)
    assert np.array_equal(evaluate_by_numpy(mod, x), evaluate_by_numpy(after, x))


def test_the_search_ends_at_inputs_of_the_network():
    graph = SkipGraph(3)
    skip = graph.add(graph.conv(graph.x, 8, "kept"), graph.layer(graph.x, 8, "a"), "skip")
    y = graph.layer(graph.layer(skip, 8, "b"), 8, "c")
    mod = graph.module(graph.emit(relax.op.nn.relu(graph.add(skip, y, "sum")), "result"))
    (connection,) = (s for s in skips(mod) if s.name == "skip")
    assert set(connection.reduced) == {"x", "a_core"} and "kept" in connection.restores
    (x,) = inputs(mod)
    assert np.array_equal(evaluate_by_numpy(mod, x), evaluate_by_numpy(copy_skips(mod, [connection]), x))


def test_roles_come_from_the_attribute_and_not_from_shapes():
    mod = hourglass(role="")
    assert all(skip.name != "a_out" or "a_fconv" not in skip.restores for skip in skips(mod))
    # restored by the convolution that looks like an lconv, from what is known as reduced
    (connection,) = skips(mod)
    assert connection.reduced == ("a_core",)
    plain = LAYER_ROLES.attach(mod, {})
    assert skips(plain) == ()
    tvm.ir.assert_structural_equal(optimize(plain), plain)


def test_results_and_short_connections_stay():
    graph = SkipGraph(3)
    skip = graph.layer(graph.x, 8, "a")
    y = graph.layer(graph.layer(skip, 8, "b"), 8, "c")
    last = graph.emit(relax.op.nn.relu(graph.add(skip, y, "sum")), "result")
    assert skips(graph.module(last, skip)) == ()  # the network returns it
    graph = SkipGraph(3)
    skip = graph.layer(graph.x, 8, "a")
    short = graph.add(graph.emit(relax.op.sigmoid(skip), "b"), skip, "sum")
    assert skips(graph.module(graph.emit(relax.op.nn.relu(short), "result"))) == ()


def test_uses_close_to_each_other_share_a_copy():
    graph = SkipGraph(3)
    skip = graph.layer(graph.x, 8, "a")
    y = graph.layer(graph.layer(skip, 8, "b"), 8, "c")
    first = graph.add(skip, y, "first")
    second = graph.add(skip, graph.emit(relax.op.sigmoid(first), "between"), "second")
    mod = graph.module(graph.emit(relax.op.nn.relu(second), "result"))
    (connection,) = skips(mod)
    assert connection.uses == ("first",)
    after = copy_skips(mod, [connection])
    readers = {b.var.name: [v.name for v in relax.analysis.free_vars(b.value)] for b in main_bindings(after)}
    assert "a_out_copy" in readers["first"] and "a_out_copy" in readers["second"]


@pytest.mark.parametrize("distance", [1, 4, 9])
def test_a_larger_distance_never_finds_more(distance):
    mod = hourglass()
    near, far = (skips(mod, distance=d) for d in (distance, distance + 1))
    assert {s.name for s in far} <= {s.name for s in near}
