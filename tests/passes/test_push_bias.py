"""Where do the biases of linear layers go, and does the result stay the same?"""

import numpy as np
import pytest
import tvm
from graphs import as_module, inputs, main_module, operators, run
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from tvm import relax
from tvm.script import relax as R

from pimflow.relay_passes.canonical.push_bias import PushBias
from pimflow.relay_passes.flat import main_bindings, operator, rebuild

C = 4


def constant(*shape: int, seed: int = 0) -> relax.Expr:
    return relax.const(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def conv(builder, x, oc: int = C, kernel: int = 1, padding: int = 0, groups: int = 1, seed: int = 1):
    filters = constant(oc, kernel, kernel, int(x.ty.shape[3]) // groups, seed=seed)
    call = relax.op.nn.conv2d(
        x, filters, padding=padding, groups=groups, data_layout="NHWC", kernel_layout="OHWI"
    )
    return builder.emit(call)


def bias(builder, x, seed: int = 2):
    return builder.emit(relax.op.add(x, constant(1, 1, 1, int(x.ty.shape[3]), seed=seed)))


def module(body) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType((1, 6, 5, C), "float32"))
    # bindings in the form that passes leave them in
    return rebuild(main_module([x], lambda builder: body(builder, x)), lambda *_: None)


def biases(mod: tvm.IRModule) -> int:
    """Additions of a constant."""
    values = (b.value for b in main_bindings(mod))
    return sum(operator(v) == "add" and isinstance(v.args[1], tvm.ir.GenericConst) for v in values)


def close(before: tvm.IRModule, after: tvm.IRModule) -> bool:
    operands = inputs(before)
    pairs = zip(run(before, *operands), run(after, *operands), strict=True)
    return all(np.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs)


def test_a_bias_goes_through_an_unpadded_convolution():
    @as_module
    def bias_push_before(x: R.Tensor((1, 2), "float32")):
        t = R.add(x, R.const([1.0, 2.0]))
        y = R.matmul(t, R.const([[1.0, 0.0], [0.0, 3.0]]))
        z = R.add(y, R.const([10.0, 20.0]))
        return z

    @as_module
    def bias_push_expected(x: R.Tensor((1, 2), "float32")):
        y = R.matmul(x, R.const([[1.0, 0.0], [0.0, 3.0]]))
        z = R.add(y, R.const([[11.0, 26.0]]))
        return z

    tvm.ir.assert_structural_equal(PushBias()(bias_push_before), bias_push_expected)


@pytest.mark.long
def test_projections_of_residual_blocks_end_without_a_bias():
    def body(builder, x):
        first = bias(builder, conv(builder, x, seed=3), seed=4)
        second = bias(builder, conv(builder, builder.emit(relax.op.nn.relu(conv(builder, first)))), seed=5)
        block = builder.emit(relax.op.add(first, second))
        return builder.emit(relax.op.nn.relu(bias(builder, conv(builder, block, oc=6, kernel=2))))

    before = module(body)
    after = PushBias()(before)
    # What is left: one before each relu.
    assert (biases(before), biases(after)) == (3, 2)
    assert close(before, after)


@pytest.mark.parametrize(
    "reader",
    [
        lambda b, t: conv(b, t, kernel=3, padding=1),
        lambda b, t: conv(b, t, groups=C),
        lambda b, t: b.emit(relax.op.clip(t, 0.0, 6.0)),
        lambda b, t: b.emit(relax.op.multiply(t, t)),
        lambda b, t: t,
    ],
    ids=["padded", "depthwise", "clip", "product", "output"],
)
def test_a_reader_that_takes_no_bias_leaves_it_where_it_is(reader):
    before = module(lambda b, x: reader(b, bias(b, conv(b, x))))
    after = PushBias()(before)
    tvm.ir.assert_structural_equal(after, before)


def test_a_bias_stays_if_one_of_two_readers_does_not_take_it():
    def body(builder, x):
        t = bias(builder, conv(builder, x))
        linear, rectified = conv(builder, t, seed=7), builder.emit(relax.op.nn.relu(t))
        return builder.emit(relax.op.add(linear, rectified))

    before = module(body)
    tvm.ir.assert_structural_equal(PushBias()(before), before)


@pytest.mark.long
@settings(max_examples=examples(15), derandomize=True, deadline=None)
@given(st.data())
def test_graphs_keep_their_values_and_a_second_run_changes_nothing(data):
    def body(builder, x):
        tensors = [x]
        for step in range(data.draw(st.integers(2, 8))):
            t = data.draw(st.sampled_from(tensors))
            kind = data.draw(st.sampled_from(["conv", "padded", "depthwise", "bias", "add", "relu"]))
            if kind == "add":
                like = [u for u in tensors if list(u.ty.shape) == list(t.ty.shape)]
                new = builder.emit(relax.op.add(t, data.draw(st.sampled_from(like))))
            elif kind == "bias":
                new = bias(builder, t, seed=step)
            elif kind == "relu":
                new = builder.emit(relax.op.nn.relu(t))
            elif kind == "padded":
                new = conv(builder, t, kernel=3, padding=1, seed=step)
            else:
                new = conv(builder, t, groups=C if kind == "depthwise" else 1, seed=step)
            tensors.append(new)
        return builder.emit(relax.op.add(tensors[-1], tensors[-2]))

    before = module(body)
    after = PushBias()(before)
    assert biases(after) <= biases(before) + operators(before).count("nn.conv2d")
    tvm.ir.assert_structural_equal(PushBias()(after), after)
    operands = inputs(before)
    (a,), (b,) = run(before, *operands), run(after, *operands)
    assert np.abs(a - b).max() <= 1e-4 * max(1.0, np.abs(a).max())
