"""Transforms of filters into what the kernels of each family read, and the matrices of Winograd tiles."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np

from pimflow.core.kernel import ConvGeometry
from pimflow.primitives.primitive import Primitive

# Points at which the polynomials of a Winograd tile are evaluated, besides infinity. Points of few bits keep
# rounding errors small.
POINTS = tuple(Fraction(*ratio) for ratio in ((0, 1), (1, 1), (-1, 1), (2, 1), (-2, 1), (1, 2), (-1, 2)))


def transform_filters(primitive: Primitive, layer: ConvGeometry, filters: np.ndarray) -> np.ndarray:
    """Transform `filters` into what the kernel of `primitive` reads.

    Parameters
    ----------
    filters : ndarray
        (output channels, input channels of a group, height, width), fp32.

    Returns
    -------
    ndarray
        Shape ``primitive.filter_shape(layer)``, fp32; transforms are computed in fp64.
    """
    channels_last = np.moveaxis(filters, 0, -1)  # I, KH, KW, O
    if primitive.family == "loops":
        filters_read = filters if primitive.layout == "CHW" else channels_last.transpose(1, 2, 0, 3)
    elif primitive.family == "depthwise":
        filters_read = _depthwise(primitive, layer, filters)
    else:
        filters_read = _DENSE[primitive.family](primitive, layer, channels_last)
    return np.ascontiguousarray(filters_read, dtype=np.float32)


def _panels(
    primitive: Primitive, layer: ConvGeometry, channels_last: np.ndarray, outer: int = 0
) -> np.ndarray:
    """Cut the last axis into zero-padded panels: (`outer` axes, panel, other axes, channel in the panel)."""
    extents = primitive.extents(layer)
    panel_width = extents.places if primitive.layout == "CHW" else extents.lanes
    padded = np.pad(
        channels_last, [(0, 0)] * (channels_last.ndim - 1) + [(0, extents.channels - channels_last.shape[-1])]
    )
    return np.moveaxis(padded.reshape(*channels_last.shape[:-1], -1, panel_width), -2, outer)


def _windows(primitive: Primitive, layer: ConvGeometry, channels_last: np.ndarray) -> np.ndarray:
    ordered = channels_last if primitive.layout == "CHW" else channels_last.transpose(1, 2, 0, 3)
    return _panels(primitive, layer, ordered.reshape(-1, layer.oc))


def _direct(primitive: Primitive, layer: ConvGeometry, channels_last: np.ndarray) -> np.ndarray:
    return _panels(
        primitive, layer, channels_last if primitive.layout == "CHW" else channels_last.transpose(1, 2, 0, 3)
    )


def _kn2_positions(primitive: Primitive, layer: ConvGeometry, channels_last: np.ndarray) -> np.ndarray:
    positions = channels_last.transpose(1, 2, 0, 3).reshape(-1, layer.c, layer.oc)
    return _panels(primitive, layer, positions, outer=1)


def _winograd(primitive: Primitive, layer: ConvGeometry, channels_last: np.ndarray) -> np.ndarray:
    _, g, _ = winograd_matrices(primitive.tile, layer.kw)
    if primitive.directions == 1:
        rows = np.einsum("xw,ihwo->xhio", g, channels_last, dtype=np.float64)
        return _panels(primitive, layer, rows, outer=1)
    transformed_tiles = np.einsum("xh,yw,ihwo->xyio", g, g, channels_last, dtype=np.float64, optimize=True)
    return _panels(primitive, layer, transformed_tiles, outer=2)


def _fourier(primitive: Primitive, layer: ConvGeometry, channels_last: np.ndarray) -> np.ndarray:
    # A layer correlates windows with the input, so it needs the conjugate of a convolution's spectrum.
    spectrum = np.conj(np.fft.rfft2(channels_last, s=(primitive.tile, primitive.tile), axes=(1, 2)))
    parts = np.stack([spectrum.real, spectrum.imag]).transpose(0, 2, 3, 1, 4)
    return _panels(primitive, layer, parts, outer=3)


def _depthwise(primitive: Primitive, layer: ConvGeometry, filters: np.ndarray) -> np.ndarray:
    single = filters[:, 0]
    if primitive.layout == "CHW":
        return single
    lanes = primitive.extents(layer).lanes
    return single.reshape(-1, lanes, layer.kh, layer.kw).transpose(0, 2, 3, 1)


_DENSE = {
    "direct": _direct,
    "windows": _windows,
    "mec": _windows,
    "pointwise": _windows,
    "shifted": _kn2_positions,
    "winograd": _winograd,
    "fft": _fourier,
}


@cache
def winograd_matrices(outputs: int, taps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``A``, ``G``, ``B`` of F(`outputs`, `taps`): ``y = A (G g * B d)``, fp64, after Cook and Toom.

    ``A`` is (outputs, points), ``G`` (points, taps), ``B`` (points, points). A tile d has `outputs` + `taps`
    - 1 inputs, which is the number of points. The algorithm is the transpose of a product of polynomials that
    is computed from their values at `POINTS` and infinity.
    """
    a = outputs + taps - 1
    points = POINTS[: a - 1]
    g = [[x**k / _difference_product(points, x) for k in range(taps)] for x in points]
    g += [[Fraction(0)] * (taps - 1) + [Fraction(1)]]
    out = [[x**k for x in points] + [Fraction(k == outputs - 1)] for k in range(outputs)]
    # The row of a point multiplies the factors of all other points: it is zero at these.
    data = [[*_from_roots([y for y in points if y != x]), Fraction(0)] for x in points]
    data += [_from_roots(list(points))]
    return _fp64(out), _fp64(g), _fp64(data)


def _fp64(matrix: list[list[Fraction]]) -> np.ndarray:
    return np.array([[float(value) for value in row] for row in matrix])


def _difference_product(points: tuple[Fraction, ...], x: Fraction) -> Fraction:
    """Product of the differences between `x` and each other point."""
    product = Fraction(1)
    for y in points:
        product *= x - y if y != x else 1
    return product


def _from_roots(roots: list[Fraction]) -> list[Fraction]:
    """Coefficients of the polynomial with these roots, the constant first."""
    coefficients = [Fraction(1)]
    for root in roots:
        coefficients = [
            low - root * high for low, high in zip([Fraction(0), *coefficients], [*coefficients, Fraction(0)])
        ]
    return coefficients
