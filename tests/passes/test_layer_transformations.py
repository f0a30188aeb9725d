"""Do merged lconvs and split fconvs compute what the layers did, and only where they may?"""

import numpy as np
import pytest
import tvm
from by_numpy import evaluate_by_numpy
from graphs import as_module, conv2d_nhwc, inputs, names, run
from hypothesis import given, settings
from length import examples
from skip_graphs import SkipGraph, networks
from tvm import relax
from tvm.script import relax as R

from pimflow.relay_passes.decomposition.fold_fconvs import FoldFconvs, fconv_sites
from pimflow.relay_passes.decomposition.fold_lconvs import FoldLconvs, fold_sites
from pimflow.relay_passes.decomposition.layer_flops import flops
from pimflow.relay_passes.decomposition.merge_lconvs import MergeLconvs
from pimflow.relay_passes.decomposition.optimize_skips import copy_skips, skips
from pimflow.relay_passes.decomposition.split_concat import SplitConcat
from pimflow.relay_passes.flat import LAYER_ROLES, main_bindings, operator, shape
from pimflow.relay_passes.regions.extract_regions import extract_regions


def close(before, after) -> bool:
    (x,) = inputs(before)
    a, b = evaluate_by_numpy(before, x), evaluate_by_numpy(after, x)
    return a.shape == b.shape and np.abs(a - b).max() <= 1e-4 * np.abs(a).max()


def joint_layers(activations=("relu", "relu"), *, bias=(True, True), join="concat", tail="relu"):
    """Two decomposed layers side by side that meet, and a third that reads them."""
    graph = SkipGraph(3)
    forms = zip("ab", activations, bias)
    parts = [graph.layer(graph.x, 8, name, activation=applied, bias=term) for name, applied, term in forms]
    met = graph.concat(parts, "met") if join == "concat" else graph.add(*parts, "met")
    met = graph.emit(relax.op.nn.relu(met), "after") if tail == "relu" else met
    return graph.module(graph.emit(relax.op.nn.relu(graph.layer(met, 4, "c")), "result"))


def test_lconvs_that_are_concatenated_become_one():
    @as_module
    def lconv_merge_before(x: R.Tensor((1, 2, 2, 1), "float32"), y: R.Tensor((1, 2, 2, 1), "float32")):
        R.func_attr({"pimflow.layer_names": {}, "pimflow.roles": {"a": "lconv", "b": "lconv"}})
        a = conv2d_nhwc(x, [[[[1.0]]], [[[2.0]]]])
        ra = R.nn.relu(a)
        b = conv2d_nhwc(y, [[[[3.0]]]])
        rb = R.nn.relu(b)
        c = R.concat((ra, rb), axis=3)
        return c

    @as_module
    def lconv_merge_expected(x: R.Tensor((1, 2, 2, 1), "float32"), y: R.Tensor((1, 2, 2, 1), "float32")):
        R.func_attr(
            {
                "pimflow.layer_names": {"c_lconv": "c.lconv"},
                "pimflow.roles": {"a": "lconv", "b": "lconv", "c.lconv": "lconv"},
            }
        )
        xy = R.concat((x, y), axis=3)
        c_lconv = conv2d_nhwc(xy, [[[[1.0, 0.0]]], [[[2.0, 0.0]]], [[[0.0, 3.0]]]])
        c = R.nn.relu(c_lconv)
        return c

    tvm.ir.assert_structural_equal(MergeLconvs()(lconv_merge_before), lconv_merge_expected)


def test_an_fconv_of_a_concatenation_becomes_a_sum_of_fconvs():
    @as_module
    def split_fconv_before(x: R.Tensor((1, 2, 2, 1), "float32"), y: R.Tensor((1, 2, 2, 2), "float32")):
        R.func_attr({"pimflow.layer_names": {"f": "c.fconv"}, "pimflow.roles": {"c.fconv": "fconv"}})
        c = R.concat((x, y), axis=3)
        r = R.nn.relu(c)
        f = conv2d_nhwc(r, [[[[1.0, 2.0, 3.0]]]])
        z = R.sigmoid(f)
        return z

    @as_module
    def split_fconv_expected(x: R.Tensor((1, 2, 2, 1), "float32"), y: R.Tensor((1, 2, 2, 2), "float32")):
        R.func_attr(
            {
                "pimflow.layer_names": {"f": "c.fconv", "f_1": "c.fconv_1", "f_2": "c.fconv_2"},
                "pimflow.roles": {"c.fconv": "fconv", "c.fconv_1": "fconv", "c.fconv_2": "fconv"},
            }
        )
        rx = R.nn.relu(x)
        f_1 = conv2d_nhwc(rx, [[[[1.0]]]])
        ry = R.nn.relu(y)
        f_2 = conv2d_nhwc(ry, [[[[2.0, 3.0]]]])
        f = R.add(f_1, f_2)
        z = R.sigmoid(f)
        return z

    tvm.ir.assert_structural_equal(SplitConcat()(split_fconv_before), split_fconv_expected)


