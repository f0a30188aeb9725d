"""Deformable convolutions of ONNX: pixels interpolated at computed places, then a matrix product."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from pimflow.zoo.foreign.builder import ExpandedNode


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Sizes of a DeformConv over maps; rows before columns."""

    batch: int
    channels: int
    sizes: tuple[int, int]
    outputs: tuple[int, int]
    kernel: tuple[int, int]
    offset_groups: int

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @property
    def pixels(self) -> int:
        """Output pixels of an image."""
        return self.outputs[0] * self.outputs[1]


def deform_conv(node: ExpandedNode) -> None:
    """Expand DeformConv over maps; what lies outside of the input is 0."""
    builder, attrs = node.builder, node.attrs
    if node.rank(0) != 4:
        raise node.unsupported(f"over {node.rank(0) - 2} axes is not supported: two are")
    (batch, channels, *sizes), (filters, *kernel) = node.shape(0), node.shape(1)[:1] + node.shape(1)[2:]
    offsets = node.shape(2)
    groups = attrs.get("group", 1)
    window = _Window(
        batch=batch,
        channels=channels,
        sizes=(sizes[0], sizes[1]),
        outputs=(offsets[2], offsets[3]),
        kernel=(kernel[0], kernel[1]),
        offset_groups=attrs.get("offset_group", 1),
    )
    samples = _samples(node, window)  # [batch, offset groups, taps, pixels, channels of a group]
    if node.operand(4):
        mask = [batch, window.offset_groups, window.taps, window.pixels, 1]
        samples = builder.emit("Mul", [samples, builder.reshape(node.operand(4), mask)])
    columns = builder.move_axes(samples, [0, 3, 1, 4, 2])  # then channels and taps lie as in the filters
    depth = channels // groups * window.taps
    columns = builder.reshape(columns, [batch, window.pixels, groups, depth])
    columns = builder.reshape(builder.move_axes(columns, [2, 0, 1, 3]), [groups, -1, depth])
    matrices = builder.reshape(node.operand(1), [groups, filters // groups, depth])
    if groups == 1:  # one matrix, which PIM can hold
        columns = builder.reshape(columns, [-1, depth])
        matrices = builder.move_axes(builder.reshape(matrices, [filters, depth]), [1, 0])
    else:
        matrices = builder.move_axes(matrices, [0, 2, 1])
    product = builder.emit("MatMul", [columns, matrices])
    product = builder.reshape(product, [groups, batch, window.pixels, filters // groups])
    maps = builder.reshape(builder.move_axes(product, [1, 0, 3, 2]), [batch, filters, *window.outputs])
    if node.operand(3):
        maps = builder.emit("Add", [maps, builder.reshape(node.operand(3), [filters, 1, 1])])
    node.bind(maps)


def _samples(node: ExpandedNode, window: _Window) -> str:
    """The input at the places of all taps, interpolated between four neighbours."""
    builder = node.builder
    emit, groups = builder.emit, window.offset_groups
    group_channels = window.channels // groups
    area = window.sizes[0] * window.sizes[1]
    pixels = builder.reshape(node.operand(0), [window.batch * groups, group_channels, area])
    pixels = builder.reshape(builder.move_axes(pixels, [0, 2, 1]), [-1, group_channels])
    corners = [_corners(node, window, axis) for axis in (0, 1)]
    begins = area * np.arange(window.batch * groups).reshape(window.batch, groups, 1, 1)
    parts = []
    for (row, row_share), (column, column_share) in itertools.product(*corners):
        flat = emit("Add", [emit("Mul", [row, builder.constant(np.int64(window.sizes[1]))]), column])
        values = emit("Gather", [pixels, emit("Add", [flat, builder.constant(begins)])], axis=0)
        share = emit("Mul", [row_share, column_share])
        dims = [window.batch, groups, window.taps, window.pixels, 1]
        parts.append(emit("Mul", [values, builder.reshape(share, dims)]))
    return emit("Sum", parts)


def _corners(node: ExpandedNode, window: _Window, axis: int) -> list[tuple[str, str]]:
    """Along an axis, the two neighbours of each place, and their shares; those outside have none."""
    builder, attrs = node.builder, node.attrs
    emit, size = builder.emit, window.sizes[axis]
    step, dilation = attrs.get("strides", [1, 1])[axis], attrs.get("dilations", [1, 1])[axis]
    tap = np.indices(window.kernel)[axis].reshape(-1, 1) * dilation
    pixel = np.indices(window.outputs)[axis].reshape(1, -1) * step - attrs.get("pads", [0] * 4)[axis]
    shape = [window.batch, window.offset_groups, window.taps, 2, window.pixels]
    offsets = builder.reshape(node.operand(2), shape)
    offsets = emit("Gather", [offsets, builder.constant(np.int64(axis))], axis=3)
    place = emit("Add", [offsets, builder.constant((tap + pixel).astype("float32"))])
    below = emit("Floor", [place])
    above_share = emit("Sub", [place, below])
    result = []
    for neighbour, share in (
        (below, emit("Sub", [builder.scalar(1), above_share])),
        (emit("Add", [below, builder.scalar(1)]), above_share),
    ):
        inside = emit("Clip", [neighbour, builder.scalar(0), builder.scalar(size - 1)])
        is_inside = emit("Equal", [inside, neighbour])
        result.append(
            (
                emit("Cast", [inside], to=TensorProto.INT64),
                emit("Where", [is_inside, share, builder.scalar(0)]),
            )
        )
    return result
