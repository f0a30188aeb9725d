"""Operators of com.microsoft that are one or a few operators of the standard."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from pimflow.zoo.foreign.builder import ExpandedNode


def rename_to(op: str, *dropped: str) -> Callable[[ExpandedNode], None]:
    """The expansion of an operator that is `op` of the standard, but for the attributes `dropped`."""

    def expand(node: ExpandedNode) -> None:
        """Emit the operator of the standard."""
        attrs = {name: value for name, value in node.attrs.items() if name not in dropped}
        node.bind(node.builder.emit(op, list(node.proto.input), **attrs))

    return expand


def expand_dims(node: ExpandedNode) -> None:
    """Expand ExpandDims: another axis of size 1."""
    axis = node.builder.constant(node.value(1).reshape(1).astype("int64"))
    node.bind(node.builder.emit("Unsqueeze", [node.operand(0), axis]))


def c_dist(node: ExpandedNode) -> None:
    """Expand CDist: distances between the rows of two matrices."""
    kind, emit = node.attrs.get("metric", b"sqeuclidean").decode(), node.builder.emit
    if kind not in ("euclidean", "sqeuclidean"):
        raise node.unsupported(f"with metric '{kind}' is not supported")
    rows, columns = (node.builder.constant(np.array([axis])) for axis in (1, 0))
    left, right = emit("Unsqueeze", [node.operand(0), rows]), emit("Unsqueeze", [node.operand(1), columns])
    difference = emit("Sub", [left, right])
    squares = node.reduce("ReduceSum", emit("Mul", [difference, difference]), [-1], keepdims=0)
    node.bind(emit("Sqrt", [squares]) if kind == "euclidean" else squares)


def unfold_tensor(node: ExpandedNode) -> None:
    """Expand UnfoldTensor: windows along an axis; places within a window become the last axis."""
    rank, size, step = node.rank(0), int(node.attrs["size"]), int(node.attrs.get("step", 1))
    axis = int(node.attrs.get("dim", -1)) % rank
    extent = node.shape(0)[axis]
    if extent < size:
        raise node.unsupported(f"of {extent} elements in windows of {size} is not supported")
    places = np.arange(0, extent - size + 1, step)[:, None] + np.arange(size)
    windows = node.builder.emit("Gather", [node.operand(0), node.builder.constant(places)], axis=axis)
    order = [index for index in range(rank + 1) if index != axis + 1]
    node.bind(node.builder.move_axes(windows, [*order, axis + 1]))


def conv_transpose_with_dynamic_pads(node: ExpandedNode) -> None:
    """Expand ConvTransposeWithDynamicPads of constant pads: a ConvTranspose."""
    operands = [node.operand(index) for index in (0, 1, 3)]
    pads = [int(pad) for pad in node.value(2)] if node.operand(2) else []
    attrs = node.attrs | ({"pads": pads} if pads else {})
    node.bind(node.builder.emit("ConvTranspose", [name for name in operands if name], **attrs))


def grid_sample(node: ExpandedNode) -> None:
    """Expand GridSample, whose modes have other names from opset 20 on."""
    mode, attrs = node.attrs.get("mode", b"bilinear").decode(), node.attrs
    names = {"bilinear": "linear", "bicubic": "cubic"} if node.opset >= 20 else {}
    attrs["mode"] = names.get(mode, mode)
    node.bind(node.builder.emit("GridSample", list(node.proto.input), **attrs))


def mat_mul_integer16(node: ExpandedNode) -> None:
    """Expand MatMulInteger16: a product in int32."""
    kind = TensorProto.UINT32 if node.kind(0) == node.kind(1) == TensorProto.UINT16 else TensorProto.INT32
    operands = [node.builder.emit("Cast", [node.operand(index)], to=kind) for index in (0, 1)]
    node.bind(node.builder.emit("MatMul", operands))


def nhwc_max_pool(node: ExpandedNode) -> None:
    """Expand NhwcMaxPool: a MaxPool whose channels are the last axis."""
    rank = len(node.attrs["kernel_shape"]) + 2
    x = node.builder.move_axes(node.operand(0), channels_first(rank))
    node.bind(node.builder.move_axes(node.builder.emit("MaxPool", [x], **node.attrs), channels_last(rank)))


def channels_first(rank: int) -> list[int]:
    """The order of axes that moves the last one behind the batch."""
    return [0, rank - 1, *range(1, rank - 1)]


def channels_last(rank: int) -> list[int]:
    """The order of axes that moves the second one to the end."""
    return [0, *range(2, rank), 1]
