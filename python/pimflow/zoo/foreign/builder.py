"""Nodes that replace a node of an ONNX network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from pimflow.errors import UnsupportedOpError


class NodeBuilder:
    """Nodes and constants that replace a node; their names begin with its name."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    @property
    def first_name(self) -> str:
        """The name of the first node."""
        return f"{self.prefix}.0"

    def emit(self, op: str, operands: Sequence[str], domain: str = "", **attrs: Any) -> str:
        """Add a node of one result; returns the name of the result, which is that of the node too."""
        return self.emit_tuple(op, operands, 1, domain, **attrs)[0]

    def emit_tuple(
        self, op: str, operands: Sequence[str], results: int, domain: str = "", **attrs: Any
    ) -> list[str]:
        """Add a node of several results; returns their names."""
        name = f"{self.prefix}.{len(self.nodes)}" if self.nodes else self.first_name
        names = [name] if results == 1 else [f"{name}.result{index}" for index in range(results)]
        self.nodes.append(helper.make_node(op, operands, names, name, domain=domain, **attrs))
        return names

    def constant(self, array: Any) -> str:
        """Add a constant; returns its name."""
        name = f"{self.prefix}.constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def scalar(self, value: float) -> str:
        """Add a constant number in fp32; returns its name."""
        return self.constant(np.float32(value))

    def reshape(self, value: str, dims: Sequence[int]) -> str:
        """Give `value` the shape `dims`."""
        return self.emit("Reshape", [value, self.constant(np.array(dims, "int64"))])

    def move_axes(self, value: str, order: Sequence[int]) -> str:
        """Transpose `value`; axes in their own order stay."""
        return value if list(order) == sorted(order) else self.emit("Transpose", [value], perm=list(order))

    def split(self, value: str, sizes: Sequence[int], axis: int) -> list[str]:
        """Split `value` in parts of `sizes`; one part is the value itself."""
        if len(sizes) == 1:
            return [value]
        return self.emit_tuple("Split", [value, self.constant(np.array(sizes))], len(sizes), axis=axis)

    def concat(self, values: Sequence[str], axis: int) -> str:
        """Concatenate `values`; one value stays as it is."""
        return values[0] if len(values) == 1 else self.emit("Concat", values, axis=axis)

    def bind(self, value: str, result: str) -> None:
        """Let `value` be `result`, a name that the rest of the network reads."""
        self.nodes.append(helper.make_node("Identity", [value], [result], f"{self.prefix}.{result}"))


@dataclass(frozen=True, kw_only=True)
class ExpandedNode:
    """A node that others replace, with what its expansion has to know.

    Attributes
    ----------
    shapes : mapping of str to list of int
        Shapes of tensors, where they are known; sizes that are open are 0.
    kinds : mapping of str to int
        Element types of tensors, where they are known.
    opset : int
        Version of ONNX's own operators in the network.
    """

    proto: onnx.NodeProto
    builder: NodeBuilder
    weights: Mapping[str, onnx.TensorProto]
    shapes: Mapping[str, list[int]]
    kinds: Mapping[str, int]
    opset: int

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes that are set, by name."""
        return {entry.name: helper.get_attribute_value(entry) for entry in self.proto.attribute}

    def operand(self, index: int) -> str:
        """The name of an operand; empty if it is missing."""
        return self.proto.input[index] if index < len(self.proto.input) else ""

    def result(self, index: int) -> str:
        """The name of a result; empty if nobody asks for it."""
        return self.proto.output[index] if index < len(self.proto.output) else ""

    def value(self, index: int) -> np.ndarray:
        """The value of a constant operand; raises `UnsupportedOpError` if it is computed."""
        name = self.operand(index)
        if name not in self.weights:
            raise self.unsupported(f"with a computed operand '{name}' is not supported; make it a constant")
        return numpy_helper.to_array(self.weights[name])

    def shape(self, index: int) -> list[int]:
        """The shape of an operand; raises `UnsupportedOpError` if its rank is unknown."""
        name = self.operand(index)
        if name in self.weights:
            return list(self.weights[name].dims)
        if name not in self.shapes:
            raise self.unsupported(f"of operand '{name}' of unknown rank is not supported")
        return self.shapes[name]

    def kind(self, index: int) -> int:
        """The element type of an operand; raises `UnsupportedOpError` if it is unknown."""
        name = self.operand(index)
        if name in self.weights:
            return self.weights[name].data_type
        if name not in self.kinds:
            raise self.unsupported(f"of operand '{name}' of unknown type is not supported")
        return self.kinds[name]

    def rank(self, index: int) -> int:
        """The number of dimensions of an operand; raises `UnsupportedOpError` if it is unknown."""
        return len(self.shape(index))

    def reduce(self, op: str, x: str, axes: Sequence[int], keepdims: int = 1) -> str:
        """Add a reduction of `x`, whose axes are an attribute or an operand by the opset."""
        if self.opset < (13 if op == "ReduceSum" else 18):
            axes_attribute = {"axes": list(axes)} if axes else {}
            return self.builder.emit(op, [x], keepdims=keepdims, **axes_attribute)
        operands = [x, self.builder.constant(np.array(axes, "int64"))] if axes else [x]
        return self.builder.emit(op, operands, keepdims=keepdims)

    def bind(self, value: str, index: int = 0) -> None:
        """Let `value` be a result, if anybody asks for it."""
        if self.result(index):
            self.builder.bind(value, self.result(index))

    def refuse(self, *names: str, beyond: int = 10**9) -> None:
        """Raise `UnsupportedOpError` for attributes that are set, and for operands from `beyond` on."""
        for name in names:
            if self.attrs.get(name, 0) not in (0, -1, 0.0, b""):
                raise self.unsupported(f"with attribute '{name}' is not supported")
        for index in range(beyond, len(self.proto.input)):
            if self.operand(index):
                raise self.unsupported(f"with operand {index} is not supported")

    def unsupported(self, reason: str) -> UnsupportedOpError:
        """The error for what cannot be expanded."""
        return UnsupportedOpError(f"'{self.proto.name}': {self.proto.op_type} {reason}")
