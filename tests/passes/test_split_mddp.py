"""Does a split convolution give the very bits of the whole one, or a clear refusal?"""

import numpy as np
import pytest
import tvm
from by_numpy import evaluate_by_numpy
from graphs import as_module, conv2d_nhwc, main_module, operators, same_bits
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from length import examples
from tvm import relax
from tvm.script import relax as R

from pimflow.errors import PlanError
from pimflow.relay_passes.flat import main_bindings, shape
from pimflow.relay_passes.splits.split_mddp import SplitMdDp

FILTERS = np.random.default_rng(0).standard_normal((4, 3, 3, 5), np.float32)


@as_module
def SplitRowsBefore(x: R.Tensor((1, 9, 6, 5), "float32")):
    conv = conv2d_nhwc(x, FILTERS, strides=2, padding=[1, 0, 2, 1])
    y = R.nn.relu(conv)
    return y


# Output rows 0, 1 read input rows -1..3, rows 2..4 read 3..9: one of two padding rows, 9 and 10.
@as_module
def SplitRowsExpected(x: R.Tensor((1, 9, 6, 5), "float32")):
    gpu_rows = R.strided_slice(x, [1], [0], [4], assume_inbound=True)
    gpu = conv2d_nhwc(gpu_rows, FILTERS, strides=2, padding=[1, 0, 0, 1])
    pim_rows = R.strided_slice(x, [1], [3], [9], assume_inbound=True)
    pim = conv2d_nhwc(pim_rows, FILTERS, strides=2, padding=[0, 0, 1, 1])
    conv = R.concat((gpu, pim), axis=1)
    y = R.nn.relu(conv)
    return y


def test_rewrite():
    after = SplitMdDp({"conv": 2})(SplitRowsBefore)
    tvm.ir.assert_structural_equal(after, SplitRowsExpected)
    assert {"conv", "conv__gpu", "conv__pim"} <= {b.var.name for b in main_bindings(after)}
    assert same_bits(SplitRowsBefore, after)
    tvm.ir.assert_structural_equal(SplitMdDp({"conv": 2})(after), after)


# Rows of zeros lie before a tensor that a kernel writes; PIM reads the tensor itself.
@as_module
def Symmetric(x: R.Tensor((1, 9, 8, 4), "float32")):
    active = R.nn.relu(x)
    conv = conv2d_nhwc(active, FILTERS[..., :4], strides=2, padding=[1, 1, 1, 1])
    return conv


@as_module
def SymmetricExpected(x: R.Tensor((1, 9, 8, 4), "float32")):
    active = R.nn.relu(x)
    zeros = R.zeros((1, 1, 8, 4), "float32")
    padded = R.concat((zeros, active), axis=1)
    gpu_rows = R.strided_slice(padded, [1], [0], [5], assume_inbound=True)
    gpu = conv2d_nhwc(gpu_rows, FILTERS[..., :4], strides=2, padding=[0, 1, 0, 1])
    pim_rows = R.strided_slice(active, [1], [3], [9], assume_inbound=True)
    pim = conv2d_nhwc(pim_rows, FILTERS[..., :4], strides=2, padding=[0, 1, 1, 1])
    conv = R.concat((gpu, pim), axis=1)
    return conv


def test_symmetric_rewrite():
    after = SplitMdDp({"conv": 2}, symmetric=True)(Symmetric)
    tvm.ir.assert_structural_equal(after, SymmetricExpected)
    assert same_bits(Symmetric, after)
    tvm.ir.assert_structural_equal(SplitMdDp({"conv": 2}, symmetric=True)(after), after)
    tvm.ir.assert_structural_equal(SplitMdDp({}, symmetric=True)(Symmetric), Symmetric)


def test_an_input_is_copied_between_constant_zeros():
    after = SplitMdDp({"conv": 2}, symmetric=True)(SplitRowsBefore)
    assert operators(after).count("zeros") == 0 and operators(after).count("concat") == 2
    assert same_bits(SplitRowsBefore, after)


@pytest.mark.parametrize("rows", [{}, {"other": 2}, {"y": 2}])
def test_other_layers_stay(rows):
    tvm.ir.assert_structural_equal(SplitMdDp(rows)(SplitRowsBefore), SplitRowsBefore)


