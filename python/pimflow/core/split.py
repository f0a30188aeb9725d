"""Splits of one layer between two devices: the axis, and the extent of the GPU's part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from pimflow.core.kernel import STORED_BYTES, ConvGeometry
from pimflow.core.liveness import view_obstacle

# Suffixes of the names of a layer's parts.
GPU_SUFFIX, PIM_SUFFIX = "__gpu", "__pim"
INPUT_SUFFIX = "_in"  # of the name of the input that a part reads
Axis = Literal["rows", "channels", "reduction", "batch"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, order=True)
class Split:
    """A layer in two parts, the GPU's first.

    Attributes
    ----------
    axis : Axis
        Output rows, output channels, input channels (the reduction), or the inferences of a
        batch.
    gpu : int
        Extent of the GPU's part along the axis; 0 if PIM computes the whole layer.
    """

    axis: Axis = "rows"
    gpu: int = 0

    def extent(self, geometry: ConvGeometry) -> int:
        """Extent of the whole axis."""
        extents = (geometry.oh, geometry.oc, geometry.c, geometry.n)
        return dict(zip(AXES, extents))[self.axis]

    def obstacle(self, geometry: ConvGeometry) -> str:
        """Why `geometry` cannot be split in this way; empty if it can."""
        total = self.extent(geometry)
        if self.axis == "rows" and geometry.n > 1:
            return "rows of a batch are not contiguous"
        if not 0 < self.gpu < total:
            return f"a split needs 1 to {total - 1} of {total} {self.axis} on the GPU, not {self.gpu}"
        if self.axis == "rows":
            return geometry.rows.split_obstacle(self.gpu)
        if self.axis != "batch" and geometry.groups != 1:
            return f"only dense layers are split along {self.axis}"
        if self.axis == "reduction" and geometry.activations:
            return "the integers of an output have one scale for the whole reduction"
        return ""

    def gpu_part(self, geometry: ConvGeometry) -> ConvGeometry:
        """The convolution that the GPU computes."""
        if self.axis == "rows":
            return geometry.first_rows(self.gpu)
        return self._with_extent(geometry, self.gpu)

    def pim_part(self, geometry: ConvGeometry) -> ConvGeometry:
        """The convolution of which PIM computes the output pixels from `pixel_begin` on."""
        if self.axis in ("channels", "reduction"):
            return self._with_extent(geometry, self.extent(geometry) - self.gpu)
        return geometry

    def pixel_begin(self, geometry: ConvGeometry) -> int:
        """The first output pixel of `pim_part` that PIM computes."""
        images = {"rows": 1, "batch": geometry.oh}.get(self.axis, 0)
        return self.gpu * images * geometry.ow

    def pim_output_elements(self, geometry: ConvGeometry) -> int:
        """Output elements that PIM computes."""
        part = self.pim_part(geometry)
        return (part.pixels - self.pixel_begin(geometry)) * part.oc

    def pim_input_elements(self, geometry: ConvGeometry) -> int:
        """Elements of the input that PIM reads."""
        g = geometry
        if self.axis == "rows":
            input_rows = g.rows.inputs(self.gpu, g.oh)
            return g.n * (input_rows.end - input_rows.begin) * g.w * g.c
        images = g.n - self.gpu if self.axis == "batch" else g.n
        return images * g.h * g.w * (g.c - self.gpu if self.axis == "reduction" else g.c)

    def pim_filters(self, filters: np.ndarray, taps: int) -> np.ndarray:
        """The filters of PIM's part among a layer's filters, [OC, taps * C]."""
        if self.axis == "channels":
            return filters[self.gpu :]
        if self.axis == "reduction":
            return filters.reshape(len(filters), taps, -1)[..., self.gpu :].reshape(len(filters), -1)
        return filters

    def deferred_epilogue(self, geometry: ConvGeometry, *, views: bool = True) -> tuple[str, ...]:
        """Deferred epilogue: the operators that join the two results; `views` is `System.uses_views`."""
        if not self.gpu:
            return ()
        if self.axis == "reduction":
            return ("add",)
        shape = (geometry.n, geometry.oh, geometry.ow, geometry.oc)
        return ("concat",) if not views or self.view_obstacle(shape) else ()

    def view_obstacle(self, shape: tuple[int, int, int, int]) -> str:
        """Why the second part of an NHWC tensor cannot be a view of it; empty if it can."""
        axis = {"batch": 0, "rows": 1}.get(self.axis, 3)
        return view_obstacle(shape, axis, self.gpu, STORED_BYTES)

    def _with_extent(self, geometry: ConvGeometry, extent: int) -> ConvGeometry:
        """`geometry` with another extent of the axis, which is not ``rows``."""
        if self.axis == "channels":
            return replace(geometry, oc=extent)
        return replace(geometry, c=extent) if self.axis == "reduction" else replace(geometry, n=extent)


WHOLE = Split()
