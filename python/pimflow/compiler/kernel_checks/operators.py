"""What the operators and functions of a kernel compute, on arrays of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import tirx

Array = npt.NDArray[Any]

BINARY: dict[type, Callable[[Array, Array], Array]] = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.Mod: np.fmod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.EQ: np.equal,
    tirx.NE: np.not_equal,
    tirx.LT: np.less,
    tirx.LE: np.less_equal,
    tirx.GT: np.greater,
    tirx.GE: np.greater_equal,
    tirx.BitwiseAnd: np.bitwise_and,
    tirx.BitwiseOr: np.bitwise_or,
    tirx.BitwiseXor: np.bitwise_xor,
    tirx.LShift: np.left_shift,
    tirx.RShift: np.right_shift,
}

_ANGLES = ("sin", "cos", "tan", "sinh", "cosh", "tanh")
FUNCTIONS: dict[str, Callable[..., Array]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "log10": np.log10,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    **{name: getattr(np, name) for name in _ANGLES},
    **{f"a{name}": getattr(np, f"arc{name}") for name in (*_ANGLES, "tan2")},
    "copysign": np.copysign,
    "fmod": np.fmod,
    "hypot": np.hypot,
    "pow": np.power,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "nearbyint": np.rint,
    "fabs": np.abs,
    "abs": np.abs,
    "fmin": np.fmin,
    "fmax": np.fmax,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "isfinite": np.isfinite,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "bitwise_not": np.invert,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
}

# By shuffle of a warp: the lane that a lane gets a value of, from its number, an argument and the width. A
# lane outside the width stands for the lane itself.
SHUFFLES: dict[str, Callable[[Array, Array, int], Array]] = {
    "__shfl_sync": lambda _, source, width: source % width,
    "__shfl_up_sync": lambda lane, offset, _: lane - offset,
    "__shfl_down_sync": lambda lane, offset, _: lane + offset,
    "__shfl_xor_sync": lambda lane, bits, _: lane ^ bits,
}


def _erf(x: Array) -> Array:
    from scipy.special import erf

    return np.asarray(erf(x), x.dtype)


FUNCTIONS["erf"] = _erf
