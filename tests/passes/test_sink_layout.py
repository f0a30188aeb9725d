"""Do layout transforms vanish between layers, and only where that keeps the values?"""

import numpy as np
import pytest
import tvm
from graphs import as_module, inputs, operators, run, same_bits
from length import long_but
from tvm.script import relax as R

from pimflow.relay_passes.canonical.sink_layout import SinkLayout
from pimflow.relay_passes.flat import main_bindings, operator

BLOCK_BIAS = np.arange(32, dtype=np.float32).reshape(1, 1, 1, 32)
CHANNEL_BIAS = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)


@as_module
def SunkResidual(x: R.Tensor((1, 5, 6, 3), "float32"), y: R.Tensor((1, 5, 6, 3), "float32")):
    a = R.permute_dims(x, axes=[0, 3, 1, 2])
    b = R.permute_dims(y, axes=[0, 3, 1, 2])
    c = R.add(a, b)
    d = R.clip(c, 0.0, 6.0)
    e = R.permute_dims(d, axes=[0, 2, 3, 1])
    f = R.nn.avg_pool2d(e, (2, 2), layout="NHWC")
    return f


@as_module
def ResidualSunk(x: R.Tensor((1, 5, 6, 3), "float32"), y: R.Tensor((1, 5, 6, 3), "float32")):
    c = R.add(x, y)
    d = R.clip(c, 0.0, 6.0)
    f = R.nn.avg_pool2d(d, (2, 2), layout="NHWC")
    return f


# Concatenation, mean and a result that leaves in NCHW.
@as_module
def Joined(x: R.Tensor((1, 5, 6, 3), "float32"), y: R.Tensor((1, 5, 6, 4), "float32")):
    a = R.permute_dims(x, axes=[0, 3, 1, 2])
    b = R.permute_dims(y, axes=[0, 3, 1, 2])
    c = R.concat((a, b), axis=1)
    d = R.mean(c, axis=[2, 3], keepdims=True)
    e = R.multiply(d, c)
    return e


@as_module
def JoinedSunk(x: R.Tensor((1, 5, 6, 3), "float32"), y: R.Tensor((1, 5, 6, 4), "float32")):
    c = R.concat((x, y), axis=3)
    d = R.mean(c, axis=[1, 2], keepdims=True)
    e = R.multiply(d, c)
    f = R.permute_dims(e, axes=[0, 3, 1, 2])
    return f


# An operand that was never NHWC, another permutation, a reduction that drops axes; a bias along W moves.
@as_module
def Mixed(x: R.Tensor((1, 5, 6, 3), "float32"), y: R.Tensor((1, 3, 5, 6), "float32")):
    a = R.permute_dims(x, axes=[0, 3, 1, 2])
    b = R.add(a, y)
    c = R.add(a, R.const([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "float32"))
    d = R.multiply(b, c)
    e = R.permute_dims(d, axes=[0, 3, 2, 1])
    f = R.sum(e, axis=[2], keepdims=False)
    return f


@as_module
def MixedSunk(x: R.Tensor((1, 5, 6, 3), "float32"), y: R.Tensor((1, 3, 5, 6), "float32")):
    a = R.permute_dims(x, axes=[0, 3, 1, 2])
    b = R.add(a, y)
    c = R.add(x, R.const(np.arange(1, 7, dtype="float32").reshape(1, 1, 6, 1)))
    c_nchw = R.permute_dims(c, axes=[0, 3, 1, 2])
    d = R.multiply(b, c_nchw)
    e = R.permute_dims(d, axes=[0, 3, 2, 1])
    f = R.sum(e, axis=[2], keepdims=False)
    return f


def sunk(before: tvm.IRModule, *layout: object) -> tvm.IRModule:
    """`before`, rewritten; once more changes nothing."""
    after = SinkLayout(*layout)(before)
    tvm.ir.assert_structural_equal(SinkLayout(*layout)(after), after)
    return after


def pools_of(mod: tvm.IRModule) -> list[str]:
    """Layouts of its poolings."""
    pools = [b.value for b in main_bindings(mod) if operator(b.value).endswith("pool2d")]
    return [pool.attrs.layout for pool in pools]


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "expected"), [(SunkResidual, ResidualSunk), (Joined, JoinedSunk), (Mixed, MixedSunk)]
)
def test_rewrite(before, expected):
    after = sunk(before)
    tvm.ir.assert_structural_equal(after, expected)
    assert same_bits(before, after)


@as_module
def Constants(x: R.Tensor((1, 5, 6, 4), "float32")):
    a = R.permute_dims(x, axes=[0, 3, 1, 2])
    b = R.add(a, R.const(CHANNEL_BIAS))
    c = R.multiply(R.const(2.0, "float32"), b)
    d = R.nn.relu(c)
    e = R.permute_dims(d, axes=[0, 2, 3, 1])
    return e


def test_constants_are_transposed():
    after = sunk(Constants)
    assert operators(after) == ["add", "multiply", "nn.relu"]
    assert same_bits(Constants, after)


# What has no axes, or operands behind a variable.
@as_module
def Odd(x: R.Tensor((1, 5, 6, 3), "float32")):
    a = R.permute_dims(x, axes=[0, 3, 1, 2])
    b = R.sum(a, keepdims=True)
    t = (a, a)
    c = R.concat(t, axis=1)
    d = R.add(c, b)
    e = R.permute_dims(d)
    f = R.max(a, axis=[-1], keepdims=True)
    g = R.sum(f)
    h = R.add(e, g)
    return h