@pytest.mark.parametrize("rows", [-1, 0, 5, 6])
def test_rows_outside_the_layer_are_refused(rows):
    with pytest.raises(
        PlanError, match=f"region 'conv': a split needs 1 to 4 of 5 rows on the GPU, not {rows}"
    ):
        SplitMdDp({"conv": rows})(SplitRowsBefore)


@pytest.mark.parametrize(
    ("padding", "rows", "reading_nothing"), [((2, 0, 0, 0), 2, "0..1"), ((0, 0, 3, 0), 5, "5..7")]
)
def test_a_part_of_nothing_but_padding_is_refused(padding, rows, reading_nothing):
    """TVM itself would accept it, and return a wrong shape."""
    mod = convolution(5, 4, kernel=(1, 1), padding=padding)
    with pytest.raises(PlanError, match=f"region 'conv': output rows {reading_nothing} read only padding"):
        SplitMdDp({"conv": rows})(mod)


def convolution(
    height: int, width: int, kernel, stride=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1), groups=1,
    layout="NHWC", batch=1,
) -> tvm.IRModule:  # fmt: skip
    channels, out_channels = 2 * groups, 3 * groups
    dims = {"N": batch, "H": height, "W": width, "C": channels}
    filter_layout = {"NHWC": "OHWI", "NCHW": "OIHW"}[layout]
    filter_dims = {"O": out_channels, "I": 2, "H": kernel[0], "W": kernel[1]}
    weights = np.random.default_rng(1).standard_normal([filter_dims[a] for a in filter_layout], np.float32)
    x = relax.Var("x", relax.TensorType([dims[a] for a in layout], "float32"))
    window = {"strides": stride, "padding": padding, "dilation": dilation, "groups": groups}
    layouts = {"data_layout": layout, "kernel_layout": filter_layout}
    conv = relax.op.nn.conv2d(x, relax.const(weights), **window, **layouts)
    return main_module([x], lambda builder: relax.op.negative(builder.emit(conv, name_hint="conv")))


@st.composite
def convolutions(draw):
    """Any convolution of at least two output rows, and after which row to split it."""
    kernel = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padding = tuple(draw(st.integers(0, limit)) for limit in (6, 1, 6, 1))
    height, width = draw(st.integers(1, 12)), draw(st.integers(3, 5))
    output_rows = (height + padding[0] + padding[2] - (kernel[0] - 1) * dilation - 1) // stride + 1
    assume(output_rows >= 2)
    mod = convolution(
        height,
        width,
        kernel=kernel,
        stride=(stride, draw(st.integers(1, 2))),
        padding=padding,
        dilation=(dilation, 1),
        groups=draw(st.integers(1, 3)),
        layout=draw(st.sampled_from(("NHWC", "NHWC", "NCHW"))),
        batch=draw(st.integers(1, 2)),
    )
    return mod, draw(st.integers(1, output_rows - 1))


@settings(max_examples=examples(150))
@given(convolutions(), st.booleans())
def test_any_split_is_exact_or_refused(case, symmetric):
    before, rows = case
    try:
        after = SplitMdDp({"conv": rows}, symmetric)(before)
    except PlanError as error:
        assert "read only padding" in str(error)
        assert reads_only_padding(before, rows)
        return
    assert operators(after).count("nn.conv2d") == 2
    (on_gpu,) = (b.value for b in main_bindings(after) if b.var.name == "conv__gpu")
    assert not symmetric or int(on_gpu.attrs.padding[0]) == int(on_gpu.attrs.padding[2])
    x = np.random.default_rng(2).standard_normal(shape(before["main"].params[0])).astype(np.float32)
    assert np.array_equal(evaluate_by_numpy(after, x), evaluate_by_numpy(before, x))


def reads_only_padding(mod: tvm.IRModule, rows: int) -> bool:
    """By brute force: whether the window of no output row of some part touches the input."""
    call = main_bindings(mod)[0].value
    height = shape(call.args[0])[str(call.attrs.data_layout).index("H")]
    taps = shape(call.args[1])[str(call.attrs.kernel_layout).index("H")]
    reach = (taps - 1) * int(call.attrs.dilation[0])
    output_rows = shape(main_bindings(mod)[0].var)[str(call.attrs.data_layout).index("H")]
    starts = [row * int(call.attrs.strides[0]) - int(call.attrs.padding[0]) for row in range(output_rows)]
    touches = [start + reach >= 0 and start < height for start in starts]
    return not any(touches[:rows]) or not any(touches[rows:])
