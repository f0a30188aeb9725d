"""Operands of the products of attention, traced through transposes, repeated heads and scale factors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import relax

from pimflow.relay_passes.flat import factors_by_axis, number, operator, shape, split_factors

_RESHAPES = ("reshape", "expand_dims", "squeeze")
Values = Mapping[relax.Var, relax.Expr]

# Where the elements along one or several axes lie in a tensor: the digits of the index, outermost first. Each
# is an extent above 1 and a stride; the stride is 0 for elements that are repeated.
Digits = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class AttentionOperand:
    """A tensor as attention reads it.

    Attributes
    ----------
    transposed : bool
        Whether its last two axes are exchanged after that.
    scale : float
        Constant factor of the tensor, which becomes a factor of the scores.
    """

    var: relax.Var
    dims: tuple[int, ...]
    transposed: bool = False
    scale: float = 1.0

    def emit(self, builder: relax.BlockBuilder, var_remap: Values) -> relax.Expr:
        """Emit the reshape and the transpose that make the operand from its variable."""
        expr = var_remap.get(self.var, self.var)
        if shape(expr) != self.dims:
            expr = builder.emit(relax.op.reshape(expr, self.dims))
        if self.transposed:
            expr = builder.emit(relax.op.permute_dims(expr, [0, 1, 3, 2]))
        return expr


def constant_scale(value: relax.Expr) -> tuple[relax.Var, float] | None:
    """Operand and factor of a multiplication or division by one constant; None for other operators."""
    kind = operator(value)
    if kind not in ("multiply", "divide"):
        return None
    x, y = value.args
    if kind == "multiply" and isinstance(y, relax.Var):
        x, y = y, x
    factor = number(y)
    if not isinstance(x, relax.Var) or factor is None or shape(x) != shape(value):
        return None
    return x, 1 / factor if kind == "divide" else factor


def query_operand(var: relax.Var, values: Values) -> AttentionOperand:
    """The earliest tensor from which `var` comes with its elements in the same order."""
    operand = AttentionOperand(var=var, dims=shape(var))
    for point, places in _source_chain(var, values):
        if places is not None and _merge_digits(places) == _merge_digits([[(math.prod(point.dims), 1)]]):
            operand = point
    return operand


def cache_operand(
    var: relax.Var,
    values: Values,
    *,
    matrices: tuple[int, ...],
    heads_per_matrix: int,
    transposed: bool,
    folded: bool = True,
) -> AttentionOperand | None:
    """The cache of keys or values [batch, kv_heads, keys, size] that a product reads as `var`; None if none.

    Parameters
    ----------
    matrices : tuple of int
        Leading axes of the product's result.
    heads_per_matrix : int
        Query heads that are rows of one matrix of the product.
    transposed : bool
        Whether the product reads [size, keys].
    folded : bool
        Whether `var` may repeat heads of the cache, which then has fewer heads than the product reads.
    """
    *matrix_dims, rows, columns = shape(var)
    keys, size = (columns, rows) if transposed else (rows, columns)
    count = math.prod(matrices)
    operand = None
    if tuple(matrix_dims) == matrices:
        operand = AttentionOperand(var=var, dims=(1, count, rows, columns), transposed=transposed)
    for point, places in _source_chain(var, values) if folded else ():
        *lead, point_keys, point_size = (*(1,) * (4 - len(point.dims)), *point.dims)
        if places is None or len(lead) != 2 or (point_keys, point_size) != (keys, size):
            continue
        group, remainder = divmod(count * heads_per_matrix, math.prod(lead))
        if remainder or group % heads_per_matrix:
            continue
        *before, row, column = _broadcast(places, (*matrix_dims, rows, columns), (*matrices, rows, columns))
        first = [(math.prod(lead), keys * size), (group // heads_per_matrix, 0)]
        expected = [_merge_digits([digits]) for digits in (first, [(keys, size)], [(size, 1)])]
        if [_merge_digits(before), *([column, row] if transposed else [row, column])] == expected:
            operand = replace(point, dims=(*lead, keys, size))
    return operand


def _source_chain(var: relax.Var, values: Values) -> list[tuple[AttentionOperand, list[Digits] | None]]:
    """`var` and the tensors from which moves make it, last first, with their digits along the axes of `var`.

    None in place of the digits where the elements do not lie in strides.
    """
    moves: list[relax.Var] = []
    points = [(AttentionOperand(var=var, dims=shape(var)), _places(var, moves, values))]
    scale = 1.0
    while (source := _source(values.get(var))) is not None:
        moves.insert(0, var)
        scale *= source[1]
        var = source[0]
        points.append((AttentionOperand(var=var, dims=shape(var), scale=scale), _places(var, moves, values)))
    return points


def _source(value: relax.Expr | None) -> tuple[relax.Var, float] | None:
    """The operand that `value` moves or scales, and the factor; None if `value` computes something else."""
    if value is None:
        return None
    kind = operator(value)
    same = kind == "astype" and value.ty.dtype == value.args[0].ty.dtype
    if kind in (*_RESHAPES, "permute_dims", "broadcast_to", "repeat") or same:
        return (value.args[0], 1.0) if isinstance(value.args[0], relax.Var) else None
    return constant_scale(value)


def _places(var: relax.Var, moves: list[relax.Var], values: Values) -> list[Digits] | None:
    """Digits of the elements of `var` after `moves`, by axis; None if they do not lie in strides."""
    if not all(math.prod(shape(tensor)) for tensor in (var, *moves)):
        return None
    places = _split([[(math.prod(shape(var)), 1)]], shape(var))
    for move in moves:
        if places is None:
            return None
        value = values[move]
        kind, input_dims = operator(value), shape(value.args[0])
        if kind in _RESHAPES:
            places = _split(places, shape(move))
        elif kind == "permute_dims":
            axes = value.attrs.axes or range(len(places))[::-1]
            places = [places[int(axis)] for axis in axes]
        elif kind == "broadcast_to":
            places = _broadcast(places, input_dims, shape(move))
        elif kind == "repeat":
            axis, repeat_digit = value.attrs.axis, (int(value.attrs.repeats), 0)
            places = [_merge_digits(places)] if axis is None else places
            position = 0 if axis is None else int(axis)
            places[position] = _merge_digits([places[position], [repeat_digit]])
    return places


def _merge_digits(axes: Sequence[Digits]) -> Digits:
    """The digits of several axes, merged into the fewest possible; equal for equal places."""
    merged: Digits = []
    for extent, stride in itertools.chain(*axes):
        if merged and merged[-1][1] == extent * stride:
            merged[-1] = (merged[-1][0] * extent, stride)
        elif extent > 1:
            merged.append((extent, stride))
    return merged


def _split(axes: Sequence[Digits], dims: Sequence[int]) -> list[Digits] | None:
    """The digits of each axis of `dims`, in the same order; None if a digit spans several axes."""
    digits = split_factors(_merge_digits(axes), dims)
    return None if digits is None else factors_by_axis(digits, dims)


def _broadcast(axes: Sequence[Digits], input_dims: Sequence[int], dims: Sequence[int]) -> list[Digits]:
    """The digits of each axis of `dims` after a broadcast from shape `input_dims`."""
    new_axes = len(dims) - len(input_dims)
    before = zip((*[[]] * new_axes, *axes), (*[1] * new_axes, *input_dims), dims)
    return [[(new, 0)] if old < new else digits for digits, old, new in before]
