"""Do chains stand where layers stood, with their roles, and does all else stay?"""

from dataclasses import replace

import numpy as np
import pytest
import tvm
from graphs import as_module, constant, deviation, input_module, main_module, names, operators
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but
from tvm import relax
from tvm.script import relax as R

from pimflow.core.chains import LayerChain, Link
from pimflow.core.kernel import ConvGeometry
from pimflow.decomposition.factorisation import decompose
from pimflow.decomposition.factors import METHODS, max_ranks
from pimflow.decomposition.ranks import RankRule
from pimflow.relay_passes.canonical.push_bias import PushBias
from pimflow.relay_passes.canonical.subpixel_convolution import SubpixelConvolution
from pimflow.relay_passes.decomposition.decompose import Decompose, decomposable_layers
from pimflow.relay_passes.flat import LAYER_NAMES, LAYER_ROLES, main_bindings, operator, rebuild, shape
from pimflow.relay_passes.regions.extract_regions import extract_regions

MAP = (2, 7, 6, 4)


def conv(builder, x, oc: int, kernel=(3, 3), seed: int = 1, name: str = "conv", **attributes):
    c = int(x.ty.shape[3]) // attributes.get("groups", 1)
    filters = constant(oc, *kernel, c, seed=seed)
    layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
    return builder.emit(relax.op.nn.conv2d(x, filters, **attributes, **layouts), name_hint=name)


def chains(mod: tvm.IRModule, method: str = "tucker", rule: RankRule | None = None) -> dict[str, LayerChain]:
    """Of all layers, by default at full rank."""
    decompositions = {}
    for layer in decomposable_layers(mod):
        g = layer.geometry
        sh, sw = layer.upsampling.scale if layer.upsampling else (1, 1)
        full = max_ranks(method, (g.oc // g.groups // (sh * sw), g.kh * sh, g.kw * sw, g.c // g.groups))
        limit = rule or RankRule(kind="ranks", ranks=full)
        decompositions[layer.name] = decompose(layer.name, layer.filters, g, method, limit, layer.upsampling)
    return decompositions


def residual(builder, x):
    """Biases, activations, a skip connection, a depthwise layer and a product."""
    first = conv(builder, x, 6, padding=[1, 1, 1, 1], name="first")
    first = builder.emit(relax.op.add(first, constant(1, 1, 1, 6, seed=2)), name_hint="first_out")
    first = builder.emit(relax.op.nn.relu(first))
    second = conv(builder, first, 6, kernel=(1, 1), seed=3, name="second")
    second = conv(builder, second, 6, seed=4, padding=[1, 1, 1, 1], groups=6, name="depthwise")
    total = builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(first, second))))
    flat = builder.emit(relax.op.mean(total, axis=[1, 2]))
    fc = builder.emit(relax.op.matmul(flat, constant(6, 5, seed=5)), name_hint="fc")
    return builder.emit(relax.op.add(fc, constant(1, 5, seed=6)), name_hint="fc_out")


def test_a_product_becomes_two_and_the_bias_stays_behind_them():
    @as_module
    def before_decompose(x: R.Tensor((3, 2), "float32")):
        fc = R.matmul(x, R.const([[1.0, 2.0], [3.0, 4.0]]))
        y = R.add(fc, R.const([1.0, 2.0]))
        return y

    @as_module
    def after_decompose(x: R.Tensor((3, 2), "float32")):
        R.func_attr(
            {
                "pimflow.layer_names": {"fc_fconv": "fc.fconv", "fc_lconv": "fc.lconv"},
                "pimflow.roles": {"fc.fconv": "fconv", "fc.lconv": "lconv"},
            }
        )
        fc_fconv = R.matmul(x, R.const([[5.0], [6.0]]))
        fc_lconv = R.matmul(fc_fconv, R.const([[7.0, 8.0]]))
        y = R.add(fc_lconv, R.const([1.0, 2.0]))
        return y

    g = ConvGeometry(n=3, h=1, w=1, c=2, oc=2)
    filters = np.array([[[[5, 6]]]], np.float32)
    first = Link(name="fconv", role="fconv", filters=filters, geometry=replace(g, oc=1))
    filters = np.array([[[[7]]], [[[8]]]], np.float32)
    last = Link(name="lconv", role="lconv", filters=filters, geometry=replace(g, c=1))
    chain = LayerChain(
        layer="fc", method="svd", ranks=(1,), relative_error=0.0, geometry=g, links=(first, last)
    )
    tvm.ir.assert_structural_equal(Decompose({"fc": chain})(before_decompose), after_decompose)


