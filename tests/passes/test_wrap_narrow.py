"""Does arithmetic of narrow integers wrap around where the language's own does not?"""

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper
from onnx_models import onnx_model
from tvm import te, tirx

import pimflow
from pimflow.relay_passes.schedules.loops import nodes
from pimflow.relay_passes.schedules.wrap_narrow import WrapNarrow

OPERATIONS = {
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "product": lambda a, b: a * b,
    "complement": lambda a, b: ~a,
    "shift": lambda a, b: a << (b & tirx.const(3, a.dtype)),
}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_result_is_cut_to_its_type_before_it_is_widened(name, dtype):
    a, b = (te.placeholder((16,), dtype, label) for label in "ab")
    wide = te.compute((16,), lambda i: OPERATIONS[name](a[i], b[i]).astype("int32"), "wide")
    function = te.create_prim_func([a, b, wide])
    wrapped = WrapNarrow()(tvm.IRModule({"main": function}))["main"]
    kinds = (tirx.Add, tirx.Sub, tirx.Mul, tirx.BitwiseNot, tirx.LShift)
    types = [[str(n.ty.dtype) for kind in kinds for n in nodes(f.body, kind)] for f in (function, wrapped)]
    assert dtype in types[0] and dtype not in types[1]


def test_floats_stay_as_they_are():
    a = te.placeholder((16,), "float16", "a")
    function = te.create_prim_func([a, te.compute((16,), lambda i: a[i] + a[i] * a[i], "sum")])
    module = tvm.IRModule({"main": function})
    tvm.ir.assert_structural_equal(WrapNarrow()(module), module)


@pytest.mark.long
def test_c_code_wraps_as_onnx_does(tmp_path):
    """C computes ``uint8`` in ``int``, where a difference below zero would stay negative."""
    network = [
        helper.make_node("Sub", ["x", "y"], ["difference"]),
        helper.make_node("Cast", ["difference"], ["wide"], to=TensorProto.INT32),
        helper.make_node("BitwiseNot", ["x"], ["complement"]),
        helper.make_node("Cast", ["complement"], ["wide complement"], to=TensorProto.INT32),
        helper.make_node("Cast", ["difference"], ["word"], to=TensorProto.UINT16),
        helper.make_node("Cast", ["complement"], ["long"], to=TensorProto.UINT64),
    ]
    results = dict.fromkeys(("wide", "wide complement"), (TensorProto.INT32, [1, 64]))
    results |= {"word": (TensorProto.UINT16, [1, 64]), "long": (TensorProto.UINT64, [1, 64])}
    path = tmp_path / "net.onnx"
    onnx.save(onnx_model(network, dict.fromkeys("xy", (TensorProto.UINT8, [1, 64])), results, opset=18), path)
    pimflow.compile(path, tmp_path / "out", target="c", conventions="none")
    x, y = (np.random.default_rng(i).integers(0, 256, (1, 64), np.uint8) for i in range(2))
    difference, complement, word, long = pimflow.run(tmp_path / "out", {"x": x, "y": y})
    np.testing.assert_array_equal(difference, (x - y).astype(np.int32))
    np.testing.assert_array_equal(complement, (~x).astype(np.int32))
    np.testing.assert_array_equal(word, (x - y).astype(np.uint16))
    np.testing.assert_array_equal(long, (~x).astype(np.uint64))
