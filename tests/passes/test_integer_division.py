"""Do divisions of integers give what NumPy gives, and a number where a processor would trap?"""

import numpy as np
import pytest
from graphs import main_module, outputs
from length import long_but
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from pimflow import frontend
from pimflow.errors import ModelError

# By operator: NumPy's own, and whether it is a quotient.
OPERATORS = {
    "divide": (lambda x, y: np.sign(x) * np.sign(y) * (abs(x) // abs(y)), True),
    "floor_divide": (lambda x, y: x // y, True),
    "mod": (np.fmod, False),
    "floor_mod": (np.mod, False),
}


@pytest.mark.parametrize("dtype", long_but(["int32"], ["int8", "int32", "int64", "uint8"]))
def test_divisions_by_any_integer(dtype):
    bounds = np.iinfo(dtype)
    x = np.array([7, -7, bounds.min, bounds.min, bounds.max, 0, 5, 6, 0]).astype(dtype)
    divisor = np.array([2, 2, -1, 0, -1, 0, 0, 5, 3]).astype(dtype)
    variables = [relax.Var(name, relax.TensorType((9,), dtype)) for name in "xy"]

    def results(builder):
        return relax.Tuple([builder.emit(getattr(relax.op, name)(*variables)) for name in OPERATORS])

    computed = outputs(main_module(variables, results), [x, divisor])
    for result, (operator, is_quotient) in zip(computed, OPERATORS.values(), strict=True):
        with np.errstate(all="ignore"):
            expected = operator(x, np.where(divisor == 0, 1, divisor).astype(dtype)).astype(dtype)
        if dtype[0] == "i":
            expected[divisor == -1] = (0 - x[divisor == -1]).astype(dtype) if is_quotient else 0
        expected[divisor == 0] = 0
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("kind", ["Div", "Mod"])
def test_a_constant_divisor_of_zero_is_refused(kind):
    """ONNX Runtime ends the process that divides by it."""
    node = helper.make_node(kind, ["x", "z"], ["y"], name="halves")
    info = [helper.make_tensor_value_info(name, TensorProto.INT32, [2]) for name in "xy"]
    divisor = numpy_helper.from_array(np.array([2, 0], np.int32), "z")
    model = helper.make_model(helper.make_graph([node], "net", info[:1], info[1:], [divisor]))
    with pytest.raises(ModelError, match=f"model 'net': {kind} 'halves' divides integers by 'z', which has"):
        frontend.load(model)
