"""QuantizeLinear and DequantizeLinear of integers as plain arithmetic, which is part of other kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tvm import relax

from pimflow.relay_passes.flat import shape

_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32")


def convert_quantisation(
    op_name: str,
    operands: Sequence[relax.Expr | None],
    values: Sequence[np.ndarray | relax.Expr | None],
    attrs: dict,
    emit: Callable[[relax.Expr], relax.Expr],
) -> relax.Expr | None:
    """Convert a quantisation of fp32 to integers, or back; None for other types, and for blocks of scales.

    Values are ONNX Runtime's: a quotient is rounded to even, then the zero point is added, then the sum is
    clipped.

    Parameters
    ----------
    values : sequence of ndarray or Expr
        Of those operands that are constants, their values; of others themselves.
    """
    x, scale, *rest = operands
    zero = rest[0] if rest else None
    quantises = op_name == "QuantizeLinear"
    integer = "uint8" if zero is None else str(zero.ty.dtype)
    if not quantises:
        integer = str(x.ty.dtype)
    floats = [scale, *([x] if quantises else [])]
    plain = {"axis", "saturate", "tvm_custom", "output_dtype"}
    if (
        integer not in _INTEGERS
        or any(str(value.ty.dtype) != "float32" for value in floats)
        or any(attrs.get(name, 0) for name in attrs.keys() - plain)
        or (quantises and (attrs.get("output_dtype", 0) or integer == "int32"))
    ):
        return None
    rank, axis = len(shape(x)), attrs.get("axis", 1)
    if zero is not None and isinstance(values[2], np.ndarray):
        zero = relax.const(values[2].astype(np.float32)) if values[2].any() else None

    def along_axis(value: relax.Expr) -> relax.Expr:
        """A scale or zero point in fp32, so that it belongs to its axis of `x`."""
        wide = value if str(value.ty.dtype) == "float32" else emit(relax.op.astype(value, "float32"))
        dims = shape(value)
        if not dims:
            return wide
        if dims == (1,):
            return emit(relax.op.reshape(wide, ()))
        return emit(relax.op.reshape(wide, (-1, *[1] * (rank - 1 - axis % rank))))

    if quantises:
        value = emit(relax.op.round(emit(relax.op.divide(x, along_axis(scale)))))
        value = value if zero is None else emit(relax.op.add(value, along_axis(zero)))
        bounds = np.iinfo(integer)
        inside = emit(relax.op.clip(value, float(bounds.min), float(bounds.max)))
        return emit(relax.op.astype(inside, integer))
    wide = emit(relax.op.astype(x, "float32"))
    wide = wide if zero is None else emit(relax.op.subtract(wide, along_axis(zero)))
    return emit(relax.op.multiply(wide, along_axis(scale)))
