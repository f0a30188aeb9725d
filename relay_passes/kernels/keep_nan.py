"""Signs, clamps, maxima and minima that propagate NaN, as ONNX demands; TVM's kernels do not.

They are as fast: on CPUs they are the same instructions with operands in another order.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, te, tirx, topi


def relu(value: tirx.Expr) -> tirx.Expr:
    """``max(value, 0)``; NaN for NaN."""
    zero = tirx.const(0, value.ty.dtype)
    return tirx.Select(value < zero, zero, value)


def clamp(value: tirx.Expr, low: float, high: float) -> tirx.Expr:
    """``min(max(value, low), high)``; NaN for NaN."""
    lower, upper = (tirx.const(bound, value.ty.dtype) for bound in (low, high))
    return tirx.Select(value > upper, upper, tirx.Select(value < lower, lower, value))


def larger(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    """``max(a, b)``; NaN if one of them is."""
    return tirx.Select(a < b, b, tirx.Select(a >= b, a, a + b))


def smaller(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    """``min(a, b)``; NaN if one of them is."""
    return tirx.Select(a > b, b, tirx.Select(a <= b, a, a + b))


def sign(value: tirx.Expr) -> tirx.Expr:
    """-1, 0 or 1; NaN for NaN."""
    unit, zero = tirx.const(1, value.ty.dtype), tirx.const(0, value.ty.dtype)
    # Both comparisons are false for NaN and 0, which are their own signs.
    return tirx.Select(value > zero, unit, tirx.Select(value < zero, -unit, value))


def elementwise(formula: Callable[[tirx.Expr], tirx.Expr], name: str) -> Callable:
    """A legalisation rule for `relax.transform.LegalizeOps`: `formula` on each element of one tensor."""

    def kernel(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        """The kernel of `call`."""

        def compute(x: te.Tensor) -> te.Tensor:
            return te.compute(x.shape, lambda *index: formula(x(*index)), name=name, tag="elemwise")

        return builder.call_te(compute, call.args[0], primfunc_name_hint=name)

    return kernel


def _clip(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    low, high = (float(bound.value) for bound in call.args[1:])
    return elementwise(lambda value: clamp(value, low, high), "clip")(builder, call)


def _leakyrelu(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """TVM's kernel; `relu` for slope 0, since TVM gives NaN for -infinity then."""
    if call.attrs.alpha:
        return builder.call_te(topi.nn.leaky_relu, call.args[0], call.attrs.alpha)
    return elementwise(relu, "leaky_relu")(builder, call)


def _binary_kernel(floats: Callable, others: Callable, name: str) -> Callable:
    """A legalisation rule for two operands, one maybe a number; `others` is the formula for integers."""

    def kernel(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        """The kernel of `call`."""
        dtype = str(call.ty.dtype)
        formula = floats if dtype.startswith("float") else others
        numbers = [_number(arg) for arg in call.args]

        def with_number(x: te.Tensor) -> te.Tensor:
            """The formula of a tensor and the constant number."""
            number = tirx.const(next(value for value in numbers if value is not None), dtype)
            return te.compute(x.shape, lambda *index: formula(x(*index), number), name=name, tag="elemwise")

        def broadcast_pair(a: te.Tensor, b: te.Tensor) -> te.Tensor:
            """The formula of two tensors, which are broadcast."""
            places = topi.add(a, b).shape
            a, b = (topi.broadcast_to(tensor, places) for tensor in (a, b))
            return te.compute(places, lambda *i: formula(a(*i), b(*i)), name=name, tag="broadcast")

        tensors = [arg for arg, number in zip(call.args, numbers) if number is None]
        if len(tensors) == 1:
            return builder.call_te(with_number, *tensors, primfunc_name_hint=name)
        return builder.call_te(broadcast_pair, *call.args, primfunc_name_hint=name)

    return kernel


def _number(expr: relax.Expr) -> float | None:
    """The value of a constant without axes; None for other expressions."""
    if not isinstance(expr, tvm.ir.GenericConst) or expr.ty.ndim:
        return None
    return float(expr.value.numpy())


LEGAL = {
    "relax.sign": elementwise(sign, "sign"),
    "relax.nn.relu": elementwise(relu, "relu"),
    "relax.nn.leakyrelu": _leakyrelu,
    "relax.clip": _clip,
    "relax.maximum": _binary_kernel(larger, tirx.max, "maximum"),
    "relax.minimum": _binary_kernel(smaller, tirx.min, "minimum"),
}
