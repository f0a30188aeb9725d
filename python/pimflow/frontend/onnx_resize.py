"""Resize of ONNX, axis by axis, with constant places and weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from pimflow.errors import UnsupportedOpError

_SYMMETRIC = b"half_pixel_symmetric"
_ALIGNED = b"align_corners"


@dataclass(frozen=True, kw_only=True)
class Resizing:
    """A Resize whose factors and sizes are constants.

    Attributes
    ----------
    factors : tuple of float
        By axis, how places of the result are scaled; 1 for axes that stay.
    roi : ndarray, optional
        Begins and ends of all axes, as shares of them.
    """

    dims: tuple[int, ...]
    counts: tuple[int, ...]
    factors: tuple[float, ...]
    has_sizes: bool
    roi: np.ndarray | None
    attrs: dict[str, Any]

    @classmethod
    def from_operands(
        cls,
        dims: Sequence[int],
        roi: np.ndarray | None,
        scales: np.ndarray | None,
        sizes: np.ndarray | None,
        attrs: dict[str, Any],
    ) -> Resizing:
        """From the constant operands of the node, which concern only its ``axes`` if it has some."""
        axes = [int(axis) % len(dims) for axis in attrs.get("axes", range(len(dims)))]
        has_sizes = sizes is not None and bool(sizes.size)
        counts, factors = np.array(dims, "int64"), np.ones(len(dims))
        policy = attrs.get("keep_aspect_ratio_policy", b"stretch")
        if has_sizes:
            ratios = np.asarray(sizes) / counts[axes]
            if policy == b"stretch":
                factors[axes], counts[axes] = ratios, sizes
            else:
                factors[axes] = ratios.min() if policy == b"not_larger" else ratios.max()
                counts[axes] = np.floor(factors[axes] * counts[axes] + 0.5)
        elif scales is not None:
            factors[axes] = scales
            counts[axes] = np.floor(counts[axes] * factors[axes])
        full_roi = None
        if roi is not None and roi.size:
            full_roi = np.repeat([0.0, 1.0], len(dims)).astype(roi.dtype)
            full_roi[[*axes, *(len(dims) + axis for axis in axes)]] = roi
        return cls(
            dims=tuple(dims),
            counts=tuple(counts.tolist()),
            factors=tuple(factors.tolist()),
            has_sizes=has_sizes,
            roi=full_roi,
            attrs=attrs,
        )

    @property
    def _axes(self) -> list[int]:
        """The axes that change."""
        triples = zip(self.dims, self.counts, self.factors)
        return [axis for axis, (size, count, factor) in enumerate(triples) if (size, 1) != (count, factor)]

    @property
    def _mode(self) -> bytes:
        return self.attrs.get("coordinate_transformation_mode", b"half_pixel")

    @property
    def _is_whole(self) -> bool:
        return all(float(size * factor).is_integer() for size, factor in zip(self.dims, self.factors))

    @property
    def _filters(self) -> bool:
        """Whether results are means over more elements where they are fewer than operands."""
        interpolates = self.attrs.get("mode", b"nearest") != b"nearest"
        return bool(self.attrs.get("antialias")) and interpolates and min(self.factors) < 1

    @property
    def is_like_importer(self) -> bool:
        """Whether TVM's importer computes it rightly: over maps, where it need not scale sizes itself."""
        keeps_ratio = self.attrs.get("keep_aspect_ratio_policy", b"stretch") != b"stretch"
        if keeps_ratio or self._filters or any(axis < 2 for axis in self._axes):
            return False
        if self._mode == _ALIGNED and 1 in self.counts[2:]:  # it divides by the distance of the corners
            return False
        return self.has_sizes or self._is_whole or self._mode not in _PLACES

    def operands(self) -> list[np.ndarray | None]:
        """Region, factors and sizes of all axes."""
        if self.has_sizes:
            return [self.roi, None, np.array(self.counts, "int64")]
        return [self.roi, np.array(self.factors, "float32"), None]

    def importer_attributes(self) -> dict[str, Any]:
        """Attributes for TVM's importer, which knows neither axes nor symmetric places."""
        kept = {name: value for name, value in self.attrs.items() if name != "axes"}
        return kept | ({"coordinate_transformation_mode": b"half_pixel"} if self._mode == _SYMMETRIC else {})

    def interpolate(self, x: relax.Expr, emit: Callable[[relax.Expr], relax.Expr]) -> relax.Expr:
        """Emit the result, axis by axis; raises `UnsupportedOpError` for places that depend on a region."""
        mode = self._mode
        if mode not in _PLACES:
            raise UnsupportedOpError(
                f"coordinate_transformation_mode '{mode.decode()}' is not supported here"
            )
        if mode == _ALIGNED and not self.has_sizes and not self._is_whole:
            raise UnsupportedOpError("align_corners with scaled sizes that are not whole is not supported")
        for axis in self._axes:
            size, count, factor = self.dims[axis], self.counts[axis], self.factors[axis]
            stretch = min(1.0, factor) if self._filters else 1.0
            x = self._interpolate_axis(x, axis, _PLACES[mode](size, count, factor), stretch, emit)
        return x

    def _interpolate_axis(
        self,
        x: relax.Expr,
        axis: int,
        places: np.ndarray,
        stretch: float,
        emit: Callable[[relax.Expr], relax.Expr],
    ) -> relax.Expr:
        """Interpolate at `places` along an axis; the filter is wider the smaller `stretch` is."""
        last = self.dims[axis] - 1

        def take(indices: np.ndarray) -> relax.Expr:
            """The elements at constant places along the axis, within the map."""
            inside = relax.const(np.clip(indices, 0, last).astype(np.int64))
            return emit(relax.op.take(x, inside, axis, mode="clip"))

        mode = self.attrs.get("mode", b"nearest")
        if mode == b"nearest":
            return take(_NEAREST[self.attrs.get("nearest_mode", b"round_prefer_floor")](places))
        below = np.floor(places)
        shares = _shares(mode, places - below, stretch, self.attrs.get("cubic_coeff_a", -0.75))
        if self.attrs.get("exclude_outside", 0):
            shares = {
                step: share * ((below + step >= 0) & (below + step <= last)) for step, share in shares.items()
            }
        total = sum(shares.values())
        rest = [1] * (len(self.dims) - 1 - axis)
        parts = []
        for step, share in shares.items():
            weights = (share / total).reshape(-1, *rest).astype(str(x.ty.dtype))
            parts.append(emit(relax.op.multiply(take(below + step), relax.const(weights))))
        return functools.reduce(lambda a, b: emit(relax.op.add(a, b)), parts)


