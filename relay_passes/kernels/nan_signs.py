"""Signs that are NaN of NaN, as ONNX says; TVM's kernel gives 0."""

from __future__ import annotations

import tvm
from tvm import relax, te, tirx


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


LEGAL = {"relax.sign": sign}
