"""Convolutions as products of matrices: im2row, im2col, MEC, kn2row, kn2col, 1x1 windows."""

from __future__ import annotations

from tvm import te, tirx

from pimflow.core.kernel import ConvGeometry
from pimflow.primitives import Primitive
from pimflow.primitives.families import output_shape, windows_shape
from pimflow.primitives.kernels.direct import Tensors, Term
from pimflow.primitives.kernels.stages import ZERO, Stages, reduce_axes
from pimflow.primitives.layer import FP32_BYTES
from pimflow.primitives.marks import ADDED, SPREAD


def windows(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """im2row (HWC) and im2col (CHW): a product with the matrix whose rows or columns are windows."""
    stages = Stages(primitive, layer)
    x, filters = stages.placeholders()
    e = primitive.extents(layer)
    (sh, sw), (dh, dw), (pad_top, pad_left) = layer.stride, layer.dilation, layer.padding[:2]
    kernel_h, kernel_w = (layer.kh, layer.kw)
    c_extent, height = layer.c, layer.oh

    def hwc_element(n: tirx.Expr, h: tirx.Expr, w: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
        """An element of the matrix of windows in HWC."""
        kh, kw, c = k // (kernel_w * c_extent), k // c_extent % kernel_w, k % c_extent
        row, column = h * sh + kh * dh - pad_top, w * sw + kw * dw - pad_left
        return stages.element_or_zero(x, [n, 0, 0, c], 1, row, column)

    def map_element(n: tirx.Expr, m: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
        return hwc_element(n, m // layer.ow, m % layer.ow, k)

    def chw_element(n: tirx.Expr, k: tirx.Expr, h: tirx.Expr, w: tirx.Expr) -> tirx.Expr:
        """An element of the matrix of windows in CHW."""
        c, kh, kw = k // (kernel_h * kernel_w), k // kernel_w % kernel_h, k % kernel_w
        row, column = h * sh + kh * dh - pad_top, w * sw + kw * dw - pad_left
        return stages.element_or_zero(x, [n, c, 0, 0], 2, row, column)

    (k,) = reduce_axes(kernel_h * kernel_w * c_extent)
    row_bytes = FP32_BYTES * e.pixels * kernel_h * kernel_w * c_extent
    element: Term = map_element if primitive.target == "cuda" else hwc_element
    element = chw_element if primitive.layout == "CHW" else element
    matrix = stages.spread(windows_shape(primitive, layer), element, "windows")
    if primitive.target == "cuda":
        tile_sums = stages.sums(
            (layer.n, e.pixels, e.channels),
            lambda n, m, o: matrix[n, m, k] * filters[o // e.lanes, k, o % e.lanes], [k], (1, 2),
        )  # fmt: skip
        shape = output_shape(primitive, layer)
        y = te.compute(shape, lambda n, h, w, o: tile_sums[n, h * layer.ow + w, o], name="result")
        return x, filters, y
    if primitive.layout == "CHW":
        tile_sums = stages.sums(
            (layer.n, e.channels, height, e.pixels),
            lambda n, o, h, w: matrix[n, k, h, w] * filters[o // e.places, k, o % e.places],
            [k], (1, 3), slab=stages.slab(2, row_bytes),
        )  # fmt: skip
    else:
        tile_sums = stages.sums(
            (layer.n, height, e.pixels, e.channels),
            lambda n, h, w, o: matrix[n, h, w, k] * filters[o // e.lanes, k, o % e.lanes],
            [k], (2, 3), slab=stages.slab(1, row_bytes),
        )  # fmt: skip
    return x, filters, stages.result(tile_sums)


def mec(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """MEC (Cho and Brand 2017): for each column of windows, the input rows that it reads are contiguous."""
    stages = Stages(primitive, layer)
    x, filters = stages.placeholders()
    e = primitive.extents(layer)
    (sh, sw), (dh, dw), (pad_top, pad_left) = layer.stride, layer.dilation, layer.padding[:2]
    width = layer.kw * layer.c

    def matrix_element(n: tirx.Expr, w: tirx.Expr, row: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
        """An element of the matrix."""
        kw, c = k // layer.c, k % layer.c
        return stages.element_or_zero(x, [n, 0, 0, c], 1, row - pad_top, w * sw + kw * dw - pad_left)

    matrix = stages.spread(primitive.stages(layer)["lowered"], matrix_element, "lowered")
    kh, k = reduce_axes(layer.kh, width)

    def terms(n: tirx.Expr, h: tirx.Expr, w: tirx.Expr, o: tirx.Expr) -> tirx.Expr:
        return matrix[n, w, h * sh + kh * dh, k] * filters[o // e.lanes, kh * width + k, o % e.lanes]

    tile_sums = stages.sums((layer.n, e.pixels, layer.ow, e.channels),
        terms, [kh, k], (1, 3),
        slab=stages.slab(2, FP32_BYTES * int(matrix.shape[2]) * width),
    )  # fmt: skip
    return x, filters, stages.result(tile_sums)


def kn2(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """kn2col (HWC) and kn2row (CHW) (Anderson et al. 2017): a product for each position in the window.

    Products of the whole input are stored, and shifted when they are added. If the primitive accumulates, the
    input is shifted instead, so that only one product exists at a time.
    """
    stages = Stages(primitive, layer)
    x, filters = stages.placeholders()
    e, chw = primitive.extents(layer), primitive.layout == "CHW"
    row_axis, positions, columns = 2 if chw else 1, layer.kh * layer.kw, layer.kw
    accumulating = primitive.accumulating
    (sh, sw), (dh, dw) = layer.stride, layer.dilation
    if accumulating:
        source = stages.pad_input(x, layer.oh, e.pixels)
    else:
        source = _pad_rows(stages, x, row_axis)
    rows = layer.oh if accumulating else layer.h
    (c,) = reduce_axes(layer.c)

    def terms(k: tirx.Expr, n: tirx.Expr, *index: tirx.Expr) -> tirx.Expr:
        """A term of a product, by the indices of the product."""
        o, h, w = index if chw else (index[2], *index[:2])
        if accumulating:
            h, w = h * sh + k // columns * dh, w * sw + k % columns * dw
        wide = e.places if chw else e.lanes
        return source[(n, c, h, w) if chw else (n, h, w, c)] * filters[k, o // wide, c, o % wide]

    inner = (e.channels, rows, e.pixels) if chw else (rows, e.pixels, e.channels)
    position_products = stages.sums((positions, layer.n, *inner), terms, [c], (2, 4) if chw else (3, 4),
        name="products", slab=stages.slab(3 if chw else 2, FP32_BYTES * e.pixels * sw * layer.c),
    )  # fmt: skip
    (k,) = reduce_axes(positions)

    def output_term(*index: tirx.Var) -> tirx.Expr:
        """An output: the sum of shifted products."""
        if accumulating:
            return te.sum(position_products(k, *index), axis=k)
        height = index[row_axis] + k // columns * dh - layer.padding[0]
        width = index[row_axis + 1] + k % columns * dw - layer.padding[1]
        return te.sum(
            stages.element_or_zero(position_products, [k, *index], row_axis + 1, height, width), axis=k
        )

    marks = {ADDED: int(accumulating), SPREAD: 1 if chw else layer.oc}
    return x, filters, te.compute(output_shape(primitive, layer), output_term, name="added", attrs=marks)


def _pad_rows(stages: Stages, x: te.Tensor, row_axis: int) -> te.Tensor:
    """The input, with rows padded to whole register tiles."""
    shapes = stages.primitive.stages(stages.layer)
    if "row" not in shapes:
        return x

    def element(*index: tirx.Var) -> tirx.Expr:
        return stages.element_or_zero(x, [*index], row_axis, index[row_axis], index[row_axis + 1])

    return stages.spread(shapes["row"], element, "row")


def pointwise(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """A 1x1 convolution: one product over all pixels of the map."""
    stages = Stages(primitive, layer)
    x, filters = stages.placeholders()
    e = primitive.extents(layer)
    chw, pixels = primitive.layout == "CHW", layer.h * layer.w

    def input_element(n: tirx.Expr, m: tirx.Expr, c: tirx.Expr) -> tirx.Expr:
        """An element of the input; `m` counts all pixels of the map."""
        row, column = m // layer.w, m % layer.w
        return x[n, c, row, column] if chw else x[n, row, column, c]

    read = input_element
    if "pixels" in primitive.stages(layer):
        shape = primitive.stages(layer)["pixels"]

        def pixel_element(n: tirx.Expr, i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
            """A pixel, zero beyond the map."""
            m, c = (j, i) if chw else (i, j)
            return tirx.if_then_else(m < pixels, input_element(n, m, c), ZERO)

        padded_pixels = stages.spread(shape, pixel_element, "pixels")

        def read(n: tirx.Expr, m: tirx.Expr, c: tirx.Expr) -> tirx.Expr:
            return padded_pixels[n, c, m] if chw else padded_pixels[n, m, c]

    elif e.pixels > pixels:

        def read(n: tirx.Expr, m: tirx.Expr, c: tirx.Expr) -> tirx.Expr:
            return input_element(n, tirx.min(m, pixels - 1), c)  # sums beyond the map are not stored

    (c,) = reduce_axes(layer.c)
    pixel_bytes = FP32_BYTES * layer.c
    if chw:
        tile_sums = stages.sums((layer.n, e.channels, e.pixels),
            lambda n, o, m: read(n, m, c) * filters[o // e.places, c, o % e.places],
            [c], (1, 2), name="products",
            slab=stages.slab(2, pixel_bytes * e.lanes),
        )  # fmt: skip
    else:
        tile_sums = stages.sums((layer.n, e.pixels, e.channels),
            lambda n, m, o: read(n, m, c) * filters[o // e.lanes, c, o % e.lanes],
            [c], (1, 2), name="products",
            slab=stages.slab(1, pixel_bytes * e.places),
        )  # fmt: skip

    def output_element(n: tirx.Expr, *index: tirx.Expr) -> tirx.Expr:
        """An output, from the sums."""
        o, h, w = index if chw else (index[2], *index[:2])
        m = h * layer.w + w
        return tile_sums[n, o, m] if chw else tile_sums[n, m, o]

    return x, filters, te.compute(output_shape(primitive, layer), output_element, name="result")
