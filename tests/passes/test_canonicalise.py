"""Is every network in one form: NHWC, folded, layers under their own names?"""

import numpy as np
import onnx
import pytest
import tvm
from graphs import as_module, close, inputs, names, operators, same_bits, shaped_model
from onnx import helper
from tvm import relax
from tvm.script import relax as R

from pimflow.errors import UnsupportedOpError
from pimflow.frontend import onnx_graph
from pimflow.relay_passes.canonical.canonicalise import Canonicalise
from pimflow.relay_passes.flat import layer_name, main_bindings, operator, shape

FILTERS = np.random.default_rng(0).standard_normal((4, 3, 3, 3), np.float32)
BIAS = np.arange(4, dtype=np.float32)


@as_module
def CanonicalBefore(x: R.Tensor((1, 3, 6, 5), "float32")):
    conv = R.nn.conv2d(x, R.const(FILTERS), padding=1)
    bias = R.reshape(R.const(BIAS), (1, 4, 1, 1))
    sum = R.add(conv, bias)
    y = R.nn.relu(sum)
    return y


@as_module
def CanonicalExpected(x: R.Tensor((1, 3, 6, 5), "float32")):
    nhwc = R.permute_dims(x, axes=[0, 2, 3, 1])
    conv = R.nn.conv2d(
        nhwc,
        R.const(np.ascontiguousarray(FILTERS.transpose(0, 2, 3, 1))),
        padding=1,
        data_layout="NHWC",
        kernel_layout="OHWI",
    )
    sum = R.add(conv, R.const(BIAS.reshape(1, 1, 1, 4)))
    z = R.nn.relu(sum)
    y = R.permute_dims(z, axes=[0, 3, 1, 2])
    return y


def test_rewrite():
    after = Canonicalise()(CanonicalBefore)
    tvm.ir.assert_structural_equal(after, CanonicalExpected)
    assert names(after, "nn.conv2d") == ["conv"]
    close(CanonicalBefore, after)
    tvm.ir.assert_structural_equal(Canonicalise()(after), after)


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {name: rng.uniform(0.5, 1.5, dims).astype(np.float32) for name, dims in shapes.items()}


NORM = ("scale", "shift", "mean", "variance")


def residual_block() -> onnx.ModelProto:
    """stem -> (1x1, norm, relu6, depthwise, norm, 1x1) + stem -> mean -> fc, names with dots and slashes."""
    constants = weights(w0=(8, 3, 3, 3), w1=(16, 8, 1, 1), w2=(16, 1, 3, 3), w3=(8, 16, 1, 1))
    constants |= weights(w4=(8, 5), b=(5,), **dict.fromkeys(NORM, (16,)))
    constants |= {"zero": np.float32(0), "six": np.float32(6)}

    def node(op, name, operands, **attributes):
        return helper.make_node(op, operands, [name], name=name, **attributes)

    nodes = [
        node("Conv", "stem/conv", ["x", "w0"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Conv", "block.0.expand", ["stem/conv", "w1"]),
        node("BatchNormalization", "norm1", ["block.0.expand", *NORM]),
        node("Clip", "relu6", ["norm1", "zero", "six"]),
        node("Conv", "block.0.depthwise", ["relu6", "w2"], pads=[1, 1, 1, 1], group=16),
        node("BatchNormalization", "norm2", ["block.0.depthwise", *NORM]),
        node("Conv", "block.0.project", ["norm2", "w3"]),
        node("Sum", "sum", ["stem/conv", "block.0.project"]),
        node("GlobalAveragePool", "pool", ["sum"]),
        node("Flatten", "flatten", ["pool"]),
        node("Gemm", "fc", ["flatten", "w4", "b"]),
    ]
    return shaped_model(nodes, {"x": (1, 3, 8, 8)}, constants, ["fc"])


@pytest.mark.long
def test_a_network_from_onnx():
    model = residual_block()
    before, after = onnx_graph.import_onnx(model), onnx_graph.from_onnx(model)
    close(before, after)
    kinds = operators(after)
    assert kinds.count("nn.conv2d") == 4 and kinds.count("matmul") == 1
    assert kinds.count("clip") == 1 and kinds.count("call_tir") == 0
    assert not {"nn.batch_norm", "isnan", "where", "stack", "sum"} & set(kinds)
    moved = [shape(b.var) for b in main_bindings(after) if operator(b.value) == "permute_dims"]
    assert moved == [(1, 8, 8, 3), (1, 8, 1, 1)], "only the input and a single pixel change their layout"
    assert layers(after) == ["stem/conv", "block.0.expand", "block.0.depthwise", "block.0.project", "fc"]
    tvm.ir.assert_structural_equal(Canonicalise()(after), after)


def layers(mod: tvm.IRModule) -> list[str]:
    variables = [b.var for b in main_bindings(mod) if operator(b.value) in ("nn.conv2d", "matmul")]
    return [layer_name(mod, var) for var in variables]


def test_a_layer_that_folds_away_leaves_the_others_running():
    """A convolution of constants is a constant: names of anchors no longer line up."""
    constants = weights(image=(1, 3, 4, 4), w0=(2, 3, 1, 1), w1=(2, 3, 1, 1))
    nodes = [
        helper.make_node("Conv", ["image", "w0"], ["a"], name="constant"),
        helper.make_node("Conv", ["x", "w1"], ["b"], name="layer"),
        helper.make_node("Add", ["a", "b"], ["y"], name="add"),
    ]
    model = shaped_model(nodes, {"x": (1, 3, 4, 4)}, constants, ["y"])
    after = onnx_graph.from_onnx(model)
    assert layers(after)[-1] == "layer"
    close(onnx_graph.import_onnx(model), after)


@as_module
def Branches(x: R.Tensor((2, 3), "float32"), c: R.Tensor((), "bool")):
    if c:
        y = R.nn.relu(x)
    else:
        y = R.negative(x)
    return y


def test_control_flow_is_refused():
    with pytest.raises(UnsupportedOpError, match="control flow"):
        Canonicalise()(Branches)


def test_a_network_that_does_nothing():
    model = shaped_model([helper.make_node("Clip", ["x"], ["y"], name="clip")], {"x": (2, 3)}, {}, ["y"])
    after = onnx_graph.from_onnx(model)
    assert operators(after) == ["call_tir"]  # the copy of its input
    assert same_bits(after, Canonicalise()(after), *inputs(after))
    assert isinstance(after["main"], relax.Function)
