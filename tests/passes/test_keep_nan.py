"""Are signs, clamps, maxima and minima NaN of NaN, and everything else TVM's?"""

import numpy as np
import pytest
from graphs import as_module, main_module, outputs
from tvm import relax
from tvm.script import relax as R

from pimflow.relay_passes import keep_nan


@as_module
def NanFloats(x: R.Tensor((8,), "float32")):
    y = R.sign(x)
    return y


@as_module
def NanIntegers(x: R.Tensor((8,), "int32")):
    y = R.sign(x)
    return y


@pytest.mark.parametrize("mod", [NanFloats, NanIntegers])
def test_signs(mod):
    x = np.array([-7, -1, 0, 1, 7, 2**20, -(2**20), 0]).astype(np.float32 if mod is NanFloats else np.int32)
    if mod is NanFloats:
        x[5:] = np.nan, np.inf, -np.inf
    (y,) = outputs(relax.transform.LegalizeOps(keep_nan.LEGAL)(mod), [x])
    np.testing.assert_array_equal(y, np.sign(x))


@pytest.mark.parametrize("slope", [0.0, 0.1, -2.0])
def test_slopes(slope):
    @as_module
    def leaky(x: R.Tensor((6,), "float32")):
        y = R.nn.leakyrelu(x, slope)
        return y

    x = np.array([np.nan, np.inf, -np.inf, 0, 3, -3], np.float32)
    (y,) = outputs(relax.transform.LegalizeOps(keep_nan.LEGAL)(leaky), [x])
    negative = x * np.float32(slope) if slope else np.zeros_like(x)
    np.testing.assert_array_equal(y, np.where(x > 0, x, np.where(np.isnan(x), x, negative)))


NOT_FINITE = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 3, -3, 7], np.float32)
UNARY = {
    "relu": (relax.op.nn.relu, lambda x: np.maximum(x, 0)),
    "clip": (lambda x: relax.op.clip(x, -1, 6), lambda x: np.clip(x, -1, 6)),
    "clip from below": (lambda x: relax.op.clip(x, 0.5, np.inf), lambda x: np.maximum(x, 0.5)),
}


def computed(params: list[relax.Var], result: relax.Expr, operands: list[np.ndarray]) -> np.ndarray:
    lowered = relax.transform.LegalizeOps(keep_nan.LEGAL)(main_module(params, lambda _: result))
    (y,) = outputs(lowered, operands)
    return y


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize("name", UNARY)
def test_clamps(name, dtype):
    operator, expected = UNARY[name]
    if dtype == "int32" and "below" in name:
        pytest.skip("no integer is infinite")
    values = np.array([5, -7, 0, 1, -1, 100, -100, 6]) if dtype == "int32" else NOT_FINITE
    x = values.astype(dtype)
    variable = relax.Var("x", relax.TensorType(x.shape, dtype))
    y = computed([variable], operator(variable), [x])
    np.testing.assert_array_equal(y, expected(x).astype(dtype))


@pytest.mark.long
@pytest.mark.parametrize("shape", [(8,), (1,), ()])
@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_maxima(name, shape):
    a, b = NOT_FINITE, np.resize(NOT_FINITE[::-1], shape)
    variables = [relax.Var(n, relax.TensorType(v.shape, "float32")) for n, v in zip("ab", (a, b))]
    for order in (1, -1):
        y = computed(variables, getattr(relax.op, name)(*variables[::order]), [a, b])
        np.testing.assert_array_equal(y, getattr(np, name)(a, b))


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_maxima_with_a_number(dtype):
    x = (NOT_FINITE if dtype == "float32" else np.arange(-4, 4)).astype(dtype)
    variable, number = relax.Var("x", relax.TensorType(x.shape, dtype)), relax.const(2, dtype)
    for operands in ((variable, number), (number, variable)):
        y = computed([variable], relax.op.minimum(*operands), [x])
        np.testing.assert_array_equal(y, np.minimum(x, 2))
