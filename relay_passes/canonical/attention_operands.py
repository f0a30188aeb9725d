"""Which tensors the products of attention read, behind transposes, repeated heads and scale factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.flat import operator, shape

_RESHAPES = ("reshape", "expand_dims", "squeeze")
Values = Mapping[relax.Var, relax.Expr]


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A tensor as attention reads it.

    Attributes
    ----------
    var : Var
        What holds it.
    dims : tuple of int
        What it is reshaped to.
    transposed : bool
        Whether its last two axes are then exchanged.
    scale : float
        What a product would multiply it by.
    """

    var: relax.Var
    dims: tuple[int, ...]
    transposed: bool = False
    scale: float = 1.0

    def emitted(self, builder: relax.BlockBuilder, renewed: Values) -> relax.Expr:
        expr = renewed.get(self.var, self.var)
        if shape(expr) != self.dims:
            expr = builder.emit(relax.op.reshape(expr, self.dims))
        if self.transposed:
            expr = builder.emit(relax.op.permute_dims(expr, [0, 1, 3, 2]))
        return expr


def constant_scale(value: relax.Expr) -> tuple[relax.Var, float] | None:
    """The operand and the factor of a multiplication or division by one constant; None of anything else."""
    kind = operator(value)
    if kind not in ("multiply", "divide"):
        return None
    x, y = value.args
    if kind == "multiply" and isinstance(y, relax.Var):
        x, y = y, x
    number = scalar(y)
    if not isinstance(x, relax.Var) or number is None or shape(x) != shape(value):
        return None
    return x, 1 / number if kind == "divide" else number


def scalar(expr: relax.Expr) -> float | None:
    """The value of a constant with one element; None of anything else."""
    if not isinstance(expr, tvm.ir.GenericConst) or math.prod(expr.value.shape) != 1:
        return None
    return float(expr.value.numpy().reshape(()))


def queries(var: relax.Var, values: Values) -> Operand:
    """The first tensor behind `var` whose elements lie in the same order."""
    first = found = Operand(var=var, dims=shape(var))
    for point, places in _points(var, values):
        if places is not None and places.size == math.prod(first.dims):
            ordered = np.array_equal(places.reshape(-1), np.arange(places.size, dtype=places.dtype))
            found = point if ordered else found
    return found


def cache(
    var: relax.Var,
    values: Values,
    *,
    matrices: tuple[int, ...],
    heads_each: int,
    transposed: bool,
    folded: bool = True,
) -> Operand | None:
    """Keys or values, [batch, kv_heads, keys, size], that a product reads as `var`; None if there are none.

    Parameters
    ----------
    matrices : tuple of int
        Leading axes of the product's result.
    heads_each : int
        How many query heads are rows of each matrix of the product.
    transposed : bool
        Whether the product reads [size, keys].
    folded : bool
        Whether to look for fewer heads than the product reads.
    """
    *own, rows, columns = shape(var)
    keys, size = (columns, rows) if transposed else (rows, columns)
    count = math.prod(matrices)
    found = None
    if tuple(own) == matrices:
        found = Operand(var=var, dims=(1, count, rows, columns), transposed=transposed)
    for point, places in _points(var, values) if folded else ():
        *lead, point_keys, point_size = (*(1,) * (4 - len(point.dims)), *point.dims)
        if places is None or len(lead) != 2 or (point_keys, point_size) != (keys, size):
            continue
        group, odd = divmod(count * heads_each, math.prod(lead))
        if odd or group % heads_each:
            continue
        read = np.broadcast_to(places, (*matrices, rows, columns)).reshape(count, rows, columns)
        read = read.swapaxes(1, 2) if transposed else read
        first = np.arange(count, dtype=np.int32) * heads_each // group * (keys * size)
        element = np.arange(keys * size, dtype=np.int32).reshape(keys, size)
        if all(np.array_equal(matrix, element + begin) for matrix, begin in zip(read, first)):
            found = replace(point, dims=(*lead, keys, size))
    return found


def _points(var: relax.Var, values: Values) -> list[tuple[Operand, np.ndarray | None]]:
    """`var` and the tensors that it is moved from, in order, each with its elements at the places of `var`.

    None in place of the elements where there would be too many.
    """
    moves: list[relax.Var] = []
    points = [(Operand(var=var, dims=shape(var)), _places(var, moves, values))]
    scale = 1.0
    while (source := _source(values.get(var))) is not None:
        moves.insert(0, var)
        scale *= source[1]
        var = source[0]
        points.append((Operand(var=var, dims=shape(var), scale=scale), _places(var, moves, values)))
    return points


def _source(value: relax.Expr | None) -> tuple[relax.Var, float] | None:
    """What `value` moves, and the factor that it multiplies it by; None if it computes something else."""
    if value is None:
        return None
    kind = operator(value)
    same = kind == "astype" and value.ty.dtype == value.args[0].ty.dtype
    if kind in (*_RESHAPES, "permute_dims", "broadcast_to", "repeat") or same:
        return (value.args[0], 1.0) if isinstance(value.args[0], relax.Var) else None
    return constant_scale(value)


def _places(var: relax.Var, moves: list[relax.Var], values: Values) -> np.ndarray | None:
    """Which element of `var` is at each place after `moves`."""
    dims = shape(var)
    if any(math.prod(shape(each)) >= 1 << 27 for each in (var, *moves)):
        return None
    places = np.arange(math.prod(dims), dtype=np.int32).reshape(dims)
    for moved in moves:
        value = values[moved]
        kind = operator(value)
        if kind in _RESHAPES:
            places = places.reshape(shape(moved))
        elif kind == "permute_dims":
            places = places.transpose(value.attrs.axes and [int(axis) for axis in value.attrs.axes])
        elif kind == "broadcast_to":
            places = np.broadcast_to(places, shape(moved))
        elif kind == "repeat":
            axis = value.attrs.axis
            places = np.repeat(places, int(value.attrs.repeats), None if axis is None else int(axis))
    return places
