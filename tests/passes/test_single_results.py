"""Is every part of a split a slice with the same bits?"""

import numpy as np
import pytest
from graphs import as_module, operators, outputs, same_bits
from tvm.script import relax as R

from pimflow.relay_passes.canonical.single_results import SingleResults


@as_module
def TupleHalves(x: R.Tensor((1, 6, 4, 4), "float32")):
    halves = R.split(x, 2, axis=1)
    first = halves[0]
    second = halves[1]
    y = R.add(first, R.nn.relu(second))
    return y


# Parts of different sizes along a negative axis, one of them unused, all of them joined again.
@as_module
def Uneven(x: R.Tensor((1, 2, 7), "float32")):
    parts = R.split(x, [1, 3], axis=-1)
    last = parts[2]
    whole = R.concat(parts, axis=2)
    y = (last, whole)
    return y


@pytest.mark.long
@pytest.mark.parametrize("mod", [TupleHalves, Uneven])
def test_parts_are_slices_with_the_same_bits(mod):
    after = SingleResults()(mod)
    assert "split" not in operators(after)
    assert same_bits(mod, after)


def test_slices_compile():
    mod = SingleResults()(TupleHalves)
    x = np.random.default_rng(0).standard_normal((1, 6, 4, 4)).astype(np.float32)
    (y,) = outputs(mod, [x])
    np.testing.assert_array_equal(y, x[:, :3] + np.maximum(x[:, 3:], 0))
