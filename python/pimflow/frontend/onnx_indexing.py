"""Operators of ONNX that move elements to computed or irregular places, as gathers and choices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from pimflow.zoo.foreign.builder import ExpandedNode


def one_hot(node: ExpandedNode) -> None:
    """Expand OneHot: comparisons with the numbers of classes; indices outside of these match none."""
    builder, dims = node.builder, node.shape(0)
    depth = int(node.value(1).item())
    axis = node.attrs.get("axis", -1) % (len(dims) + 1)
    zero, count = builder.constant(np.int64(0)), builder.constant(np.int64(depth))
    index = builder.emit("Cast", [node.operand(0)], to=TensorProto.INT64)
    wrapped = builder.emit("Add", [index, count])
    index = builder.emit("Where", [builder.emit("Less", [index, zero]), wrapped, index])
    index = builder.reshape(index, [*dims[:axis], 1, *dims[axis:]])
    classes = np.arange(depth, dtype="int64").reshape(-1, *[1] * (len(dims) - axis))
    is_class = builder.emit("Equal", [index, builder.constant(classes)])
    off, on = (
        builder.emit("Gather", [node.operand(2), builder.constant(np.array([place]))], axis=0)
        for place in (0, 1)
    )
    node.bind(builder.emit("Where", [is_class, on, off]))


def reverse_sequence(node: ExpandedNode) -> None:
    """Expand ReverseSequence: the first elements of each sequence backwards, by its length."""
    dims, builder = node.shape(0), node.builder
    time_axis, batch_axis = node.attrs.get("time_axis", 0), node.attrs.get("batch_axis", 1)
    steps = builder.constant(np.arange(dims[time_axis], dtype="int64"))
    lengths = builder.emit("Cast", [node.operand(1)], to=TensorProto.INT64)
    lengths = builder.reshape(lengths, [dims[batch_axis], 1])
    last = builder.emit("Sub", [lengths, builder.constant(np.int64(1))])
    backwards = builder.emit("Sub", [last, steps])
    places = builder.emit("Where", [builder.emit("Less", [steps, lengths]), backwards, steps])
    order = [batch_axis, time_axis, *(a for a in range(len(dims)) if a not in (batch_axis, time_axis))]
    moved = builder.move_axes(node.operand(0), order)
    taken = _rows_of_batch(node, moved, [dims[axis] for axis in order], places)
    node.bind(builder.move_axes(taken, np.argsort(order).tolist()))


def tensor_scatter(node: ExpandedNode) -> None:
    """Expand TensorScatter: tokens written into a cache, from a place of each sequence on, perhaps around."""
    builder, dims, new_dims = node.builder, node.shape(0), node.shape(1)
    axis = node.attrs.get("axis", -2) % len(dims)
    length, count = dims[axis], new_dims[axis]
    begin = node.operand(2) or builder.constant(np.zeros(dims[0], "int64"))
    begin = builder.reshape(builder.emit("Cast", [begin], to=TensorProto.INT64), [dims[0], 1])
    places = builder.emit("Sub", [builder.constant(np.arange(length, dtype="int64")), begin])
    zero = builder.constant(np.int64(0))
    if node.attrs.get("mode", b"linear") == b"circular":
        wrapped = builder.emit("Add", [places, builder.constant(np.int64(length))])
        places = builder.emit("Where", [builder.emit("Less", [places, zero]), wrapped, places])
    below = builder.emit("Less", [places, builder.constant(np.int64(count))])
    is_new = builder.emit("And", [below, builder.emit("GreaterOrEqual", [places, zero])])
    order = [0, axis, *(place for place in range(1, len(dims)) if place != axis)]
    cache, update = (builder.move_axes(node.operand(index), order) for index in (0, 1))
    inside = builder.emit("Where", [is_new, places, zero])
    taken = _rows_of_batch(node, update, [new_dims[place] for place in order], inside)
    is_new = builder.reshape(is_new, [dims[0], length, *[1] * (len(dims) - 2)])
    result = builder.emit("Where", [is_new, taken, cache])
    node.bind(builder.move_axes(result, np.argsort(order).tolist()))


def _rows_of_batch(node: ExpandedNode, table: str, dims: list[int], places: str) -> str:
    """For each element of the batch, rows of `table` [batch, rows, …] at `places` [batch, count]."""
    builder, (batch, rows, *rest) = node.builder, dims
    flat = builder.reshape(table, [batch * rows, *rest])
    begins = builder.constant(rows * np.arange(batch, dtype="int64")[:, None])
    return builder.emit("Gather", [flat, builder.emit("Add", [places, begins])], axis=0)


def max_unpool(node: ExpandedNode) -> None:
    """Expand MaxUnpool: values at the flat places that they were the maxima of, zeros elsewhere."""
    attrs, dims, builder = node.attrs, node.shape(0), node.builder
    window = list(attrs["kernel_shape"])
    rank = len(window)
    strides, pads = list(attrs.get("strides", [1] * rank)), list(attrs.get("pads", [0] * 2 * rank))
    pooled = [
        (size - 1) * strides[axis] + window[axis] - pads[axis] - pads[rank + axis]
        for axis, size in enumerate(dims[2:])
    ]
    pooled = [*dims[:2], *pooled]
    zeros = builder.constant(np.zeros(math.prod(pooled), "float32"))
    operands = (builder.reshape(node.operand(index), [-1]) for index in (1, 0))
    flat = builder.emit("ScatterElements", [zeros, *operands], axis=0)
    result = builder.reshape(flat, pooled)
    if node.operand(2):
        ends = [int(size) - inner for size, inner in zip(node.value(2), pooled)]
        if min(ends) < 0:
            raise node.unsupported(f"into {node.value(2).tolist()}, smaller than {pooled}, is not supported")
        if any(ends):
            widths = builder.constant(np.array([*[0] * len(ends), *ends]))
            result = builder.emit("Pad", [result, widths])
    node.bind(result)


def col2im(node: ExpandedNode) -> None:
    """Expand Col2Im: each pixel is the sum of the elements of columns that were copied from it."""
    attrs, builder = node.attrs, node.builder
    image, block = (node.value(index).astype(int).tolist() for index in (1, 2))
    rank = len(image)
    pads, strides, dilations = (
        list(attrs.get(name, [default] * size))
        for name, default, size in (("pads", 0, 2 * rank), ("strides", 1, rank), ("dilations", 1, rank))
    )
    batch, rows, columns = node.shape(0)
    channels, taps = rows // math.prod(block), math.prod(block)
    counts = [
        (image[axis] + pads[axis] + pads[rank + axis] - dilations[axis] * (block[axis] - 1) - 1)
        // strides[axis]
        + 1
        for axis in range(rank)
    ]
    if math.prod(counts) != columns:
        raise node.unsupported(f"of {columns} columns where {math.prod(counts)} belong is not supported")
    tap, place = np.indices((taps, columns))
    pixel = np.zeros((taps, columns), int)
    inside = np.ones((taps, columns), bool)
    for axis in range(rank):
        step = tap // math.prod(block[axis + 1 :]) % block[axis]
        window = place // math.prod(counts[axis + 1 :]) % counts[axis]
        where = window * strides[axis] + step * dilations[axis] - pads[axis]
        inside &= (where >= 0) & (where < image[axis])
        pixel = pixel * image[axis] + where
    source = np.full((taps, math.prod(image)), taps * columns)  # beyond all elements: a zero
    source[tap[inside], pixel[inside]] = (tap * columns + place)[inside]
    flat = builder.reshape(node.operand(0), [batch, channels, taps * columns])
    padded = builder.emit("Pad", [flat, builder.constant(np.array([0, 0, 0, 0, 0, 1]))])
    parts = builder.emit("Gather", [padded, builder.constant(source)], axis=2)
    node.bind(builder.reshape(node.reduce("ReduceSum", parts, [2]), [batch, channels, *image]))


def max_pool(node: ExpandedNode) -> None:
    """Expand a MaxPool whose places of maxima are a result: all elements of windows, side by side."""
    attrs, builder, dims = node.attrs, node.builder, node.shape(0)
    window = list(attrs["kernel_shape"])
    rank, sizes, taps = len(window), dims[2:], math.prod(window)
    strides, dilations = (list(attrs.get(name, [1] * rank)) for name in ("strides", "dilations"))
    counts, begins = zip(
        *(
            _window_places(node, axis, sizes[axis], (window[axis] - 1) * dilations[axis] + 1, strides[axis])
            for axis in range(rank)
        )
    )
    places = window_elements(window, counts, strides, dilations, begins)
    inside = np.all([(place >= 0) & (place < size) for place, size in zip(places, sizes)], axis=0)
    pixel = sum(place * math.prod(sizes[axis + 1 :]) for axis, place in enumerate(places))
    flat = pixel
    if attrs.get("storage_order", 0):
        flat = sum(place * math.prod(sizes[:axis]) for axis, place in enumerate(places))
    elements = builder.reshape(node.operand(0), [*dims[:2], math.prod(sizes)])
    parts = builder.emit("Gather", [elements, builder.constant(np.where(inside, pixel, 0))], axis=2)
    parts = builder.emit("Where", [builder.constant(inside), parts, builder.scalar(-np.inf)])
    node.bind(builder.reshape(node.reduce("ReduceMax", parts, [2]), [*dims[:2], *counts]))
    first = builder.emit("ArgMax", [parts], axis=2, keepdims=1)
    is_first = builder.emit("Equal", [builder.constant(np.arange(taps)[:, None]), first])
    zero = builder.constant(np.int64(0))
    chosen = builder.emit("Where", [is_first, builder.constant(np.where(inside, flat, 0)), zero])
    maps = math.prod(sizes) * np.arange(dims[0] * dims[1]).reshape(*dims[:2], 1, 1)
    places = builder.emit("Add", [node.reduce("ReduceSum", chosen, [2]), builder.constant(maps)])
    node.bind(builder.reshape(places, [*dims[:2], *counts]), 1)


def window_elements(
    window: Sequence[int],
    counts: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    begins: Sequence[int],
) -> list[np.ndarray]:
    """Where the elements of windows lie, by axis of the map: [elements of a window, windows].

    Parameters
    ----------
    counts, begins : sequence of int
        By axis, the number of windows, and the padding before the first.
    """
    tap, number = np.indices((math.prod(window), math.prod(counts)))
    places = []
    for axis, size in enumerate(window):
        step = tap // math.prod(window[axis + 1 :]) % size
        start = number // math.prod(counts[axis + 1 :]) % counts[axis] * strides[axis]
        places.append(start + step * dilations[axis] - begins[axis])
    return places


def _window_places(node: ExpandedNode, axis: int, size: int, reach: int, stride: int) -> tuple[int, int]:
    """Along an axis, the number of windows of `reach` elements, and the padding before the first."""
    attrs, rank = node.attrs, node.rank(0) - 2
    pads, mode = attrs.get("pads", [0] * 2 * rank), attrs.get("auto_pad", b"NOTSET")
    if mode in (b"SAME_UPPER", b"SAME_LOWER"):
        count = -(-size // stride)
        total = max(0, (count - 1) * stride + reach - size)
        return count, total // 2 if mode == b"SAME_UPPER" else total - total // 2
    before, after = (0, 0) if mode == b"VALID" else (pads[axis], pads[rank + axis])
    free = size + before + after - reach
    count = free // stride + 1
    if attrs.get("ceil_mode", 0) and free % stride and count * stride < size + before:
        count += 1  # the last window begins inside
    return count, before
