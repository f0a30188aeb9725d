"""Types of 8 bits with an exponent, as fp32: TVM rounds to them otherwise than the standard."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnx import TensorProto
from tvm import relax, te, tirx


@dataclass(frozen=True, kw_only=True)
class Float8:
    """A type of 8 bits.

    Attributes
    ----------
    mantissa_bits, least_exponent : int
        Bits behind the point, and the exponent of the least number that has all of them.
    largest : float
        The largest finite number.
    beyond : float
        What a larger number is where it is not the largest one: infinity, or NaN.
    has_negative_zero : bool
        Whether zero has a sign.
    """

    mantissa_bits: int
    least_exponent: int
    largest: float
    beyond: float
    has_negative_zero: bool


FLOAT8 = {
    TensorProto.FLOAT8E4M3FN: Float8(
        mantissa_bits=3, least_exponent=-6, largest=448.0, beyond=math.nan, has_negative_zero=True
    ),
    TensorProto.FLOAT8E4M3FNUZ: Float8(
        mantissa_bits=3, least_exponent=-7, largest=240.0, beyond=math.nan, has_negative_zero=False
    ),
    TensorProto.FLOAT8E5M2: Float8(
        mantissa_bits=2, least_exponent=-14, largest=57344.0, beyond=math.inf, has_negative_zero=True
    ),
    TensorProto.FLOAT8E5M2FNUZ: Float8(
        mantissa_bits=2, least_exponent=-15, largest=57344.0, beyond=math.nan, has_negative_zero=False
    ),
}


def float8_values(builder: relax.BlockBuilder, x: relax.Expr, kind: Float8, saturates: bool) -> relax.Expr:
    """The nearest numbers of a type to those of `x`, in fp32; ties are even.

    Parameters
    ----------
    saturates : bool
        Whether numbers above the largest become it; else they are `Float8.beyond`.
    """

    def compute(tensor: te.Tensor) -> te.Tensor:
        """The kernel."""
        return te.compute(
            tensor.shape,
            lambda *place: _float8_value(tensor(*place), kind, saturates),
            name="round_float8",
            tag="elemwise",
        )

    return builder.emit_te(compute, x, primfunc_name_hint="round_float8")


def _float8_value(value: tirx.Expr, kind: Float8, saturates: bool) -> tirx.Expr:
    """One number, rounded on its bits."""
    word, single = "uint32", "float32"

    def number(x: float) -> tirx.Expr:
        """A constant."""
        return tirx.const(x, single)

    def integer(x: int) -> tirx.Expr:
        """A constant of bits."""
        return tirx.const(x, word)

    all_bits, dropped = tirx.reinterpret(word, value), 23 - kind.mantissa_bits
    sign, bits = all_bits & integer(1 << 31), all_bits & integer((1 << 31) - 1)
    odd = (bits >> integer(dropped)) & integer(1)
    normal = (bits + integer((1 << (dropped - 1)) - 1) + odd) & integer(-1 << dropped & 0xFFFFFFFF)
    # Smaller numbers are multiples of one step.
    step, size = 2.0 ** (kind.least_exponent - kind.mantissa_bits), tirx.reinterpret(single, bits)
    is_small = size < number(2.0**kind.least_exponent)
    multiple = tirx.Select(is_small, size * number(1 / step), number(0))
    whole = tirx.Cast("int32", multiple)
    rest = multiple - tirx.Cast(single, whole)
    is_up = tirx.any(rest > number(0.5), tirx.all(rest == number(0.5), (whole & tirx.const(1, "int32")) == 1))
    small = tirx.Cast(single, whole + tirx.Cast("int32", is_up)) * number(step)
    result = tirx.Select(is_small, small, tirx.reinterpret(single, normal))
    end = kind.largest if saturates else kind.beyond
    result = tirx.Select(result > number(kind.largest), number(end), result)
    signed = tirx.reinterpret(single, tirx.reinterpret(word, result) | sign)
    if not kind.has_negative_zero:
        signed = tirx.Select(result == number(0), number(0), signed)
    return tirx.Select(tirx.isnan(value), value, signed)
