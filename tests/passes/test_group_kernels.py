"""Does grouping keep values, and leave what it cannot look into?"""

import numpy as np
import pytest
import tvm
from graphs import as_module, runs_alike
from tvm.script import ir as I
from tvm.script import relax as R

from pimflow.relay_passes.kernels.group_kernels import GroupKernels

BIAS = np.arange(2, dtype=np.float32)


# ---- scalars that are no immediates ----


# A choice, a comparison and an index take a tensor, if of rank 0, where arithmetic takes a number.
@as_module
def Scalars(x: R.Tensor((2, 3), "float32")):
    positive = R.greater(x, R.const(0.0))
    chosen = R.where(positive, x, R.const(-1.0))
    row = R.take(chosen, R.const(1, "int64"), axis=0)
    y = R.multiply(row, R.const(2.0))
    return y


def test_scalars_of_any_operator():
    runs_alike(Scalars)


# ---- the rewrite ----


@as_module
def LayerWithEpilogue(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    conv = R.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI")
    sum = R.add(conv, R.const(BIAS))
    scaled = R.multiply(sum, R.const(2.0))
    y = R.nn.relu(scaled)
    return y


@I.ir_module
class EpilogueGrouped:
    @R.function(private=True)
    def fused_conv(
        x0: R.Tensor((1, 4, 4, 2), "float32"),
        x1: R.Tensor((2, 1, 1, 2), "float32"),
        x2: R.Tensor((2,), "float32"),
    ) -> R.Tensor((1, 4, 4, 2), "float32"):
        R.func_attr({"Primitive": True})
        with R.dataflow():
            a = R.nn.conv2d(x0, x1, data_layout="NHWC", kernel_layout="OHWI")
            b = R.add(a, x2)
            c = R.multiply(b, R.const(2.0))
            d = R.nn.relu(c)
            R.output(d)
        return d

    @R.function
    def main(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
        cls = EpilogueGrouped
        with R.dataflow():
            y: R.Tensor((1, 4, 4, 2), "float32") = cls.fused_conv(x, w, R.const(BIAS))
            R.output(y)
        return y


# The sum is read by the convolution of its block and, later, by the next sum.
@as_module
def GroupedResidual(
    x: R.Tensor((1, 4, 4, 2), "float32"),
    y: R.Tensor((1, 4, 4, 2), "float32"),
    w: R.Tensor((2, 1, 1, 2), "float32"),
):
    sum = R.add(x, y)
    conv = R.nn.conv2d(sum, w, data_layout="NHWC", kernel_layout="OHWI")
    pool = R.nn.max_pool2d(conv, layout="NHWC")
    next = R.add(pool, sum)
    return next


@I.ir_module
class ResidualGrouped:
    @R.function(private=True)
    def fused_conv(
        x0: R.Tensor((1, 4, 4, 2), "float32"),
        x1: R.Tensor((1, 4, 4, 2), "float32"),
        x2: R.Tensor((2, 1, 1, 2), "float32"),
    ) -> R.Tuple(R.Tensor((1, 4, 4, 2), "float32"), R.Tensor((1, 4, 4, 2), "float32")):
        R.func_attr({"Primitive": True})
        with R.dataflow():
            sum = R.add(x0, x1)
            conv = R.nn.conv2d(sum, x2, data_layout="NHWC", kernel_layout="OHWI")
            both = (sum, conv)
            R.output(both)
        return both

    @R.function(private=True)
    def fused_pool(x0: R.Tensor((1, 4, 4, 2), "float32"), x1: R.Tensor((1, 4, 4, 2), "float32")) -> R.Tensor(
        (1, 4, 4, 2), "float32"
    ):
        R.func_attr({"Primitive": True})
        with R.dataflow():
            pool = R.nn.max_pool2d(x0, layout="NHWC")
            next = R.add(pool, x1)
            R.output(next)
        return next

    @R.function
    def main(
        x: R.Tensor((1, 4, 4, 2), "float32"),
        y: R.Tensor((1, 4, 4, 2), "float32"),
        w: R.Tensor((2, 1, 1, 2), "float32"),
    ):
        cls = ResidualGrouped
        with R.dataflow():
            both: R.Tuple(R.Tensor((1, 4, 4, 2), "float32"), R.Tensor((1, 4, 4, 2), "float32")) = (
                cls.fused_conv(x, y, w)
            )
            sum: R.Tensor((1, 4, 4, 2), "float32") = both[0]
            conv: R.Tensor((1, 4, 4, 2), "float32") = both[1]
            next: R.Tensor((1, 4, 4, 2), "float32") = cls.fused_pool(conv, sum)
            R.output(next)
        return next


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "expected"), [(LayerWithEpilogue, EpilogueGrouped), (GroupedResidual, ResidualGrouped)]
)
def test_rewrite(before, expected):
    after = GroupKernels()(before)
    tvm.ir.assert_structural_equal(after, expected)
    tvm.ir.assert_structural_equal(GroupKernels()(after), after)


@as_module
def Opaque(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    pim = R.call_dps_packed("pim", (x,), out_ty=R.Tensor((1, 4, 4, 2), "float32"))
    return pim


def test_a_call_of_something_else_stays():
    tvm.ir.assert_structural_equal(GroupKernels()(Opaque), Opaque)
