"""Winograd and Fourier: products between transformed tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from tvm import te, tirx

from pimflow.core.kernel import ConvGeometry
from pimflow.primitives import Primitive
from pimflow.primitives.families import output_shape, tile_counts, tile_outputs, tile_points
from pimflow.primitives.filters import winograd_matrices
from pimflow.primitives.kernels.direct import Tensors
from pimflow.primitives.kernels.stages import Stages, reduce_axes
from pimflow.primitives.marks import INSIDE, UNROLLED

Entry = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]


def winograd(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """Winograd's F(m, r) (Lavin and Gray 2016), on square tiles or on pieces of rows."""
    return (_winograd_rows if primitive.directions == 1 else _winograd_squares)(primitive, layer)


def fft(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    """Circular correlation of square tiles by FFT; only outputs that do not wrap around are used."""
    stages = Stages(primitive, layer)
    x, filters = stages.placeholders()
    n = primitive.tile
    half, (cos, sin) = n // 2 + 1, _cosine_and_sine(n)

    def transform_rows(part: str) -> te.Tensor:
        """The transform along the width; a copy for each of the two stages that read it."""
        tile, (j,) = _input_tiles(stages, x, (n, n)), reduce_axes(n)
        sign = cos if part == "real" else lambda v, position: -sin(v, position)
        shape = (n, half, *tile.shape[2:])
        return _inner_stage(
            shape, lambda p, v, *tc: te.sum(sign(v, j) * tile(p, j, *tc), axis=j), f"row_{part}"
        )

    def transform_columns(part: str) -> te.Tensor:
        """The real or the imaginary part of the transform along both axes."""
        re, im, (i,) = transform_rows("real"), transform_rows("imaginary"), reduce_axes(n)

        def real(u: tirx.Expr, v: tirx.Expr, *tc: tirx.Expr) -> tirx.Expr:
            return te.sum(cos(u, i) * re(i, v, *tc) + sin(u, i) * im(i, v, *tc), axis=i)

        def imaginary(u: tirx.Expr, v: tirx.Expr, *tc: tirx.Expr) -> tirx.Expr:
            return te.sum(cos(u, i) * im(i, v, *tc) - sin(u, i) * re(i, v, *tc), axis=i)

        terms, shape = (real if part == "real" else imaginary), primitive.stages(layer)[part]
        return _flat_stage(shape, terms, part, [0, 0, 1, 0], _lane(primitive, 2))

    xr, xi = transform_columns("real"), transform_columns("imaginary")
    re = _products(stages, "products_real", lambda index, w: xr(*index) * w(0) - xi(*index) * w(1), filters)
    im = _products(
        stages, "products_imaginary", lambda index, w: xr(*index) * w(1) + xi(*index) * w(0), filters
    )
    return x, filters, _inverse_fft(stages, re, im)


def _inverse_fft(stages: Stages, re: te.Tensor, im: te.Tensor) -> te.Tensor:
    """The outputs of transformed tiles of which both parts are given."""
    n = stages.primitive.tile
    half, (cos, sin) = n // 2 + 1, _cosine_and_sine(n)
    u, v = reduce_axes(n, n)[0], te.reduce_axis((0, half), "v")
    shape = (tile_outputs(stages.primitive, stages.layer)[0], half, *re.shape[2:])
    column_re = _inner_stage(
        shape,
        lambda p, q, *to: te.sum(cos(u, p) * re(u, q, *to) - sin(u, p) * im(u, q, *to), axis=u),
        "column_real",
    )
    (u2,) = reduce_axes(n)
    column_im = _inner_stage(
        shape,
        lambda p, q, *to: te.sum(sin(u2, p) * re(u2, q, *to) + cos(u2, p) * im(u2, q, *to), axis=u2),
        "column_imaginary",
    )

    def output_term(h: tirx.Expr, w: tirx.Expr, t: tirx.Expr) -> tirx.Expr:
        """An output, from the sums."""
        weight = tirx.Select(
            tirx.any(v == 0, v == half - 1), tirx.const(1 / n**2, "float32"), tirx.const(2 / n**2, "float32")
        )
        return te.sum(weight * (cos(v, w) * column_re(h, v, *t) - sin(v, w) * column_im(h, v, *t)), axis=v)

    return _output_stage(stages, output_term)


def _winograd_squares(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    stages = Stages(primitive, layer)
    x, filters = stages.placeholders()
    a = tile_points(primitive, layer)
    out, _, data = (_matrix_entry(matrix) for matrix in winograd_matrices(primitive.tile, layer.kw))
    tile = _input_tiles(stages, x, (a, a))
    i, j, p, q = (reduce_axes(a)[0] for _ in range(4))
    columns = _inner_stage(
        (a, a, *tile.shape[2:]), lambda u, v, *tc: te.sum(data(u, i) * tile(i, v, *tc), axis=i), "columns"
    )
    transformed = _flat_stage(
        primitive.stages(layer)["transformed"],
        lambda u, v, *tc: te.sum(data(v, j) * columns(u, j, *tc), axis=j),
        "transformed", [0, 0, 1, 0], _lane(primitive, 2),
    )  # fmt: skip
    products = _products(stages, "products", lambda index, w: transformed(*index) * w(), filters)
    rows = _inner_stage(
        (primitive.tile, a, *products.shape[2:]),
        lambda h, v, *to: te.sum(out(h, p) * products(p, v, *to), axis=p),
        "rows",
    )
    return (x, filters, _output_stage(stages, lambda h, w, t: te.sum(out(w, q) * rows(h, q, *t), axis=q)))


def _winograd_rows(primitive: Primitive, layer: ConvGeometry) -> Tensors:
    stages = Stages(primitive, layer)
    x, filters = stages.placeholders()
    a, m = tile_points(primitive, layer), primitive.tile
    out, _, data = (_matrix_entry(matrix) for matrix in winograd_matrices(m, layer.kw))
    chw, e, dh = primitive.layout == "CHW", primitive.extents(layer), layer.dilation[0]
    (i,), (q,) = reduce_axes(a), reduce_axes(a)
    kh, c = reduce_axes(layer.kh, layer.c)

    def forward(u: tirx.Expr, n: tirx.Expr, row: tirx.Expr, *tc: tirx.Expr) -> tirx.Expr:
        """The transform of a piece of a row."""
        t, c = tc[::-1] if chw else tc
        column = t * m + i - layer.padding[1]
        index, row_axis = ([n, c, 0, 0], 2) if chw else ([n, 0, 0, c], 1)
        return te.sum(
            data(u, i) * stages.element_or_zero(x, index, row_axis, row - layer.padding[0], column), axis=i
        )

    shapes = primitive.stages(layer)
    transformed = _flat_stage(shapes["transformed"], forward, "transformed", [0, 0], _lane(primitive, 3))

    def terms(u: tirx.Expr, n: tirx.Expr, h: tirx.Expr, *to: tirx.Expr) -> tirx.Expr:
        """A term of a product, by the indices of the product."""
        t, o = to[::-1] if chw else to
        tc, wide = ((c, t), e.places) if chw else ((t, c), e.lanes)
        return transformed(u, n, h + kh * dh, *tc) * filters(u, o // wide, kh, c, o % wide)

    products = stages.sums(shapes["products"], terms, [kh, c], (3, 4), name="products", slab=(2, 1))

    def output_element(n: tirx.Expr, *index: tirx.Expr) -> tirx.Expr:
        """An output, from the sums."""
        o, h, w = index if chw else (index[2], *index[:2])
        to = (o, w // m) if chw else (w // m, o)
        return te.sum(out(w % m, q) * products(q, n, h, *to), axis=q)

    axis = 3 if chw else 2
    y = _flat_stage(output_shape(primitive, layer), output_element, "result", [axis, m], -1 if chw else 3)
    return x, filters, y


def _lane(primitive: Primitive, outer: int) -> int:
    """Axis of the channels, after `outer` axes and the tiles; -1 in CHW: channels are not contiguous."""
    return -1 if primitive.layout == "CHW" else outer + 1


def _inner_stage(shape: Sequence[tirx.Expr], element: Callable[..., tirx.Expr], name: str) -> te.Tensor:
    return te.compute(tuple(shape), element, name=name, attrs={INSIDE: 1})


def _flat_stage(
    shape: Sequence[int], element: Callable[..., tirx.Expr], name: str, unroll_sizes: list[int], lane: int
) -> te.Tensor:
    return te.compute(tuple(shape), element, name=name, attrs={UNROLLED: [*unroll_sizes, lane]})


def _matrix_entry(matrix: np.ndarray) -> Entry:
    """A function that gives entries of `matrix`; they are constants once both indices are unrolled."""

    def entry(row: tirx.Expr, column: tirx.Expr) -> tirx.Expr:
        """An entry of the matrix, as nested selections."""
        selected = tirx.const(0, "float32")
        for (i, j), value in np.ndenumerate(matrix):
            if value:
                is_entry = tirx.all(row == i, column == j)
                selected = tirx.Select(is_entry, tirx.const(float(value), "float32"), selected)
        return selected

    return entry


def _cosine_and_sine(n: int) -> tuple[Entry, Entry]:
    """Functions for cosine and sine of ``2 pi a b / n``; constants once a and b are unrolled."""

    def angle(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
        return tirx.Cast("float32", a * b % n) * tirx.const(2 * math.pi / n, "float32")

    return (lambda a, b: tirx.cos(angle(a, b))), (lambda a, b: tirx.sin(angle(a, b)))


def _input_tiles(stages: Stages, x: te.Tensor, extents: tuple[int, int]) -> te.Tensor:
    """Tiles of the input, (row, column, tile, channel); in CHW channels before tiles. 0 outside the map."""
    primitive, layer = stages.primitive, stages.layer
    across, down = tile_counts(primitive, layer)[::-1]
    height, width = tile_outputs(primitive, layer)
    chw, pixels = primitive.layout == "CHW", primitive.extents(layer).pixels

    def element(i: tirx.Expr, j: tirx.Expr, *tc: tirx.Expr) -> tirx.Expr:
        """An element of a tile."""
        t, c = tc[::-1] if chw else tc
        n = tirx.min(t // (across * down), layer.n - 1)  # tiles that only pad repeat the last inference
        row = t // across % down * height + i - layer.padding[0]
        column = t % across * width + j - layer.padding[1]
        index, row_axis = ([n, c, 0, 0], 2) if chw else ([n, 0, 0, c], 1)
        return stages.element_or_zero(x, index, row_axis, row, column)

    inner = (layer.c, pixels) if chw else (pixels, layer.c)
    return _inner_stage((*extents, *inner), element, "tile")


def _products(stages: Stages, name: str, term: Callable[..., tirx.Expr], filters: te.Tensor) -> te.Tensor:
    """For each pair of the two outer indices, the product of the tiles with the filters."""
    primitive, layer = stages.primitive, stages.layer
    e, (c,) = primitive.extents(layer), reduce_axes(layer.c)
    chw = primitive.layout == "CHW"
    wide = e.places if chw else e.lanes

    def terms(u: tirx.Expr, v: tirx.Expr, *to: tirx.Expr) -> tirx.Expr:
        """A term of a product, by the indices of the product."""
        t, o = to[::-1] if chw else to
        tc = (c, t) if chw else (t, c)
        return term((u, v, *tc), lambda *part: filters(*part, u, v, o // wide, c, o % wide))

    return stages.sums(primitive.stages(layer)[name], terms, [c], (2, 3), name=name, slab=(1, 1))


def _output_stage(stages: Stages, element: Callable[..., tirx.Expr]) -> te.Tensor:
    """The output; `element` gives it by (row in the tile, column in the tile, index of tile and channel)."""
    primitive, layer = stages.primitive, stages.layer
    height, width = tile_outputs(primitive, layer)
    down, across = tile_counts(primitive, layer)
    chw = primitive.layout == "CHW"

    def output_element(n: tirx.Expr, *index: tirx.Expr) -> tirx.Expr:
        """An output, from the sums."""
        o, h, w = index if chw else (index[2], *index[:2])
        t = (n * down + h // height) * across + w // width
        return element(h % height, w % width, (o, t) if chw else (t, o))

    axis = 2 if chw else 1
    return _flat_stage(
        output_shape(primitive, layer),
        output_element,
        "result",
        [axis, height, axis + 1, width],
        -1 if chw else 3,
    )