@pytest.mark.parametrize(
    "before",
    [
        joint_layers(),
        pytest.param(joint_layers(bias=(True, False)), marks=pytest.mark.long),
        pytest.param(joint_layers((None, None), tail=""), marks=pytest.mark.long),
        pytest.param(joint_layers((None, None), join="add"), marks=pytest.mark.long),
        joint_layers((None, None), bias=(False, True), join="add"),
    ],
)
def test_merged_lconvs_compute_the_same_on_llvm(before):
    after = MergeLconvs()(before)
    assert {"a_lconv", "b_lconv"} & {*names(after, "nn.conv2d")} == set()
    assert LAYER_ROLES.read(after)["met.lconv"] == "lconv"
    (x,), (y,) = (run(mod, *inputs(before)) for mod in (before, after))
    assert np.abs(x - y).max() <= 1e-4 * np.abs(x).max()
    tvm.ir.assert_structural_equal(MergeLconvs()(after), after)


@pytest.mark.long
@settings(max_examples=examples(24), derandomize=True, deadline=None)
@given(networks())
def test_any_network_computes_the_same_in_every_form(before):
    for base in (before, copy_skips(before, skips(before))):
        merged = MergeLconvs()(base)
        for after in (merged, SplitConcat()(base), SplitConcat()(merged)):
            assert close(before, after)
            extract_regions(after)  # names are unique
        tvm.ir.assert_structural_equal(MergeLconvs()(merged), merged)
        split = SplitConcat()(merged)
        tvm.ir.assert_structural_equal(SplitConcat()(split), split)


@pytest.mark.parametrize(
    "before",
    [
        joint_layers(("relu", "sigmoid")),
        joint_layers(("relu", None)),
        joint_layers(join="add"),  # a sum of activations is no sum of lconvs
        LAYER_ROLES.attach(joint_layers(), {"c.fconv": "fconv"}),  # shapes of lconvs without the role
    ],
)
def test_lconvs_that_do_not_agree_stay(before):
    tvm.ir.assert_structural_equal(MergeLconvs()(before), before)


def test_an_lconv_that_others_read_stays():
    graph = SkipGraph(3)
    a, b = graph.layer(graph.x, 8, "a"), graph.layer(graph.x, 8, "b")
    concatenation = graph.concat([a, b], "met")
    mod = graph.module(graph.concat([concatenation, graph.emit(relax.op.sigmoid(a), "other")], "result"))
    tvm.ir.assert_structural_equal(MergeLconvs()(mod), mod)


def test_what_is_no_fconv_of_a_concatenation_is_not_split():
    roles = {name: role for name, role in LAYER_ROLES.read(joint_layers()).items() if role != "fconv"}
    for before in (LAYER_ROLES.attach(joint_layers(), roles), joint_layers(join="add")):
        tvm.ir.assert_structural_equal(SplitConcat()(before), before)


def test_neighbours_that_agree_are_merged_and_the_others_stay():
    graph = SkipGraph(3)
    plain_layer = graph.conv(graph.x, 4, "kept")
    parts = [graph.layer(graph.x, 8, name) for name in "ab"]
    met = graph.concat([plain_layer, *parts], "met")
    mod = graph.module(graph.emit(relax.op.nn.relu(graph.layer(met, 4, "c")), "result"))
    after = MergeLconvs()(mod)
    (met,) = (b for b in main_bindings(after) if b.var.name == "met" and operator(b.value) == "concat")
    assert [shape(part)[3] for part in met.value.args[0].fields] == [4, 16]
    assert close(mod, after)


