"""Does the search see the network's layers, under their own names, with their own sizes?"""

import numpy as np
import onnx
import pytest
from graphs import as_module, shaped_model
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from onnx import helper
from tvm.script import relax as R

from pimflow.core.kernel import ConvGeometry
from pimflow.core.region_graph import RegionGraph
from pimflow.errors import UnknownNameError, UnsupportedOpError
from pimflow.frontend import onnx_graph
from pimflow.relay_passes.flat import LAYER_NAMES
from pimflow.relay_passes.regions.extract_regions import extract_regions, filters


def weight(*dims: int) -> np.ndarray:
    return np.random.default_rng(dims).standard_normal(dims, np.float32)


def node(op: str, operands: str, result: str, name: str | None = None, **attributes) -> onnx.NodeProto:
    return helper.make_node(op, operands.split(), [result], result if name is None else name, **attributes)


def regions(model: onnx.ModelProto) -> RegionGraph:
    return extract_regions(onnx_graph.from_onnx(model), "net")


def residual_network(**names: str) -> onnx.ModelProto:
    """stem -> relu -> (depthwise -> clip -> strided) + skip -> pool -> fc."""
    nodes = [
        node("Conv", "x ws b4", "stem", names.get("stem"), pads=[1, 1, 1, 1]),
        node("Relu", "stem", "act", names.get("act")),
        node("Conv", "act wd", "dw", names.get("dw"), group=4, kernel_shape=[3, 1], pads=[1, 0, 1, 0]),
        node("Clip", "dw zero six", "relu6", names.get("relu6")),
        node("Conv", "relu6 wp", "project", names.get("project")),
        node("Add", "project act", "sum", names.get("sum")),
        node("Conv", "sum wg", "grouped", names.get("grouped"), group=2, strides=[2, 1], dilations=[2, 1]),
        node("GlobalAveragePool", "grouped", "pool", names.get("pool")),
        node("Flatten", "pool", "flat", names.get("flat")),
        node("Gemm", "flat wf b5", "fc", names.get("fc"), transB=1),
    ]
    weights = {"ws": weight(4, 3, 3, 3), "wd": weight(4, 1, 3, 1), "wp": weight(4, 4, 1, 1)}
    weights |= {"wg": weight(6, 2, 3, 1), "wf": weight(5, 6), "b4": weight(4), "b5": weight(5)}
    weights |= {"zero": np.float32(0), "six": np.float32(6)}
    return shaped_model(nodes, {"x": (2, 3, 9, 8)}, weights, ["fc"])


def test_a_residual_network():
    graph = regions(residual_network())
    assert [r.name for r in graph.regions] == ["stem", "dw", "project", "grouped", "pool", "fc"]
    assert [r.operator for r in graph.regions] == ["conv2d", "depthwise", "conv2d", "grouped", "mean", "fc"]
    inputs = [("%x",), ("stem",), ("dw", "stem"), ("project",), ("grouped",), ("pool",)]
    assert [r.inputs for r in graph.regions] == inputs
    operators = [("bias", "nn.relu"), ("clip",), ("add",), (), (), ("bias",)]
    assert [r.epilogue.operators for r in graph.regions] == operators
    assert graph.outputs == ("fc",)
    assert graph.region("stem").prologue == ("permute_dims",)
    assert graph.consumers["stem"] == ("dw", "project")
    stem = dict(n=2, h=9, w=8, c=3, oc=4, kh=3, kw=3, padding=(1, 1, 1, 1))
    depthwise = dict(n=2, h=9, w=8, c=4, oc=4, kh=3, kw=1, padding=(1, 0, 1, 0), groups=4)
    grouped = dict(n=2, h=9, w=8, c=4, oc=6, kh=3, stride=(2, 1), dilation=(2, 1), groups=2)
    assert graph.region("stem").geometry == ConvGeometry(**stem)
    assert graph.region("dw").geometry == ConvGeometry(**depthwise)
    assert graph.region("project").geometry == ConvGeometry(n=2, h=9, w=8, c=4, oc=4)
    assert graph.region("grouped").geometry == ConvGeometry(**grouped)
    assert graph.region("fc").geometry == ConvGeometry(n=2, h=1, w=1, c=6, oc=5)
    assert graph.region("pool").geometry is None
    shapes = [(2, 9, 8, 4), (2, 9, 8, 4), (2, 9, 8, 4), (2, 3, 8, 6), (2, 6), (2, 5)]
    assert [r.output_shape for r in graph.regions] == shapes
    assert [r.kernel.weight_elements for r in graph.regions] == [108 + 4, 12, 16, 36, 0, 30 + 5]
    assert [r.kernel.has_anchor for r in graph.regions] == [True] * 6


