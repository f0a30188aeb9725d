"""Stages that the kernels of all families are made of: computed tensors, with marks for the schedule.

`primitives.marks` defines the marks. On a GPU, a stage that moves data is computed where it is read. If it is
marked `SPREAD`, it is a workspace instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import te, tirx

from pimflow.core.kernel import ConvGeometry
from pimflow.primitives import Primitive
from pimflow.primitives.families import input_shape, output_shape, required_input_extents
from pimflow.primitives.layer import BLOCK, input_bytes
from pimflow.primitives.marks import SHARED, SLAB, SPREAD, TILE

SLAB_BYTES = 1 << 18  # half of a small L2 (assumed)
ZERO = tirx.const(0, "float32")


@dataclass(frozen=True)
class Stages:
    """Makes the stages of a kernel."""

    primitive: Primitive
    layer: ConvGeometry

    def placeholders(self) -> tuple[te.Tensor, te.Tensor]:
        """Placeholders of input and filters."""
        x = te.placeholder(input_shape(self.primitive, self.layer), "float32", name="x")
        return x, te.placeholder(self.primitive.filter_shape(self.layer), "float32", name="filters")

    def spread(self, shape: Sequence[int], element: Callable[..., tirx.Expr], name: str) -> te.Tensor:
        """A stage that moves data; marked with the number of contiguous channels if it is a workspace."""
        vector = {"HWC": self.layer.c, "CHW": 1, "CHWc16": BLOCK}[self.primitive.layout]
        stored = name in self.primitive.stages(self.layer)
        return te.compute(tuple(shape), element, name=name, attrs={SPREAD: vector} if stored else {})

    def pad_input(self, x: te.Tensor, rows: int, columns: int) -> te.Tensor:
        """The input, padded to what `rows` by `columns` outputs read; `x` itself if it needs no padding."""
        extents = required_input_extents(self.layer, rows, columns)
        if extents is None:
            return x
        pad_top, pad_left = self.layer.padding[:2]
        row_axis = 1 if self.primitive.layout == "HWC" else 2

        def element(*index: tirx.Var) -> tirx.Expr:
            """An element of the padded input."""
            row, column = index[row_axis] - pad_top, index[row_axis + 1] - pad_left
            return self.element_or_zero(x, [*index], row_axis, row, column)

        return self.spread(input_shape(self.primitive, self.layer, *extents), element, "padded")

    def element_or_zero(
        self, x: te.Tensor, index: list[tirx.Expr], row_axis: int, row: tirx.Expr, column: tirx.Expr
    ) -> tirx.Expr:
        """``x[index]``, with `row` and `column` as indices of the axes `row_axis` and `row_axis` + 1.

        0 outside the map.
        """
        index[row_axis : row_axis + 2] = [row, column]
        is_inside = tirx.all(row >= 0, row < self.layer.h, column >= 0, column < self.layer.w)
        return tirx.if_then_else(is_inside, x[tuple(index)], ZERO)

    def sums(  # the parts of ``te.compute`` and ``te.sum``, and how their loops are tiled
        self,
        shape: Sequence[int],
        terms: Callable[..., tirx.Expr],
        over: Sequence[te.IterVar],
        axes: tuple[int, int],
        name: str = "sums",
        slab: tuple[int, int] | None = None,
    ) -> te.Tensor:
        """Sums in register tiles.

        Parameters
        ----------
        over : sequence of IterVar
            Reduction axes, outermost first.
        axes : (int, int)
            Axes of the places and of the lanes.
        slab : (int, int), optional
            An axis, and the size of a slab of it (in tiles, if the axis is tiled). A slab is computed with
            all panels of filters before the next slab. Without slabs, all outputs of a panel are computed
            before the next panel.
        """
        e, by_channel = self.primitive.extents(self.layer), int(self.primitive.layout != "CHW")
        marks: dict[str, object] = {
            TILE: [axes[0], e.places, axes[1], e.lanes, by_channel],
            SLAB: list(slab or ()),
        }
        marks |= {SHARED: 1} if self.primitive.shared else {}
        return te.compute(
            tuple(shape), lambda *index: te.sum(terms(*index), axis=list(over)), name=name, attrs=marks
        )

    def result(self, sums: te.Tensor) -> te.Tensor:
        """The part of `sums` that the convolution returns."""
        shape = output_shape(self.primitive, self.layer)
        return te.compute(shape, lambda *index: sums(*index), name="result")

    def slab(self, axis: int, element_bytes: int) -> tuple[int, int] | None:
        """`axis`, and how many of its elements fit in a core's cache if each reads `element_bytes`.

        None if filters have more bytes than the input: then it is better to read the filters once.
        """
        if self.primitive.filter_bytes(self.layer) > input_bytes(self.layer):
            return None
        return axis, max(1, SLAB_BYTES // element_bytes)


def reduce_axes(*extents: int) -> list[te.IterVar]:
    """A reduction axis for each of `extents`."""
    return [te.reduce_axis((0, extent), f"r{i}") for i, extent in enumerate(extents)]
