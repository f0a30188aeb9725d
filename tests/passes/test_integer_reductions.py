"""Are reductions of integers those that ONNX means?"""

import numpy as np
import pytest
import tvm
from graphs import as_module, outputs
from tvm.script import relax as R

from pimflow.relay_passes.canonical.integer_reductions import IntegerReductions


@as_module
def IntegerReductionBefore(x: R.Tensor((2, 5), "int32"), p: R.Tensor((2, 5), "uint8")):
    m = R.mean(x, axis=[1])
    a = R.argmax(p, axis=1)
    y = (m, a)
    return y


@as_module
def IntegerReductionExpected(x: R.Tensor((2, 5), "int32"), p: R.Tensor((2, 5), "uint8")):
    m_sum = R.sum(x, axis=[1])
    m = R.divide(m_sum, R.const(5, "int32"))
    a_wide = R.astype(p, "int64")
    a = R.argmax(a_wide, axis=1)
    y = (m, a)
    return y


@as_module
def Floats(x: R.Tensor((2, 5), "float32")):
    m = R.mean(x, axis=[1])
    a = R.argmax(x, axis=1)
    y = (m, a)
    return y


def test_what_it_rewrites():
    after = IntegerReductions()(IntegerReductionBefore)
    tvm.ir.assert_structural_equal(after, IntegerReductionExpected)
    second = IntegerReductions()(after)
    tvm.ir.assert_structural_equal(second, after)


def test_floats_stay_as_they_are():
    assert IntegerReductions()(Floats).same_as(Floats)


@pytest.mark.parametrize("seed", range(4))
def test_values(seed):
    draw = np.random.default_rng(seed)
    x = draw.integers(-9, 9, (2, 5)).astype(np.int32)
    p = (draw.integers(0, 3, (2, 5)) * (seed > 0)).astype(np.uint8)  # only zeros for seed 0
    mean, place = outputs(IntegerReductions()(IntegerReductionBefore), [x, p])
    np.testing.assert_array_equal(mean, np.trunc(x.sum(axis=1) / 5).astype(np.int32))
    np.testing.assert_array_equal(place, p.argmax(axis=1))
