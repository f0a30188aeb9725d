"""Do PReLU, GELU and SiLU become elementwise operators with the same values, and nothing else?"""

import math

import numpy as np
import pytest
from graphs import inputs, main_module, operators, outputs, run, same_bits, shaped_model
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from onnx import helper
from tvm import ir, relax

from pimflow.frontend import onnx_graph, onnx_runtime
from pimflow.relay_passes.canonical.plain_activations import PlainActivations
from pimflow.relay_passes.regions.extract_regions import extract_regions

ROOT = math.sqrt(2)


def module(build, dims=(2, 3, 4, 4), second=None):
    """``build(emit, x)`` as the body of ``main``; ``build(emit, x, y)`` with a second input."""
    x = relax.Var("x", relax.TensorType(dims, "float32"))
    operands = [x] if second is None else [x, relax.Var("y", relax.TensorType(second, "float32"))]
    return main_module(operands, lambda builder: build(builder.emit, *operands))


def prelu(slopes, axis):
    return module(lambda emit, x: relax.op.nn.prelu(x, relax.const(np.float32(slopes)), axis))


@pytest.mark.parametrize("slopes", [[0.25], [0.25] * 3])
def test_one_slope_is_a_leaky_rectifier_with_the_same_bits(slopes):
    before = prelu(slopes, 1)
    after = PlainActivations()(before)
    assert operators(after) == ["nn.leakyrelu"]
    assert same_bits(before, after)
    ir.assert_structural_equal(PlainActivations()(after), after)


def test_other_slopes_are_left():
    before = module(lambda emit, x, y: relax.op.nn.prelu(x, y, 1), second=(3,))
    ir.assert_structural_equal(PlainActivations()(before), before)
    before = prelu([0.25, -1.5, 3.0], 1)
    ir.assert_structural_equal(PlainActivations()(before), before)


def spell_gelu(emit, x, order=(0, 1, 2), grouped=True, swapped=(), divided=True, half=0.5, one=1, root=ROOT):
    """A GELU of `x` in the operators of exporters: its factors in any order, its operands swapped or not."""
    const = lambda value: relax.const(value, "float32")  # noqa: E731
    pair = lambda name, a, b: (b, a) if name in swapped else (a, b)  # noqa: E731
    inner = relax.op.divide(x, const(root)) if divided else relax.op.multiply(*pair("in", x, const(1 / root)))
    curve = emit(relax.op.add(*pair("one", emit(relax.op.erf(emit(inner))), const(one))))
    factors = [(x, curve, const(half))[i] for i in order]
    if grouped:
        return relax.op.multiply(emit(relax.op.multiply(factors[0], factors[1])), factors[2])
    return relax.op.multiply(factors[0], emit(relax.op.multiply(factors[1], factors[2])))


@settings(max_examples=examples(8), deadline=None)
@given(st.permutations([0, 1, 2]), st.booleans(), st.sets(st.sampled_from(["in", "one"])), st.booleans())
def test_however_a_gelu_is_spelled_it_is_one(order, grouped, swapped, divided):
    before = module(lambda emit, x: spell_gelu(emit, x, order, grouped, swapped, divided))
    after = PlainActivations()(before)
    assert operators(after) == ["nn.gelu"]
    (x,) = inputs(before)
    erf = np.vectorize(math.erf)(x.astype(np.float64) / ROOT)
    np.testing.assert_allclose(run(after, x)[0], x * (1 + erf) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [{"half": 0.51}, {"one": 0.99}, {"root": 1.5}])
def test_what_is_nearly_a_gelu_is_left(wrong):
    before = module(lambda emit, x: spell_gelu(emit, x, **wrong))
    ir.assert_structural_equal(PlainActivations()(before), before)


def test_a_gelu_of_something_else_is_left():
    before = module(lambda emit, x, y: relax.op.multiply(spell_gelu(emit, x), y), second=(2, 3, 4, 4))
    after = PlainActivations()(before)
    assert operators(after) == ["nn.gelu", "multiply"]

    def other(emit, x, y):
        erf = emit(relax.op.erf(emit(relax.op.divide(x, relax.const(ROOT, "float32")))))
        curve = emit(relax.op.add(erf, relax.const(1.0, "float32")))
        return relax.op.multiply(emit(relax.op.multiply(y, curve)), relax.const(0.5, "float32"))

    before = module(other, second=(2, 3, 4, 4))
    ir.assert_structural_equal(PlainActivations()(before), before)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_silu_is_one_operator_with_the_same_values(swapped):
    def silu(emit, x):
        curve = emit(relax.op.sigmoid(x))
        return relax.op.multiply(curve, x) if swapped else relax.op.multiply(x, curve)

    before = module(silu)
    after = PlainActivations()(before)
    assert operators(after) == ["nn.silu"]
    x = np.clip(inputs(before)[0], -20, 20)
    np.testing.assert_allclose(run(after, x)[0], x / (1 + np.exp(-x)), rtol=1e-5, atol=1e-6)


def test_what_is_nearly_a_silu_is_left():
    def other_factor(emit, x, y):
        return relax.op.multiply(y, emit(relax.op.sigmoid(x)))

    def read_twice(emit, x):
        curve = emit(relax.op.sigmoid(x))
        return relax.op.add(emit(relax.op.multiply(x, curve)), curve)

    for before in (module(other_factor, second=(2, 3, 4, 4)), module(read_twice)):
        ir.assert_structural_equal(PlainActivations()(before), before)


def test_a_part_that_is_read_elsewhere_too_is_left():
    def twice(emit, x):
        curve = emit(relax.op.add(emit(relax.op.erf(emit(relax.op.divide(x, relax.const(ROOT, "float32"))))),
                                  relax.const(1.0, "float32")))  # fmt: skip
        half = emit(relax.op.multiply(emit(relax.op.multiply(x, curve)), relax.const(0.5, "float32")))
        return relax.op.add(half, curve)

    before = module(twice)
    ir.assert_structural_equal(PlainActivations()(before), before)


@pytest.mark.long
@pytest.mark.parametrize("slopes", [1, 8])
def test_a_prelu_joins_the_kernel_of_its_convolution(slopes):
    """With one slope, or one a channel, which the layout moves."""
    rng = np.random.default_rng(slopes)
    model = shaped_model(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
            helper.make_node("PRelu", ["c", "s"], ["y"], "prelu"),
        ],
        {"x": (1, 3, 6, 6)},
        {"w": rng.standard_normal((8, 3, 3, 3), np.float32), "s": rng.random((slopes, 1, 1), np.float32)},
        ["y"],
    )
    mod = onnx_graph.from_onnx(model)
    assert len(extract_regions(mod).regions) == 1
    assert operators(mod).count("permute_dims") == 2  # of the input and of the result
    x = rng.standard_normal((1, 3, 6, 6), np.float32)
    (expected,) = onnx_runtime.reference(model)({"x": x})
    np.testing.assert_allclose(outputs(mod, [x])[0], expected, rtol=1e-5, atol=1e-5)
