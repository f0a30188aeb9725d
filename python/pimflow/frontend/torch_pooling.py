"""Pooling of PyTorch that TVM's importer gets wrong: divisors, and places of maxima."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from tvm import relax

from pimflow.frontend.onnx_indexing import window_elements
from pimflow.relay_passes.flat import shape

if TYPE_CHECKING:
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter


def _per_axis(value: int | Sequence[int], rank: int) -> list[int]:
    """A number for each axis of the map."""
    numbers = [int(number) for number in value] if isinstance(value, list | tuple) else [int(value)]
    return numbers * rank if len(numbers) == 1 else numbers


def _window_counts(
    sizes: Sequence[int],
    reaches: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
) -> list[int]:
    """By axis, how many windows there are; with `ceil_mode` the last may be partial, but begins inside."""
    counts = []
    for size, reach, stride, pad in zip(sizes, reaches, strides, padding):
        free = size + 2 * pad - reach
        count = free // stride + 1
        counts.append(count + (ceil_mode and free % stride > 0 and count * stride < size + pad))
    return counts


def _average_pool(node: torch.fx.Node, importer: ExportedProgramImporter, rank: int) -> relax.Expr:
    """Convert an average pool; one with a divisor of its own is a mean over whole windows, scaled."""
    x, window, *given = importer.retrieve_args(node)
    strides, padding, ceil_mode, _, divisor = (*given, *(None, 0, False, True, None)[len(given) :])
    if divisor is None:
        return importer._avg_pool2d(node) if rank == 2 else importer._avg_pool3d(node)
    window, padding = _per_axis(window, rank), _per_axis(padding, rank)
    strides, sizes = _per_axis(strides or window, rank), shape(x)[-rank:]
    counts = _window_counts(sizes, window, strides, padding, ceil_mode)
    emit, widths = importer.block_builder.emit, [0] * 2 * (len(shape(x)) - rank)
    for size, reach, stride, pad, count in zip(sizes, window, strides, padding, counts):
        widths += [pad, max(pad, (count - 1) * stride + reach - size - pad)]
    x = emit(relax.op.nn.pad(x, widths)) if any(widths) else x
    is_single = len(shape(x)) == rank + 1
    x = emit(relax.op.expand_dims(x, 0)) if is_single else x
    pool = relax.op.nn.avg_pool2d if rank == 2 else relax.op.nn.avg_pool3d
    mean = emit(pool(x, window, strides))
    mean = emit(relax.op.squeeze(mean, [0])) if is_single else mean
    return emit(relax.op.multiply(mean, relax.const(math.prod(window) / divisor, str(x.ty.dtype))))


def _max_pool(node: torch.fx.Node, importer: ExportedProgramImporter, rank: int) -> relax.Expr:
    """Convert a max pool whose places may be a result; the importer's are zeros."""
    used = {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
    if 1 not in used:
        return getattr(importer, f"_max_pool{rank}d_with_indices")(node)
    x, window, *given = importer.retrieve_args(node)
    strides, padding, dilations, ceil_mode = (*given, *(None, 0, 1, False)[len(given) :])
    window, padding, dilations = (_per_axis(value, rank) for value in (window, padding, dilations))
    strides, (*maps, sizes) = _per_axis(strides or window, rank), (*shape(x)[:-rank], shape(x)[-rank:])
    reaches = [(size - 1) * dilation + 1 for size, dilation in zip(window, dilations)]
    counts = _window_counts(sizes, reaches, strides, padding, ceil_mode)
    places = window_elements(window, counts, strides, dilations, padding)
    inside = np.all([(place >= 0) & (place < size) for place, size in zip(places, sizes)], axis=0)
    pixels = sum(place * math.prod(sizes[axis + 1 :]) for axis, place in enumerate(places))
    pixels = np.where(inside, pixels, 0)
    emit, op = importer.block_builder.emit, relax.op
    flat = emit(op.reshape(x, (*maps, math.prod(sizes))))
    elements = emit(op.take(flat, relax.const(pixels.reshape(-1), "int64"), len(maps), mode="clip"))
    elements = emit(op.reshape(elements, (*maps, *pixels.shape)))
    lowest = relax.const(-np.inf, str(x.ty.dtype))
    elements = emit(op.where(relax.const(inside), elements, lowest))
    first = emit(op.argmax(elements, len(maps)))
    cell = emit(op.multiply(first, relax.const(pixels.shape[1], "int64")))
    cell = emit(op.add(cell, relax.const(np.arange(pixels.shape[1]), "int64")))
    where = emit(op.take(relax.const(pixels.reshape(-1), "int64"), cell, 0, mode="clip"))
    results = (emit(op.max(elements, len(maps))), where)
    return emit(relax.Tuple([emit(op.reshape(result, (*maps, *counts))) for result in results]))


def _adaptive_max_pool(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Convert an adaptive max pool of a map; the places of the maxima count within the map."""
    x, output_sizes = importer.retrieve_args(node)
    (*maps, height, width), counts = shape(x), _per_axis(output_sizes, 2)
    rows, columns = (
        [range(cell * size // count, -((cell + 1) * size // -count)) for cell in range(count)]
        for size, count in zip((height, width), counts)
    )
    windows = [[row * width + column for row in i for column in j] for i in rows for j in columns]
    reach = max(map(len, windows))
    # A smaller window has its last pixel several times; the first maximum counts.
    pixels = np.array([window + window[-1:] * (reach - len(window)) for window in windows])
    emit, op = importer.block_builder.emit, relax.op
    flat = emit(op.reshape(x, (*maps, height * width)))
    elements = emit(op.take(flat, relax.const(pixels.reshape(-1), "int64"), len(maps), mode="clip"))
    elements = emit(op.reshape(elements, (*maps, *pixels.shape)))
    starts = relax.const(np.arange(len(windows)) * reach, "int64")
    cell = emit(op.add(emit(op.argmax(elements, len(maps) + 1)), starts))
    where = emit(op.take(relax.const(pixels.reshape(-1), "int64"), cell, 0, mode="clip"))
    results = (emit(op.max(elements, len(maps) + 1)), where)
    return emit(relax.Tuple([emit(op.reshape(result, (*maps, *counts))) for result in results]))


# By name of the operator, as TVM's importer takes it.
CONVERTERS = {
    "adaptive_max_pool2d.default": _adaptive_max_pool,
    **{f"avg_pool{rank}d.default": functools.partial(_average_pool, rank=rank) for rank in (2, 3)},
    **{f"max_pool{rank}d_with_indices.default": functools.partial(_max_pool, rank=rank) for rank in (2, 3)},
}
