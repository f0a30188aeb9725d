"""What a Relax module says of its inputs' values, as `zoo.indices` does of ONNX networks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.flat import has_static_shape, main_bindings, operator, shape
from pimflow.zoo.draws import Draw
from pimflow.zoo.indices import ABOVE_ONE, DIVISORS, INSIDE_UNIT

# Operators that change the shape or the type of values, or choose some of them.
_MOVES = frozenset({
    "astype", "broadcast_to", "expand_dims", "permute_dims", "reshape", "squeeze", "strided_slice",
})  # fmt: skip
_POSITIVE_WITH_CONSTANT = frozenset({"add", "divide", "multiply"})
_POSITIVE_DOMAIN = frozenset({"acos", "asin", "atanh", "log", "rsqrt", "sqrt"})
_DIVISIONS = frozenset({"divide", "floor_divide", "floor_mod", "mod"})
_TABLES = frozenset({"gather_elements", "scatter_elements", "take"})


def index_bounds(mod: tvm.IRModule) -> dict[str, int]:
    """Upper bounds of inputs that are indices: the rows of the smallest table that each indexes."""
    bounds: dict[str, int] = {}
    for param, call, place, is_unchanged in _uses(mod):
        if operator(call) in _TABLES and place == 1 and is_unchanged and has_static_shape(call.args[0]):
            dims, axis = shape(call.args[0]), call.attrs.axis
            rows = int(np.prod(dims)) if axis is None else dims[int(axis)]
            bounds[param.name] = min(rows, bounds.get(param.name, rows))
    return bounds


def input_draws(mod: tvm.IRModule) -> dict[str, Draw]:
    """Distributions of the inputs whose values the module restricts.

    Divisors are not zero, arguments of roots and logarithms are positive. Other inputs are left out.
    """
    draws: dict[str, Draw] = {}
    indices = index_bounds(mod)
    for param, call, place, _ in _uses(mod):
        kind, dtype = operator(call), str(param.ty.dtype)
        if param.name in indices or param.name in draws or dtype == "bool":
            continue
        if kind in _DIVISIONS and place == 1:
            draws[param.name] = DIVISORS["f" if "float" in dtype else "i"]
        elif "float" in dtype and (kind in _POSITIVE_DOMAIN or (place == 0 and _is_root(call))):
            draws[param.name] = INSIDE_UNIT
        elif "float" in dtype and kind == "acosh":
            draws[param.name] = ABOVE_ONE
    return draws


def _uses(mod: tvm.IRModule) -> Iterator[tuple[relax.Var, relax.Call, int, bool]]:
    """Calls that read an input: it, the operand that it is, and whether its values are unchanged.

    It may have been moved or converted, or be as positive as the input.
    """
    sources: dict[relax.Var, tuple[relax.Var, bool]] = {param: (param, True) for param in mod["main"].params}
    for binding in main_bindings(mod):
        call = binding.value
        if not isinstance(call, relax.Call):
            continue
        for place, operand in enumerate(call.args[:]):
            if not isinstance(operand, relax.Var) or operand not in sources:
                continue
            param, is_unchanged = sources[operand]
            yield param, call, place, is_unchanged
            moves = operator(call) in _MOVES and place == 0
            if moves or _keeps_sign(call, place):
                sources[binding.var] = (param, is_unchanged and moves)


def _keeps_sign(call: relax.Call, place: int) -> bool:
    """Whether positive values of an operand give positive results, since the other is a constant."""
    if operator(call) not in _POSITIVE_WITH_CONSTANT or (operator(call) == "divide" and place):
        return False
    factor = call.args[1 - place]
    return isinstance(factor, tvm.ir.GenericConst) and bool((factor.value.numpy() > 0).all())


def _is_root(call: relax.Call) -> bool:
    """Whether a call is a power with an exponent that is no whole number."""
    exponent = call.args[1] if operator(call) == "power" else None
    if not isinstance(exponent, tvm.ir.GenericConst):
        return False
    values = exponent.value.numpy()
    return bool((values != np.floor(values)).any())
