"""Do the simpler operators that replace one compute what the tests of the ONNX standard ask for?

ONNX's own evaluator runs them, so no importer and no kernel is between them and the expected values.
"""

import functools
import importlib

import numpy as np
import pytest
from onnx.backend.test.case import node
from onnx.reference import ReferenceEvaluator
from onnx_node_tests import constants_model

from pimflow import zoo
from pimflow.frontend.onnx_bodies import BODIES, needs_body
from pimflow.zoo import foreign

FAMILIES = {
    "Col2Im": "test_col2im",
    "CumProd": "test_cumprod",
    "DeformConv": "deform_conv",
    "Det": "test_det",
    "DequantizeLinear": "test_dequantizelinear_blocked",
    "DFT": "test_dft",
    "EyeLike": "test_eyelike",
    "LSTM": "test_lstm_batchwise",
    "MaxPool": "test_maxpool_with_argmax",
    "MaxUnpool": "test_maxunpool",
    "OneHot": "test_onehot",
    "QuantizeLinear": "test_quantizelinear_blocked_asym",
    "ReverseSequence": "test_reversesequence",
    "STFT": "test_stft",
    "TensorScatter": "test_tensorscatter",
    "TfIdfVectorizer": "test_tfidf",
}


@pytest.mark.parametrize("operator", FAMILIES)
def test_bodies(operator):
    # The tests of an operator are made where its module is imported; those of all take seconds.
    importlib.import_module(f"{node.__name__}.{operator.lower()}")
    chosen = [t for t in node._NodeTestCases if FAMILIES[operator] in t.name and "expanded" not in t.name]
    assert chosen
    for test in chosen:
        model, [(inputs, expected)] = constants_model(test.model, test.data_sets[0])
        model = zoo.load_model(model)
        weights = {tensor.name: tensor for tensor in model.graph.initializer}
        foreign.expand(model, weights, BODIES, functools.partial(needs_body, scalars=set(), floats8=set()))
        kinds = {operation.op_type for operation in model.graph.node}
        assert operator in ("LSTM",) or operator not in kinds, test.name
        names = [value.name for value in model.graph.input]
        types = [zoo.input_types(model)[name][1] for name in names]
        operands = {name: np.asarray(x).astype(t) for name, x, t in zip(names, inputs, types, strict=True)}
        results = ReferenceEvaluator(model).run(None, operands)
        for result, value in zip(results, expected, strict=True):
            assert result.shape == np.shape(value), test.name
            np.testing.assert_allclose(
                np.asarray(result, "float64"), np.asarray(value, "float64"), atol=1e-4, err_msg=test.name
            )
