"""Families of convolution primitives: applicability, filters and workspaces, by formula.

Shapes are in elements, fp32. *Filters* are what a kernel reads, transformed when the network is compiled;
`filters.py` transforms them. Stages are named as the kernels in `pimflow.primitive_kernels` name theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pimflow.primitives.layer import ConvLayer

if TYPE_CHECKING:
    from pimflow.primitives.primitive import Primitive

BLOCK = 16  # channels side by side in CHWc16
VECTOR = 8  # lanes come in multiples of this
Shape = tuple[int, ...]
Stages = dict[str, Shape]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the primitives of a family have in common.

    Attributes
    ----------
    applies, filter_shape, stages : callable
        Of a primitive and a layer; see `Primitive`.
    pixels : callable
        Extent of the axis whose places (in CHW, lanes) make register tiles.
    """

    applies: Callable[[Primitive, ConvLayer], bool]
    filter_shape: Callable[[Primitive, ConvLayer], Shape]
    stages: Callable[[Primitive, ConvLayer], Stages]
    pixels: Callable[[Primitive, ConvLayer], int] = lambda _, layer: layer.out_width


def padded_extents(layer: ConvLayer, rows: int, columns: int) -> tuple[int, int] | None:
    """Height and width of the input that `rows` by `columns` outputs read, zeros included; None if it has them.

    More outputs than there are belong to register tiles that are not full.
    """
    height = (rows - 1) * layer.stride[0] + layer.reach[0]
    width = (columns - 1) * layer.stride[1] + layer.reach[1]
    if any(layer.padding) or height > layer.height or width > layer.width:
        return height, width
    return None


def input_shape(primitive: Primitive, layer: ConvLayer, height: int = 0, width: int = 0) -> Shape:
    """Of the input in the primitive's layout, or of one of `height` by `width`."""
    return tensor_shape(
        primitive.layout, layer.batch, layer.in_channels, height or layer.height, width or layer.width
    )


def output_shape(primitive: Primitive, layer: ConvLayer) -> Shape:
    return tensor_shape(primitive.layout, layer.batch, layer.out_channels, layer.out_height, layer.out_width)


