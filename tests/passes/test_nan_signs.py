"""Is the sign of NaN NaN, and every other sign TVM's?"""

import numpy as np
import pytest
from graphs import outputs
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from pimflow.relay_passes.kernels import nan_signs


@I.ir_module
class Floats:
    @R.function
    def main(x: R.Tensor((8,), "float32")):
        with R.dataflow():
            y = R.sign(x)
            R.output(y)
        return y


@I.ir_module
class Integers:
    @R.function
    def main(x: R.Tensor((8,), "int32")):
        with R.dataflow():
            y = R.sign(x)
            R.output(y)
        return y


@pytest.mark.parametrize("mod", [Floats, Integers])
def test_signs(mod):
    x = np.array([-7, -1, 0, 1, 7, 2**20, -(2**20), 0]).astype(np.float32 if mod is Floats else np.int32)
    if mod is Floats:
        x[5:] = np.nan, np.inf, -np.inf
    (y,) = outputs(relax.transform.LegalizeOps(nan_signs.LEGAL)(mod), [x])
    np.testing.assert_array_equal(y, np.sign(x))


@pytest.mark.parametrize("slope", [0.0, 0.1, -2.0])
def test_slopes(slope):
    @I.ir_module
    class Leaky:
        @R.function
        def main(x: R.Tensor((6,), "float32")):
            with R.dataflow():
                y = R.nn.leakyrelu(x, slope)
                R.output(y)
            return y

    x = np.array([np.nan, np.inf, -np.inf, 0, 3, -3], np.float32)
    (y,) = outputs(relax.transform.LegalizeOps(nan_signs.LEGAL)(Leaky), [x])
    negative = x * np.float32(slope) if slope else np.zeros_like(x)
    np.testing.assert_array_equal(y, np.where(x > 0, x, np.where(np.isnan(x), x, negative)))
