"""Do layout transforms vanish between layers, and only where that keeps the values?"""

import numpy as np
import pytest
import tvm
from graphs import inputs, operators, run, same_bits
from tvm.script import ir as I
from tvm.script import relax as R

from pimflow.relay_passes.sink_layout import SinkLayout

CHANNEL_BIAS = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)


@I.ir_module
class Residual:
    @R.function
    def main(x: R.Tensor((1, 5, 6, 3), "float32"), y: R.Tensor((1, 5, 6, 3), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[0, 3, 1, 2])
            b = R.permute_dims(y, axes=[0, 3, 1, 2])
            c = R.add(a, b)
            d = R.clip(c, 0.0, 6.0)
            e = R.permute_dims(d, axes=[0, 2, 3, 1])
            f = R.nn.avg_pool2d(e, (2, 2), layout="NHWC")
            R.output(f)
        return f


@I.ir_module
class ResidualSunk:
    @R.function
    def main(x: R.Tensor((1, 5, 6, 3), "float32"), y: R.Tensor((1, 5, 6, 3), "float32")):
        with R.dataflow():
            c = R.add(x, y)
            d = R.clip(c, 0.0, 6.0)
            f = R.nn.avg_pool2d(d, (2, 2), layout="NHWC")
            R.output(f)
        return f


@I.ir_module
class Joined:
    """Concatenation, mean and a result that leaves in NCHW."""

    @R.function
    def main(x: R.Tensor((1, 5, 6, 3), "float32"), y: R.Tensor((1, 5, 6, 4), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[0, 3, 1, 2])
            b = R.permute_dims(y, axes=[0, 3, 1, 2])
            c = R.concat((a, b), axis=1)
            d = R.mean(c, axis=[2, 3], keepdims=True)
            e = R.multiply(d, c)
            R.output(e)
        return e


@I.ir_module
class JoinedSunk:
    @R.function
    def main(x: R.Tensor((1, 5, 6, 3), "float32"), y: R.Tensor((1, 5, 6, 4), "float32")):
        with R.dataflow():
            c = R.concat((x, y), axis=3)
            d = R.mean(c, axis=[1, 2], keepdims=True)
            e = R.multiply(d, c)
            f = R.permute_dims(e, axes=[0, 3, 1, 2])
            R.output(f)
        return f


@I.ir_module
class Mixed:
    """An operand that was never NHWC, a bias along W, another permutation, a reduction that drops axes."""

    @R.function
    def main(x: R.Tensor((1, 5, 6, 3), "float32"), y: R.Tensor((1, 3, 5, 6), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[0, 3, 1, 2])
            b = R.add(a, y)
            c = R.add(a, R.const([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "float32"))
            d = R.multiply(b, c)
            e = R.permute_dims(d, axes=[0, 3, 2, 1])
            f = R.sum(e, axis=[2], keepdims=False)
            R.output(f)
        return f


@pytest.mark.parametrize(
    ("before", "expected"), [(Residual, ResidualSunk), (Joined, JoinedSunk), (Mixed, Mixed)]
)
def test_rewrite(before, expected):
    after = SinkLayout()(before)
    tvm.ir.assert_structural_equal(after, expected)
    assert same_bits(before, after)
    tvm.ir.assert_structural_equal(SinkLayout()(after), after)


@I.ir_module
class Constants:
    @R.function
    def main(x: R.Tensor((1, 5, 6, 4), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[0, 3, 1, 2])
            b = R.add(a, R.const(CHANNEL_BIAS))
            c = R.multiply(R.const(2.0, "float32"), b)
            d = R.nn.relu(c)
            e = R.permute_dims(d, axes=[0, 2, 3, 1])
            R.output(e)
        return e


def test_constants_are_transposed():
    after = SinkLayout()(Constants)
    assert operators(after) == ["add", "multiply", "nn.relu"]
    assert same_bits(Constants, after)


@I.ir_module
class Odd:
    """What has no axes, or operands behind a variable."""

    @R.function
    def main(x: R.Tensor((1, 5, 6, 3), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[0, 3, 1, 2])
            b = R.sum(a, keepdims=True)
            t = (a, a)
            c = R.concat(t, axis=1)
            d = R.add(c, b)
            e = R.permute_dims(d)
            f = R.max(a, axis=[-1], keepdims=True)
            g = R.sum(f)
            h = R.add(e, g)
            R.output(h)
        return h


def test_reductions_of_all_axes_and_plain_transposes():
    after = SinkLayout()(Odd)
    operands = inputs(Odd)
    (expected,), (got,) = run(Odd, *operands), run(after, *operands)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)  # 90 elements, summed in another order
    tvm.ir.assert_structural_equal(SinkLayout()(after), after)


@I.ir_module
class Flattened:
    @R.function
    def main(x: R.Tensor((1, 5, 6, 3), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[0, 3, 1, 2])
            b = R.max(a, axis=[1], keepdims=False)
            R.output(b)
        return b


def test_a_reduction_that_drops_its_axes_has_no_layout_to_keep():
    tvm.ir.assert_structural_equal(SinkLayout()(Flattened), Flattened)
