"""Do operators of integers give what ONNX means?"""

import numpy as np
import pytest
import tvm
from graphs import as_module, outputs
from tvm.script import relax as R

from pimflow.relay_passes.canonical.plain_integers import PlainIntegers


@as_module
def IntegersBefore(x: R.Tensor((2, 5), "int32"), p: R.Tensor((2, 5), "uint8")):
    m = R.mean(x, axis=[1])
    a = R.argmax(p, axis=1)
    s = R.sign(p)
    y = (m, a, s)
    return y


@as_module
def IntegersExpected(x: R.Tensor((2, 5), "int32"), p: R.Tensor((2, 5), "uint8")):
    m_sum = R.sum(x, axis=[1])
    m = R.divide(m_sum, R.const(5, "int32"))
    a_wide = R.astype(p, "int64")
    a = R.argmax(a_wide, axis=1)
    s = R.minimum(p, R.const(1, "uint8"))
    y = (m, a, s)
    return y


@as_module
def Floats(x: R.Tensor((2, 5), "float32")):
    m = R.mean(x, axis=[1])
    a = R.argmax(x, axis=1)
    y = (m, a)
    return y


def test_what_it_rewrites():
    after = PlainIntegers()(IntegersBefore)
    tvm.ir.assert_structural_equal(after, IntegersExpected)
    second = PlainIntegers()(after)
    tvm.ir.assert_structural_equal(second, after)


def test_floats_stay_as_they_are():
    assert PlainIntegers()(Floats).same_as(Floats)


@pytest.mark.parametrize("seed", range(4))
def test_values(seed):
    draw = np.random.default_rng(seed)
    x = draw.integers(-9, 9, (2, 5)).astype(np.int32)
    p = (draw.integers(0, 3, (2, 5)) * (seed > 0)).astype(np.uint8)  # only zeros for seed 0
    mean, place, sign = outputs(PlainIntegers()(IntegersBefore), [x, p])
    np.testing.assert_array_equal(mean, np.trunc(x.sum(axis=1) / 5).astype(np.int32))
    np.testing.assert_array_equal(place, p.argmax(axis=1))
    np.testing.assert_array_equal(sign, np.minimum(p, 1))


@as_module
def Sorts(p: R.Tensor((2, 5), "uint16")):
    with R.dataflow():
        s = R.sort(p, axis=1)
        a = R.argsort(p, axis=1, dtype="int64")
        t = R.topk(p, k=3, axis=1, ret_type="values")
        i = R.topk(p, k=3, axis=1, ret_type="indices", dtype="int64")
        y = (s, a, t, i)
        R.output(y)
    return y


def test_sorts_of_small_types():
    """TVM's on a CPU have none of uint16."""
    p = np.array([[7, 65535, 0, 40000, 3], [1, 2, 300, 4, 5]], np.uint16)
    after = PlainIntegers()(Sorts)
    tvm.ir.assert_structural_equal(PlainIntegers()(after), after)
    ascending, places, largest, largest_places = outputs(after, [p])
    assert ascending.dtype == largest.dtype == np.uint16
    np.testing.assert_array_equal(ascending, np.sort(p))
    np.testing.assert_array_equal(places, np.argsort(p))
    np.testing.assert_array_equal(largest, np.sort(p)[:, :1:-1])
    np.testing.assert_array_equal(largest_places, np.argsort(p)[:, :1:-1])
