"""Convolutions that read the input without a transform: plain loops, register tiles, depthwise."""

from __future__ import annotations

from tvm import te

from pimflow.core.region import ConvGeometry
from pimflow.primitives import Primitive
from pimflow.primitives.families import output_shape
from pimflow.primitives.kernels.stages import inside, padded, placeholders, reduce_axes, result, slab, sums
from pimflow.primitives.layer import BLOCK, FP32_BYTES

Tensors = tuple[te.Tensor, te.Tensor, te.Tensor]


def loops(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """Plain loops: one output after the other."""
    x, filters = placeholders(primitive, layer)
    source = padded(primitive, layer, x, layer.oh, layer.ow)
    (sh, sw), (dh, dw) = layer.stride, layer.dilation
    channels, outputs = layer.c // layer.groups, layer.oc // layer.groups
    kh, kw, c = reduce_axes(layer.kh, layer.kw, channels)

    def in_hwc(n, h, w, o):
        """An output in HWC."""
        value = source[n, h * sh + kh * dh, w * sw + kw * dw, o // outputs * channels + c]
        return te.sum(value * filters[kh, kw, c, o], axis=[kh, kw, c])

    def in_chw(n, o, h, w):
        """An output in CHW."""
        value = source[n, o // outputs * channels + c, h * sh + kh * dh, w * sw + kw * dw]
        return te.sum(value * filters[o, c, kh, kw], axis=[c, kh, kw])

    terms = in_chw if primitive.layout == "CHW" else in_hwc
    y = te.compute(output_shape(primitive, layer), terms, name="sums", attrs={"pimflow.tile": []})
    return x, filters, y


def direct(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """Register tiles over the input, without a transform."""
    x, filters = placeholders(primitive, layer)
    e = primitive.extents(layer)
    source = padded(primitive, layer, x, layer.oh, e.pixels)
    (sh, sw), (dh, dw) = layer.stride, layer.dilation
    kh, kw = reduce_axes(layer.kh, layer.kw)
    c = te.reduce_axis((0, layer.c), "c")
    n, height = layer.n, layer.oh
    row_bytes = FP32_BYTES * e.pixels * sw * sh * layer.c

    def in_hwc(n, h, w, o):
        """The term of an output in HWC."""
        value = source[n, h * sh + kh * dh, w * sw + kw * dw, c]
        return value * filters[o // e.lanes, kh, kw, c, o % e.lanes]

    def in_chw(n, o, h, w):
        """The term of an output in CHW."""
        value = source[n, c, h * sh + kh * dh, w * sw + kw * dw]
        return value * filters[o // e.places, c, kh, kw, o % e.places]

    def in_blocks(n, b, h, w, o):
        """The term of an output in CHWc16."""
        value = source[n, c // BLOCK, h * sh + kh * dh, w * sw + kw * dw, c % BLOCK]
        return value * filters[b, kh, kw, c, o]

    if primitive.layout == "HWC":
        made = sums(
            primitive,
            layer,
            (n, height, e.pixels, e.channels),
            in_hwc,
            [kh, kw, c],
            (2, 3),
            slab=slab(primitive, layer, 1, row_bytes),
        )
    elif primitive.layout == "CHW":
        made = sums(
            primitive,
            layer,
            (n, e.channels, height, e.pixels),
            in_chw,
            [c, kh, kw],
            (1, 3),
            slab=slab(primitive, layer, 2, row_bytes),
        )
    else:
        shape = (n, e.channels // BLOCK, height, e.pixels, BLOCK)
        made = sums(
            primitive, layer, shape, in_blocks, [kh, kw, c], (3, 4), slab=slab(primitive, layer, 2, row_bytes)
        )
    return x, filters, result(primitive, layer, made)


def depthwise(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """A depthwise convolution: each channel by itself.

    In HWC, a whole vector is either inside the map or outside it. A branch for each vector is predicted well.
    It takes less time than a padded copy of the map, of which every element is read only a few times.
    """
    x, filters = placeholders(primitive, layer)
    e = primitive.extents(layer)
    (sh, sw), (dh, dw) = layer.stride, layer.dilation
    top, left = layer.padding[:2]
    kh, kw = reduce_axes(layer.kh, layer.kw)

    def in_hwc(n, h, w, o):
        """The term of an output in HWC."""
        row, column = h * sh + kh * dh - top, w * sw + kw * dw - left
        value = inside(layer, x, [n, row, column, o], 1, row, column)
        return value * filters[o // e.lanes, kh, kw, o % e.lanes]

    def in_chw(n, o, h, w):
        return source[n, o, h * sh + kh * dh, w * sw + kw * dw] * filters[o, kh, kw]

    if primitive.layout == "CHW":
        source = padded(primitive, layer, x, layer.oh, e.pixels)
        shape, terms, axes = (layer.n, e.channels, layer.oh, e.pixels), in_chw, (2, 3)
    else:
        shape, terms, axes = (layer.n, layer.oh, e.pixels, e.channels), in_hwc, (2, 3)
    made = sums(primitive, layer, shape, terms, [kh, kw], axes, slab=(1, 1))
    return x, filters, result(primitive, layer, made)
