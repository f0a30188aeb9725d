"""Divisions of integers that do not end the process; by 0 they give 0, as nothing says what else.

Processors trap on a division by 0, and on that of the least integer by -1.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, te, tirx, topi


def _is_plain(divisor: relax.Expr) -> bool:
    """Whether no element of a divisor is 0 or -1."""
    if not isinstance(divisor, tvm.ir.GenericConst):
        return False
    values = divisor.value.numpy()
    return bool(((values != 0) & (values != -1)).all())


def _guarded(divide: Callable[..., tirx.Expr], is_quotient: bool) -> Callable:
    """A legalisation rule: TVM's own of floats and of plain divisors, else `divide` by what is neither."""

    def kernel(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        """The kernel of `call`."""
        dtype = str(call.ty.dtype)
        if "int" not in dtype or _is_plain(call.args[1]):
            result: relax.Expr = call.op.get_attr("FLegalize")(builder, call)
            return result
        zero, unit, minus = (tirx.const(number, dtype) for number in (0, 1, -1 if "u" not in dtype else 0))

        def element(x: tirx.Expr, divisor: tirx.Expr) -> tirx.Expr:
            """An element of the result."""
            is_odd = tirx.any(divisor == zero, divisor == minus)
            ordinary = divide(x, tirx.Select(is_odd, unit, divisor))
            negative = tirx.Select(divisor == zero, zero, zero - x) if is_quotient else zero
            return tirx.Select(is_odd, negative, ordinary)

        def compute(x: te.Tensor, divisor: te.Tensor) -> te.Tensor:
            """The kernel of two tensors, which are broadcast."""
            places = topi.add(x, divisor).shape
            x, divisor = (topi.broadcast_to(tensor, places) for tensor in (x, divisor))
            return te.compute(places, lambda *i: element(x(*i), divisor(*i)), name="divide", tag="broadcast")

        return builder.call_te(compute, *call.args, primfunc_name_hint="divide")

    return kernel


LEGAL = {
    "relax.divide": _guarded(tirx.truncdiv, True),
    "relax.floor_divide": _guarded(tirx.floordiv, True),
    "relax.mod": _guarded(tirx.truncmod, False),
    "relax.floor_mod": _guarded(tirx.floormod, False),
}
