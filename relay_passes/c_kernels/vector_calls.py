"""Vector operations of TIR as calls of small C functions."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx

from pimflow.relay_passes.flat import bare_operator
from pimflow.relay_passes.schedules.loops import nodes, rewrite_kernels

LANES = (4, 8, 16)  # vector lengths with C functions
OPERATORS = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Max": "max", "Min": "min"}
COMPARISONS = {"GT": "gt", "GE": "ge", "LT": "lt", "LE": "le", "EQ": "eq", "NE": "ne"}
FUNCTIONS = ("exp", "log", "sqrt", "tanh", "erf", "floor", "ceil", "round", "trunc", "fabs")
_BINARY = tuple(getattr(tirx, name) for name in OPERATORS)


@tvm.transform.module_pass(opt_level=0, name="VectorCalls")
class VectorCalls:
    """Replace arithmetic, loads and stores of fp32 vectors by calls of C functions.

    Run it last, after ``LowerIntrin``: TVM's C generator can name vector types, but not compute with them.
    Other vectors (of integers, of casts) stay; `has_vectors` finds them.

    Rewrite: ``y[Ramp(i, 1, 16)] = x[Ramp(j, 1, 16)] * Broadcast(a, 16)
    -> store16(&y[i], mul16(load16(&x[j]), splat16(a)))``; a sum with a product becomes ``muladd``; a choice
    by a comparison, a call of four operands (`COMPARISONS`); a function (`FUNCTIONS`), a call of its name
    with a v in front; elements with a stride between them, ``gather`` and ``scatter``.
    Preserves: values, except that compilers may now contract products into sums; signatures, all else.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_kernels(mod, lambda f: f.with_body(tvm_ffi.structural_map(f.body, _VISITORS)))


def has_vectors(func: tirx.PrimFunc) -> bool:
    """Whether `func` has vectors for which `VectorCalls` has no calls."""
    compared = (getattr(tirx, name) for name in COMPARISONS)
    others = (tirx.And, tirx.Or, tirx.Not, tirx.Cast, tirx.Ramp, tirx.Broadcast, tvm.ir.Call)
    computed = nodes(func.body, *_BINARY, *compared, *others)
    stored = [node.buffer.dtype for node in nodes(func.body, tirx.AllocBuffer)]
    return (
        any(_lanes(e) > 1 and bare_operator(e) not in ("call_pure_extern", "if_then_else") for e in computed)
        or any(_lanes(node.condition) > 1 for node in nodes(func.body, tirx.Select))
        or any(tvm.DataType(str(dtype)).lanes > 1 and not _is_supported(dtype) for dtype in stored)
    )


def _lanes(expr: tirx.Expr) -> int:
    return getattr(getattr(expr.ty, "dtype", None), "lanes", 1)


def _is_supported(dtype: object) -> bool:
    """Whether there are functions for vectors of `dtype`."""
    return str(dtype) in {f"float32x{lanes}" for lanes in LANES}


def _call(name: str, like: tirx.Expr, *operands: tirx.Expr) -> tirx.Expr:
    lanes = _lanes(like)
    return tirx.call_pure_extern(f"float32x{lanes}", f"{name}{lanes}", *operands)


def _is_vector(expr: tirx.Expr) -> bool:
    """Whether there are functions for the vector `expr`."""
    return _is_supported(getattr(expr.ty, "dtype", ""))


def _binary(old: tirx.Expr) -> tirx.Expr:
    if not _is_vector(old):
        return old
    name = OPERATORS[type(old).__name__]
    if name == "add":
        for summand, product in ((old.a, old.b), (old.b, old.a)):
            if _callee(product) == "mul":
                return _call("muladd", old, summand, *list(product.args)[1:])
    return _call(name, old, old.a, old.b)


def _callee(expr: tirx.Expr) -> str:
    return str(expr.args[0].value).rstrip("0123456789") if bare_operator(expr) == "call_pure_extern" else ""


def _broadcast(old: tirx.Broadcast) -> tirx.Expr:
    return _call("splat", old, old.value) if _is_vector(old) else old


def _select(old: tirx.Select) -> tirx.Expr:
    condition = old.condition
    if isinstance(condition, tirx.Broadcast):
        return tirx.Select(condition.value, old.true_value, old.false_value)
    name = COMPARISONS.get(type(condition).__name__)
    if not name or not _is_vector(old) or not _is_vector(condition.a):
        return old
    return _call(name, old, condition.a, condition.b, old.true_value, old.false_value)


def _function(old: tvm.ir.Call) -> tirx.Expr:
    name = bare_operator(old)
    return _call(f"v{name}", old, old.args[0]) if name in FUNCTIONS and _is_vector(old) else old


def _elements(buffer: tirx.Buffer, indices: list, dtype: object) -> tuple[str, list[tirx.Expr]] | None:
    """Order of the elements at `indices`, and address of the first (and stride); None for other vectors."""
    (index,) = indices if len(indices) == 1 else (None,)
    if not isinstance(index, tirx.Ramp) or str(buffer.dtype) != "float32" or not _is_supported(dtype):
        return None
    address = tirx.address_of(tirx.BufferLoad(buffer, [index.base]))
    if isinstance(index.stride, tirx.IntImm) and int(index.stride) == 1:
        return "side by side", [address]
    return "apart", [address, index.stride]


def _load(old: tvm.ir.TensorLoad) -> tirx.Expr:
    access = _elements(old.source, list(old.indices), old.ty.dtype)
    if access is None:
        return old
    order, address = access
    return _call("load" if order == "side by side" else "gather", old, *address)


def _store(old: tirx.BufferStore) -> tirx.Stmt:
    access = _elements(old.buffer, list(old.indices), old.value.ty.dtype)
    if access is None:
        return old
    order, address = access
    name = "store" if order == "side by side" else "scatter"
    return tirx.Evaluate(tirx.call_extern("void", f"{name}{_lanes(old.value)}", *address, old.value))


_VISITORS = [
    (_BINARY, _binary),
    (tirx.Broadcast, _broadcast),
    (tirx.Select, _select),
    (tvm.ir.Call, _function),
    (tvm.ir.TensorLoad, _load),
    (tirx.BufferStore, _store),
]
