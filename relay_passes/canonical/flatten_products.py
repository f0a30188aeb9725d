"""Products of tensors with many leading axes as products of matrices."""

from __future__ import annotations

import math
from collections.abc import Container

import tvm
from tvm import relax

from pimflow.relay_passes.flat import operator, rebuild, shape
from pimflow.relay_passes.operators import BINARY, UNARY

NORMS = ("nn.layer_norm", "nn.rms_norm")


@tvm.transform.module_pass(opt_level=0, name="FlattenProducts")
class FlattenProducts:
    """Flatten operands of products with a constant matrix to matrices, as PIM and the GPU's GEMMs take them.

    Elementwise operators and normalisations of the last axis between such products also work on matrices.
    So reshapes remain only where heads are split, and no kernel is added.

    Rewrite: ``matmul(x[a, b, k], w[k, n]) -> reshape(matmul(reshape(x, [a * b, k]), w), [a, b, n])``,
    ``op(reshape(x, [a, b, n])) -> reshape(op(x), [a, b, n])`` for elementwise operators and
    ``layer_norm`` and ``rms_norm`` whose operands are all flattened.
    Preserves: values exactly, names, interface.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        flat: dict[relax.Var, relax.Var] = {}  # by variable, the same tensor as a matrix

        def matrix(builder: relax.BlockBuilder, x: relax.Var) -> relax.Var:
            """Emit `x` as a matrix, once."""
            if x not in flat:
                reshaped = relax.op.reshape(_source(builder, x), (-1, shape(x)[-1]))
                flat[x] = builder.emit(reshaped, name_hint=f"{x.name}_rows")
            return flat[x]

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if operator(value) == "reshape" and value.args[0] in flat:
                return relax.op.reshape(flat[value.args[0]], value.args[1])
            if not (_is_batched_product(value) or _is_row_wise(var, value, flat)):
                return None
            args = [
                matrix(builder, a) if isinstance(a, relax.Var) else _drop_leading_axes(a) for a in value.args
            ]
            result = builder.emit(_call_on_rows(value, args), name_hint=var.name)
            unflattened = builder.emit(relax.op.reshape(result, shape(var)), name_hint=f"{var.name}_whole")
            flat[unflattened] = result
            return unflattened

        return rebuild(mod, rewrite)


def _source(builder: relax.BlockBuilder, x: relax.Var) -> relax.Var:
    """The operand of the reshape that produces `x`; `x` itself if another operator produces it."""
    value = builder.lookup_binding(x)
    return value.args[0] if value is not None and operator(value) == "reshape" else x


def _is_batched_product(value: relax.Expr) -> bool:
    """Whether `value` multiplies a tensor of more than two axes by a constant matrix."""
    if operator(value) != "matmul":
        return False
    x, weights = value.args
    constant = isinstance(weights, tvm.ir.GenericConst) and len(shape(weights)) == 2
    return constant and isinstance(x, relax.Var) and len(shape(x)) > 2


def _is_row_wise(var: relax.Var, value: relax.Expr, flat: Container[relax.Var]) -> bool:
    """Whether an operator treats every row alike, and all its tensors are flattened already."""
    kind = operator(value)
    if kind not in (*UNARY, *BINARY, *NORMS) or kind == "nn.prelu":
        return False
    tensors = [a for a in value.args if isinstance(a, relax.Var)]
    if not tensors or not all(a in flat and shape(a) == shape(var) for a in tensors):
        return False
    last = len(shape(var)) - 1
    if kind in NORMS and [int(a) % (last + 1) for a in value.attrs.axes] != [last]:
        return False
    return all(_is_same_for_all_rows(a) for a in value.args if not isinstance(a, relax.Var))


def _is_same_for_all_rows(arg: relax.Expr) -> bool:
    """Whether `arg` is no tensor, or a constant that is the same for every row."""
    if not isinstance(arg.ty, relax.TensorType):
        return True
    dims = shape(arg)
    return isinstance(arg, tvm.ir.GenericConst) and math.prod(dims) == (dims[-1] if dims else 1)


def _drop_leading_axes(arg: relax.Expr) -> relax.Expr:
    """A constant without its leading axes, which are 1; other expressions unchanged."""
    if isinstance(arg, tvm.ir.GenericConst) and isinstance(arg.ty, relax.TensorType) and len(shape(arg)) > 2:
        return relax.const(arg.value.numpy().reshape(-1))
    return arg


def _call_on_rows(value: relax.Call, args: list[relax.Expr]) -> relax.Call:
    if operator(value) == "nn.layer_norm":
        attrs = value.attrs
        return relax.op.nn.layer_norm(*args, [-1], attrs.epsilon, attrs.center, attrs.scale)
    if operator(value) == "nn.rms_norm":
        return relax.op.nn.rms_norm(*args, [-1], value.attrs.epsilon)
    return relax.Call(value.op, args, value.attrs, value.ty_args)
