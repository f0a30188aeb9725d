"""Regions: the layers that the search places, with what is one kernel with them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pimflow.core.attention import Attention
from pimflow.core.kernel import ELEMENT_BYTES, ConvGeometry, Product
from pimflow.core.typed_values import from_fields

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
