"""Arithmetic of 8- and 16-bit integers, which C and CUDA compute in 32 bits."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx

from pimflow.relay_passes.schedules.loops import nodes, rewrite_kernels

_NARROW = ("int8", "uint8", "int16", "uint16")
_OPERATIONS = (tirx.Add, tirx.Sub, tirx.Mul, tirx.LShift)
_SOURCES = (tvm.ir.TensorLoad, tirx.Cast)


@tvm.transform.module_pass(opt_level=0, name="WrapNarrow")
class WrapNarrow:
    """Cut sums, differences, products, complements and shifts of narrow integers to their type.

    A language of the C family promotes narrow operands to ``int`` and keeps what does not fit, so a
    result that is not stored at once but read as a wider one would not wrap around.

    Rewrite: ``a - b -> Cast("uint8", Cast("int32", a) - Cast("int32", b))``.
    Preserves: values of integers that wrap around; everything of other types and of vectors.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_kernels(mod, _wrap)


def _wrap(func: tirx.PrimFunc) -> tirx.PrimFunc:
    # Few kernels have narrow values: where none is read or made, their many indices are not visited.
    if not any(_is_narrow(value) for kind in _SOURCES for value in nodes(func.body, kind)):
        return func
    visitors = [*((kind, _wide_operation) for kind in _OPERATIONS), (tirx.BitwiseNot, _wide_complement)]
    return func.with_body(tvm_ffi.structural_map(func.body, visitors))


def _is_narrow(value: tirx.Expr) -> bool:
    return str(getattr(value.ty, "dtype", "")) in _NARROW


def _wide_operation(value: tirx.Expr) -> tirx.Expr:
    if not _is_narrow(value):
        return value
    operands = (tirx.Cast("int32", operand) for operand in (value.a, value.b))
    return tirx.Cast(str(value.ty.dtype), type(value)(*operands))


def _wide_complement(value: tirx.BitwiseNot) -> tirx.Expr:
    """The complement as a difference: ``~x`` is ``-1 - x``."""
    if not _is_narrow(value):
        return value
    wide = tirx.Sub(tirx.IntImm("int32", -1), tirx.Cast("int32", value.a))
    return tirx.Cast(str(value.ty.dtype), wide)