def tensor_shape(layout: str, batch: int, channels: int, height: int, width: int) -> Shape:
    """In HWC (batch, height, width, channels), in CHW (batch, channels, height, width), in CHWc16 (batch,
    channels / 16, height, width, 16)."""
    if layout == "HWC":
        return (batch, height, width, channels)
    if layout == "CHW":
        return (batch, channels, height, width)
    return (batch, channels // BLOCK, height, width, BLOCK)


def _padded(primitive: Primitive, layer: ConvLayer, rows: int, columns: int) -> Stages:
    extents = padded_extents(layer, rows, columns)
    return {"padded": input_shape(primitive, layer, *extents)} if extents else {}


def _dense(_: Primitive, layer: ConvLayer) -> bool:
    return layer.groups == 1


def _panels(primitive: Primitive, layer: ConvLayer, *inner: int) -> Shape:
    """Filters whose output channels are cut into panels as wide as a register tile."""
    extents = primitive.extents(layer)
    wide = extents.places if primitive.layout == "CHW" else extents.lanes
    return (extents.channels // wide, *inner, wide)


# Plain loops.


def _plain_filters(primitive: Primitive, layer: ConvLayer) -> Shape:
    out_channels, in_channels, height, width = layer.filter_shape
    if primitive.layout == "CHW":
        return layer.filter_shape
    return (height, width, in_channels, out_channels)


def _plain_stages(primitive: Primitive, layer: ConvLayer) -> Stages:
    return _padded(primitive, layer, layer.out_height, layer.out_width)


# Register tiles over the input as it lies.


def _direct_filters(primitive: Primitive, layer: ConvLayer) -> Shape:
    if primitive.layout == "CHW":
        return _panels(primitive, layer, layer.in_channels, *layer.kernel)
    return _panels(primitive, layer, *layer.kernel, layer.in_channels)


def _direct_stages(primitive: Primitive, layer: ConvLayer) -> Stages:
    return _padded(primitive, layer, layer.out_height, primitive.extents(layer).pixels)


# im2row and im2col: one product with the matrix of all windows.


def _window(layer: ConvLayer) -> int:
    return layer.kernel[0] * layer.kernel[1] * layer.in_channels


def _windows_filters(primitive: Primitive, layer: ConvLayer) -> Shape:
    return _panels(primitive, layer, _window(layer))


def _windows_stages(primitive: Primitive, layer: ConvLayer) -> Stages:
    pixels = primitive.extents(layer).pixels
    if primitive.layout == "CHW":
        return {"windows": (layer.batch, _window(layer), layer.out_height, pixels)}
    return {"windows": (layer.batch, layer.out_height, pixels, _window(layer))}


# MEC: the rows of windows of one column lie one behind the other, so that a window is one piece.


def _mec_rows(primitive: Primitive, layer: ConvLayer) -> int:
    return (primitive.extents(layer).pixels - 1) * layer.stride[0] + layer.reach[0]


def _mec_stages(primitive: Primitive, layer: ConvLayer) -> Stages:
    rows, width = _mec_rows(primitive, layer), layer.kernel[1] * layer.in_channels
    return {"lowered": (layer.batch, layer.out_width, rows, width)}


# kn2row and kn2col: a product of the whole input for each window position, moved and added.


def _shifted(primitive: Primitive, layer: ConvLayer) -> bool:
    return layer.groups == 1 and layer.kernel != (1, 1) and (primitive.accumulating or layer.unit_stride)


def _shifted_filters(primitive: Primitive, layer: ConvLayer) -> Shape:
    return (layer.kernel[0] * layer.kernel[1], *_panels(primitive, layer, layer.in_channels))


def _shifted_pixels(primitive: Primitive, layer: ConvLayer) -> int:
    return layer.out_width if primitive.accumulating else layer.width


def _shifted_stages(primitive: Primitive, layer: ConvLayer) -> Stages:
    extents, filled = primitive.extents(layer), {}
    channels, pixels = extents.channels, extents.pixels
    if primitive.accumulating:  # what is moved is the input
        filled, outer = _padded(primitive, layer, layer.out_height, pixels), (1, layer.batch)
        rows = layer.out_height
    else:
        if pixels > layer.width:
            filled = {"row": input_shape(primitive, layer, width=pixels)}
        outer, rows = (layer.kernel[0] * layer.kernel[1], layer.batch), layer.height
    inner = (channels, rows, pixels) if primitive.layout == "CHW" else (rows, pixels, channels)
    return filled | {"products": (*outer, *inner)}


# Winograd and Fourier: products between transformed tiles.


def tiles(primitive: Primitive, layer: ConvLayer) -> tuple[int, int]:
    """Tiles along height and width; rows, where only rows are tiled."""
    outputs = outputs_of_tile(primitive, layer)
    rows = layer.out_height if primitive.directions == 1 else -(-layer.out_height // outputs[0])
    return rows, -(-layer.out_width // outputs[1])


def outputs_of_tile(primitive: Primitive, layer: ConvLayer) -> tuple[int, int]:
    """Outputs of a tile along height and width."""
    if primitive.family == "fft":
        height, width = (primitive.tile - k + 1 for k in layer.kernel)
        return height, width
    return (1 if primitive.directions == 1 else primitive.tile), primitive.tile


def points(primitive: Primitive, layer: ConvLayer) -> int:
    """Inputs of a Winograd tile in each direction that it tiles."""
    return primitive.tile + layer.kernel[1] - 1


def _tiled(primitive: Primitive, layer: ConvLayer) -> bool:
    plain = layer.groups == 1 and layer.unit_stride and layer.unit_dilation
    if primitive.family == "fft":
        return plain and 1 < max(layer.kernel) <= primitive.tile // 2 + 1
    square = primitive.directions == 1 or layer.kernel == (3, 3)
    return plain and square and layer.kernel[1] == 3


def _tiles_pixels(primitive: Primitive, layer: ConvLayer) -> int:
    rows, columns = tiles(primitive, layer)
    return columns if primitive.directions == 1 else layer.batch * rows * columns


def _winograd_filters(primitive: Primitive, layer: ConvLayer) -> Shape:
    a = points(primitive, layer)
    if primitive.directions == 1:
        return (a, *_panels(primitive, layer, layer.kernel[0], layer.in_channels))
    return (a, a, *_panels(primitive, layer, layer.in_channels))


def _winograd_stages(primitive: Primitive, layer: ConvLayer) -> Stages:
    extents, a = primitive.extents(layer), points(primitive, layer)
    if primitive.directions == 1:
        rows = layer.out_height + layer.reach[0] - 1
        return {
            "transformed": _matrix(primitive, (a, layer.batch, rows), extents.pixels, layer.in_channels),
            "products": _matrix(
                primitive, (a, layer.batch, layer.out_height), extents.pixels, extents.channels
            ),
        }
    return {
        "transformed": _matrix(primitive, (a, a), extents.pixels, layer.in_channels),
        "products": _matrix(primitive, (a, a), extents.pixels, extents.channels),
    }


def _matrix(primitive: Primitive, outer: Shape, pixels: int, channels: int) -> Shape:
    return (*outer, channels, pixels) if primitive.layout == "CHW" else (*outer, pixels, channels)


def _fourier_filters(primitive: Primitive, layer: ConvLayer) -> Shape:
    return (2, primitive.tile, primitive.tile // 2 + 1, *_panels(primitive, layer, layer.in_channels))


def _fourier_stages(primitive: Primitive, layer: ConvLayer) -> Stages:
    extents, outer = primitive.extents(layer), (primitive.tile, primitive.tile // 2 + 1)
    inputs = _matrix(primitive, outer, extents.pixels, layer.in_channels)
    outputs = _matrix(primitive, outer, extents.pixels, extents.channels)
    return {"real": inputs, "imaginary": inputs, "products_real": outputs, "products_imaginary": outputs}


# 1x1 windows: one product over all pixels of the map.


def _pointwise(_: Primitive, layer: ConvLayer) -> bool:
    return layer.pointwise


def _pointwise_stages(primitive: Primitive, layer: ConvLayer) -> Stages:
    extents, pixels = primitive.extents(layer), layer.height * layer.width
    rows = {"pixels": _matrix(primitive, (layer.batch,), extents.pixels, layer.in_channels)}
    sums = {"products": _matrix(primitive, (layer.batch,), extents.pixels, extents.channels)}
    return (rows if extents.pixels > pixels else {}) | sums


# Depthwise.


def _depthwise_filters(primitive: Primitive, layer: ConvLayer) -> Shape:
    if primitive.layout == "CHW":
        return (layer.out_channels, *layer.kernel)
    lanes = primitive.extents(layer).lanes
    return (layer.out_channels // lanes, *layer.kernel, lanes)


def _depthwise(primitive: Primitive, layer: ConvLayer) -> bool:
    return layer.depthwise and (primitive.layout == "CHW" or layer.out_channels % VECTOR == 0)


FAMILIES = {
    "loops": Family(applies=lambda _, __: True, filter_shape=_plain_filters, stages=_plain_stages),
    "direct": Family(applies=_dense, filter_shape=_direct_filters, stages=_direct_stages),
    "windows": Family(applies=_dense, filter_shape=_windows_filters, stages=_windows_stages),
    "mec": Family(
        applies=_dense,
        filter_shape=_windows_filters,
        stages=_mec_stages,
        pixels=lambda _, layer: layer.out_height,
    ),
    "shifted": Family(
        applies=_shifted,
        filter_shape=_shifted_filters,
        stages=_shifted_stages,
        pixels=_shifted_pixels,
    ),
    "winograd": Family(
        applies=_tiled, filter_shape=_winograd_filters, stages=_winograd_stages, pixels=_tiles_pixels
    ),
    "fft": Family(
        applies=_tiled, filter_shape=_fourier_filters, stages=_fourier_stages, pixels=_tiles_pixels
    ),
    "pointwise": Family(
        applies=_pointwise,
        filter_shape=_windows_filters,
        stages=_pointwise_stages,
        pixels=lambda _, layer: layer.height * layer.width,
    ),
    "depthwise": Family(applies=_depthwise, filter_shape=_depthwise_filters, stages=_direct_stages),
}