@pytest.mark.long
def test_reductions_of_all_axes_and_plain_transposes():
    after = sunk(Odd)
    operands = inputs(Odd)
    (expected,), (got,) = run(Odd, *operands), run(after, *operands)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)  # 90 elements, summed in another order


@as_module
def Flattened(x: R.Tensor((1, 5, 6, 3), "float32")):
    a = R.permute_dims(x, axes=[0, 3, 1, 2])
    b = R.max(a, axis=[1], keepdims=False)
    return b


# A block's sum with a bias and a clamp, joined with another, and gates; then into blocks again.
@as_module
def Blocks(x: R.Tensor((1, 2, 3, 5, 16), "float32"), y: R.Tensor((1, 1, 3, 5, 16), "float32")):
    a = R.permute_dims(x, axes=[0, 2, 3, 1, 4])
    b = R.reshape(a, (1, 3, 5, 32))
    c = R.add(b, R.const(BLOCK_BIAS))
    d = R.clip(c, 0.0, 6.0)
    e = R.add(d, b)
    f = R.permute_dims(y, axes=[0, 2, 3, 1, 4])
    g = R.reshape(f, (1, 3, 5, 16))
    h = R.concat((e, g), axis=3)
    i = R.mean(h, axis=[1, 2], keepdims=True)
    j = R.multiply(i, h)
    k = R.reshape(j, (1, 3, 5, 3, 16))
    z = R.permute_dims(k, axes=[0, 3, 1, 2, 4])
    return z


@as_module
def BlocksSunk(x: R.Tensor((1, 2, 3, 5, 16), "float32"), y: R.Tensor((1, 1, 3, 5, 16), "float32")):
    c = R.add(x, R.const(BLOCK_BIAS.reshape(1, 1, 1, 2, 16).transpose(0, 3, 1, 2, 4)))
    d = R.clip(c, 0.0, 6.0)
    e = R.add(d, x)
    h = R.concat((e, y), axis=1)
    i = R.mean(h, axis=[2, 3], keepdims=True)
    z = R.multiply(i, h)
    return z


@pytest.mark.long
def test_blocks_are_kept():
    after = sunk(Blocks, "NCHW16c")
    tvm.ir.assert_structural_equal(after, BlocksSunk)
    assert same_bits(Blocks, after)


# A largest pixel, an average of what is there, and one that counts borders too, rounded up.
@as_module
def Pools(x: R.Tensor((1, 2, 6, 5, 16), "float32")):
    a = R.permute_dims(x, axes=[0, 2, 3, 1, 4])
    b = R.reshape(a, (1, 6, 5, 32))
    c = R.nn.max_pool2d(b, (3, 2), (2, 1), (1, 0, 1, 1), layout="NHWC")
    d = R.nn.avg_pool2d(c, (2, 2), (1, 1), (1, 1, 1, 1), layout="NHWC")
    e = R.nn.avg_pool2d(
        d, (3, 3), (2, 2), (1, 1, 1, 1), ceil_mode=True, count_include_pad=True, layout="NHWC"
    )
    f = R.nn.max_pool2d(d, (2, 2), layout="NCHW")
    g = R.mean(f)
    h = R.add(e, g)
    return h


@pytest.mark.parametrize(
    "kept, layout", [pytest.param("NCHW16c", "NCHW16c", marks=pytest.mark.long), ("NCHW", "NHWC")]
)
def test_pools_keep_the_layout_of_what_they_read(kept, layout):
    after = sunk(Pools, kept)
    assert pools_of(after) == [layout] * 3 + ["NCHW"]  # the last is of another layout
    assert same_bits(Pools, after)


@pytest.mark.long
@pytest.mark.parametrize("kept", long_but(["NCHW"], ["NCHW", "NCHW16c"]))
def test_what_is_named_is_computed_in_the_layout_and_nothing_else(kept):
    after = sunk(Pools, kept, {"d", "e"})
    assert pools_of(after) == ["NHWC", kept, kept, "NCHW"]
    assert same_bits(Pools, after)
    tvm.ir.assert_structural_equal(SinkLayout(kept, set())(SunkResidual), SunkResidual)


# A reduction over channels, a bias of other channels, reshapes that cut no blocks.
@as_module
def NoBlocks(x: R.Tensor((1, 2, 3, 5, 16), "float32")):
    a = R.permute_dims(x, axes=[0, 2, 3, 1, 4])
    b = R.reshape(a, (1, 3, 5, 32))
    c = R.sum(b, axis=[3], keepdims=True)
    d = R.sum(b, keepdims=True)
    e = R.multiply(R.add(b, c), d)
    f = R.reshape(e, (1, 3, 5, 4, 8))
    g = R.reshape(e, (1, 15, 32))
    h = R.sum(f)
    i = R.add(g, h)
    return i


def test_what_has_no_blocks_stays():
    after = sunk(NoBlocks, "NCHW16c")
    tvm.ir.assert_structural_equal(after, NoBlocks)


def test_a_reduction_that_drops_its_axes_has_no_layout_to_keep():
    tvm.ir.assert_structural_equal(SinkLayout()(Flattened), Flattened)
