"""Functions of fp16, which no target's library has all of."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx

from pimflow.relay_passes.schedules.loops import nodes, rewrite_kernels

HALF, FULL = "float16", "float32"
FUNCTIONS = tuple(
    f"tirx.{name}"
    for name in (
        *("sin", "cos", "tan", "sinh", "cosh", "tanh"),
        *("asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh"),
        *("erf", "exp", "exp2", "exp10", "log", "log1p", "log2", "log10", "sigmoid"),
        *("fmod", "hypot", "pow", "rsqrt", "sqrt"),
        *("ceil", "copysign", "fabs", "floor", "nearbyint", "round", "trunc"),
    )
)


@tvm.transform.module_pass(opt_level=0, name="WidenHalf")
class WidenHalf:
    """Compute mathematical functions and remainders of fp16 operands in fp32.

    CUDA has no ``hnearbyint`` and no ``hcosh``, LLVM no arc sine and C nothing at all of fp16. Run it before
    ``LowerIntrin``, which gives functions the names of the target's library.

    Rewrite: ``exp(x) -> Cast("float16", exp(Cast("float32", x)))``.
    Preserves: values up to fp16 rounding, signatures, everything else.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_kernels(mod, _widen)


def _widen(func: tirx.PrimFunc) -> tirx.PrimFunc:
    if not any(_is_half(value) for value in nodes(func.body, tvm.ir.Call, tirx.Mod)):
        return func
    visitors = [(tvm.ir.Call, _wide_call), (tirx.Mod, _wide_remainder)]
    return func.with_body(tvm_ffi.structural_map(func.body, visitors))


def _is_half(value: tirx.Expr) -> bool:
    return _dtype(value).partition("x")[0] == HALF


def _dtype(value: tirx.Expr) -> str:
    return str(getattr(value.ty, "dtype", ""))


def _wide_call(call: tvm.ir.Call) -> tirx.Expr:
    if not _is_half(call) or getattr(call.op, "name", "") not in FUNCTIONS:
        return call
    wide = tirx.call_intrin(_wide_type(call), call.op, *map(_wide, call.args))
    return tirx.Cast(_dtype(call), wide)


def _wide_remainder(value: tirx.Mod) -> tirx.Expr:
    return tirx.Cast(_dtype(value), tirx.Mod(_wide(value.a), _wide(value.b))) if _is_half(value) else value


def _wide(value: tirx.Expr) -> tirx.Expr:
    return tirx.Cast(_wide_type(value), value)


def _wide_type(value: tirx.Expr) -> str:
    """Single precision, of as many lanes."""
    return _dtype(value).replace(HALF, FULL)
