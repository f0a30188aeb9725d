"""Is a clamp in two opaque kernels one operator again?"""

import numpy as np
import pytest
import tvm
from graphs import as_module, inputs, operators, same_bits, shaped_model
from onnx import TensorProto, helper
from tvm import relax, te
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from pimflow.frontend import onnx_graph
from pimflow.relay_passes.canonical.recognise_clip import RecogniseClip


def kernels(shape: tuple[int, int], *steps) -> tvm.IRModule:
    """One kernel after another: of each its operands behind the map, and an element of what it gives.

    An operand is a number, or the shape of a parameter of ``main``.
    """
    builder = relax.BlockBuilder()
    y = x = relax.Var("x", relax.TensorType(shape, "float32"))
    operands = [
        relax.const(spec) if isinstance(spec, float) else relax.Var(name, relax.TensorType(spec, "float32"))
        for name, spec, _ in steps
    ]
    with builder.function("main", [x, *(var for var in operands if isinstance(var, relax.Var))]):
        with builder.dataflow():
            for (name, _, element), operand in zip(steps, operands):
                y = builder.emit_te(
                    lambda a, low, f=element: te.compute(a.shape, lambda i, j: f(a, low, i, j)),
                    y,
                    operand,
                    primfunc_name_hint=name,
                )
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    return builder.get()


RecognisedClipBefore = kernels(
    (2, 3),
    ("maximum", 0.0, lambda x, low, i, j: te.max(x[i, j], low())),
    ("minimum", 6.0, lambda x, high, i, j: te.min(x[i, j], high())),
)


@as_module
def RecognisedClipExpected(x: R.Tensor((2, 3), "float32")):
    b = R.clip(x, 0.0, 6.0)
    return b


# None clamps an element by a scalar: a transpose, a scaled clamp, a clamp by a row, a sum.
def max_of_double(x, low, i, j):
    return te.max(x[i, j] * 2.0, low())


OtherKernels = kernels(
    (3, 3),
    ("turned", 0.0, lambda x, low, i, j: te.max(x[j, i], low())),
    ("scaled", 0.0, max_of_double),
    ("by_row", (3,), lambda x, low, i, j: te.max(x[i, j], low[j])),
    ("tensors", 1.0, lambda x, low, i, j: x[i, j] + low()),
    ("scaled_by_a_parameter", (), max_of_double),
)


def test_relu6():
    after = RecogniseClip()(RecognisedClipBefore)
    tvm.ir.assert_structural_equal(after, RecognisedClipExpected)
    assert same_bits(RecognisedClipBefore, after)
    tvm.ir.assert_structural_equal(RecogniseClip()(after), after)


def test_other_kernels_stay():
    tvm.ir.assert_structural_equal(RecogniseClip()(OtherKernels), OtherKernels)


def clip(low: float | None, high: float | None, dtype: int = TensorProto.FLOAT) -> tvm.IRModule:
    """ONNX Clip as the importer writes it, its NaN tests folded."""
    array = helper.tensor_dtype_to_np_dtype(dtype)
    bounds = {name: array.type(v) for name, v in (("low", low), ("high", high)) if v is not None}
    operands = ["x", "low" if low is not None else "", "high" if high is not None else ""]
    node = helper.make_node("Clip", operands, ["y"], name="clip")
    model = shaped_model([node], {"x": (2, 3)}, {n: np.array(v) for n, v in bounds.items()}, ["y"], dtype)
    passes = [relax.transform.FoldConstant(), relax.transform.DeadCodeElimination()]
    return tvm.transform.Sequential(passes)(onnx_graph.import_onnx(model))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 6.0, ["clip"]),
        pytest.param(-1.0, 0.5, ["clip"], marks=pytest.mark.long),
        (0.0, None, ["nn.relu"]),
        pytest.param(0.5, None, ["clip"], marks=pytest.mark.long),
        pytest.param(None, 0.5, ["clip"], marks=pytest.mark.long),
        (None, None, []),
        (2.0, -2.0, ["clip"]),  # everything is -2: the second bound wins
    ],
)
def test_onnx_clip(low, high, expected):
    before = clip(low, high)
    after = RecogniseClip()(before)
    assert operators(after) == expected
    infinite = np.array([[np.inf, -np.inf, 0.0], [-0.0, 3.0, -3.0]], np.float32)
    assert same_bits(before, after, infinite)
    assert same_bits(before, after)
    tvm.ir.assert_structural_equal(RecogniseClip()(after), after)


@pytest.mark.parametrize(("low", "high"), [(0, 6), (None, 1), (1, None)])
def test_integers_keep_their_kernels(low, high):
    """They have no infinity to stand for a missing bound."""
    before = clip(low, high, TensorProto.INT32)
    after = RecogniseClip()(before)
    assert set(operators(after)) == {"call_tir"}
    assert same_bits(before, after, np.array([[-5, -1, 0], [1, 6, 7]], np.int32))


def test_a_clamp_used_twice_stays_for_its_other_use():
    @I.ir_module
    class Twice:
        @T.prim_func(private=True, s_tir=True)
        def maximum(x: T.Buffer((2, 3)), low: T.Buffer(()), y: T.Buffer((2, 3))):
            for i, j in T.grid(2, 3):
                with T.sblock("maximum"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    y[vi, vj] = T.max(x[vi, vj], low[()])

        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            cls = Twice
            with R.dataflow():
                a = R.call_tir(cls.maximum, (x, R.const(0.0)), out_ty=R.Tensor((2, 3), "float32"))
                b = R.call_tir(cls.maximum, (a, R.const(1.0)), out_ty=R.Tensor((2, 3), "float32"))
                c = R.add(a, b)
                R.output(c)
            return c

    after = RecogniseClip()(Twice)
    assert operators(after) == ["nn.relu", "clip", "add"]
    assert same_bits(Twice, after, *inputs(Twice))