@pytest.mark.long
@pytest.mark.parametrize("method", long_but(["tucker"], METHODS))
def test_a_network_at_full_rank_computes_what_it_did(method):
    before = input_module(residual, MAP)
    after = Decompose(chains(before, method))(before)
    assert "depthwise" in names(after, "nn.conv2d")
    assert not {"first", "second", "fc"} & {*names(after, "nn.conv2d"), *names(after, "matmul")}
    assert deviation(before, after) <= 1e-4


@settings(max_examples=examples(8), derandomize=True, deadline=None)
@given(st.data())
def test_stride_padding_dilation_and_groups_are_kept(data):
    def pair(low, high):
        return [data.draw(st.integers(low, high)) for _ in range(2)]

    attributes = {
        "strides": pair(1, 2),
        "dilation": pair(1, 2),
        "padding": pair(0, 2) + pair(0, 2),
        "groups": data.draw(st.sampled_from([1, 2])),
    }
    kernel = tuple(pair(1, 3))
    before = input_module(lambda b, x: conv(b, x, 6, kernel=kernel, **attributes), MAP)
    after = Decompose(chains(before, data.draw(st.sampled_from(METHODS))))(before)
    assert operators(after).count("nn.conv2d") > 1
    assert deviation(before, after) <= 1e-4


