"""Are constant expressions evaluated, with the values that TVM would compute?"""

import numpy as np
import pytest
import tvm
from graphs import main_module, operators, run
from tvm import relax

from pimflow.relay_passes.canonical.evaluate_constants import CompileConstants, EvaluateConstants

A = np.random.default_rng(0).uniform(0.5, 2.0, (2, 1, 3)).astype(np.float32)
B = np.random.default_rng(1).uniform(0.5, 2.0, (3,)).astype(np.float32)
EXPRESSIONS = {
    "add": lambda a, b: relax.op.add(a, b),
    "subtract": lambda a, b: relax.op.subtract(a, b),
    "multiply": lambda a, b: relax.op.multiply(a, b),
    "divide": lambda a, b: relax.op.divide(a, b),
    "maximum": lambda a, b: relax.op.maximum(a, b),
    "minimum": lambda a, b: relax.op.minimum(a, b),
    "negative": lambda a, b: relax.op.negative(a),
    "sqrt": lambda a, b: relax.op.sqrt(a),
    "rsqrt": lambda a, b: relax.op.rsqrt(a),
    "where": lambda a, b: relax.op.where(relax.op.isnan(a), a, b),
    "reshape": lambda a, b: relax.op.reshape(a, (3, 2)),
    "expand_dims": lambda a, b: relax.op.expand_dims(a, [0]),
    "squeeze": lambda a, b: relax.op.squeeze(a, [1]),
    "permute_dims": lambda a, b: relax.op.permute_dims(a, [2, 0, 1]),
    "transpose": lambda a, b: relax.op.permute_dims(a),
    "broadcast_to": lambda a, b: relax.op.broadcast_to(b, (2, 4, 3)),
    "scalar": lambda a, b: relax.op.add(a, relax.const(1e-5, "float32")),
}


def module(expression) -> tvm.IRModule:
    """The expression added to an input, so that something is left to run."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(ndim=-1, dtype="float32"))
    with builder.function("probe", [x]):
        builder.emit_func_output(builder.emit(expression(relax.const(A), relax.const(B))))
    x = relax.Var("x", builder.get()["probe"].ret_ty)
    return main_module([x], lambda b: relax.op.add(x, b.emit(expression(relax.const(A), relax.const(B)))))


@pytest.mark.long
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_only_the_addition_is_left_and_the_values_are_the_same(name):
    before = module(EXPRESSIONS[name])
    after = EvaluateConstants()(before)
    assert operators(after) == ["add"]
    x = np.zeros([int(d) for d in before["main"].params[0].ty.shape], np.float32)
    (a,), (b,) = run(before, x), run(after, x)
    assert a.shape == b.shape and np.allclose(a, b, rtol=1e-6, atol=0)
    tvm.ir.assert_structural_equal(EvaluateConstants()(after), after)


def test_what_depends_on_an_input_stays():
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    before = main_module([x], lambda builder: relax.op.sqrt(relax.op.multiply(x, relax.const(B))))
    tvm.ir.assert_structural_equal(EvaluateConstants()(before), before)


def module_with_input(expression) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    return main_module([x], lambda builder: expression(builder, x))


@pytest.mark.long
def test_tvm_compiles_what_is_not_known_here():
    """A function of constants; of what such a function gives; of nothing at all; of a shape."""
    exp, folded = relax.op.exp, relax.transform.FoldConstant()
    alive = relax.transform.DeadCodeElimination(["main"])
    for expression in (
        lambda b, x: relax.op.add(x, b.emit(exp(relax.const(B)))),
        lambda b, x: relax.op.add(x, b.emit(relax.op.sin(b.emit(exp(relax.const(B)))))),
        lambda b, x: relax.op.add(x, b.emit(relax.op.full((3,), relax.const(2.0), "float32"))),
        lambda b, x: relax.op.add(x, b.emit(relax.op.full_like(x, relax.const(2.0)))),
        lambda b, x: relax.op.add(x, b.emit(relax.op.ones_like(b.emit(relax.op.exp(x))))),
        lambda b, x: b.emit(relax.op.shape_to_tensor(b.emit(relax.op.shape_of(x)))),
    ):
        before = module_with_input(expression)
        after = alive(CompileConstants()(before))
        tvm.ir.assert_structural_equal(after, alive(folded(before)))
        assert operators(after) in (["add"], [])


def test_without_constants_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(relax.transform, "FoldConstant", lambda: pytest.fail("compiles every operator"))
    mod = module_with_input(lambda b, x: relax.op.add(relax.const(B), b.emit(relax.op.multiply(x, x))))
    assert CompileConstants()(mod).same_as(mod)
