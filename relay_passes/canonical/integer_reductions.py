"""Reductions of integers by operators for which TVM's kernels are correct."""

from __future__ import annotations

import math

import tvm
from tvm import relax

from pimflow.relay_passes.flat import main_bindings, operator, rebuild, shape

INDEX_REDUCTIONS = ("argmax", "argmin")
_WIDEST = ("int64", "uint64")  # nothing is wider


@tvm.transform.module_pass(opt_level=0, name="IntegerReductions")
class IntegerReductions:
    """Replace means of integers, and ``argmax`` and ``argmin`` of small integer types.

    TVM's kernel of a mean divides by a number of another type. That of ``argmax`` starts from the minimum of
    the type, without an index, and returns no index where all values equal that minimum, as zeros of uint8.

    Rewrite: ``mean(x, axes) -> divide(sum(x, axes), n)``, ``argmax(x) -> argmax(astype(x, int64))``.
    Preserves: values as ONNX defines them, with quotients rounded towards zero; names.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if not _reduces_integers(value):
                return None
            x, attrs = value.args[0], value.attrs
            dtype = str(x.ty.dtype)
            if operator(value) == "mean":
                total = builder.emit(relax.op.sum(x, attrs.axis, attrs.keepdims), name_hint=f"{var.name}_sum")
                count = math.prod(shape(x)) // max(1, math.prod(shape(total)))
                return relax.op.divide(total, relax.const(count, dtype))
            if dtype in _WIDEST:
                return None
            wide = builder.emit(relax.op.astype(x, "int64"), name_hint=f"{var.name}_wide")
            return relax.Call(value.op, [wide], attrs, value.ty_args)

        has_reductions = any(_reduces_integers(binding.value) for binding in main_bindings(mod))
        return rebuild(mod, rewrite) if has_reductions else mod


def _reduces_integers(value: relax.Expr) -> bool:
    if operator(value) not in ("mean", *INDEX_REDUCTIONS):
        return False
    return str(value.args[0].ty.dtype).startswith(("int", "uint", "bool"))
