"""Slices, concatenations and reshapes without copies, preserved until memory is planned."""

from __future__ import annotations

import math

import tvm
from tvm import relax

from pimflow.relay_passes.flat import BindingPass, element_bytes, operator, shape, slice_begin

PART, JOIN = "pimflow.part", "pimflow.join"


@tvm.transform.module_pass(opt_level=0, name="KeepViews")
class KeepViews(BindingPass):
    """Hide slices, concatenations and reshapes that `GroupKernels` left in ``main`` from legalisation.

    Rewrite: ``strided_slice(x, [1], [2], [4]) -> call_pure_packed("pimflow.part", x, offset in bytes)``,
    ``concat((x, y), 1) -> call_pure_packed("pimflow.join", x, y)``; `PlanPool` turns them into
    places in memory. ``reshape(x, dims) -> memory.view(x, dims)``, an alias of the same place.
    Preserves: values, names.
    """

    def rewrite(self, builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        """The new value of `var`; None if `value` stays."""
        kind = operator(value)
        if kind == "reshape":
            return relax.op.memory.view(value.args[0], var.ty.shape)
        if kind == "strided_slice":
            offset = relax.prim_value(_offset_bytes(value, var))
            return relax.op.call_pure_packed(PART, value.args[0], offset, ty_args=var.ty)
        if kind == "concat":
            return relax.op.call_pure_packed(JOIN, *value.args[0].fields, ty_args=var.ty)
        return None


def view_call(value: relax.Expr) -> str:
    """`PART` or `JOIN` if `value` is a call of it, past ``RemovePurityChecking``; empty otherwise."""
    callee = value.op if isinstance(value, relax.Call) else None
    name = str(callee.global_symbol) if isinstance(callee, relax.ExternFunc) else ""
    return name if name in (PART, JOIN) else ""


def _offset_bytes(call: relax.Call, part: relax.Var) -> int:
    """Offset of `part` in the operand that `call` slices."""
    axis, begin = slice_begin(call)
    return begin * math.prod(shape(part)[axis + 1 :]) * element_bytes(part)
