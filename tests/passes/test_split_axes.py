"""Do splits along channels, the reduction and the batch give the values of the whole layer?"""

from functools import partial

import numpy as np
import pytest
import tvm
from graphs import as_module, conv2d_nhwc, inputs, main_module, operators, run, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from tvm import relax
from tvm.script import relax as R

from pimflow.errors import PlanError
from pimflow.relay_passes.flat import main_bindings
from pimflow.relay_passes.splits.split_axis import SplitAxis

RNG = np.random.default_rng(0)
FILTERS = RNG.standard_normal((6, 3, 3, 5), np.float32)
GPU_FILTERS, PIM_FILTERS = FILTERS[:2].copy(), FILTERS[2:].copy()
MATRIX = RNG.standard_normal((96, 7), np.float32)
GPU_MATRIX, PIM_MATRIX = MATRIX[:32].copy(), MATRIX[32:].copy()


@as_module
def Convolution(x: R.Tensor((3, 9, 6, 5), "float32")):
    conv = conv2d_nhwc(x, FILTERS, strides=2, padding=[1, 0, 2, 1])
    y = R.nn.relu(conv)
    return y


@as_module
def Channels(x: R.Tensor((3, 9, 6, 5), "float32")):
    pim = conv2d_nhwc(x, PIM_FILTERS, strides=2, padding=[1, 0, 2, 1])
    gpu = conv2d_nhwc(x, GPU_FILTERS, strides=2, padding=[1, 0, 2, 1])
    conv = R.concat((gpu, pim), axis=-1)
    y = R.nn.relu(conv)
    return y


@as_module
def Batch(x: R.Tensor((3, 9, 6, 5), "float32")):
    second = R.strided_slice(x, [0], [1], [3], assume_inbound=True)
    pim = conv2d_nhwc(second, FILTERS, strides=2, padding=[1, 0, 2, 1])
    first = R.strided_slice(x, [0], [0], [1], assume_inbound=True)
    gpu = conv2d_nhwc(first, FILTERS, strides=2, padding=[1, 0, 2, 1])
    conv = R.concat((gpu, pim), axis=0)
    y = R.nn.relu(conv)
    return y


@as_module
def Product(x: R.Tensor((1, 96), "float32")):
    conv = R.matmul(x, R.const(MATRIX))
    y = R.nn.relu(conv)
    return y


@as_module
def Reduction(x: R.Tensor((1, 96), "float32")):
    second = R.strided_slice(x, [1], [32], [96], assume_inbound=True)
    pim = R.matmul(second, R.const(PIM_MATRIX))
    first = R.strided_slice(x, [1], [0], [32], assume_inbound=True)
    gpu = R.matmul(first, R.const(GPU_MATRIX))
    conv = R.add(gpu, pim)
    y = R.nn.relu(conv)
    return y


CASES = {
    "channels": (partial(SplitAxis, "channels"), Convolution, 2, Channels),
    "batch": (partial(SplitAxis, "batch"), Convolution, 1, Batch),
    "reduction": (partial(SplitAxis, "reduction"), Product, 32, Reduction),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_rewrite(name):
    split, before, gpu, expected = CASES[name]
    after = split({"conv": gpu})(before)
    tvm.ir.assert_structural_equal(after, expected)
    assert {"conv", "conv__gpu", "conv__pim"} <= {b.var.name for b in main_bindings(after)}
    tvm.ir.assert_structural_equal(split({"conv": gpu})(after), after)
    if name == "reduction":
        ((unsplit,), (parts,)) = (run(mod, *inputs(before)) for mod in (before, after))
        assert np.abs(unsplit - parts).max() <= 1e-5 * np.abs(unsplit).max()
    else:
        assert same_bits(before, after)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gpu", [{}, {"other": 1}, {"y": 1}])
def test_other_layers_stay(name, gpu):
    split, before, *_ = CASES[name]
    tvm.ir.assert_structural_equal(split(gpu)(before), before)


@pytest.mark.parametrize(
    ("name", "gpu", "says"),
    [
        *((name, 0, f"1 to {last} of {last + 1} {name}") for name, last in (("channels", 5), ("batch", 2))),
        ("channels", 6, "1 to 5 of 6 channels on the GPU, not 6"),
        ("reduction", 96, "1 to 95 of 96 reduction"),
    ],
)
def test_what_cannot_be_split_so_is_refused(name, gpu, says):
    split, before, *_ = CASES[name]
    with pytest.raises(PlanError, match=f"region 'conv': .*{says}"):
        split({"conv": gpu})(before)


def layer(batch, side, c, oc, window, product, groups=1) -> tvm.IRModule:
    """A convolution, or a product of as many rows."""
    rng = np.random.default_rng(1)
    x = relax.Var("x", relax.TensorType((batch, c) if product else (batch, side, side, c), "float32"))
    if product:
        call = relax.op.matmul(x, relax.const(rng.standard_normal((c, oc), np.float32)))
    else:
        filters = rng.standard_normal((oc, window, window, c // groups), np.float32)
        call = conv2d_nhwc(x, filters, padding=window // 2, groups=groups)
    return main_module([x], lambda builder: relax.op.negative(builder.emit(call, name_hint="conv")))


@pytest.mark.parametrize("axis", ["channels", "reduction"])
def test_groups_are_not_split_along_channels(axis):
    with pytest.raises(PlanError, match="only dense layers"):
        SplitAxis(axis, {"conv": 2})(layer(1, 4, 4, 4, 1, False, groups=2))


@st.composite
def layers(draw):
    axis, product = draw(st.sampled_from(tuple(CASES))), draw(st.booleans())
    batch = draw(st.integers(2, 4) if axis == "batch" else st.integers(1, 2))
    c, oc = draw(st.integers(2, 9)), draw(st.integers(2, 9))
    side, window = draw(st.integers(1, 5)), draw(st.sampled_from((1, 3)))
    gpu = draw(st.integers(1, {"channels": oc, "reduction": c, "batch": batch}[axis] - 1))
    return axis, gpu, layer(batch, side, c, oc, window, product)


@pytest.mark.long
@settings(max_examples=examples(5), deadline=None)
@given(layers())
def test_any_split_gives_the_values(case):
    axis, gpu, before = case
    after = CASES[axis][0]({"conv": gpu})(before)
    kind = "matmul" if "matmul" in operators(before) else "nn.conv2d"
    assert operators(after).count(kind) == 2
    ((unsplit,), (parts,)) = (run(mod, *inputs(before)) for mod in (before, after))
    assert unsplit.shape == parts.shape
    assert np.abs(unsplit - parts).max() <= 1e-5 * np.abs(unsplit).max()
