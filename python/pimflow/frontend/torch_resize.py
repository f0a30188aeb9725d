"""Interpolation of PyTorch: one kernel of TVM where that is right, else axis by axis."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from tvm import relax, tirx

from pimflow.frontend.onnx_resize import Resizing

if TYPE_CHECKING:
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

_NEAREST: dict[str, Any] = {"coordinate_transformation_mode": b"asymmetric", "nearest_mode": b"floor"}
_EXACT: dict[str, Any] = {"nearest_mode": b"round_prefer_ceil"}
_LINEAR, _CUBIC = {"mode": b"linear"}, {"mode": b"cubic"}
_MEAN = {"antialias": 1, "exclude_outside": 1}  # over what is inside
# By name of the operator, its attributes as those of a Resize of ONNX. It would else be decomposed.
_ATTRIBUTES = {
    **{f"upsample_nearest{rank}d.vec": _NEAREST for rank in (1, 2, 3)},
    **{f"_upsample_nearest_exact{rank}d.vec": _EXACT for rank in (1, 2, 3)},
    "upsample_linear1d.vec": _LINEAR,
    "upsample_bilinear2d.vec": _LINEAR,
    "upsample_trilinear3d.vec": _LINEAR,
    "upsample_bicubic2d.vec": _CUBIC,
    "_upsample_bilinear2d_aa.default": _LINEAR | _MEAN,
    "_upsample_bicubic2d_aa.default": _CUBIC | _MEAN | {"cubic_coeff_a": -0.5},
}
_METHODS = {b"nearest": "nearest_neighbor", b"linear": "linear", b"cubic": "cubic"}


def _interpolate(
    node: torch.fx.Node, importer: ExportedProgramImporter, attributes: dict[str, Any]
) -> relax.Var:
    """Convert an interpolation of maps; an open size of a batch stays open."""
    x, sizes, *rest = importer.retrieve_args(node)
    is_aligned = bool(rest and rest[0] is True)
    factors = (
        None if "antialias" in attributes else next((v for v in rest if isinstance(v, list | tuple)), None)
    )
    dims = [int(size) if isinstance(size, tirx.IntImm) else 0 for size in x.ty.shape]
    spatial = dims[2:]
    if not all(spatial):
        raise NotImplementedError(
            "interpolation of maps of open size is not supported; fix it when exporting"
        )
    if sizes is None:
        sizes = [math.floor(size * factor) for size, factor in zip(spatial, factors, strict=True)]
    if factors is None or is_aligned:  # corners lie on corners, whatever the factors are
        factors = [count / size for count, size in zip(sizes, spatial, strict=True)]
    if is_aligned:
        attributes = attributes | {"coordinate_transformation_mode": b"align_corners"}
    resizing = Resizing(
        dims=tuple(dims),
        counts=(*dims[:2], *map(int, sizes)),
        factors=(1.0, 1.0, *factors),
        has_sizes=is_aligned or all(count == size * f for count, size, f in zip(sizes, spatial, factors)),
        roi=None,
        attrs=attributes,
    )
    emit = importer.block_builder.emit
    if not resizing.is_like_importer or (is_aligned and len(spatial) == 1):  # a row has one corner
        return resizing.interpolate(x, emit)
    return _resize(x, resizing, emit)


def _resize(x: relax.Expr, resizing: Resizing, emit: Any) -> relax.Var:
    """Emit the kernel of TVM; a signal is a map of one row."""
    sizes, attributes = list(resizing.counts[2:]), resizing.attrs
    keywords = {
        "method": _METHODS[attributes.get("mode", b"nearest")],
        "coordinate_transformation_mode": attributes.get(
            "coordinate_transformation_mode", b"half_pixel"
        ).decode(),
        "rounding_method": attributes.get("nearest_mode", b"").decode(),
        "cubic_alpha": -0.75,
    }
    if len(sizes) == 3:
        return emit(relax.op.image.resize3d(x, relax.ShapeExpr(sizes), layout="NCDHW", **keywords))
    if len(sizes) == 2:
        return emit(relax.op.image.resize2d(x, relax.ShapeExpr(sizes), layout="NCHW", **keywords))
    row = emit(relax.op.expand_dims(x, 2))
    row = emit(relax.op.image.resize2d(row, relax.ShapeExpr([1, *sizes]), layout="NCHW", **keywords))
    return emit(relax.op.squeeze(row, [2]))


# By name of the operator, as TVM's importer takes it.
CONVERTERS = {
    name: functools.partial(_interpolate, attributes=attributes) for name, attributes in _ATTRIBUTES.items()
}