# Index of the nearest element, by `nearest_mode`.
_NEAREST = {
    b"round_prefer_floor": lambda places: np.ceil(places - np.float32(0.5)),
    b"round_prefer_ceil": lambda places: np.floor(places + 0.5),
    b"floor": np.floor,
    b"ceil": np.ceil,
}


def _shares(mode: bytes, fractions: np.ndarray, stretch: float, a: float) -> dict[int, np.ndarray]:
    """Weights of the neighbours of places, by their step from the one below; zeros are left out."""
    reach = math.ceil((1 if mode == b"linear" else 2) / stretch)
    shares = {}
    for step in range(1 - reach, reach + 1):
        d = np.abs(step - fractions) * stretch
        if mode == b"linear":
            share = np.maximum(1 - d, 0)
        else:
            near = ((a + 2) * d - (a + 3)) * d * d + 1
            far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
            share = np.where(d <= 1, near, np.where(d < 2, far, 0))
        if share.any():
            shares[step] = share
    return shares


# Places at which an axis of `size` elements is read for `count` results if it is scaled by `factor`: in fp32,
# as in ONNX Runtime, since some lie halfway between two elements.


def _numbers(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32)


def _half_pixel(size: int, count: int, factor: float) -> np.ndarray:
    return (_numbers(count) + np.float32(0.5)) / np.float32(factor) - np.float32(0.5)


def _about_centre(size: int, count: int, factor: float) -> np.ndarray:
    """Places if the axis is scaled about its centre."""
    offset = size / 2 * (1 - count / (size * factor))
    return np.float32(offset) + _half_pixel(size, count, factor)


_PLACES: dict[bytes, Callable[[int, int, float], np.ndarray]] = {  # by `coordinate_transformation_mode`
    _ALIGNED: lambda size, count, factor: _numbers(count) * np.float32((size - 1) / max(1, count - 1)),
    _SYMMETRIC: _about_centre,
    b"asymmetric": lambda size, count, factor: _numbers(count) / np.float32(factor),
    b"half_pixel": _half_pixel,
    b"pytorch_half_pixel": lambda size, count, factor: (
        _half_pixel(size, count, factor) if count > 1 else np.zeros(1)
    ),
}
