"""Families of convolution primitives: applicability, filters and workspaces, by formula.

Shapes are in elements, fp32. *Filters* are those that a kernel reads: `filters.py` transforms them when the
network is compiled. Stages have the same names as in the kernels of `pimflow.primitives.kernels`.
"""

from __future__ import annotations

from pimflow.core.kernel import ConvGeometry
from pimflow.primitives.layer import BLOCK, VECTOR, Shape, filter_shape, is_depthwise, reach
from pimflow.primitives.primitive import Family, Primitive, Stages


def required_input_extents(layer: ConvGeometry, rows: int, columns: int) -> tuple[int, int] | None:
    """Height and width of the input that `rows` by `columns` outputs read; None if no padding is needed.

    There may be more outputs than the layer has, in register tiles that are not full.
    """
    height = (rows - 1) * layer.stride[0] + reach(layer)[0]
    width = (columns - 1) * layer.stride[1] + reach(layer)[1]
    if any(layer.padding) or height > layer.h or width > layer.w:
        return height, width
    return None


def input_shape(primitive: Primitive, layer: ConvGeometry, height: int = 0, width: int = 0) -> Shape:
    """Shape of the input in the primitive's layout; `height` and `width` replace the layer's."""
    return tensor_shape(primitive.layout, layer.n, layer.c, height or layer.h, width or layer.w)


def output_shape(primitive: Primitive, layer: ConvGeometry) -> Shape:
    """Shape of the output in the primitive's layout."""
    return tensor_shape(primitive.layout, layer.n, layer.oc, layer.oh, layer.ow)


