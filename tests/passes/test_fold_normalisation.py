"""Is a normalisation folded into the filters of the convolution before it, as TVM folds it?"""

import numpy as np
import tvm
from graphs import as_module, close, operators
from tvm import relax
from tvm.script import relax as R

from pimflow.relay_passes.canonical.evaluate_constants import EvaluateConstants
from pimflow.relay_passes.canonical.fold_normalisation import FoldNormalisation

RNG = np.random.default_rng(5)
FILTERS = RNG.standard_normal((4, 3, 3, 3), np.float32)
SCALE, SHIFT, MEAN, VARIANCE = RNG.uniform(0.5, 1.5, (4, 4)).astype(np.float32)


@as_module
def FoldedNorm(x: R.Tensor((1, 3, 6, 5), "float32")):
    conv = R.nn.conv2d(x, R.const(FILTERS), padding=1)
    parts = R.nn.batch_norm(
        conv, R.const(SCALE), R.const(SHIFT), R.const(MEAN), R.const(VARIANCE), axis=1, training=False
    )
    norm = parts[0]
    y = R.nn.relu(norm)
    return y


@as_module
def SharedNorm(x: R.Tensor((1, 3, 6, 5), "float32")):
    conv = R.nn.conv2d(x, R.const(FILTERS), padding=1)
    parts = R.nn.batch_norm(
        conv, R.const(SCALE), R.const(SHIFT), R.const(MEAN), R.const(VARIANCE), axis=1, training=False
    )
    norm = parts[0]
    y = R.add(norm, conv)
    return y


@as_module
def InputNorm(x: R.Tensor((1, 4, 6, 5), "float32")):
    parts = R.nn.batch_norm(
        x, R.const(SCALE), R.const(SHIFT), R.const(MEAN), R.const(VARIANCE), axis=1, training=False
    )
    y = parts[0]
    return y


def test_the_result_is_that_of_tvm_bit_by_bit():
    after, by_tvm = FoldNormalisation()(FoldedNorm), relax.transform.FoldBatchnormToConv2D()(FoldedNorm)
    tvm.ir.assert_structural_equal(after, EvaluateConstants()(by_tvm))
    assert operators(after) == ["nn.conv2d", "add", "nn.relu"]
    close(FoldedNorm, after)


def test_a_convolution_that_others_read_stays_beside_the_folded_one():
    after = FoldNormalisation()(SharedNorm)
    assert operators(after).count("nn.conv2d") == 2 and "nn.batch_norm" not in operators(after)
    close(SharedNorm, after)


def test_a_normalisation_of_an_input_stays():
    tvm.ir.assert_structural_equal(FoldNormalisation()(InputNorm), InputNorm)
