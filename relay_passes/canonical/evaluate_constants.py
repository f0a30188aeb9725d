"""Constant expressions, evaluated with NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax, tirx

from pimflow.relay_passes.flat import constant, main_bindings, operator, rebuild, shape

_EVALUATE: dict[str, Callable[..., np.ndarray]] = {
    "arange": np.arange,
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "negative": np.negative,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "isnan": np.isnan,
    "where": np.where,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_not": np.logical_not,
    "bitwise_not": np.bitwise_not,
}
# `FoldConstant` does not compile these; the importers' are inclusive.
_SCANS: dict[str, Callable[..., np.ndarray]] = {"cumsum": np.cumsum, "cumprod": np.cumprod}
_SHAPE_ONLY = ("full_like", "ones_like", "zeros_like")  # they need no values of their operand
_FILLS = ("full", "full_like")  # `FoldConstant` cannot fill with infinity
_MOVES = ("reshape", "expand_dims", "squeeze", "permute_dims", "broadcast_to")
_NUMBERS = ("float32", "float64", "int32", "int64", "bool")  # NumPy converts these as kernels do


@tvm.transform.module_pass(opt_level=0, name="EvaluateConstants")
class EvaluateConstants:
    """Fold constants like `FoldConstant`, for the operators that importers and batch normalisation leave.

    `FoldConstant` compiles every expression: 660 of them, 19 s, on MobileNetV2, against 0.3 s here.
    `CompileConstants` uses it for the operators that this pass does not know.

    Rewrite: ``op(constant, …) -> constant``.
    Preserves: values, in the operands' own precision.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        constants: dict[relax.Var, relax.Expr] = {}

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            kind = operator(value)
            is_scan = kind in _SCANS and value.attrs.axis is not None and not value.attrs.exclusive
            if kind not in (*_EVALUATE, *_MOVES) and not is_scan and not _converts(var, value):
                return None
            args = [constants.get(a, a) if isinstance(a, relax.Var) else a for a in value.args[:]]
            operands = args[:1] if kind in _MOVES else args[1:] if kind in _FILLS else args
            arrays = [_array(a) for a in operands]
            if any(a is None for a in arrays):
                same = all(new.same_as(old) for new, old in zip(args, value.args[:]))
                return None if same else relax.Call(value.op, args, value.attrs, value.ty_args)
            if kind == "permute_dims":
                axes = value.attrs.axes
                result = arrays[0].transpose(None if axes is None else [int(a) for a in axes])
            elif kind in ("broadcast_to", *_FILLS):
                result = np.broadcast_to(arrays[0], shape(var))
            elif kind in _MOVES:
                result = arrays[0].reshape(shape(var))
            elif kind == "astype":
                result = arrays[0]  # `constant` converts it
            elif is_scan:
                result = _SCANS[kind](arrays[0], int(value.attrs.axis), str(var.ty.dtype))
            else:
                result = _EVALUATE[kind](*arrays)
            folded_constant = constant(np.asarray(result), str(var.ty.dtype))
            emitted = builder.emit(folded_constant, name_hint=var.name)
            constants[emitted] = folded_constant
            return emitted

        return rebuild(mod, rewrite)


@tvm.transform.module_pass(opt_level=0, name="CompileConstants")
class CompileConstants:
    """`FoldConstant`, only where it has something to fold: it first makes a function of every operator.

    Rewrite: ``op(constant, …) -> constant``; ``shape_of(x)`` where the shape is known.
    Preserves: values.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        constant_vars: set[relax.Var] = set()
        for binding in main_bindings(mod):
            value = binding.value
            kind, read = operator(value), relax.analysis.free_vars(value)
            folds = kind in _SHAPE_ONLY or constant_vars.issuperset(read)
            if folds:
                constant_vars.add(binding.var)
            if kind and (
                folds or not all(isinstance(var.ty, relax.TensorType) for var in (binding.var, *read))
            ):
                return relax.transform.FoldConstant()(mod)
        return mod


def _converts(var: relax.Var, value: relax.Expr) -> bool:
    """Whether `value` fills or converts a tensor of numbers that NumPy has; never fp32 to integers."""
    kind = operator(value)
    if kind not in (*_FILLS, "astype") or str(var.ty.dtype) not in _NUMBERS:
        return False
    source = str(value.args[1 if kind in _FILLS else 0].ty.dtype)
    return source in _NUMBERS and ("float" not in source or "int" not in str(var.ty.dtype))


def _array(expr: relax.Expr) -> np.ndarray | None:
    """The value of a constant tensor (not copied) or of a scalar; None for other expressions."""
    if isinstance(expr, tvm.ir.GenericConst):
        return np.from_dlpack(expr.value)
    if isinstance(expr, tirx.FloatImm | tirx.IntImm):
        return np.asarray(expr.value, str(expr.ty.dtype))
    return None