def tensor_shape(layout: str, batch: int, channels: int, height: int, width: int) -> Shape:
    """Shape of a tensor in a layout.

    HWC: (batch, height, width, channels); CHW: (batch, channels, height, width); CHWc16: (batch, channels /
    16, height, width, 16).
    """
    if layout == "HWC":
        return (batch, height, width, channels)
    if layout == "CHW":
        return (batch, channels, height, width)
    return (batch, channels // BLOCK, height, width, BLOCK)


def _padding_stage(primitive: Primitive, layer: ConvGeometry, rows: int, columns: int) -> Stages:
    extents = required_input_extents(layer, rows, columns)
    if not extents or primitive.target == "cuda":  # CUDA kernels pad where they read
        return {}
    return {"padded": input_shape(primitive, layer, *extents)}


def _is_dense(_: Primitive, layer: ConvGeometry) -> bool:
    return layer.groups == 1


def _panels(primitive: Primitive, layer: ConvGeometry, *inner: int) -> Shape:
    """Shape of filters whose output channels are cut into panels as wide as a register tile."""
    extents = primitive.extents(layer)
    wide = extents.places if primitive.layout == "CHW" else extents.lanes
    return (extents.channels // wide, *inner, wide)


# Plain loops.


def _plain_filters(primitive: Primitive, layer: ConvGeometry) -> Shape:
    out_channels, in_channels, height, width = filter_shape(layer)
    if primitive.layout == "CHW":
        return filter_shape(layer)
    return (height, width, in_channels, out_channels)


def _plain_stages(primitive: Primitive, layer: ConvGeometry) -> Stages:
    return _padding_stage(primitive, layer, layer.oh, layer.ow)


# Register tiles over the input, without a transform.


def _direct_filters(primitive: Primitive, layer: ConvGeometry) -> Shape:
    if primitive.layout == "CHW":
        return _panels(primitive, layer, layer.c, layer.kh, layer.kw)
    return _panels(primitive, layer, layer.kh, layer.kw, layer.c)


def _direct_stages(primitive: Primitive, layer: ConvGeometry) -> Stages:
    return _padding_stage(primitive, layer, layer.oh, primitive.extents(layer).pixels)


# im2row and im2col: one product with the matrix of all windows.


def _window_elements(layer: ConvGeometry) -> int:
    return layer.kh * layer.kw * layer.c


def _windows_filters(primitive: Primitive, layer: ConvGeometry) -> Shape:
    return _panels(primitive, layer, _window_elements(layer))


def windows_shape(primitive: Primitive, layer: ConvGeometry) -> Shape:
    """Shape of the matrix of all windows; on a GPU the pixels of the whole map are one axis."""
    pixels = primitive.extents(layer).pixels
    if primitive.target == "cuda":
        return (layer.n, pixels, _window_elements(layer))
    if primitive.layout == "CHW":
        return (layer.n, _window_elements(layer), layer.oh, pixels)
    return (layer.n, layer.oh, pixels, _window_elements(layer))


def _windows_pixels(primitive: Primitive, layer: ConvGeometry) -> int:
    return layer.oh * layer.ow if primitive.target == "cuda" else layer.ow


def _windows_stages(primitive: Primitive, layer: ConvGeometry) -> Stages:
    return {} if primitive.implicit else {"windows": windows_shape(primitive, layer)}


# MEC: the rows of all windows in one column of the map are contiguous, so that each window is contiguous.


def _mec_stages(primitive: Primitive, layer: ConvGeometry) -> Stages:
    rows = (primitive.extents(layer).pixels - 1) * layer.stride[0] + reach(layer)[0]
    width = layer.kw * layer.c
    return {"lowered": (layer.n, layer.ow, rows, width)}


# kn2row and kn2col: for each window position a product with the whole input; shifted products are added.


def _kn2_applies(primitive: Primitive, layer: ConvGeometry) -> bool:
    return (
        layer.groups == 1
        and (layer.kh, layer.kw) != (1, 1)
        and (primitive.accumulating or layer.stride == (1, 1))
    )


def _kn2_filters(primitive: Primitive, layer: ConvGeometry) -> Shape:
    return (layer.kh * layer.kw, *_panels(primitive, layer, layer.c))


def _kn2_pixels(primitive: Primitive, layer: ConvGeometry) -> int:
    return layer.ow if primitive.accumulating else layer.w


def _kn2_stages(primitive: Primitive, layer: ConvGeometry) -> Stages:
    extents, input_stages = primitive.extents(layer), {}
    channels, pixels = extents.channels, extents.pixels
    if primitive.accumulating:  # the input is shifted, not the products
        input_stages, outer = _padding_stage(primitive, layer, layer.oh, pixels), (1, layer.n)
        rows = layer.oh
    else:
        if pixels > layer.w:
            input_stages = {"row": input_shape(primitive, layer, width=pixels)}
        outer, rows = (layer.kh * layer.kw, layer.n), layer.h
    inner = (channels, rows, pixels) if primitive.layout == "CHW" else (rows, pixels, channels)
    return input_stages | {"products": (*outer, *inner)}


# Winograd and Fourier: products between transformed tiles.


def tile_counts(primitive: Primitive, layer: ConvGeometry) -> tuple[int, int]:
    """Number of tiles along height and width; along height that of rows, if only rows are tiled."""
    outputs = tile_outputs(primitive, layer)
    rows = layer.oh if primitive.directions == 1 else -(-layer.oh // outputs[0])
    return rows, -(-layer.ow // outputs[1])


def tile_outputs(primitive: Primitive, layer: ConvGeometry) -> tuple[int, int]:
    """Outputs of a tile along height and width."""
    if primitive.family == "fft":
        height, width = (primitive.tile - k + 1 for k in (layer.kh, layer.kw))
        return height, width
    return (1 if primitive.directions == 1 else primitive.tile), primitive.tile


def tile_points(primitive: Primitive, layer: ConvGeometry) -> int:
    """Inputs of a Winograd tile along each tiled axis."""
    return primitive.tile + layer.kw - 1


def _tiles_apply(primitive: Primitive, layer: ConvGeometry) -> bool:
    is_plain = layer.groups == 1 and layer.stride == (1, 1) and layer.dilation == (1, 1)
    if primitive.family == "fft":
        return is_plain and 1 < max((layer.kh, layer.kw)) <= primitive.tile // 2 + 1
    is_square = primitive.directions == 1 or (layer.kh, layer.kw) == (3, 3)
    return is_plain and is_square and layer.kw == 3


def _tiles_pixels(primitive: Primitive, layer: ConvGeometry) -> int:
    rows, columns = tile_counts(primitive, layer)
    return columns if primitive.directions == 1 else layer.n * rows * columns


def _winograd_filters(primitive: Primitive, layer: ConvGeometry) -> Shape:
    a = tile_points(primitive, layer)
    if primitive.directions == 1:
        return (a, *_panels(primitive, layer, layer.kh, layer.c))
    return (a, a, *_panels(primitive, layer, layer.c))


def _winograd_stages(primitive: Primitive, layer: ConvGeometry) -> Stages:
    extents, a = primitive.extents(layer), tile_points(primitive, layer)
    if primitive.directions == 1:
        rows = layer.oh + reach(layer)[0] - 1
        return {
            "transformed": _matrix(primitive, (a, layer.n, rows), extents.pixels, layer.c),
            "products": _matrix(primitive, (a, layer.n, layer.oh), extents.pixels, extents.channels),
        }
    return {
        "transformed": _matrix(primitive, (a, a), extents.pixels, layer.c),
        "products": _matrix(primitive, (a, a), extents.pixels, extents.channels),
    }


def _matrix(primitive: Primitive, outer: Shape, pixels: int, channels: int) -> Shape:
    return (*outer, channels, pixels) if primitive.layout == "CHW" else (*outer, pixels, channels)


def _fourier_filters(primitive: Primitive, layer: ConvGeometry) -> Shape:
    return (2, primitive.tile, primitive.tile // 2 + 1, *_panels(primitive, layer, layer.c))


def _fourier_stages(primitive: Primitive, layer: ConvGeometry) -> Stages:
    extents, outer = primitive.extents(layer), (primitive.tile, primitive.tile // 2 + 1)
    inputs = _matrix(primitive, outer, extents.pixels, layer.c)
    outputs = _matrix(primitive, outer, extents.pixels, extents.channels)
    return {"real": inputs, "imaginary": inputs, "products_real": outputs, "products_imaginary": outputs}


# 1x1 windows: one product over all pixels of the map.


def _is_pointwise(_: Primitive, layer: ConvGeometry) -> bool:
    return layer.is_pointwise


def _pointwise_stages(primitive: Primitive, layer: ConvGeometry) -> Stages:
    extents = primitive.extents(layer)
    if primitive.target == "cuda" or extents.pixels == layer.h * layer.w:
        return {}
    return {"pixels": _matrix(primitive, (layer.n,), extents.pixels, layer.c)}


# Depthwise.


def _depthwise_filters(primitive: Primitive, layer: ConvGeometry) -> Shape:
    if primitive.layout == "CHW":
        return (layer.oc, layer.kh, layer.kw)
    lanes = primitive.extents(layer).lanes
    return (layer.oc // lanes, layer.kh, layer.kw, lanes)


def _depthwise_applies(primitive: Primitive, layer: ConvGeometry) -> bool:
    return is_depthwise(layer) and (primitive.layout == "CHW" or layer.oc % VECTOR == 0)


def _depthwise_stages(primitive: Primitive, layer: ConvGeometry) -> Stages:
    return _direct_stages(primitive, layer) if primitive.layout == "CHW" else {}


def _always(_: Primitive, __: ConvGeometry) -> bool:
    return True


def _no_stages(_: Primitive, __: ConvGeometry) -> Stages:
    return {}


def _output_rows(_: Primitive, layer: ConvGeometry) -> int:
    return layer.oh


def _map_pixels(_: Primitive, layer: ConvGeometry) -> int:
    return layer.h * layer.w


FAMILIES = {
    family.name: family
    for family in (
        Family(name="loops", applies=_always, filter_shape=_plain_filters, stages=_plain_stages),
        # The convolution as `ScheduleGpu` schedules it by its own rules.
        Family(name="operator", applies=_always, filter_shape=_plain_filters, stages=_no_stages),
        Family(name="direct", applies=_is_dense, filter_shape=_direct_filters, stages=_direct_stages),
        Family(
            name="windows",
            applies=_is_dense,
            filter_shape=_windows_filters,
            stages=_windows_stages,
            pixels=_windows_pixels,
        ),
        Family(
            name="mec",
            applies=_is_dense,
            filter_shape=_windows_filters,
            stages=_mec_stages,
            pixels=_output_rows,
        ),
        Family(
            name="shifted",
            applies=_kn2_applies,
            filter_shape=_kn2_filters,
            stages=_kn2_stages,
            pixels=_kn2_pixels,
        ),
        Family(
            name="winograd",
            applies=_tiles_apply,
            filter_shape=_winograd_filters,
            stages=_winograd_stages,
            pixels=_tiles_pixels,
        ),
        Family(
            name="fft",
            applies=_tiles_apply,
            filter_shape=_fourier_filters,
            stages=_fourier_stages,
            pixels=_tiles_pixels,
        ),
        Family(
            name="pointwise",
            applies=_is_pointwise,
            filter_shape=_windows_filters,
            stages=_pointwise_stages,
            pixels=_map_pixels,
        ),
        Family(
            name="depthwise",
            applies=_depthwise_applies,
            filter_shape=_depthwise_filters,
            stages=_depthwise_stages,
        ),
    )
}
