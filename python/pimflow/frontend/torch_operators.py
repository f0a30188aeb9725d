"""Operators of PyTorch that TVM's importer gets wrong, or that would be decomposed into many."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tvm import relax, topi

from pimflow.frontend import torch_experts, torch_pooling, torch_resize, torch_scatter
from pimflow.relay_passes.flat import shape

if TYPE_CHECKING:
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

_INTERPOLATION = ("bilinear", "nearest", "bicubic")
_PADDING = ("zeros", "border", "reflection")


def _grid_sample(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Var:
    """Convert ``grid_sampler_2d``: PyTorch's grid is [N, H, W, 2], Relax's [N, 2, H, W]."""
    x, grid, *modes = importer.retrieve_args(node)
    mode, padding, align_corners = (*modes, *(0, 0, False)[len(modes) :])
    emit = importer.block_builder.emit
    return emit(
        relax.op.image.grid_sample(
            x,
            emit(relax.op.permute_dims(grid, [0, 3, 1, 2])),
            method=_INTERPOLATION[mode],
            layout="NCHW",
            padding_mode=_PADDING[padding],
            align_corners=align_corners,
        )
    )


def _divide(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Var:
    """Convert ``div`` with a rounding mode; the importer gives a number the type of integers."""
    x, divisor = importer.retrieve_args(node)[:2]
    dtype = str((x if isinstance(x, relax.Expr) else divisor).ty.dtype)
    x, divisor = (
        operand if isinstance(operand, relax.Expr) else relax.const(operand, dtype)
        for operand in (x, divisor)
    )
    emit, mode = importer.block_builder.emit, node.kwargs.get("rounding_mode")
    if mode == "floor":
        return emit(relax.op.floor_divide(x, divisor))
    quotient = emit(relax.op.divide(x, divisor))
    return emit(relax.op.trunc(quotient)) if mode == "trunc" else quotient


def _elu(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Var:
    """Convert ``elu``, of which SELU is a scaled one; the importer has no scales, and makes 0 of NaN."""
    x, *given = importer.retrieve_args(node)
    alpha, scale, input_scale = (*given, *(1.0, 1.0, 1.0)[len(given) :])
    emit, op, dtype = importer.block_builder.emit, relax.op, str(x.ty.dtype)
    inner = x if input_scale == 1 else emit(op.multiply(x, relax.const(float(input_scale), dtype)))
    curve = emit(op.nn.relu(emit(op.subtract(relax.const(1.0, dtype), emit(op.exp(inner))))))
    bent = emit(op.multiply(relax.const(-float(alpha), dtype), curve))
    result = emit(op.add(bent, emit(op.nn.leakyrelu(x, 0.0))))
    return result if scale == 1 else emit(op.multiply(relax.const(float(scale), dtype), result))


def _extreme(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Tuple:
    """Convert ``max`` and ``min`` along an axis; the importer sorts for them."""
    x, axis, *rest = importer.retrieve_args(node)
    keeps = rest[0] if rest else node.kwargs.get("keepdim", False)
    emit, largest = importer.block_builder.emit, str(node.target).split(".")[1] == "max"
    extreme, place = (relax.op.max, relax.op.argmax) if largest else (relax.op.min, relax.op.argmin)
    return relax.Tuple([emit(extreme(x, axis, keeps)), emit(place(x, axis, keeps))])


def _reduction(
    node: torch.fx.Node, importer: ExportedProgramImporter, reduce: Callable[..., relax.Expr]
) -> relax.Var:
    """Convert a reduction over given axes, or over all of them."""
    x, *given = importer.retrieve_args(node)
    axes = given[0] if given else node.kwargs.get("dim")
    keeps = given[1] if len(given) > 1 else node.kwargs.get("keepdim", False)
    return importer.block_builder.emit(reduce(x, None if axes == [] else axes, keeps))


def _shift(
    node: torch.fx.Node, importer: ExportedProgramImporter, shift: Callable[..., relax.Expr]
) -> relax.Var:
    """Convert a shift of the bits of integers by a number or a tensor."""
    x, width = importer.retrieve_args(node)
    width = width if isinstance(width, relax.Expr) else relax.const(width, str(x.ty.dtype))
    return importer.block_builder.emit(shift(x, width))


def _linear(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Var:
    """Convert ``linear`` in the type of its operand; the importer's result is always fp32."""
    x, weight, *given = importer.retrieve_args(node)
    emit = importer.block_builder.emit
    product = emit(relax.op.matmul(x, emit(relax.op.permute_dims(weight))))
    bias = given[0] if given else node.kwargs.get("bias")
    return product if bias is None else emit(relax.op.add(product, bias))


