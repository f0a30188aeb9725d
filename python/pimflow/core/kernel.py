"""GPU kernels as their model sees them, the convolutions and products in them, and types of elements."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field, replace

from pimflow.core.json_form import OMITTED
from pimflow.core.ranges import RangeMap
from pimflow.weight_types import stored_bytes

# Bytes of one stored element.
ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "int8": 1}
# Bytes of one result that READRES returns: products of int8 are summed in int32.
RESULT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "int8": 4}
# Bits of an element of a vector that the multipliers of a device may take (`hardware.operands.Operand`).
ACTIVATION_BITS = {**{dtype: 8 * size for dtype, size in ELEMENT_BYTES.items()}, "fp8": 8, "int4": 4}
# Storage types that networks are compiled in.
NETWORK_DTYPES = ("fp16", "fp32")
# Bytes of the smallest element: a part that is aligned with it is aligned with every storage type.
STORED_BYTES = min(ELEMENT_BYTES[dtype] for dtype in NETWORK_DTYPES)


@dataclass(frozen=True, kw_only=True)
class ConvGeometry:
    """A convolution over NHWC; a fully connected layer is the 1x1 case on a 1x1 map.

    Attributes
    ----------
    n, h, w, c : int
        Input batch, height, width, channels.
    oc : int
        Output channels.
    stride, dilation : tuple of int
        (vertical, horizontal).
    padding : tuple of int
        (top, left, bottom, right).
    weights : str, optional
        Type in which its filters are stored (`weight_types.WEIGHT_TYPES`); None for that of the network.
    activations : str, optional
        Type to which its input is rounded before it is multiplied (one of `ACTIVATION_BITS`); None for
        that of the network.
    """

    n: int
    h: int
    w: int
    c: int
    oc: int
    kh: int = 1
    kw: int = 1
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    groups: int = 1
    weights: str | None = field(default=None, metadata=OMITTED)
    activations: str | None = field(default=None, metadata=OMITTED)

    def __repr__(self) -> str:
        """What digests are made of: all fields, but types only where they are not the network's."""
        names = (*_GEOMETRY_FIELDS, *(name for name in _GEOMETRY_TYPES if getattr(self, name)))
        return f"ConvGeometry({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def filter_bytes(self, dtype: str) -> int:
        """Bytes of its filters in a network of type `dtype`."""
        if self.weights:
            return stored_bytes(self.weights, self.oc, self.reduction)
        return self.oc * self.reduction * ELEMENT_BYTES[dtype]

    def weight_share(self, dtype: str) -> float:
        """`filter_bytes` over what they are in type `dtype`."""
        return self.filter_bytes(dtype) / (self.oc * self.reduction * ELEMENT_BYTES[dtype])

    @functools.cached_property
    def rows(self) -> RangeMap:
        """Output rows to input rows."""
        return RangeMap(
            extent=self.h,
            window=self.kh,
            stride=self.stride[0],
            dilation=self.dilation[0],
            pad_before=self.padding[0],
            pad_after=self.padding[2],
        )

    @functools.cached_property
    def columns(self) -> RangeMap:
        """Output columns to input columns."""
        return RangeMap(
            extent=self.w,
            window=self.kw,
            stride=self.stride[1],
            dilation=self.dilation[1],
            pad_before=self.padding[1],
            pad_after=self.padding[3],
        )

    @functools.cached_property
    def oh(self) -> int:
        """Output height."""
        return self.rows.output_extent

    @functools.cached_property
    def ow(self) -> int:
        """Output width."""
        return self.columns.output_extent

    @property
    def pixels(self) -> int:
        """Output pixels over the batch: matrix-vector products of the layer."""
        return self.n * self.oh * self.ow

    @property
    def reduction(self) -> int:
        """Products that are summed for one output element: K, the length of a group's im2col vector."""
        return self.c // self.groups * self.kh * self.kw

    @property
    def macs(self) -> int:
        """Multiply-accumulates."""
        return self.pixels * self.oc * self.reduction

    def dense(self, groups_per_matrix: int = 1) -> ConvGeometry:
        """The grouped convolution as a dense one over more images; each weight matrix has
        `groups_per_matrix` groups.

        Image ``m * n + i`` has the `m`-th part of the channels of image `i`, and its own filters. Weights
        between channels of different groups are zero.
        """
        if self.groups == 1:
            return self
        matrices = self.groups // groups_per_matrix
        return replace(self, n=self.n * matrices, c=self.c // matrices, oc=self.oc // matrices, groups=1)

    @property
    def input_elements(self) -> int:
        """Elements of its input."""
        return self.n * self.h * self.w * self.c

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is a group."""
        return self.groups == self.c > 1

    @property
    def is_pointwise(self) -> bool:
        """Whether it is one matrix product that reads its input as it is stored, without im2col."""
        window = (self.kh, self.kw, self.stride, self.groups)
        return window == (1, 1, (1, 1), 1) and not any(self.padding)

    @property
    def with_added_channels(self) -> ConvGeometry:
        """The product that also adds a residual of the result's shape, as additional input channels.

        ``W x + r = [W I] [x; r]``: the weights of these channels are the identity. Only for `is_pointwise`
        layers.
        """
        return replace(self, c=self.c + self.oc)

    def first_rows(self, rows: int) -> ConvGeometry:
        """The convolution of only the first `rows` output rows, over the input rows that they read."""
        return self.row_range(0, rows)

    def row_range(self, begin: int, end: int) -> ConvGeometry:
        """The convolution of only the output rows ``[begin, end)``, over the input rows that they read."""
        part = self.rows.output_part(begin, end)
        _, pad_left, _, pad_right = self.padding
        return replace(self, h=part.extent, padding=(part.pad_before, pad_left, part.pad_after, pad_right))


_GEOMETRY_TYPES = ("weights", "activations")
_GEOMETRY_FIELDS = tuple(f.name for f in dataclasses.fields(ConvGeometry) if f.name not in _GEOMETRY_TYPES)


@dataclass(frozen=True, kw_only=True)
class Product:
    """Matrix products that an operator computes, over any number of axes.

    Attributes
    ----------
    many : int
        Number of products: groups of a convolution, or pairs of matrices.
    m, n, k : int
        Rows, columns and reduction of each product; for a convolution, pixels, output channels, and taps
        times input channels.
    window : int
        Taps of a convolution.
    stride : int
        Largest stride of a convolution.
    weighted : bool
        Whether the second operand is constant.
    second_type : str, optional
        Type in which the second operand is stored (`weight_types.WEIGHT_TYPES`); None for that of the
        network.
    """

    many: int = 1
    m: int
    n: int
    k: int
    window: int = 1
    stride: int = 1
    weighted: bool = False
    second_type: str | None = field(default=None, metadata=OMITTED)

    @property
    def macs(self) -> int:
        """Multiply-accumulates."""
        return self.many * self.m * self.n * self.k

    @property
    def second_elements(self) -> int:
        """Elements of the second operand."""
        return self.many * self.n * self.k

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is a group."""
        return self.many > 1 and self.k == self.window and (self.window > 1 or self.n == 1)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One GPU grid launch after fusion.

    Attributes
    ----------
    kind : str
        ``"gemm"`` (dense or grouped convolution as implicit GEMM, and FC), ``"depthwise"``, ``"stream"``
        (elementwise, pooling, reduction, copies: all that memory bandwidth bounds).
    m, n, k : int
        GEMM sizes per group: output pixels, output channels, reduction; zero for other kinds.
    window : int
        Taps of the convolution window (kh*kw); 1 for pointwise.
    stride : int
        Larger of the two strides.
    operations, multiplications : int
        Operations besides `macs`, and the multiplications among them; both 0 where there is at most one
        operation for each element that it moves.
    input_bytes, weight_bytes, output_bytes : int
        Footprints, each byte once; fused operands such as a residual count as input.
    layers : int
        Number of layers that it computes; a block synchronises its threads between two layers. A layer that
        is computed in chunks counts once for each chunk.
    blocks : int
        Thread blocks that share the work; 0 where the model of the GPU chooses.
    again_bytes : int
        Bytes that further blocks load again, from the L2; the first load of each byte counts in
        `input_bytes` or `weight_bytes`.
    tensor_macs, fragments, moved_fragments, steps : int
        For a tiled kernel: those of `macs` that run on tensor cores; the multiplications of 16 x 16 x 16
        fragments that these take; the fragments that are read or written on chip for them; the steps that a
        block does one after the other.
    tile : tuple of int, optional
        Rows and columns of the tiles of a GEMM, if they are known (then without split-K); if None, the model
        takes the fastest.
    primitive : str
        The convolution primitive that it belongs to; empty for the operator's own kernel.
    weight_share : float
        Bytes of its weights over those in the network's type: below 1 for narrow ones, which it widens as it
        multiplies.
    """

    kind: str
    m: int = 0
    n: int = 0
    k: int = 0
    groups: int = 1
    window: int = 1
    stride: int = 1
    macs: int = 0
    operations: int = 0
    multiplications: int = 0
    input_bytes: int
    weight_bytes: int = 0
    output_bytes: int
    geometry: ConvGeometry | None = None
    layers: int = 1
    blocks: int = 0
    again_bytes: int = 0
    tensor_macs: int = 0
    fragments: int = 0
    moved_fragments: int = 0
    steps: int = 0
    tile: tuple[int, int] | None = None
    primitive: str = ""
    weight_share: float = 1.0

    @property
    def convolution(self) -> ConvGeometry | None:
        """`geometry`; for a matrix product without one, a convolution over one axis with as many products.

        None for a stream, and for kernels of unknown size.
        """
        if self.geometry is not None or self.kind == "stream" or not self.m:
            return self.geometry
        return ConvGeometry(
            n=1,
            h=self.m,
            w=1,
            c=self.groups * (self.k // self.window),
            oc=self.groups * self.n,
            kh=self.window,
            padding=((self.window - 1) // 2, 0, self.window // 2, 0),
            groups=self.groups,
        )


# The smallest kernel: one element, no operands.
EMPTY_KERNEL = Kernel(kind="stream", input_bytes=0, output_bytes=4)


def convolution_kernel(geometry: ConvGeometry, dtype: str, fused_input_bytes: int = 0) -> Kernel:
    """The kernel of one convolution or FC.

    Where the stride skips input pixels, only those that are read count.

    Parameters
    ----------
    fused_input_bytes : int
        Further bytes, which its epilogue reads.
    """
    element, taps = ELEMENT_BYTES[dtype], geometry.kh * geometry.kw
    stride, is_depthwise = max(geometry.stride), geometry.is_depthwise
    pixels = geometry.n * geometry.h * geometry.w
    if stride > max(geometry.kh, geometry.kw):
        pixels = geometry.pixels * taps
    return Kernel(
        kind="depthwise" if is_depthwise else "gemm",
        m=0 if is_depthwise else geometry.pixels,
        n=0 if is_depthwise else geometry.oc // geometry.groups,
        k=0 if is_depthwise else geometry.reduction,
        groups=1 if is_depthwise else geometry.groups,
        window=taps,
        stride=stride,
        macs=geometry.macs,
        input_bytes=pixels * geometry.c * element + fused_input_bytes,
        weight_bytes=geometry.filter_bytes(dtype),
        weight_share=geometry.weight_share(dtype),
        output_bytes=geometry.pixels * geometry.oc * element,
        geometry=geometry,
    )
