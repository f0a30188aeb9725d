"""Softmax over scores and sinks: one score more for each head, which no key stands for."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.canonical.attention_operands import Values
from pimflow.relay_passes.flat import operator, shape

_MOVES = ("reshape", "broadcast_to", "expand_dims", "astype")


def softmax_with_sinks(
    value: relax.Expr | None, values: Values, counts: Mapping[relax.Var, int]
) -> tuple[relax.Var, relax.Expr] | None:
    """Scores and sinks of ``softmax(concat(scores, sinks))[..., :-1]``, along the last axis; else None.

    The largest score may be subtracted before, as transformers does: that changes nothing. The sinks that
    come back have one element for each head.
    """
    if operator(value) != "strided_slice" or value.args[0] not in values:
        return None
    softmax, dims = values[value.args[0]], shape(value.args[0])
    if operator(softmax) != "nn.softmax" or int(softmax.attrs.axis) not in (-1, len(dims) - 1):
        return None
    if len(dims) != 4 or not _drops_last(value, dims) or counts.get(value.args[0], 0) != 1:
        return None
    source, readers = softmax.args[0], 1
    shifted = values.get(source)
    if operator(shifted) == "subtract" and _is_maximum(shifted.args[1], shifted.args[0], values):
        source, readers = shifted.args[0], 2
    joined = values.get(source)
    if operator(joined) != "concat" or counts.get(source, 0) != readers:
        return None
    parts = list(joined.args[0].fields)
    if len(parts) != 2 or shape(parts[1])[-1] != 1 or int(joined.attrs.axis) not in (-1, len(dims) - 1):
        return None
    sinks = _sinks_by_head(parts[1], values)
    return (parts[0], sinks) if sinks is not None and isinstance(parts[0], relax.Var) else None


def _drops_last(value: relax.Call, dims: tuple[int, ...]) -> bool:
    """Whether a slice keeps all but the last element of the last axis, and all other axes whole."""
    begins = [getattr(begin, "value", None) for begin in value.args[2].fields]
    return shape(value) == (*dims[:-1], dims[-1] - 1) and all(begin == 0 for begin in begins)


def _is_maximum(expr: relax.Expr, source: relax.Expr, values: Values) -> bool:
    """Whether `expr` is the largest element of `source` along its last axis."""
    value = values.get(expr)
    while operator(value) in ("reshape", "expand_dims"):
        value = values.get(value.args[0])
    if operator(value) != "max" or not value.args[0].same_as(source):
        return False
    axes = [int(axis) for axis in value.attrs.axis or ()]
    return axes in ([-1], [len(shape(source)) - 1])


def _sinks_by_head(expr: relax.Expr, values: Values) -> relax.Expr | None:
    """The tensor with one element for each head that `expr` [batch, heads, queries, 1] repeats; else None."""
    heads = shape(expr)[1]
    while isinstance(expr, relax.Var) and operator(values.get(expr)) in _MOVES:
        dims = shape(expr)
        if len(dims) not in (1, 3, 4) or dims[max(len(dims) - 3, 0)] != heads:
            return None
        expr = values[expr].args[0]
    if isinstance(expr, tvm.ir.GenericConst):
        array = expr.value.numpy()
        if array.ndim == 4 and array.shape[1] == heads and (array == array[:1, :, :1, :1]).all():
            return relax.const(np.ascontiguousarray(array[0, :, 0, 0], np.float32))
        return relax.const(array.reshape(-1).astype(np.float32)) if array.size == heads else None
    return expr if math.prod(shape(expr)) == heads else None