def test_a_part_is_reduced_as_soon_as_it_is_there():
    after = SplitConcat()(joint_layers())
    order = [b.var.name for b in main_bindings(after)]
    assert order.index("c_fconv_1") < order.index("b_fconv")  # the first part waits in its reduced form


def test_an_lconv_and_the_fconv_behind_it_become_one():
    @as_module
    def pair_merge_before(x: R.Tensor((1, 2, 2, 1), "float32")):
        R.func_attr({"pimflow.layer_names": {}, "pimflow.roles": {"a": "lconv", "f": "fconv"}})
        a = conv2d_nhwc(x, [[[[1.0]]], [[[2.0]]]])
        b = R.add(a, R.const([[[[5.0, 7.0]]]]))
        f = conv2d_nhwc(b, [[[[3.0, 4.0]]]], strides=[2, 2])
        y = R.nn.relu(f)
        return y

    @as_module
    def pair_merge_expected(x: R.Tensor((1, 2, 2, 1), "float32")):
        R.func_attr({"pimflow.layer_names": {"f": "f"}, "pimflow.roles": {"a": "lconv", "f": "core"}})
        f = conv2d_nhwc(x, [[[[11.0]]]], strides=[2, 2])
        b = R.add(f, R.const([[[[43.0]]]]))
        y = R.nn.relu(b)
        return y

    folded = FoldLconvs()(pair_merge_before)
    tvm.ir.assert_structural_equal(folded, pair_merge_expected)
    tvm.ir.assert_structural_equal(FoldLconvs()(folded), folded)


@pytest.mark.parametrize("why", ["activation", "read by others", "residual"])
def test_an_lconv_stays_where_more_lies_behind_it(why):
    graph = SkipGraph(3)
    x = graph.layer(graph.x, 8, "a", activation="relu" if why == "activation" else "")
    y = graph.add(x, x, "twice") if why == "residual" else x
    y = graph.layer(y, 8, "b")
    module = graph.module(graph.add(x, y, "sum") if why == "read by others" else y)
    assert FoldLconvs()(module).same_as(module) and not fold_sites(module)


@settings(max_examples=examples(15))
@given(networks())
def test_folding_keeps_values_and_saves_operations(module):
    folded = FoldLconvs()(module)
    assert close(module, folded)
    sites = fold_sites(module)
    assert flops(folded) < flops(module) if sites else folded.same_as(module)
    assert not fold_sites(folded)
    tvm.ir.assert_structural_equal(FoldLconvs()(folded), folded)


def test_an_fconv_of_an_input_becomes_part_of_its_core():
    @as_module
    def first_layer_before(x: R.Tensor((1, 2, 4, 4), "float32")):
        R.func_attr({"pimflow.layer_names": {}, "pimflow.roles": {"f": "fconv", "c": "core"}})
        t = R.permute_dims(x, [0, 2, 3, 1])
        f = conv2d_nhwc(t, [[[[1.0, 3.0]]]])
        c = conv2d_nhwc(f, [[[[1.0], [2.0]], [[4.0], [5.0]]]], strides=[2, 2])
        return c

    @as_module
    def first_layer_expected(x: R.Tensor((1, 2, 4, 4), "float32")):
        R.func_attr({"pimflow.layer_names": {}, "pimflow.roles": {"f": "fconv", "c": "core"}})
        t = R.permute_dims(x, [0, 2, 3, 1])
        c = conv2d_nhwc(t, [[[[1.0, 3.0], [2.0, 6.0]], [[4.0, 12.0], [5.0, 15.0]]]], strides=[2, 2])
        return c

    folded = FoldFconvs()(first_layer_before)
    tvm.ir.assert_structural_equal(folded, first_layer_expected)
    assert FoldFconvs()(folded).same_as(folded)


@settings(max_examples=examples(15))
@given(networks())
def test_folding_first_layers_keeps_values_and_all_other_layers(module):
    """Padding and strides stay, and a layer behind another one keeps its fconv."""
    sites, folded = fconv_sites(module), FoldFconvs()(module)
    assert close(module, folded)
    assert len(main_bindings(module)) - len(main_bindings(folded)) == len(sites)
    assert not fconv_sites(folded) and (sites or folded.same_as(module))
