"""Writes of PyTorch to places that are data: scatters with a reduction, and rows by index."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tvm import relax

from pimflow.relay_passes.flat import shape

if TYPE_CHECKING:
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

_REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}
_NEUTRAL = {"sum": 0.0, "prod": 1.0, "amax": -math.inf, "amin": math.inf}


def _scatter_add(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Var:
    """Convert ``scatter_add``."""
    x, axis, index, source = importer.retrieve_args(node)
    source = _first_part(source, shape(index), importer)
    return importer.block_builder.emit(relax.op.scatter_elements(x, index, source, axis, "add"))


def _scatter_reduce(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Var:
    """Convert ``scatter_reduce``; without the tensor's own values its places hold the neutral one first."""
    x, axis, index, source, kind = importer.retrieve_args(node)[:5]
    if kind not in _REDUCTIONS:
        raise NotImplementedError(f"scatter_reduce by '{kind}' is not supported")
    dtype, emit = str(x.ty.dtype), importer.block_builder.emit
    if not node.kwargs.get("include_self", True):
        if "float" not in dtype and math.isinf(_NEUTRAL[kind]):
            raise NotImplementedError("scatter_reduce of integers without their own values is not supported")
        neutral = emit(relax.op.broadcast_to(relax.const(_NEUTRAL[kind], dtype), shape(index)))
        x = emit(relax.op.scatter_elements(x, index, neutral, axis))
    source = _first_part(source, shape(index), importer)
    return emit(relax.op.scatter_elements(x, index, source, axis, _REDUCTIONS[kind]))


def _first_part(x: relax.Expr, sizes: tuple[int, ...], importer: ExportedProgramImporter) -> relax.Expr:
    """The first elements of every axis: PyTorch's source may be larger than the index."""
    if shape(x) == sizes:
        return x
    axes = list(range(len(sizes)))
    return importer.block_builder.emit(relax.op.strided_slice(x, axes, [0] * len(sizes), list(sizes)))


def rows_written(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Var | None:
    """``index_put`` by integers of some axes, whose rest is whole; None if it is another.

    TVM takes an index of every axis.
    """
    x, indices, values, *given = importer.retrieve_args(node)
    adds = given[0] if given else node.kwargs.get("accumulate", False)
    places = {axis: index for axis, index in enumerate(indices) if index is not None}
    sizes, axes = shape(x), list(places)
    if len(axes) == len(sizes) or any("int" not in str(index.ty.dtype) for index in places.values()):
        return None
    emit, op = importer.block_builder.emit, relax.op
    row = row_numbers(places, sizes, importer)
    rest = [axis for axis in range(len(sizes)) if axis not in places]
    begin = first_row_axis(axes)
    row_shape, inner = shape(row), [sizes[axis] for axis in rest]
    rows, width, rank = math.prod(row_shape), math.prod(inner), len(row_shape)
    values = emit(op.broadcast_to(values, (*inner[:begin], *row_shape, *inner[begin:])))
    outer = [*range(begin, begin + rank)]
    values = emit(op.permute_dims(values, [*outer, *(i for i in range(rank + len(rest)) if i not in outer)]))
    values = emit(op.reshape(values, (rows, width)))
    targets = emit(op.broadcast_to(emit(op.reshape(row, (rows, 1))), (rows, width)))
    order = [*axes, *rest]
    turned = emit(op.permute_dims(x, order))
    flat = emit(op.reshape(turned, (math.prod(sizes[axis] for axis in axes), width)))
    written = emit(op.scatter_elements(flat, targets, values, 0, "add" if adds else "update"))
    written = emit(op.reshape(written, [sizes[axis] for axis in order]))
    return emit(op.permute_dims(written, [order.index(axis) for axis in range(len(sizes))]))


def first_row_axis(axes: list[int]) -> int:
    """Where chosen values have the axes of the indices: in the place of `axes`, first if these lie apart."""
    return axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0


def row_numbers(
    places: Mapping[int, relax.Expr], sizes: Sequence[int], importer: ExportedProgramImporter
) -> relax.Expr:
    """Numbers of rows of flattened axes, from an index of each of them; negative ones count from the end."""
    emit, op = importer.block_builder.emit, relax.op
    row: relax.Expr = relax.const(0, "int64")
    for axis, index in places.items():
        wide, extent = emit(op.astype(index, "int64")), relax.const(sizes[axis], "int64")
        is_negative = emit(op.less(wide, relax.const(0, "int64")))
        wide = emit(op.where(is_negative, emit(op.add(wide, extent)), wide))
        row = emit(op.add(emit(op.multiply(row, extent)), wide))
    return row


# By name of the operator, as TVM's importer takes it.
CONVERTERS = {"scatter_add.default": _scatter_add, "scatter_reduce.two": _scatter_reduce}