def test_filters_in_the_order_of_the_im2col_vector():
    """[OC, K] with K over (kh, kw, c): what a program multiplies with."""
    rows = filters(onnx_graph.from_onnx(residual_network()))
    assert set(rows) == {"stem", "dw", "project", "grouped", "fc"}
    np.testing.assert_array_equal(rows["stem"], weight(4, 3, 3, 3).transpose(0, 2, 3, 1).reshape(4, 27))
    np.testing.assert_array_equal(rows["fc"], weight(5, 6))


def test_the_digest_follows_shapes_and_names_but_not_weights():
    model = residual_network()
    digest = regions(model).digest
    changed_model = residual_network()
    changed_model.graph.initializer[0].raw_data = weight(7, 4, 3, 3, 3)[0].tobytes()
    assert regions(changed_model).digest == digest
    assert regions(residual_network(stem="root")).digest != digest


def check_names(first: str, last: str, act: str) -> None:
    nodes = [node("Conv", "x w0 b", "a", first), node("Relu", "a", "r", act), node("Conv", "r w1", "y", last)]
    weights = {"w0": weight(4, 3, 1, 1), "w1": weight(4, 4, 1, 1), "b": weight(4)}
    graph = regions(shaped_model(nodes, {"x": (1, 3, 4, 4)}, weights, ["y"]))
    assert [r.name for r in graph.regions] == [first, last]
    assert graph.outputs == (last,)


@settings(max_examples=examples(8))
@given(st.lists(st.text("ab./:-_ 0é", min_size=1, max_size=4), min_size=3, max_size=3, unique=True))
def test_layers_keep_the_names_of_their_nodes(given_names):
    """Whatever the characters: the first layer, the last one, whose result leaves, and what is between."""
    check_names(*given_names)


@pytest.mark.long
@pytest.mark.parametrize("name", ["lv", "lv1", "gv", "main", "x", "7", "w0", "a_b", "maximum", "conv.out"])
def test_names_that_something_else_has_too(name):
    """Automatic variables, functions, inputs and weights have names of their own."""
    check_names(name, "conv", "act")
    check_names("conv", name, "a.b")
    check_names("conv", "a.b", name)


def conv_pair(first: str, last: str) -> onnx.ModelProto:
    nodes = [node("Conv", "x w0", "a", first), node("Conv", "a w1", "y", last)]
    weights = {"w0": weight(4, 3, 1, 1), "w1": weight(4, 4, 1, 1)}
    return shaped_model(nodes, {"x": (1, 3, 4, 4)}, weights, ["y"])


@pytest.mark.parametrize(
    ("curve", "epilogue", "prologue"), [("Tanh", (), ("tanh", "multiply")), ("Sigmoid", ("nn.silu",), ())]
)
def test_a_layer_goes_on_with_what_its_own_activation_reads_twice(curve, epilogue, prologue):
    """So its kernel does what PIM left undone of that. A SiLU is one operator: it ends the layer before."""
    nodes = [node("Conv", "x w", "a", "first"), node(curve, "a", "s")]
    nodes += [node("Mul", "a s", "m"), node("Conv", "m w", "y", "second")]
    model = shaped_model(nodes, {"x": (1, 16, 8, 8)}, {"w": weight(16, 16, 1, 1)}, ["y"])
    first, second = regions(model).regions
    assert (first.kernel.fusible_inputs, second.kernel.fusible_inputs) == ((), (0,))
    assert (first.epilogue.operators, second.prologue) == (epilogue, prologue)


def test_names_that_differ_only_in_signs():
    assert [r.name for r in regions(conv_pair("a/b", "a.b")).regions] == ["a/b", "a.b"]


