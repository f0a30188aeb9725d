"""Signs and linear parts that are NaN of NaN, as ONNX says; TVM's kernels give 0, or NaN of infinity."""

from __future__ import annotations

import tvm
from tvm import relax, te, tirx, topi


def sign(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """A kernel for ``sign(x)``, for `relax.transform.LegalizeOps`: as many comparisons as TVM's."""
    return builder.call_te(_sign, call.args[0], primfunc_name_hint="tir_sign")


def _sign(x: te.Tensor) -> te.Tensor:
    def element(*index: tirx.Expr) -> tirx.Expr:
        value = x(*index)
        one, zero = tvm.tirx.const(1, x.dtype), tvm.tirx.const(0, x.dtype)
        # Neither is true of NaN, nor of 0: both are their own signs.
        return tirx.Select(value > zero, one, tirx.Select(value < zero, -one, value))

    return te.compute(x.shape, element, name="sign", tag="elemwise")


def leakyrelu(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """A kernel for ``leakyrelu(x)``; without a slope, which is a ``relu`` that keeps NaN, 0 of -infinity."""
    if call.attrs.alpha:
        return builder.call_te(topi.nn.leaky_relu, call.args[0], call.attrs.alpha)
    return builder.call_te(_linear_part, call.args[0], primfunc_name_hint="leaky_relu")


def _linear_part(x: te.Tensor) -> te.Tensor:
    def element(*index: tirx.Expr) -> tirx.Expr:
        value, zero = x(*index), tvm.tirx.const(0, x.dtype)
        return tirx.Select(value < zero, zero, value)

    return te.compute(x.shape, element, name="linear_part", tag="elemwise")


LEGAL = {"relax.sign": sign, "relax.nn.leakyrelu": leakyrelu}
