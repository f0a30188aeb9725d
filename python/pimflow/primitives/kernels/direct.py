"""Convolutions that read the input without a transform: plain loops, register tiles, depthwise."""

from __future__ import annotations

from collections.abc import Callable

from tvm import te, tirx

from pimflow.core.kernel import ConvGeometry
from pimflow.primitives import Primitive
from pimflow.primitives.families import output_shape
from pimflow.primitives.kernels.stages import Stages, reduce_axes
from pimflow.primitives.layer import BLOCK, FP32_BYTES

Tensors = tuple[te.Tensor, te.Tensor, te.Tensor]
Term = Callable[..., tirx.Expr]  # of an output, by its indices


def loops(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """Plain loops: one output after the other."""
    stages = Stages(primitive, layer)
    x, filters = stages.placeholders()
    source = stages.pad_input(x, layer.oh, layer.ow)
    (sh, sw), (dh, dw) = layer.stride, layer.dilation
    channels, outputs = layer.c // layer.groups, layer.oc // layer.groups
    kh, kw, c = reduce_axes(layer.kh, layer.kw, channels)

    def hwc_term(n: tirx.Expr, h: tirx.Expr, w: tirx.Expr, o: tirx.Expr) -> tirx.Expr:
        """An output in HWC."""
        value = source[n, h * sh + kh * dh, w * sw + kw * dw, o // outputs * channels + c]
        return te.sum(value * filters[kh, kw, c, o], axis=[kh, kw, c])

    def chw_term(n: tirx.Expr, o: tirx.Expr, h: tirx.Expr, w: tirx.Expr) -> tirx.Expr:
        """An output in CHW."""
        value = source[n, o // outputs * channels + c, h * sh + kh * dh, w * sw + kw * dw]
        return te.sum(value * filters[o, c, kh, kw], axis=[c, kh, kw])

    terms = chw_term if primitive.layout == "CHW" else hwc_term
    y = te.compute(output_shape(primitive, layer), terms, name="sums", attrs={"pimflow.tile": []})
    return x, filters, y


def direct(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """Register tiles over the input, without a transform."""
    stages = Stages(primitive, layer)
    x, filters = stages.placeholders()
    e = primitive.extents(layer)
    source = stages.pad_input(x, layer.oh, e.pixels)
    (sh, sw), (dh, dw) = layer.stride, layer.dilation
    kh, kw = reduce_axes(layer.kh, layer.kw)
    c = te.reduce_axis((0, layer.c), "c")
    n, height = layer.n, layer.oh
    row_bytes = FP32_BYTES * e.pixels * sw * sh * layer.c

    def hwc_term(n: tirx.Expr, h: tirx.Expr, w: tirx.Expr, o: tirx.Expr) -> tirx.Expr:
        """The term of an output in HWC."""
        value = source[n, h * sh + kh * dh, w * sw + kw * dw, c]
        return value * filters[o // e.lanes, kh, kw, c, o % e.lanes]

    def chw_term(n: tirx.Expr, o: tirx.Expr, h: tirx.Expr, w: tirx.Expr) -> tirx.Expr:
        """The term of an output in CHW."""
        value = source[n, c, h * sh + kh * dh, w * sw + kw * dw]
        return value * filters[o // e.places, c, kh, kw, o % e.places]

    def block_term(n: tirx.Expr, b: tirx.Expr, h: tirx.Expr, w: tirx.Expr, o: tirx.Expr) -> tirx.Expr:
        """The term of an output in CHWc16."""
        value = source[n, c // BLOCK, h * sh + kh * dh, w * sw + kw * dw, c % BLOCK]
        return value * filters[b, kh, kw, c, o]

    shape: tuple[int, ...]
    terms: Term
    slab_axis = 1 if primitive.layout == "HWC" else 2
    if primitive.layout == "HWC":
        shape, terms, over, axes = (n, height, e.pixels, e.channels), hwc_term, [kh, kw, c], (2, 3)
    elif primitive.layout == "CHW":
        shape, terms, over, axes = (n, e.channels, height, e.pixels), chw_term, [c, kh, kw], (1, 3)
    else:
        shape = (n, e.channels // BLOCK, height, e.pixels, BLOCK)
        terms, over, axes = block_term, [kh, kw, c], (3, 4)
    tile_sums = stages.sums(shape, terms, over, axes, slab=stages.slab(slab_axis, row_bytes))
    return x, filters, stages.result(tile_sums)


def depthwise(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """A depthwise convolution: each channel by itself.

    In HWC, a whole vector is either inside the map or outside it. A branch for each vector is predicted well.
    It takes less time than a padded copy of the map, of which every element is read only a few times.
    """
    stages = Stages(primitive, layer)
    x, filters = stages.placeholders()
    e = primitive.extents(layer)
    (sh, sw), (dh, dw) = layer.stride, layer.dilation
    pad_top, pad_left = layer.padding[:2]
    kh, kw = reduce_axes(layer.kh, layer.kw)

    def hwc_term(n: tirx.Expr, h: tirx.Expr, w: tirx.Expr, o: tirx.Expr) -> tirx.Expr:
        """The term of an output in HWC."""
        row, column = h * sh + kh * dh - pad_top, w * sw + kw * dw - pad_left
        value = stages.element_or_zero(x, [n, row, column, o], 1, row, column)
        return value * filters[o // e.lanes, kh, kw, o % e.lanes]

    def chw_term(n: tirx.Expr, o: tirx.Expr, h: tirx.Expr, w: tirx.Expr) -> tirx.Expr:
        return source[n, o, h * sh + kh * dh, w * sw + kw * dw] * filters[o, kh, kw]

    terms: Term
    if primitive.layout == "CHW":
        source = stages.pad_input(x, layer.oh, e.pixels)
        shape, terms = (layer.n, e.channels, layer.oh, e.pixels), chw_term
    else:
        shape, terms = (layer.n, layer.oh, e.pixels, e.channels), hwc_term
    tile_sums = stages.sums(shape, terms, [kh, kw], (2, 3), slab=(1, 1))
    return x, filters, stages.result(tile_sums)
