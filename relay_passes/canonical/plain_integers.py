"""Operators of integers by others for which TVM's kernels are correct."""

from __future__ import annotations

import math

import tvm
from tvm import relax

from pimflow.relay_passes.flat import main_bindings, operator, rebuild, shape

INDEX_REDUCTIONS = ("argmax", "argmin")
SORTS = ("topk", "sort", "argsort")
_WIDEST = ("int64", "uint64")  # nothing is wider
_NARROW = ("int8", "uint8", "int16", "uint16")


@tvm.transform.module_pass(opt_level=0, name="PlainIntegers")
class PlainIntegers:
    """Replace means of integers, ``argmax``, ``argmin`` and sorts of small types, and signs of unsigned ones.

    TVM's kernel of a mean divides by a number of another type. That of ``argmax`` starts from the minimum of
    the type, without an index, and returns no index where all values equal that minimum, as zeros of uint8.
    That of a sign has a -1, which is no unsigned number: nothing of such a network could be folded.
    Its sorts on a CPU have no types of 16 bits, and some none of 8.

    Rewrite: ``mean(x, axes) -> divide(sum(x, axes), n)``, ``argmax(x) -> argmax(astype(x, int64))``,
    ``sign(x) -> minimum(x, 1)``, ``sort(x) -> astype(sort(astype(x, int32)), int16)``.
    Preserves: values as ONNX defines them, with quotients rounded towards zero; names.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if not _is_replaced(value):
                return None
            x, attrs = value.args[0], value.attrs
            dtype = str(x.ty.dtype)
            if operator(value) == "sign":
                return relax.op.minimum(x, relax.const(1, dtype))
            if operator(value) == "mean":
                total = builder.emit(relax.op.sum(x, attrs.axis, attrs.keepdims), name_hint=f"{var.name}_sum")
                count = math.prod(shape(x)) // max(1, math.prod(shape(total)))
                return relax.op.divide(total, relax.const(count, dtype))
            if dtype in _WIDEST:
                return None
            wide_type = "int32" if operator(value) in SORTS else "int64"
            wide = builder.emit(relax.op.astype(x, wide_type), name_hint=f"{var.name}_wide")
            result = relax.Call(value.op, [wide], attrs, value.ty_args)
            if operator(value) in INDEX_REDUCTIONS or str(var.ty.dtype) != dtype:
                return result
            return relax.op.astype(builder.emit(result, name_hint=f"{var.name}_sorted"), dtype)

        is_changed = any(_is_replaced(binding.value) for binding in main_bindings(mod))
        return rebuild(mod, rewrite) if is_changed else mod


def _is_replaced(value: relax.Expr) -> bool:
    kind = operator(value)
    if kind not in ("mean", "sign", *INDEX_REDUCTIONS, *SORTS):
        return False
    dtype = str(value.args[0].ty.dtype)
    if kind in SORTS:
        return dtype in _NARROW
    return dtype.startswith(("uint",) if kind == "sign" else ("int", "uint", "bool"))
