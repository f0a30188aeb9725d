"""Softmax without a guard against rows that are hidden whole, where there are none."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.canonical.attention_operands import constant_scale
from pimflow.relay_passes.flat import main_bindings, number, operator, rebuild, shape, use_counts

Values = dict[relax.Var, relax.Expr]
_MOVES = ("reshape", "permute_dims", "broadcast_to", "expand_dims", "squeeze")
_GUARD = ("logical_not", "astype", "max", "astype", "logical_not", "equal")


def guarded_softmax(
    value: relax.Expr | None, values: Values, counts: dict[relax.Var, int]
) -> tuple[relax.Call, int] | None:
    """The softmax that `value` sets to 0 where all scores are -inf, and readers of the scores; else None.

    PyTorch's programs have ``where(all(scores == -inf), 0, softmax(scores))``, its ONNX networks
    ``where(isnan(weights), 0, weights)`` with ``weights = softmax(scores)``.
    """
    if operator(value) != "where" or not isinstance(value.args[1], tvm.ir.GenericConst):
        return None
    condition, zeros, weights = value.args
    softmax = values.get(weights)
    if operator(softmax) != "nn.softmax" or zeros.value.numpy().any():
        return None

    def sole(var: relax.Expr) -> relax.Expr | None:
        """The value of a variable with one reader."""
        return values.get(var) if counts.get(var, 0) == 1 else None

    test = sole(condition)
    if operator(test) == "isnan":
        return (softmax, 1) if test.args[0].same_as(weights) and counts.get(weights, 0) == 2 else None
    for kind in _GUARD:
        step = sole(condition)
        if operator(step) != kind:
            return None
        condition = step.args[0]
    is_guard = condition.same_as(softmax.args[0]) and number(step.args[1]) == -np.inf
    return (softmax, 2) if is_guard and counts.get(weights, 0) == 1 else None


@tvm.transform.module_pass(opt_level=0, name="PlainSoftmax")
class PlainSoftmax:
    """Drop the guard of a softmax whose scores have no row of negative infinity.

    PyTorch decomposes attention into a softmax that gives zeros for such rows: five kernels more, which ONNX
    files do not have. Products have finite elements, and a constant mask shows which rows it hides.

    Rewrite: ``where(all(x == -inf), 0, softmax(x)) -> softmax(x)``, and the same with ``isnan(softmax(x))``.
    Preserves: values where products are finite, names.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        values = {binding.var: binding.value for binding in main_bindings(mod)}
        counts = use_counts(mod)
        plain: dict[relax.Var, relax.Call] = {}
        for var, value in values.items():
            guarded = guarded_softmax(value, values, counts)
            if guarded is not None and _has_visible_rows(guarded[0], values):
                plain[var] = guarded[0]
        if not plain:
            return mod
        var_remap: dict[relax.Var, relax.Expr] = {var: var for var in mod["main"].params}

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if var not in plain:
                return None
            softmax = plain[var]
            return relax.op.nn.softmax(var_remap[softmax.args[0]], softmax.attrs.axis)

        return rebuild(mod, rewrite, var_remap)


def _has_visible_rows(softmax: relax.Call, values: Values) -> bool:
    """Whether no row along the axis of `softmax` can be negative infinity, as long as products are finite."""
    dims, axis = shape(softmax.args[0]), int(softmax.attrs.axis)
    hidden = np.zeros((1,) * len(dims), dtype=bool)  # elements that masks hide
    value, is_moved = values.get(softmax.args[0]), False  # a mask in front of a move has other axes
    while value is not None:
        kind = operator(value)
        if kind == "matmul":
            return not hidden.all(axis=axis).any()
        if kind in _MOVES:
            operand, is_moved = value.args[0], True
        elif (scaled := constant_scale(value)) is not None:
            operand = scaled[0]
        elif not is_moved and (masked := _mask(value)) is not None and masked[1].ndim <= len(dims):
            operand, hidden = masked[0], hidden | masked[1]
        else:
            return False
        value = values.get(operand)
    return False


def _mask(value: relax.Expr) -> tuple[relax.Expr, np.ndarray] | None:
    """The scores that `value` masks by a constant, and where it hides them; None for other operators."""
    kind = operator(value)
    sides = value.args[-2:] if kind in ("add", "where") else ()
    constants = [side for side in sides if isinstance(side, tvm.ir.GenericConst)]
    if len(constants) != 1:
        return None
    operand = next(side for side in sides if side is not constants[0] and not side.same_as(constants[0]))
    hides = constants[0].value.numpy() == -np.inf
    if kind == "add":
        return operand, hides
    condition = value.args[0]
    if not isinstance(condition, tvm.ir.GenericConst):
        return None
    chosen = condition.value.numpy() if constants[0].same_as(value.args[1]) else ~condition.value.numpy()
    return operand, chosen & hides
