"""A network as layers over NHWC tensors, each with the range map of every axis of every operand."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from pimflow.core.ranges import RangeMap

Shape = tuple[int, int, int, int]
AXES = ("n", "h", "w", "c")
Maps = tuple[RangeMap, RangeMap, RangeMap, RangeMap]

# Table 1's rows, in its order, and what other networks add.
KINDS = (
    "convolution", "batch_norm", "scale", "relu", "pooling", "eltwise", "inner_product", "softmax",
    "lrn", "concat", "pad", "other",
)  # fmt: skip


def same(shape: Shape) -> Maps:
    """Maps of an elementwise layer."""
    return tuple(map(RangeMap.same, shape))


def whole(shape: Shape, result: Shape) -> Maps:
    """Maps of an operand of which every result needs everything."""
    return tuple(map(RangeMap.whole, shape, result))


def broadcast(shape: Shape, result: Shape) -> Maps:
    """Maps of an elementwise operand whose axes of length 1 are repeated; `whole` where others differ."""
    if any(a not in (1, b) for a, b in zip(shape, result)):
        return whole(shape, result)
    return tuple(RangeMap.same(a) if a == b else RangeMap.whole(a, b) for a, b in zip(shape, result))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One step of a network; its result carries its name.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    inputs : tuple of str
        Tensors that it reads.
    maps : tuple of tuple of RangeMap
        For each of them, what a range of the result reads along n, h, w and c.
    filters : int
        Pieces that its weights can be loaded in one after the other: output channels.
    macs : int
        Multiply-accumulates of convolutions and products.
    operations : int
        Arithmetic operations; 2 for a multiply-accumulate.
    in_place : bool
        Whether each element of the result needs just that element of the operands.
    view : bool
        Whether it moves nothing where it is no part of a group: its operands lie inside its result.
    kept_elements : int
        Written beside the result, fused or not.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    maps: tuple[Maps, ...]
    weight_elements: int = 0
    filters: int = 1
    macs: int = 0
    operations: int = 0
    in_place: bool = False
    view: bool = False
    kept_elements: int = 0

    @property
    def filter_elements(self) -> int:
        """Weights of one piece."""
        return -(-self.weight_elements // self.filters)


@dataclass(frozen=True, kw_only=True)
class LayerGraph:
    """Layers in an order in which they can run.

    Attributes
    ----------
    shapes : mapping of str to tuple of int
        NHWC shape of every tensor: inputs and results.
    """

    name: str
    layers: tuple[Layer, ...]
    shapes: Mapping[str, Shape]
    outputs: tuple[str, ...]

    def elements(self, tensor: str) -> int:
        return math.prod(self.shapes[tensor])

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Position of the layer that makes a tensor."""
        return {layer.name: position for position, layer in enumerate(self.layers)}

    @functools.cached_property
    def readers(self) -> dict[str, tuple[int, ...]]:
        """Positions of the layers that read a tensor, ascending."""
        readers: dict[str, list[int]] = {name: [] for name in self.shapes}
        for position, layer in enumerate(self.layers):
            for name in dict.fromkeys(layer.inputs):
                readers[name].append(position)
        return {name: tuple(positions) for name, positions in readers.items()}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Tensors that no layer makes and some layer reads."""
        return tuple(name for name in self.shapes if name not in self.index and self.readers[name])

    def moved_elements(self, layer: Layer) -> int:
        """Elements that a layer by itself reads and writes: operands once each, weights, the result."""
        if layer.view:
            return 0
        read = sum(self.elements(name) for name in dict.fromkeys(layer.inputs))
        return read + layer.weight_elements + self.elements(layer.name) + layer.kept_elements

    def stored(self, tensor: str, members: Container[int]) -> bool:
        """Whether a group of the layers at these positions has to store a tensor that it makes."""
        readers = self.readers[tensor]
        return tensor in self.outputs or not readers or any(each not in members for each in readers)

    @functools.cached_property
    def sources(self) -> tuple[frozenset[int], ...]:
        """By position, the layers that a layer reads."""
        return tuple(
            frozenset(self.index[name] for name in layer.inputs if name in self.index)
            for layer in self.layers
        )

    def ancestors(self, positions: Sequence[int]) -> set[int]:
        """Layers outside that these depend on, directly or not."""
        ancestors, left = set(), list(positions)
        while left:
            more = self.sources[left.pop()] - ancestors - set(positions)
            ancestors |= more
            left += more
        return ancestors

    def ordered(self, positions: Sequence[int]) -> LayerGraph:
        """The same layers in another order in which they can run; itself for its own."""
        if list(positions) == list(range(len(self.layers))):
            return self
        return replace(self, layers=tuple(self.layers[position] for position in positions))

    @property
    def ideal_elements(self) -> int:
        """Elements that have to move if every layer were fused: inputs, weights, outputs."""
        ends = sum(self.elements(name) for name in (*self.inputs, *dict.fromkeys(self.outputs)))
        return ends + sum(layer.weight_elements + layer.kept_elements for layer in self.layers)