def test_layers_without_names_get_distinct_ones():
    model = conv_pair("", "")
    names = [r.name for r in regions(model).regions]
    assert len(set(names)) == 2 and all(names)
    assert [r.name for r in regions(model).regions] == names


def test_two_layers_of_one_name_are_refused():
    mod = onnx_graph.from_onnx(conv_pair("a", "b"))
    with pytest.raises(UnsupportedOpError, match=r"two layers carry the same name.*; rename"):
        extract_regions(LAYER_NAMES.attach(mod, {"a": "conv", "b": "conv"}))


@pytest.mark.parametrize("op", ["MaxPool", "Softmax", "ReduceMean"])
def test_a_last_layer_without_weights_keeps_its_name(op):
    attributes = {"kernel_shape": [2, 2]} if op == "MaxPool" else {}
    nodes = [node("Conv", "x w", "a", "first"), node(op, "a", "y", "last/one", **attributes)]
    graph = regions(shaped_model(nodes, {"x": (1, 3, 4, 4)}, {"w": weight(4, 3, 1, 1)}, ["y"]))
    assert [r.name for r in graph.regions] == ["first", "last/one"]


def test_several_results():
    nodes = [node("Conv", "x w0", "a"), node("Relu", "a", "r")]
    nodes += [node("Conv", "r w1", "b"), node("GlobalAveragePool", "r", "c")]
    weights = {"w0": weight(4, 3, 1, 1), "w1": weight(4, 4, 1, 1)}
    graph = regions(shaped_model(nodes, {"x": (1, 3, 4, 4)}, weights, ["b", "c"]))
    assert {r.name for r in graph.regions} >= {"a", "b", "c"}
    assert set(graph.outputs) == {"b", "c"}
    assert all(life.pinned == (life.name in ("b", "c", "%x")) for life in graph.liveness("fp16").lifetimes)


@as_module
def SplitHalves(x: R.Tensor((4, 4), "float32")):
    halves = R.split(x, 2, axis=0)
    y = halves[0]
    return y


def test_an_operator_with_several_results_is_refused():
    with pytest.raises(UnsupportedOpError, match="'halves': split is not supported"):
        extract_regions(SplitHalves)


@as_module
def Dynamic(x: R.Tensor(("n", 4), "float32")):
    y = R.nn.softmax(x)
    return y


def test_a_dynamic_shape_is_refused():
    with pytest.raises(UnsupportedOpError, match=r"dynamic shape; fix open sizes"):
        extract_regions(Dynamic)


@as_module
def Nchw(x: R.Tensor((1, 4, 3, 3), "float32")):
    conv = R.nn.conv2d(x, R.const(np.ones((2, 4, 1, 1), np.float32)))
    return conv


def test_what_is_not_canonical_is_refused():
    with pytest.raises(UnsupportedOpError, match="'conv': NCHW convolution is not canonical"):
        extract_regions(Nchw)


def test_an_unknown_region_lists_near_ones():
    with pytest.raises(UnknownNameError, match=r"unknown region 'projet'; did you mean project"):
        regions(residual_network()).region("projet")


def test_a_layer_without_a_name_is_the_region_that_its_program_computes():
    """Files of old exporters name no node; a bias or activation must not lend its name to the product."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"], "named")]
    mod = onnx_graph.from_onnx(shaped_model(nodes, {"x": (1, 3, 4, 4)}, {"w": weight(4, 3, 1, 1)}, ["y"]))
    (region,) = extract_regions(mod).regions
    assert set(filters(mod)) == {region.name}


def test_weights_that_are_looked_up_are_read_by_their_product():
    """One kernel reads the rows that it is asked for, once, and stores none of them."""
    nodes = [node("Gather", "weights number", "chosen"), node("MatMul", "x chosen", "product")]
    inputs = {"x": (1, 1, 6), "number": (1,)}
    model = shaped_model(nodes, inputs, {"weights": weight(5, 6, 4)}, ["product"])
    model.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.INT64
    (region,) = regions(model).regions
    kernel = region.kernel
    assert region.operators == ("take", "matmul")
    assert (kernel.weight_elements, kernel.read_weight_elements) == (5 * 24, 24)
    assert kernel.product.macs == 24 and kernel.product.weighted
