"""Convolutions as products of matrices: im2row, im2col, MEC, kn2row, kn2col, 1x1 windows."""

from __future__ import annotations

from tvm import te, tirx

from pimflow.core.region import ConvGeometry
from pimflow.primitives import Primitive
from pimflow.primitives.families import output_shape, windows_shape
from pimflow.primitives.kernels.direct import Tensors
from pimflow.primitives.kernels.stages import (
    ZERO,
    inside,
    padded,
    placeholders,
    reduce_axes,
    result,
    slab,
    spread,
    sums,
)
from pimflow.primitives.layer import FP32_BYTES
from pimflow.primitives.marks import ADDED, SPREAD


def windows(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """im2row (HWC) and im2col (CHW): a product with the matrix whose rows or columns are windows."""
    x, filters = placeholders(primitive, layer)
    e = primitive.extents(layer)
    (sh, sw), (dh, dw), (top, left) = layer.stride, layer.dilation, layer.padding[:2]
    kernel_h, kernel_w = (layer.kh, layer.kw)
    c_extent, height = layer.c, layer.oh

    def in_hwc(n, h, w, k):
        """An element of the matrix of windows in HWC."""
        kh, kw, c = k // (kernel_w * c_extent), k // c_extent % kernel_w, k % c_extent
        return inside(layer, x, [n, 0, 0, c], 1, h * sh + kh * dh - top, w * sw + kw * dw - left)

    def in_map(n, m, k):
        return in_hwc(n, m // layer.ow, m % layer.ow, k)

    def in_chw(n, k, h, w):
        """An element of the matrix of windows in CHW."""
        c, kh, kw = k // (kernel_h * kernel_w), k // kernel_w % kernel_h, k % kernel_w
        return inside(layer, x, [n, c, 0, 0], 2, h * sh + kh * dh - top, w * sw + kw * dw - left)

    (k,) = reduce_axes(kernel_h * kernel_w * c_extent)
    row_bytes = FP32_BYTES * e.pixels * kernel_h * kernel_w * c_extent
    matrix = spread(
        primitive,
        layer,
        windows_shape(primitive, layer),
        in_chw if primitive.layout == "CHW" else in_map if primitive.target == "cuda" else in_hwc,
        "windows",
    )
    if primitive.target == "cuda":
        made = sums(primitive, layer, (layer.n, e.pixels, e.channels),
            lambda n, m, o: matrix[n, m, k] * filters[o // e.lanes, k, o % e.lanes], [k], (1, 2),
        )  # fmt: skip
        shape = output_shape(primitive, layer)
        return x, filters, te.compute(shape, lambda n, h, w, o: made[n, h * layer.ow + w, o], name="result")
    if primitive.layout == "CHW":
        made = sums(primitive, layer, (layer.n, e.channels, height, e.pixels),
            lambda n, o, h, w: matrix[n, k, h, w] * filters[o // e.places, k, o % e.places],
            [k], (1, 3), slab=slab(primitive, layer, 2, row_bytes),
        )  # fmt: skip
    else:
        made = sums(primitive, layer, (layer.n, height, e.pixels, e.channels),
            lambda n, h, w, o: matrix[n, h, w, k] * filters[o // e.lanes, k, o % e.lanes],
            [k], (2, 3), slab=slab(primitive, layer, 1, row_bytes),
        )  # fmt: skip
    return x, filters, result(primitive, layer, made)


def mec(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """MEC (Cho and Brand 2017): for each column of windows, the input rows that it reads are contiguous."""
    x, filters = placeholders(primitive, layer)
    e = primitive.extents(layer)
    (sh, sw), (dh, dw), (top, left) = layer.stride, layer.dilation, layer.padding[:2]
    width = layer.kw * layer.c

    def lowered(n, w, row, k):
        """An element of the matrix."""
        kw, c = k // layer.c, k % layer.c
        return inside(layer, x, [n, 0, 0, c], 1, row - top, w * sw + kw * dw - left)

    matrix = spread(primitive, layer, primitive.stages(layer)["lowered"], lowered, "lowered")
    kh, k = reduce_axes(layer.kh, width)

    def terms(n, h, w, o):
        return matrix[n, w, h * sh + kh * dh, k] * filters[o // e.lanes, kh * width + k, o % e.lanes]

    made = sums(primitive, layer, (layer.n, e.pixels, layer.ow, e.channels),
        terms, [kh, k], (1, 3),
        slab=slab(primitive, layer, 2, FP32_BYTES * int(matrix.shape[2]) * width),
    )  # fmt: skip
    return x, filters, result(primitive, layer, made)


def shifted(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """kn2col (HWC) and kn2row (CHW) (Anderson et al. 2017): a product for each position in the window.

    Products of the whole input are stored, and shifted when they are added. If the primitive accumulates, the
    input is shifted instead, so that only one product exists at a time.
    """
    x, filters = placeholders(primitive, layer)
    e, chw = primitive.extents(layer), primitive.layout == "CHW"
    at, positions, columns = 2 if chw else 1, layer.kh * layer.kw, layer.kw
    one_by_one = primitive.accumulating
    (sh, sw), (dh, dw) = layer.stride, layer.dilation
    if one_by_one:
        source = padded(primitive, layer, x, layer.oh, e.pixels)
    else:
        source = _widened(primitive, layer, x, at)
    rows = layer.oh if one_by_one else layer.h
    (c,) = reduce_axes(layer.c)

    def terms(k, n, *index):
        """A term of a product, by the indices of the product."""
        o, h, w = index if chw else (index[2], *index[:2])
        if one_by_one:
            h, w = h * sh + k // columns * dh, w * sw + k % columns * dw
        wide = e.places if chw else e.lanes
        return source[(n, c, h, w) if chw else (n, h, w, c)] * filters[k, o // wide, c, o % wide]

    inner = (e.channels, rows, e.pixels) if chw else (rows, e.pixels, e.channels)
    made = sums(
        primitive, layer, (positions, layer.n, *inner), terms, [c], (2, 4) if chw else (3, 4),
        name="products", slab=slab(primitive, layer, 3 if chw else 2, FP32_BYTES * e.pixels * sw * layer.c),
    )  # fmt: skip
    (k,) = reduce_axes(positions)

    def moved(*index: tirx.Var) -> tirx.Expr:
        """An output: the sum of shifted products."""
        if one_by_one:
            return te.sum(made(k, *index), axis=k)
        height = index[at] + k // columns * dh - layer.padding[0]
        width = index[at + 1] + k % columns * dw - layer.padding[1]
        return te.sum(inside(layer, made, [k, *index], at + 1, height, width), axis=k)

    marks = {ADDED: int(one_by_one), SPREAD: 1 if chw else layer.oc}
    return x, filters, te.compute(output_shape(primitive, layer), moved, name="added", attrs=marks)


def _widened(primitive: Primitive, layer: ConvGeometry, x: te.Tensor, at: int) -> te.Tensor:
    """The input, with rows padded to whole register tiles."""
    if "row" not in primitive.stages(layer):
        return x

    def element(*index: tirx.Var) -> tirx.Expr:
        return inside(layer, x, [*index], at, index[at], index[at + 1])

    return spread(primitive, layer, primitive.stages(layer)["row"], element, "row")


def pointwise(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """A 1x1 convolution: one product over all pixels of the map."""
    x, filters = placeholders(primitive, layer)
    e = primitive.extents(layer)
    chw, pixels = primitive.layout == "CHW", layer.h * layer.w

    def flat(n, m, c):
        """An element of the input; `m` counts all pixels of the map."""
        row, column = m // layer.w, m % layer.w
        return x[n, c, row, column] if chw else x[n, row, column, c]

    read = flat
    if "pixels" in primitive.stages(layer):
        shape = primitive.stages(layer)["pixels"]

        def element(n, i, j):
            """A pixel, zero beyond the map."""
            m, c = (j, i) if chw else (i, j)
            return tirx.if_then_else(m < pixels, flat(n, m, c), ZERO)

        filled = spread(primitive, layer, shape, element, "pixels")

        def read(n, m, c):
            return filled[n, c, m] if chw else filled[n, m, c]

    (c,) = reduce_axes(layer.c)
    pixel_bytes = FP32_BYTES * layer.c
    if chw:
        made = sums(primitive, layer, (layer.n, e.channels, e.pixels),
            lambda n, o, m: read(n, m, c) * filters[o // e.places, c, o % e.places],
            [c], (1, 2), name="products",
            slab=slab(primitive, layer, 2, pixel_bytes * e.lanes),
        )  # fmt: skip
    else:
        made = sums(primitive, layer, (layer.n, e.pixels, e.channels),
            lambda n, m, o: read(n, m, c) * filters[o // e.lanes, c, o % e.lanes],
            [c], (1, 2), name="products",
            slab=slab(primitive, layer, 1, pixel_bytes * e.places),
        )  # fmt: skip

    def back(n, *index):
        """An output, from the sums."""
        o, h, w = index if chw else (index[2], *index[:2])
        m = h * layer.w + w
        return made[n, o, m] if chw else made[n, m, o]

    return x, filters, te.compute(output_shape(primitive, layer), back, name="result")
