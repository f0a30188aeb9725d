"""Convolution primitives: parameters, applicability, and memory.

Families are those of Wen et al., *TASO*, section 3: direct loops, im2row and im2col, kn2row and kn2col, MEC,
Winograd, FFT, products for 1x1 windows, depthwise. Sums go through register tiles of some *places*, each a
vector of *lanes*: in HWC lanes are output channels and places are pixels; in CHW the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from pimflow.core.kernel import ConvGeometry
from pimflow.primitives.layer import BLOCK, FP32_BYTES, VECTOR, Shape, is_depthwise

STACK_BYTES = 1024  # smaller tensors are on the stack of the kernel (TVM's kMaxStackAlloca)
THREAD_PLACES = 4  # places that a thread of a GPU computes
Stages = dict[str, Shape]


def part_size(extent: int, max_size: int, multiple: int = 1) -> int:
    """Size of the parts if `extent` is cut evenly into as few parts as possible, of at most `max_size` each.

    Sizes are multiples of `multiple`; all parts together may be longer than `extent`.
    """
    parts = -(-extent // max_size)
    return -(-extent // (parts * multiple)) * multiple


def equal_part_size(extent: int, max_size: int) -> int:
    """The largest divisor of `extent` in (`max_size` / 2, `max_size`].

    Without one, the size that `part_size` gives.
    """
    sizes = (size for size in range(min(max_size, extent), max_size // 2, -1) if extent % size == 0)
    return next(sizes, 0) or part_size(extent, max_size)


def round_up(extent: int, part: int) -> int:
    """`extent`, rounded up to a multiple of `part`."""
    return -(-extent // part) * part


@dataclass(frozen=True, kw_only=True)
class Extents:
    """The register tiles of a layer.

    Attributes
    ----------
    pixels, channels : int
        Tiled extents, rounded up to whole tiles: pixels (of a row, unless the family tiles another axis) and
        output channels.
    """

    places: int
    lanes: int
    pixels: int
    channels: int


def _row_pixels(_: Primitive, layer: ConvGeometry) -> int:
    return layer.ow


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of primitives: the functions that they share.

    Attributes
    ----------
    applies, filter_shape, stages : callable
        Functions of a primitive and a layer; see `Primitive`.
    pixels : callable
        Extent of the axis that is cut into places (in CHW, into lanes) of register tiles.
    """

    name: str
    # Not in the repr, which is part of cache keys: the repr of a function has an address.
    applies: Callable[[Primitive, ConvGeometry], bool] = field(repr=False)
    filter_shape: Callable[[Primitive, ConvGeometry], Shape] = field(repr=False)
    stages: Callable[[Primitive, ConvGeometry], Stages] = field(repr=False)
    pixels: Callable[[Primitive, ConvGeometry], int] = field(default=_row_pixels, repr=False)


@dataclass(frozen=True, kw_only=True)
class Primitive:
    """A primitive: one algorithm for a convolution, with its parameters.

    Attributes
    ----------
    layout : str
        Layout of input and output: one of `layer.LAYOUTS`.
    places, lanes : int
        Maximum places and lanes of a register tile; 0 for loops without tiles.
    tile : int
        Outputs of a Winograd tile, or points of a Fourier transform, along each tiled axis.
    directions : int
        How many axes are tiled: 2, or 1 for rows only.
    accumulating : bool
        Whether the products of window positions are added one after the other. Otherwise all are stored, and
        added at the end.
    target : str
        ``cpu`` or ``cuda``: for what its kernels are scheduled. On a GPU, the tile is that of a thread block.
    shared : bool
        On a GPU, whether tiles of both operands go through shared memory.
    implicit : bool
        On a GPU, whether windows are formed while they are loaded into shared memory, without a workspace.
    """

    name: str
    formulas: Family
    layout: str = "HWC"
    places: int = 0
    lanes: int = 0
    tile: int = 0
    directions: int = 0
    accumulating: bool = False
    target: str = "cpu"
    shared: bool = False
    implicit: bool = False

    @property
    def family(self) -> str:
        """Name of its family."""
        return self.formulas.name

    def applies(self, layer: ConvGeometry) -> bool:
        """Whether it can compute `layer`; on a GPU, tiles do not apply to a layer of a single pixel."""
        has_partial_blocks = self.layout == "CHWc16" and (layer.c % BLOCK or layer.oc % BLOCK)
        is_single_pixel = self.target == "cuda" and self.family != "operator" and layer.pixels == 1
        return not (has_partial_blocks or is_single_pixel) and self.formulas.applies(self, layer)

    def filter_shape(self, layer: ConvGeometry) -> Shape:
        """Shape of the transformed filters, which the kernel reads."""
        return self.formulas.filter_shape(self, layer)

    def filter_bytes(self, layer: ConvGeometry) -> int:
        """Bytes of the transformed filters."""
        return FP32_BYTES * prod(self.filter_shape(layer))

    def stages(self, layer: ConvGeometry) -> dict[str, Shape]:
        """Shapes of intermediate tensors, by the stage of the kernel that writes them."""
        return self.formulas.stages(self, layer)

    def workspaces(self, layer: ConvGeometry) -> dict[str, Shape]:
        """The `stages` that do not fit on the stack; on a GPU all, since launches do not share a stack."""
        stages, min_bytes = self.stages(layer).items(), 0 if self.target == "cuda" else STACK_BYTES
        return {stage: shape for stage, shape in stages if FP32_BYTES * prod(shape) >= min_bytes}

    def workspace_bytes(self, layer: ConvGeometry) -> int:
        """Bytes of all workspaces."""
        return FP32_BYTES * sum(prod(shape) for shape in self.workspaces(layer).values())

    def extents(self, layer: ConvGeometry) -> Extents:
        """The register tiles that `layer` is cut into."""
        pixels = self.formulas.pixels(self, layer)
        if not self.places:
            return Extents(places=1, lanes=1, pixels=pixels, channels=layer.oc)
        if self.layout == "CHW":
            places, lanes = part_size(layer.oc, self.places), part_size(pixels, self.lanes, VECTOR)
            pixel, channel = lanes, places
        else:
            multiple = BLOCK if self.layout == "CHWc16" else VECTOR
            if self.target == "cuda":
                places = part_size(pixels, self.places, THREAD_PLACES)
            else:  # a tile beyond the last pixel needs a copy of the input; with padding there is one anyway
                places = (part_size if any(layer.padding) else equal_part_size)(pixels, self.places)
            lanes = part_size(layer.oc, self.lanes, multiple)
            if is_depthwise(layer):  # each lane reads a channel of its own
                lanes = max(n for n in range(VECTOR, self.lanes + 1, VECTOR) if layer.oc % n == 0)
            pixel, channel = places, lanes
        return Extents(
            places=places, lanes=lanes, pixels=round_up(pixels, pixel), channels=round_up(layer.oc, channel)
        )
