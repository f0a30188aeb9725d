"""A network as layers over NHWC tensors; a layer has the range map of every axis of every operand."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from pimflow.core.ranges import RangeMap

Shape = tuple[int, int, int, int]
AXES = ("n", "h", "w", "c")
Maps = tuple[RangeMap, ...]

# The rows of the paper's Table 1, in its order, and kinds of other networks.
KINDS = (
    "convolution", "batch_norm", "scale", "relu", "pooling", "eltwise", "inner_product", "softmax",
    "lrn", "concat", "pad", "other",
)  # fmt: skip


def elementwise_maps(shape: Shape) -> Maps:
    """Maps of an elementwise layer."""
    return tuple(map(RangeMap.same, shape))


def full_maps(shape: Shape, result: Shape) -> Maps:
    """Maps of an operand of which every result reads all elements."""
    return tuple(map(RangeMap.whole, shape, result))


def broadcast_maps(shape: Shape, result: Shape) -> Maps:
    """Maps of an elementwise operand whose axes of length 1 are repeated.

    `full_maps` if other axes differ.
    """
    if any(a not in (1, b) for a, b in zip(shape, result)):
        return full_maps(shape, result)
    return tuple(RangeMap.same(a) if a == b else RangeMap.whole(a, b) for a, b in zip(shape, result))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a network; its result has its name.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    maps : tuple of tuple of RangeMap
        For each operand, the ranges that a range of the result reads along n, h, w and c.
    filters : int
        Number of pieces that weights can be loaded in, one after the other: output channels.
    macs : int
        Multiply-accumulates of convolutions and products.
    operations : int
        Arithmetic operations; 2 for a multiply-accumulate.
    is_in_place : bool
        Whether each element of the result reads only the same element of the operands.
    is_view : bool
        Whether the unfused layer moves nothing, since its operands are parts of its result.
    extra_output_elements : int
        Elements that are stored besides the result, fused or not.
    extra_output : str
        The tensor of these elements, if other layers read it; they are not in a group with this layer.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    maps: tuple[Maps, ...]
    weight_elements: int = 0
    filters: int = 1
    macs: int = 0
    operations: int = 0
    is_in_place: bool = False
    is_view: bool = False
    extra_output_elements: int = 0
    extra_output: str = ""

    @property
    def output_names(self) -> tuple[str, ...]:
        """The result, and the extra output if others read it."""
        return (self.name, self.extra_output) if self.extra_output else (self.name,)

    @property
    def filter_elements(self) -> int:
        """Number of weights of one piece."""
        return -(-self.weight_elements // self.filters)


@dataclass(frozen=True, kw_only=True)
class LayerGraph:
    """Layers in an order in which they can run.

    Attributes
    ----------
    shapes : mapping of str to tuple of int
        NHWC shape of every input and result.
    """

    name: str
    layers: tuple[Layer, ...]
    shapes: Mapping[str, Shape]
    outputs: tuple[str, ...]

    def elements(self, tensor: str) -> int:
        """Number of elements of a tensor."""
        return math.prod(self.shapes[tensor])

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """By tensor, the position of the layer that computes it."""
        return {name: position for position, layer in enumerate(self.layers) for name in layer.output_names}

    @functools.cached_property
    def readers(self) -> dict[str, tuple[int, ...]]:
        """By tensor, ascending positions of the layers that read it."""
        readers: dict[str, list[int]] = {name: [] for name in self.shapes}
        for position, layer in enumerate(self.layers):
            for name in dict.fromkeys(layer.inputs):
                readers[name].append(position)
        return {name: tuple(positions) for name, positions in readers.items()}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Tensors that a layer reads and none computes."""
        return tuple(name for name in self.shapes if name not in self.index and self.readers[name])

    def traffic_elements(self, layer: Layer) -> int:
        """Elements that an unfused layer reads and writes: each operand once, weights, the result."""
        if layer.is_view:
            return 0
        read = sum(self.elements(name) for name in dict.fromkeys(layer.inputs))
        return read + layer.weight_elements + self.elements(layer.name) + layer.extra_output_elements

    def is_stored(self, tensor: str, members: Container[int]) -> bool:
        """Whether a group with the layers at positions `members` has to store a tensor that it computes."""
        readers = self.readers[tensor]
        return tensor in self.outputs or not readers or any(reader not in members for reader in readers)

    @functools.cached_property
    def sources(self) -> tuple[frozenset[int], ...]:
        """By position of a layer, the positions of the layers whose results it reads."""
        return tuple(
            frozenset(self.index[name] for name in layer.inputs if name in self.index)
            for layer in self.layers
        )

    def ancestors(self, positions: Sequence[int]) -> set[int]:
        """Positions of all other layers that these layers depend on."""
        ancestors: set[int] = set()
        queue = list(positions)
        while queue:
            new_sources = self.sources[queue.pop()] - ancestors - set(positions)
            ancestors |= new_sources
            queue += new_sources
        return ancestors

    def with_order(self, positions: Sequence[int]) -> LayerGraph:
        """The same layers in another order in which they can run."""
        if list(positions) == list(range(len(self.layers))):
            return self
        return replace(self, layers=tuple(self.layers[position] for position in positions))

    @property
    def ideal_elements(self) -> int:
        """Elements that move even if all layers are fused: inputs, weights, outputs."""
        ends = sum(self.elements(name) for name in (*self.inputs, *dict.fromkeys(self.outputs)))
        return ends + sum(layer.weight_elements + layer.extra_output_elements for layer in self.layers)