@pytest.mark.long
@settings(max_examples=examples(9), derandomize=True, deadline=None)
@given(st.data())
def test_transposed_convolutions_are_decomposed_as_such(data):
    def pair(low, high):
        return [data.draw(st.integers(low, high)) for _ in range(2)]

    strides, groups = pair(1, 3), data.draw(st.sampled_from([1, 2]))
    kernel = pair(1, 4)
    attributes = {
        "strides": strides,
        "padding": [min(p, k - 1) for p, k in zip(pair(0, 1) + pair(0, 1), kernel * 2)],
        "output_padding": [data.draw(st.integers(0, s - 1)) for s in strides],
        "groups": groups,
    }
    filters = constant(4, 6 // groups, *kernel, seed=7)

    def body(builder, x):
        layouts = {"data_layout": "NHWC", "kernel_layout": "IOHW"}
        up = relax.op.nn.conv2d_transpose(x, filters, **attributes, **layouts)
        return builder.emit(relax.op.nn.relu(builder.emit(up, name_hint="up")))

    before = SubpixelConvolution()(input_module(body, MAP))
    decompositions = chains(before, data.draw(st.sampled_from(METHODS)))
    after = Decompose(decompositions)(before)
    links = decompositions["up"].links
    assert links[0].scale == links[-1].scale == (1, 1)
    assert np.prod([link.scale for link in links], axis=0).tolist() == strides
    assert list(LAYER_ROLES.read(after)) == [f"up.{link.name}" for link in links]
    # The last link makes the full map; the maps before it are smaller.
    last = next(b for b in main_bindings(after) if b.var.name == "up_lconv")
    assert shape(last.var) == shape(main_bindings(after)[-1].var)
    assert deviation(before, after) <= 1e-4
    tvm.ir.assert_structural_equal(Decompose(decompositions)(after), after)


def test_a_spread_that_others_read_too_is_left_as_it_is():
    filters = constant(4, 3, 2, 2, seed=7)

    def body(builder, x):
        layouts = {"data_layout": "NHWC", "kernel_layout": "IOHW"}
        up = relax.op.nn.conv2d_transpose(x, filters, strides=[2, 2], **layouts)
        return builder.emit(relax.op.nn.relu(builder.emit(up, name_hint="up")))

    before = SubpixelConvolution()(input_module(body, MAP))

    def expose(builder, var, value):
        if operator(value) != "nn.relu":
            return None
        spread = next(b.var for b in main_bindings(before) if operator(b.value) == "permute_dims")
        flat = builder.emit(relax.op.reshape(env[spread.name], (2, 14, 12, 3)))
        return relax.op.add(builder.emit(value), flat)

    env = {}

    def remember(builder, var, value):
        if operator(value) == "permute_dims":
            env[var.name] = builder.emit(value, name_hint=var.name)
            return env[var.name]
        return expose(builder, var, value)

    (layer,) = decomposable_layers(rebuild(before, remember))
    assert layer.upsampling is None and layer.geometry.oc == 12
    (layer,) = decomposable_layers(before)
    assert layer.upsampling.scale == (2, 2)


def test_at_a_low_rank_only_the_filters_change():
    """The module computes what the original does with the filters that the chain says it has."""
    before = input_module(lambda b, x: conv(b, x, 6, padding=[1, 1, 1, 1]), MAP)
    decomposition = chains(before, rule=RankRule.parse("0.4"))["conv"]
    u, core, v = (link.filters for link in reversed(decomposition.links))
    composed = np.einsum("or,ryxi,ic->oyxc", u[:, 0, 0], core, v[:, 0, 0])
    (original,) = (layer.filters for layer in decomposable_layers(before))
    error = np.linalg.norm(original - composed) / np.linalg.norm(original)
    assert error == pytest.approx(decomposition.relative_error, abs=1e-6) and error > 0.1
    rank1 = relax.const(composed.astype(np.float32))

    def rewrite(_, var, value):
        return relax.Call(value.op, [value.args[0], rank1], value.attrs) if var.name == "conv" else None

    assert deviation(rebuild(before, rewrite), Decompose({"conv": decomposition})(before)) <= 1e-4


def test_a_second_run_changes_nothing():
    before = input_module(residual, MAP)
    decompositions = chains(before)
    once = Decompose(decompositions)(before)
    tvm.ir.assert_structural_equal(Decompose(decompositions)(once), once)
    assert decomposable_layers(once) == []  # what is decomposed has roles


def test_layers_that_are_not_named_stay():
    before = input_module(residual, MAP)
    tvm.ir.assert_structural_equal(Decompose({})(before), before)
    decompositions = chains(before)
    after = Decompose({"second": decompositions["second"]})(before)
    assert {"first", "depthwise"} < set(names(after, "nn.conv2d")) and names(after, "matmul") == ["fc"]


def test_what_can_be_decomposed():
    def body(builder, x):
        y = conv(builder, x, 8, groups=2, padding=[1, 1, 1, 1], name="grouped")
        z = conv(builder, y, 8, groups=8, name="depthwise")
        flat = builder.emit(relax.op.reshape(z, (2, 20, 8)))
        scores = builder.emit(relax.op.matmul(flat, builder.emit(relax.op.permute_dims(flat, [0, 2, 1]))))
        return builder.emit(relax.op.matmul(scores, constant(20, 3)), name_hint="tokens")

    layers = decomposable_layers(input_module(body, MAP))
    assert [(layer.name, layer.fc) for layer in layers] == [("grouped", False), ("tokens", True)]
    assert (layers[1].geometry.n, layers[1].geometry.c, layers[1].geometry.oc) == (40, 20, 3)


def test_weights_keep_their_type_and_integers_are_left_alone():
    def product_module(dtype):
        x = relax.Var("x", relax.TensorType((3, 4), dtype))
        y = relax.op.matmul(x, relax.const(np.arange(20).reshape(4, 5), dtype))
        mod = main_module([x], lambda builder: builder.emit(y, name_hint="fc"))
        return rebuild(mod, lambda *_: None)

    half = Decompose(chains(product_module("float16")))(product_module("float16"))
    assert operators(half) == ["matmul"] * 2 and str(half["main"].ret_ty.dtype) == "float16"
    assert decomposable_layers(product_module("int32")) == []


def test_roles_reach_the_regions_through_other_passes():
    before = input_module(residual, MAP)
    after = PushBias()(Decompose(chains(before))(before))
    role_by_region = {region.name: region.role for region in extract_regions(after).regions if region.role}
    assert role_by_region == {
        "first.fconv": "fconv",
        "first.core": "core",
        "first.lconv": "lconv",
        "second.fconv": "fconv",
        "second.lconv": "lconv",
        "fc.fconv": "fconv",
        "fc.lconv": "lconv",
    }
    assert not any(region.role for region in extract_regions(before).regions)


def test_names_of_other_layers_stay_even_if_they_are_those_of_a_chain():
    def body(builder, x):
        y = builder.emit(relax.op.nn.relu(conv(builder, x, 4, name="a")))
        return builder.emit(relax.op.nn.relu(conv(builder, y, 5, kernel=(1, 1), name="a_fconv")))

    before = LAYER_NAMES.attach(input_module(body, MAP), {"a": "a", "a_fconv": "a.fconv"})
    after = Decompose({"a": chains(before)["a"]})(before)
    regions = {region.name: region for region in extract_regions(after).regions}
    assert list(regions) == ["a.fconv_", "a.core", "a.lconv", "a.fconv"]
    assert [region.role for region in regions.values()] == ["fconv", "core", "lconv", ""]
    assert LAYER_ROLES.read(after).keys() == {"a.fconv_", "a.core", "a.lconv"}