def _transpose_volumes(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Var:
    """Convert ``conv_transpose3d``, which the importer lacks."""
    x, weight, *given = importer.retrieve_args(node)
    defaults = (None, (1, 1, 1), (0, 0, 0), (0, 0, 0), 1, (1, 1, 1))
    bias, strides, padding, extra, groups, dilation = (*given, *defaults[len(given) :])
    emit = importer.block_builder.emit
    sides = [list(part) * (3 if len(part) == 1 else 1) for part in (strides, padding, extra, dilation)]
    product = emit(
        relax.op.nn.conv3d_transpose(x, weight, sides[0], sides[1] * 2, sides[2], sides[3], groups=groups)
    )
    if bias is None:
        return product
    return emit(relax.op.add(product, emit(relax.op.reshape(bias, (1, -1, 1, 1, 1)))))


def _reflect(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Var:
    """Convert ``reflection_pad`` as the importer of ONNX does."""
    x, widths = importer.retrieve_args(node)[:2]
    return _pad_borders(importer, x, widths, "reflect", 0.0)


def _pad(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Var:
    """Convert ``pad`` of any mode."""
    x, widths, *rest = importer.retrieve_args(node)
    mode = rest[0] if rest else node.kwargs.get("mode", "constant")
    value = rest[1] if len(rest) > 1 else node.kwargs.get("value")
    return _pad_borders(importer, x, widths, mode, value or 0.0)


def _pad_borders(
    importer: ExportedProgramImporter, x: relax.Expr, widths: Sequence[int], mode: str, value: float
) -> relax.Var:
    """Pad as the importer of ONNX does; `widths` begin at the last axis, negative ones cut."""
    builder, rest = importer.block_builder, [0] * (len(x.ty.shape) - len(widths) // 2)
    before, after = ([*rest, *reversed([int(width) for width in widths[side::2]])] for side in (0, 1))
    for axis, (first, last) in enumerate(zip(before, after)):
        if first < 0 or last < 0:
            end = shape(x)[axis] + min(last, 0)
            x = builder.emit(relax.op.strided_slice(x, [axis], [max(-first, 0)], [end]))
    before, after = ([max(width, 0) for width in side] for side in (before, after))
    if mode == "reflect":
        return builder.emit_te(topi.nn.mirror_pad, x, before, after, "REFLECT")
    if mode in ("circular", "replicate"):
        kernel = topi.nn.circular_pad if mode == "circular" else topi.nn.replicate_pad
        return builder.emit_te(kernel, x, before, after)
    pairs = [width for pair in zip(before, after) for width in pair]
    return builder.emit(relax.op.nn.pad(x, pairs, "constant", value))


def _index(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Var:
    """Convert ``index`` by tensors of whole numbers, which may be negative.

    The importer's reads in front of the tensor then, and takes several indices beside a whole axis as if each
    were of an axis of its own.
    """
    x, indices = importer.retrieve_args(node)[:2]
    places = {axis: index for axis, index in enumerate(indices) if index is not None}
    if any("int" not in str(index.ty.dtype) for index in places.values()):
        raise NotImplementedError("an index by a mask is not supported: its size depends on the data")
    emit = importer.block_builder.emit
    if len(places) == 1:
        ((axis, index),) = places.items()
        return emit(relax.op.take(x, index, axis, mode="wrap"))
    dims, axes = shape(x), list(places)
    begin = torch_scatter.first_row_axis(axes)
    rest = [axis for axis in range(len(dims)) if axis not in places]
    x = emit(relax.op.permute_dims(x, [*rest[:begin], *axes, *rest[begin:]]))
    rows = math.prod(dims[axis] for axis in axes)
    before, after = ([dims[axis] for axis in part] for part in (rest[:begin], rest[begin:]))
    x = emit(relax.op.reshape(x, (*before, rows, *after)))
    row = torch_scatter.row_numbers(places, dims, importer)
    return emit(relax.op.take(x, row, begin, mode="clip"))


# Operators that would be decomposed into several, though they have a converter.
KEPT_OPERATORS = (
    *(f"reflection_pad{axes}d.default" for axes in (1, 2, 3)),
    "pad.default",
    # Else they are batched products of weights that are repeated, where the operand is a permuted view.
    "linear.default",
    "matmul.default",
    "conv_transpose3d.input",
    *torch_resize.CONVERTERS,
)
_LEFT_SHIFTS = ("__lshift__.Scalar", "__lshift__.Tensor", "bitwise_left_shift.Tensor")
_RIGHT_SHIFTS = ("__rshift__.Scalar", "__rshift__.Tensor", "bitwise_right_shift.Tensor")
# By name of the operator, as TVM's importer takes it.
CONVERTERS: dict[str, Callable[[Any, Any], relax.Expr]] = {
    "grid_sampler_2d.default": _grid_sample,
    "conv_transpose3d.input": _transpose_volumes,
    "div.Tensor_mode": _divide,
    "div.Scalar_mode": _divide,
    "elu.default": _elu,
    "histc.default": torch_experts.histogram,
    "index.Tensor": _index,
    "amax.default": functools.partial(_reduction, reduce=relax.op.max),
    "amin.default": functools.partial(_reduction, reduce=relax.op.min),
    "prod.dim_int": functools.partial(_reduction, reduce=relax.op.prod),
    **dict.fromkeys(_LEFT_SHIFTS, functools.partial(_shift, shift=relax.op.left_shift)),
    **dict.fromkeys(_RIGHT_SHIFTS, functools.partial(_shift, shift=relax.op.right_shift)),
    "linear.default": _linear,
    "max.dim": _extreme,
    "min.dim": _extreme,
    "pad.default": _pad,
    **dict.fromkeys(KEPT_OPERATORS[:3], _reflect),
    **torch_pooling.CONVERTERS,
    **torch_resize.CONVERTERS,
    **torch_scatter.CONVERTERS,
}
