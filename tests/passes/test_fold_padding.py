"""Are zeros around the input of convolutions their padding, and does nothing else change?"""

import numpy as np
import onnx
import pytest
import tvm
from graphs import main_module, operators, run, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from onnx import helper, numpy_helper
from onnx_models import onnx_model
from tvm import relax

from pimflow.frontend import load
from pimflow.relay_passes.canonical.fold_padding import FoldPadding
from pimflow.relay_passes.flat import main_bindings, operator, rebuild

C = 3


def conv(builder, x, layout="NCHW", kernel=(3, 3), seed=0, **attributes):
    channels = int(x.ty.shape[layout.index("C")])
    dims = {"O": 2, "I": channels, "H": kernel[0], "W": kernel[1]}
    filters = {"NCHW": "OIHW", "NHWC": "OHWI"}[layout]
    weights = np.random.default_rng(seed).standard_normal([dims[axis] for axis in filters])
    call = relax.op.nn.conv2d(
        x, relax.const(weights.astype(np.float32)), data_layout=layout, kernel_layout=filters, **attributes
    )
    return builder.emit(call)


def pad(builder, x, widths, mode="constant", value=0.0):
    return builder.emit(relax.op.nn.pad(x, list(widths), mode, value))


def module(body, dims=(1, C, 6, 5)) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType(dims, "float32"))
    return rebuild(main_module([x], lambda builder: body(builder, x)), lambda *_: None)


def paddings(mod: tvm.IRModule) -> list[list[int]]:
    convs = [b.value for b in main_bindings(mod) if operator(b.value) == "nn.conv2d"]
    return [[int(p) for p in call.attrs.padding] for call in convs]


SPATIAL = (0, 0, 0, 0, 1, 2, 0, 1)  # top 1, bottom 2, left 0, right 1


def test_zeros_become_padding_of_every_reader():
    def body(builder, x):
        padded = pad(builder, x, SPATIAL)
        return builder.emit(relax.op.add(conv(builder, padded), conv(builder, padded, seed=1)))

    before = module(body)
    after = FoldPadding()(before)
    assert "nn.pad" in operators(before) and "nn.pad" not in operators(after)
    assert paddings(after) == [[1, 0, 2, 1]] * 2
    assert same_bits(before, after)
    tvm.ir.assert_structural_equal(FoldPadding()(after), after)


def test_the_rewrite():
    dims = (1, 8, 8, 3)
    before = module(lambda b, x: conv(b, pad(b, x, (0, 0, 0, 1, 0, 1, 0, 0)), "NHWC", strides=2), dims)
    expected = module(lambda b, x: conv(b, x, "NHWC", strides=2, padding=[0, 0, 1, 1]), dims)
    tvm.ir.assert_structural_equal(FoldPadding()(before), expected)


@settings(max_examples=examples(8), deadline=None)
@given(
    st.sampled_from(["NCHW", "NHWC"]),
    st.tuples(*[st.integers(0, 4)] * 4),
    st.tuples(*[st.integers(0, 2)] * 4),
    st.sampled_from([(1, 1), (3, 3), (2, 5), (5, 1)]),
    st.integers(1, 2),
)
def test_any_padding_gives_the_same_bits(layout, zeros, padding, kernel, dilation):
    """And it is folded exactly where no window then lies in padding alone."""
    top, bottom, left, right = zeros
    widths = {"NCHW": (0, 0, 0, 0, *zeros), "NHWC": (0, 0, *zeros, 0, 0)}[layout]
    dims = {"NCHW": (1, C, 9, 10), "NHWC": (1, 9, 10, C)}[layout]
    attributes = {"padding": list(padding), "dilation": dilation}
    before = module(lambda b, x: conv(b, pad(b, x, widths), layout, kernel, **attributes), dims)
    after = FoldPadding()(before)
    total = [p + z for p, z in zip(padding, (top, left, bottom, right))]
    windows = [(k - 1) * dilation + 1 for k in kernel] * 2
    folded = all(p < window for p, window in zip(total, windows))
    assert paddings(after) == [total if folded else list(padding)]
    assert ("nn.pad" in operators(after)) != folded
    assert same_bits(before, after)


def ones(builder, x):
    return conv(builder, pad(builder, x, SPATIAL, value=1.0))


def reflection(builder, x):
    return conv(builder, pad(builder, x, (0, 0, 0, 0, 1, 1, 1, 1), "reflect"))


def channels(builder, x):
    return conv(builder, pad(builder, x, (0, 0, 0, 1, 1, 1, 1, 1)))


def another_reader(builder, x):
    padded = pad(builder, x, SPATIAL)
    return builder.emit(relax.op.sum(padded, [1, 2, 3]) + relax.op.sum(conv(builder, padded), [1, 2, 3]))


def an_output(builder, x):
    padded = pad(builder, x, SPATIAL)
    return relax.Tuple([padded, conv(builder, padded)])


def filters(builder, x):
    padded = pad(builder, x, (0, 0, 0, 0, 0, 1, 0, 1))
    return builder.emit(relax.op.nn.conv2d(padded, padded))


@pytest.mark.parametrize("body", [ones, reflection, channels, another_reader, an_output, filters])
def test_other_padding_stays(body):
    before = module(body)
    tvm.ir.assert_structural_equal(FoldPadding()(before), before)


def model_with_pad(opset: int, mode: str = "constant", value: float = 0.0) -> onnx.ModelProto:
    """A Pad before a convolution, as exporters of TensorFlow write SAME padding."""
    widths = np.array([0, 0, 0, 0, 0, 0, 1, 1], np.int64)
    weights = np.random.default_rng(0).standard_normal((4, C, 3, 3)).astype(np.float32)
    stored = [numpy_helper.from_array(weights, "w")]
    if opset < 11:
        node = helper.make_node("Pad", ["x"], ["padded"], mode=mode, pads=widths.tolist(), value=value)
    elif opset < 18:
        stored += [
            numpy_helper.from_array(widths, "pads"),
            numpy_helper.from_array(np.float32(value), "value"),
        ]
        node = helper.make_node("Pad", ["x", "pads", "value"], ["padded"], mode=mode)
    else:
        stored += [
            numpy_helper.from_array(widths[[2, 3, 6, 7]], "pads"),
            numpy_helper.from_array(np.array([-2, 3]), "axes"),
        ]
        node = helper.make_node("Pad", ["x", "pads", "", "axes"], ["padded"], mode=mode)
    nodes = [node, helper.make_node("Conv", ["padded", "w"], ["y"], name="conv", strides=[2, 2])]
    return onnx_model(nodes, {"x": [1, C, 8, 8]}, {"y": [1, 4, 4, 4]}, stored, name="padded", opset=opset)


@pytest.mark.parametrize("opset", [9, 13, 18])
def test_networks_have_no_kernel_that_pads(opset):
    network = load(model_with_pad(opset))
    assert paddings(network.module) == [[0, 0, 1, 1]]
    assert operators(network.module).count("nn.pad") == operators(network.module).count("call_tir") == 0


@pytest.mark.parametrize(("mode", "value"), [("constant", 1.5), ("edge", 0.0)])
def test_other_pads_of_networks_are_computed(mode, value):
    network = load(model_with_pad(13, mode, value))
    inputs = network.example_inputs()
    (result,) = run(network.module, *inputs.values())
    np.testing.assert_allclose(result, network.reference(inputs)[0], rtol=1e-4, atol=1e-4)
