"""Regions: the layers that the search places, the graph of them, and the GPU kernels that they become."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from pimflow.core.attention import Attention
from pimflow.core.json_form import OMITTED
from pimflow.core.liveness import BufferUses, Liveness
from pimflow.core.ranges import RangeMap
from pimflow.core.typed_values import from_fields, has_type
from pimflow.errors import UnknownNameError
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
# Operators that read parts of tensors, or concatenate them.
GATHERS = ("concat", "strided_slice")

# Operators that move elements: the rows of their operand are not those of their result.
MOVES = ("reshape", "permute_dims", "expand_dims", "squeeze", "broadcast_to", "astype", "nn.pad")

# Gives a tensor another shape without moving data: no kernel. Passes know which operators of a file mean it.
RESHAPE = "reshape"

# Writes new tokens into a cache in place.
APPEND = "append"

# Suffix of a region that is only the concatenation in front of another region, whose name it has.
CONCAT_SUFFIX = ".concat"
ROLES = ("", "fconv", "core", "lconv", "skip")


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


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """What follows the product of a layer in the same kernel.

    Attributes
    ----------
    operators : tuple of str
        Bias, residual add, activation, in order.
    clip_bounds : tuple of tuple of float
        Lower and upper bound of each ``clip`` among them, in order.
    """

    operators: tuple[str, ...] = ()
    clip_bounds: tuple[tuple[float, float], ...] = ()

    @property
    def arithmetic(self) -> tuple[str, ...]:
        """The operators that compute: without reshapes."""
        return tuple(operator for operator in self.operators if operator != RESHAPE)


@dataclass(frozen=True, kw_only=True)
class KernelShape:
    """What the GPU's model prices of a region, beside its tensors and its convolution.

    Attributes
    ----------
    has_anchor : bool
        False if every operator is elementwise or moves data.
    fusible_inputs : tuple of int
        Positions of those inputs whose deferred epilogue the kernel can apply as it reads them, if no earlier
        region reads them.
    weight_elements, unread_weight_elements : int
        Elements of constants, and those that it does not read: a look-up reads the rows that it is asked for.
    extra_output_elements : int
        Elements of extra outputs: tensors before its anchor that other regions read too.
    workspace_elements : int
        Elements of prologue results that schedules store in a workspace while the kernel runs, such as an
        activation after a batch norm. Schedules recompute cheap operators instead.
    append_elements : int
        Elements that a region whose operator is `APPEND` writes into its first input, which its result is.
    pooling : ConvGeometry, optional
        The window of a pooling, as the geometry of a depthwise convolution.
    product : Product, optional
        The largest matrix product of a kernel without convolution: of two computed tensors, or a convolution
        over one or three axes.
    operations, multiplications : int
        Other operations of a kernel without convolution (additions, comparisons, elementwise functions), and
        the multiplications and divisions among them.
    parts : tuple of Region
        The kernels that a GPU launches for attention, in order.
    """

    has_anchor: bool = True
    fusible_inputs: tuple[int, ...] = (0,)
    weight_elements: int = 0
    unread_weight_elements: int = 0
    extra_output_elements: int = 0
    workspace_elements: int = 0
    append_elements: int = 0
    pooling: ConvGeometry | None = None
    product: Product | None = None
    operations: int = 0
    multiplications: int = 0
    integers: bool = False
    parts: tuple[Region, ...] = ()

    @property
    def read_weight_elements(self) -> int:
        """Elements of constants that the kernel reads."""
        return self.weight_elements - self.unread_weight_elements


@dataclass(frozen=True, kw_only=True)
class PimShape:
    """What GPU kernels do before PIM computes the convolution or attention of a region.

    Attributes
    ----------
    prologue_kernels : int
        Kernels of the prologue; 0 if it only reshapes.
    padding_copy_reason : str
        Why padding the input by rows of zeros needs a copy of it; empty if no copy is needed.
    """

    prologue_kernels: int = 1
    padding_copy_reason: str = ""


# By key of a region in files, in their order, the field with its value; those of a part are "part.field".
_FIELD_BY_KEY = {
    "name": "name", "operator": "operator", "operators": "operators", "geometry": "geometry",
    "prologue": "prologue", "prologue_kernels": "pim.prologue_kernels", "epilogue": "epilogue.operators",
    "inputs": "inputs", "input_shapes": "input_shapes", "operands": "operands",
    "kept_inputs": "extra_inputs", "taken_inputs": "kernel.fusible_inputs", "output_shape": "output_shape",
    "weight_elements": "kernel.weight_elements", "kept_elements": "kernel.extra_output_elements",
    "workspace_elements": "kernel.workspace_elements", "anchored": "kernel.has_anchor", "view": "is_view",
    "padding_copied": "pim.padding_copy_reason", "role": "role", "pooling": "kernel.pooling",
    "product": "kernel.product", "operations": "kernel.operations",
    "multiplications": "kernel.multiplications", "attention": "attention", "parts": "kernel.parts",
    "appended_elements": "kernel.append_elements", "clipped": "epilogue.clip_bounds",
    "unread_weight_elements": "kernel.unread_weight_elements",
}  # fmt: skip
# Keys on which `RegionGraph.digest` does not depend; attention is a part of its own there.
_KEYS_BESIDE_DIGEST = {
    *("prologue_kernels", "taken_inputs", "workspace_elements", "product", "operations", "multiplications"),
    *("attention", "parts", "appended_elements", "clipped", "unread_weight_elements"),
}


@dataclass(frozen=True, kw_only=True)
class Region:
    """A layer with the operators that are fused into its kernel: the unit that the search places.

    Attributes
    ----------
    name : str
        Name of the ONNX node it came from.
    role : str
        One of `ROLES`; only a decomposition sets it.
    operator : str
        Its anchor: ``conv2d``, ``depthwise``, ``grouped``, ``fc``, ``attention``; else the name of its first
        operator.
    is_view : bool
        True for a region without a kernel: a slice that lies inside its operand, a concatenation whose
        operands lie inside it, or a tensor in another shape.
    geometry : ConvGeometry, optional
        Geometry of the convolution or FC; None for other operators.
    attention : Attention, optional
        What a region whose operator is attention computes. Its inputs are Q, K and V, then a mask and
        positions; if the prologue computes Q, its operands come last.
    inputs : tuple of str
        Regions that produce what it reads, or ``"%name"`` for graph inputs: the anchor's operands first, then
        the epilogue's.
    operands : int
        Number of `inputs` that the anchor reads, directly or through its prologue.
    extra_inputs : tuple of int
        Positions of those `inputs` that are not the result of a region, but an extra output
        (`KernelShape.extra_output_elements`).
    prologue : tuple of str
        Operators before the convolution, such as the layout transform of a network's input.
    """

    name: str
    role: str = ""
    operator: str
    operators: tuple[str, ...]
    is_view: bool = False
    geometry: ConvGeometry | None = None
    attention: Attention | None = None
    inputs: tuple[str, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    operands: int = 1
    extra_inputs: tuple[int, ...] = ()
    output_shape: tuple[int, ...]
    prologue: tuple[str, ...] = ()
    epilogue: Epilogue = Epilogue()
    kernel: KernelShape = KernelShape()
    pim: PimShape = PimShape()

    @classmethod
    def from_table(cls, plain: Mapping[str, Any]) -> Region:
        """The inverse of `to_table`; raises `TypeError` for keys that are missing or unknown."""
        if not (isinstance(plain, Mapping) and plain.keys() <= _FIELD_BY_KEY.keys()):
            raise TypeError("not the keys of a region")
        fields: dict[str, Any] = {"epilogue": {}, "kernel": {}, "pim": {}}
        for key, value in plain.items():
            part, _, field = _FIELD_BY_KEY[key].rpartition(".")
            (fields[part] if part else fields)[field] = value
        return from_fields(cls, fields)

    def to_table(self) -> dict[str, Any]:
        """The region as one flat object of JSON, as `regions.json` has it."""
        return {key: attrgetter(field)(self) for key, field in _FIELD_BY_KEY.items()}

    def __repr__(self) -> str:
        """What a plan depends on: `RegionGraph.digest` is made of this text."""
        table = self.to_table().items()
        fields = (f"{key}={value!r}" for key, value in table if key not in _KEYS_BESIDE_DIGEST)
        return f"Region({', '.join(fields)})"

    @property
    def layer(self) -> ConvGeometry:
        """`geometry` of a region that must be a convolution or FC."""
        assert self.geometry is not None, f"'{self.name}' is neither a convolution nor FC"
        return self.geometry

    @property
    def macs(self) -> int:
        """Multiply-accumulates of its convolution, matrix product or attention; 0 if it is none of these."""
        products = self.geometry or self.attention or self.kernel.product
        return products.macs if products else 0

    def weight_bytes(self, dtype: str, filter_bytes: int | None = None) -> int:
        """Bytes of its weights in a network of type `dtype`, `filter_bytes` of them filters.

        By default, filters take as much as in the network; narrow ones are of a type of their own.
        """
        filters = 0
        if self.geometry is None:
            filter_bytes = 0
        else:
            filters = self.geometry.oc * self.geometry.reduction
            filter_bytes = self.geometry.filter_bytes(dtype) if filter_bytes is None else filter_bytes
        return (self.kernel.weight_elements - filters) * ELEMENT_BYTES[dtype] + filter_bytes

    @property
    def late_operands(self) -> tuple[str, ...]:
        """Operands that only the epilogue of a layer reads, such as a residual."""
        is_late = self.geometry is not None and self.epilogue.operators and not self.prologue
        return tuple(name for name in self.inputs[1:] if name != self.inputs[0]) if is_late else ()

    @functools.cached_property
    def overwritable_inputs(self) -> tuple[str, ...]:
        """Those of `inputs` that its GPU kernel may write its result over, if nothing else reads them later.

        The epilogue reads each element of them only to compute the element of the result with the same index.
        """
        if (
            self.attention is not None
            or not self.kernel.has_anchor
            or not set(MOVES).isdisjoint(self.epilogue.operators)
        ):
            return ()
        return tuple(
            name
            for position, (name, shape) in enumerate(zip(self.inputs, self.input_shapes, strict=True))
            if position >= self.operands and shape == self.output_shape
            if self.inputs.count(name) == 1 and position not in self.extra_inputs
        )

    @property
    def attention_layer(self) -> Attention:
        """`attention` of a region that must be attention."""
        assert self.attention is not None, f"'{self.name}' is no attention"
        return self.attention

    @property
    def append_position(self) -> str:
        """The input that says where in the cache an `APPEND` writes the tokens."""
        return self.inputs[-1]

    @property
    def output_elements(self) -> int:
        """Elements of its result."""
        return math.prod(self.output_shape)

    @functools.cached_property
    def input_elements(self) -> tuple[int, ...]:
        """Elements of each of `inputs`."""
        return tuple(math.prod(shape) for shape in self.input_shapes)

    @functools.cached_property
    def result_inputs(self) -> tuple[str, ...]:
        """Those of `inputs` that are results of regions, or graph inputs."""
        return tuple(name for i, name in enumerate(self.inputs) if i not in self.extra_inputs)

    @property
    def has_prologue_kernels(self) -> bool:
        """Whether GPU kernels do its prologue where PIM does the anchor."""
        return bool(self.prologue and self.pim.prologue_kernels)

    @property
    def first_result_input(self) -> str:
        """The first of `inputs`; empty if that is an extra output."""
        return "" if 0 in self.extra_inputs or not self.inputs else self.inputs[0]


@dataclass(frozen=True, kw_only=True)
class RegionGraph:
    """A network as regions, in execution order.

    Attributes
    ----------
    runs : tuple of tuple of str
        Chains of regions that may be one kernel on the GPU.
    fusible : tuple of str
        Regions that may be fused with their neighbours into one tiled kernel.
    extra_outputs : tuple of str
        Those of `outputs` whose extra output the network returns, not their result.
    """

    name: str
    regions: tuple[Region, ...]
    outputs: tuple[str, ...]
    runs: tuple[tuple[str, ...], ...] = ()
    fusible: tuple[str, ...] = ()
    extra_outputs: tuple[str, ...] = ()

    @classmethod
    def from_table(cls, plain: Mapping[str, Any]) -> RegionGraph:
        """The inverse of `to_table`, for untrusted data; raises `TypeError` or `ValueError`."""
        fields = dict(plain)
        graph = from_fields(cls, fields | {"extra_outputs": fields.pop("kept_outputs", ())})
        if not has_type(graph, cls):
            raise TypeError("not of the types of a graph of regions")
        graph.require_order()
        return graph

    def to_table(self) -> dict[str, Any]:
        """The graph as an object of JSON, as `regions.json` has it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"kept_outputs": fields.pop("extra_outputs")}

    def require_order(self) -> None:
        """Raise `ValueError` unless every region reads only earlier regions and inputs of the graph."""
        earlier: set[str] = set()
        for region in self.regions:
            read = {name for name in region.inputs if not name.startswith("%")}
            if (
                not read <= earlier
                or region.name in earlier
                or len(region.inputs) != len(region.input_shapes)
            ):
                raise ValueError(f"region '{region.name}' reads an unknown tensor")
            earlier.add(region.name)
        runs = {name for run in self.runs for name in run}
        if not {*self.outputs, *self.extra_outputs, *self.fusible} | runs <= earlier:
            raise ValueError("names of unknown regions")

    def region(self, name: str) -> Region:
        """The region of that name; raises `UnknownNameError` if there is none."""
        if name not in self._region_by_name:
            raise UnknownNameError("region", name, self._region_by_name)
        return self._region_by_name[name]

    @functools.cached_property
    def _region_by_name(self) -> dict[str, Region]:
        return {region.name: region for region in self.regions}

    @functools.cached_property
    def consumers(self) -> dict[str, tuple[str, ...]]:
        """By region, the regions that read its result."""
        return self._readers_by_region({region.name: region.result_inputs for region in self.regions})

    @functools.cached_property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """By region, the regions that read its result or its second tensor, once for each read."""
        return self._readers_by_region({region.name: region.inputs for region in self.regions})

    @functools.cached_property
    def last_readers(self) -> dict[str, str]:
        """By region that is read, the last region that reads it."""
        return {name: readers[-1] for name, readers in self.readers.items() if readers}

    def returns_result(self, name: str) -> bool:
        """Whether the network returns the result of a region, not only its extra output."""
        return name in self.outputs and name not in self.extra_outputs

    def is_shared(self, name: str) -> bool:
        """Whether the result of a region is needed more than once: by regions, or as an output."""
        return len(self.consumers[name]) + self.returns_result(name) > 1

    def _readers_by_region(self, reads: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        readers: dict[str, list[str]] = {region.name: [] for region in self.regions}
        for reader, names in reads.items():
            for name in names:
                if name in readers:
                    readers[name].append(reader)
        return {name: tuple(region_readers) for name, region_readers in readers.items()}

    def tensor_bytes(self, dtype: str) -> dict[str, int]:
        """Bytes of the graph's inputs, and of the regions' results together with their extra outputs."""
        element = ELEMENT_BYTES[dtype]
        sizes = {r.name: (r.output_elements + r.kernel.extra_output_elements) * element for r in self.regions}
        for region in self.regions:
            for name, elements in zip(region.inputs, region.input_elements):
                if name.startswith("%"):
                    sizes[name] = elements * element
        return sizes

    def buffer_uses(self, dtype: str) -> BufferUses:
        """Uses of the regions' results and the graph's inputs; each region is one step.

        Views take no bytes: a region that reads a view reads the tensor that the view lies inside, or all
        parts of a concatenation, which share the bytes of the whole.
        """
        tensor_bytes = self.tensor_bytes(dtype)
        inputs = [name for name in tensor_bytes if name.startswith("%")]
        size_bytes, aliases = dict(tensor_bytes), dict[str, str]()
        steps: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        storage: dict[str, tuple[str, ...]] = {name: (name,) for name in inputs}
        for region in self.regions:
            name = region.name
            reads = tuple(
                dict.fromkeys(buffer for input_name in region.inputs for buffer in storage[input_name])
            )
            steps.append((reads, (name,)))
            storage[name] = (*reads, name) if region.is_view else (name,)
            if region.operator == APPEND:
                storage[name] = storage[region.inputs[0]]
            if region.is_view or region.operator == APPEND:
                size_bytes[name] = 0
            if region.is_view and region.operator == "concat":
                parts = [buffer for buffer in reads if size_bytes[buffer]]
                aliases |= dict.fromkeys(parts, name)
                size_bytes |= dict.fromkeys(parts, sum(tensor_bytes[part] for part in region.inputs))
        outputs = tuple(dict.fromkeys(buffer for name in self.outputs for buffer in storage[name]))
        return BufferUses(
            steps=steps, size_bytes=size_bytes, inputs=tuple(inputs), outputs=outputs, aliases=aliases
        )

    def liveness(self, dtype: str) -> Liveness:
        """Lifetimes of `buffer_uses`."""
        uses = self.buffer_uses(dtype)
        lifetimes = Liveness.from_steps(uses.steps, uses.size_bytes, inputs=uses.inputs, outputs=uses.outputs)
        return lifetimes.with_aliases(uses.aliases)

    @functools.cached_property
    def digest(self) -> str:
        """Hash of everything that a plan depends on: names, shapes, order. Weights do not matter."""
        attention = [region.attention for region in self.regions if region.attention is not None]
        identity = (self.regions, self.outputs, self.extra_outputs, *attention)
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
