"""Operators of PyTorch that TVM's importer gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm import relax, topi

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
    if not isinstance(divisor, relax.Expr):
        divisor = relax.const(divisor, str(x.ty.dtype))
    emit, mode = importer.block_builder.emit, node.kwargs.get("rounding_mode")
    if mode == "floor":
        return emit(relax.op.floor_divide(x, divisor))
    quotient = emit(relax.op.divide(x, divisor))
    return emit(relax.op.trunc(quotient)) if mode == "trunc" else quotient


def _reflect(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Var:
    """Convert ``reflection_pad``, whose widths begin at the last axis, as the importer of ONNX does."""
    x, widths = importer.retrieve_args(node)[:2]
    rest = [0] * (len(x.ty.shape) - len(widths) // 2)
    before, after = ([*rest, *reversed(widths[side::2])] for side in (0, 1))
    return importer.block_builder.emit_te(topi.nn.mirror_pad, x, before, after, "REFLECT")


# Operators that would be decomposed into several, though they have a converter.
KEPT_OPERATORS = tuple(f"reflection_pad{axes}d.default" for axes in (1, 2, 3))
# By name of the operator, as TVM's importer takes it.
CONVERTERS: dict[str, Callable[[Any, Any], relax.Var]] = {
    "grid_sampler_2d.default": _grid_sample,
    "div.Tensor_mode": _divide,
    "div.Scalar_mode": _divide,
    **dict.fromkeys(KEPT_OPERATORS, _reflect),
}
