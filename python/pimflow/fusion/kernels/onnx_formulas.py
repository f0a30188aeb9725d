"""Formulas of the layers of an ONNX network: each node as Relax operators over maps.

A layer of `fusion` says what is read; here is what is done with it, and the values of its weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from tvm import relax
from tvm.relax import op

from pimflow.errors import UnsupportedOpError
from pimflow.fusion import LayerGraph
from pimflow.fusion.kernels.formula import LOWEST, Computation, Formula, no_weights
from pimflow.fusion.kernels.reductions import response_normalisation, softmax
from pimflow.fusion.kernels.relax_formulas import read_layer
from pimflow.fusion.layers import Shape
from pimflow.relay_passes import flat
from pimflow.zoo.nodes import VIEWS, attributes, constant_nodes


def computations(model: onnx.ModelProto, graph: LayerGraph) -> dict[str, Computation]:
    """By layer of ``unfolded(model)``; `model` has its values.

    Raises
    ------
    UnsupportedOpError
        Naming the first layer for which there is no formula.
    """
    values = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    numbers = {name: onnx.numpy_helper.to_array(each) for name, each in constant_nodes(model.graph).items()}
    values |= {name: value.reshape(()) for name, value in numbers.items() if value.size == 1}
    by_layer: dict[str, Computation] = {}
    for node in model.graph.node:
        if node.output[0] in graph.index and node.op_type not in VIEWS:
            by_layer |= _Maps(node, graph, values).computations()
    for layer in graph.layers:
        if by_layer[layer.name].weights.size != layer.weight_elements:
            raise UnsupportedOpError(
                f"layer '{layer.name}': its {layer.weight_elements} constants are not those of its formula, "
                f"{by_layer[layer.name].weights.size}; it cannot be executed fused"
            )
    return by_layer


class _Maps:
    """A node as what is emitted of variables for its operands, which are NHWC maps, and of constants."""

    def __init__(self, node: onnx.NodeProto, graph: LayerGraph, values: Mapping[str, np.ndarray]) -> None:
        self.type, self.name, self.attributes = node.op_type, node.output[0], attributes(node)
        self.maps, self.shape = graph.layers[graph.index[self.name]].maps, graph.shapes[self.name]
        first = graph.layers[graph.index.get(f"{self.name}.normalised", graph.index[self.name])]
        self.operands = [self.variable(graph.shapes[source]) for source in first.inputs]
        given = [name for name in node.input if name and name not in values]
        if len(given) != len(self.operands):
            raise self.refuse("an operand is computed from constants")
        made = dict(enumerate(self.operands))
        places = iter(range(len(given)))
        self.inputs: list[Any] = [
            None if not name else values[name] if name in values else made[next(places)]
            for name in node.input
        ]
        self.builder, self.bindings = relax.BlockBuilder(), list[relax.VarBinding]()

    def refuse(self, why: str) -> UnsupportedOpError:
        """The error for a layer that has no formula."""
        return UnsupportedOpError(f"layer '{self.name}' ({self.type}): {why}; it cannot be executed fused")

    @staticmethod
    def variable(dims: Shape) -> relax.Var:
        return relax.Var("map", relax.TensorType(dims, "float32"))

    def emit(self, value: relax.Expr) -> relax.Var:
        """The variable that holds `value`."""
        value = self.builder.normalize(value)
        self.bindings.append(relax.VarBinding(relax.Var("map", value.ty), value))
        return self.bindings[-1].var

    def term(self, value: relax.Var | np.ndarray) -> relax.Expr:
        """An operand of something elementwise: a constant is a number, or one for each channel."""
        shape, channels = self.shape, self.shape[3]
        if isinstance(value, relax.Var):
            if any(size not in (1, full) for size, full in zip(flat.shape(value), shape)):
                raise self.refuse("its operand is reshaped")
            return value
        if value.size == 1:
            return relax.const(value.item())
        axis = -1 if shape[1:3] == (1, 1) else -3  # of channels, in the file
        if value.ndim < -axis or value.shape[axis] != value.size or value.size != channels:
            raise self.refuse("its constant has a shape of its own")
        return vector(value)

    def computations(self) -> dict[str, Computation]:
        """By layer: the node's own, and of a batch norm the one before it."""
        if self.type in _FORMULAS:
            return {self.name: Computation(formulas=(_FORMULAS[self.type](self),), weights=no_weights())}
        if self.type == "BatchNormalization":
            return self._batch_norm()
        if self.type not in _RULES:
            raise self.refuse("there is no formula for it")
        _RULES[self.type](self, *self.inputs)
        return {self.name: self._read(self.operands)}

    def _read(self, operands: list[relax.Var]) -> Computation:
        """Of what was emitted; `operands` are in the order of the layer's."""
        bindings, self.bindings = self.bindings, []
        layer, computation = read_layer(self.name, bindings, {v: str(i) for i, v in enumerate(operands)})
        return computation.reading([int(place) for place in layer.inputs])

    def _batch_norm(self) -> dict[str, Computation]:
        """(x - mean) / deviation, then scale and shift."""
        x, scale, shift, mean, variance = self.inputs
        if not all(isinstance(each, np.ndarray) for each in self.inputs[1:]):
            raise self.refuse("its statistics are no constants")
        deviation = np.sqrt(variance + np.float32(self.attributes.get("epsilon", 1e-5)))
        self.emit(op.divide(self.emit(op.subtract(x, vector(mean))), vector(deviation)))
        normalised, middle = self._read([x]), self.variable(self.shape)
        self.emit(op.add(self.emit(op.multiply(middle, vector(scale))), vector(shift)))
        return {f"{self.name}.normalised": normalised, self.name: self._read([middle])}

    def window(self) -> dict[str, Any]:
        """Attributes of a window as Relax has them, by what its result reads."""
        axes = self.maps[0][1:3]
        if any(axis.repeat > 1 for axis in axes):
            raise self.refuse("its operand is reshaped")
        behind = (max(0, axis.pad_after) for axis in axes)
        return {
            "strides": [axis.stride for axis in axes],
            "dilation": [axis.dilation for axis in axes],
            "padding": [*(axis.pad_before for axis in axes), *behind],
        }

    def convolved(self, filters: np.ndarray, bias: np.ndarray | None, **attrs: Any) -> None:
        """The first operand by `filters` as ONNX has them, [O, I, H, W]."""
        constant = relax.const(np.ascontiguousarray(filters.transpose(0, 2, 3, 1), np.float32))
        layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
        y = self.emit(op.nn.conv2d(self.operands[0], constant, **layouts, **attrs))
        if bias is not None:
            self.emit(op.add(y, vector(bias)))


def vector(value: np.ndarray) -> relax.Expr:
    """One number for each channel."""
    return relax.const(np.ascontiguousarray(value, np.float32).reshape(1, 1, 1, -1))


def _conv(node: _Maps, _: relax.Var, filters: np.ndarray, bias: np.ndarray | None = None) -> None:
    if not isinstance(filters, np.ndarray) or len(node.operands) > 1:
        raise node.refuse("its filters are no constants")
    rows, columns, channels = node.maps[0][1:]
    if filters.shape[1:] != (channels.window, rows.window, columns.window):
        raise node.refuse("its operand is reshaped")
    node.convolved(filters, bias, groups=node.attributes.get("group", 1), **node.window())


def _pool(node: _Maps, x: relax.Var) -> None:
    padded = bool(node.attributes.get("count_include_pad"))
    if padded and node.attributes.get("ceil_mode"):
        raise node.refuse("an average over padding with ceil_mode")
    if node.type.startswith("Global"):
        attrs = {"pool_size": flat.shape(x)[1:3]}
    else:
        attrs = {"pool_size": [axis.window for axis in node.maps[0][1:3]]} | node.window()
    if node.type.endswith("MaxPool"):
        node.emit(op.nn.max_pool2d(x, **attrs, layout="NHWC"))
    else:
        node.emit(op.nn.avg_pool2d(x, **attrs, layout="NHWC", count_include_pad=padded))


def _product(node: _Maps, x: relax.Var, matrix: np.ndarray, addend: np.ndarray | None = None) -> None:
    """As a convolution: of the whole map if that is flattened, else of each pixel."""
    get, constant = node.attributes.get, isinstance(matrix, np.ndarray) and matrix.ndim == 2
    if not constant or node.operands != [x] or get("transA"):
        raise node.refuse("it is no product with a constant matrix")
    n, h, w, c = flat.shape(x)
    matrix = (matrix if get("transB") else matrix.T) * np.float32(get("alpha", 1.0))
    flattened = (n, h * w * c, 1, 1) == (node.shape[0], matrix.shape[1], *node.shape[1:3])
    if not flattened and matrix.shape[1] != c:
        raise node.refuse("its operand is reshaped")
    if addend is not None:
        if addend.size != len(matrix):
            raise node.refuse("its addend is no bias")
        addend = addend * np.float32(get("beta", 1.0))
    window = (h, w) if flattened else (1, 1)
    node.convolved(matrix.reshape(-1, c, *window), addend)  # ONNX flattens channels first


def _concatenation(node: _Maps, *parts: relax.Var) -> None:
    if any(flat.shape(part)[:3] != node.shape[:3] for part in parts):
        raise node.refuse("it is not over channels")
    node.emit(op.concat(parts, 3))


def _clip(node: _Maps, x: relax.Var, *bounds: np.ndarray | None) -> None:
    given = [*bounds, None, None][:2]
    older = (node.attributes.get("min", LOWEST), node.attributes.get("max", -LOWEST))
    low, high = (float(b if a is None else a.item()) for a, b in zip(given, older))
    node.emit(op.clip(x, low, high))


def _leaking(node: _Maps, x: relax.Var, slope: np.ndarray | None = None) -> None:
    slope = np.float32(node.attributes.get("alpha", 0.01)) if slope is None else slope
    below = node.emit(op.multiply(node.emit(op.minimum(x, relax.const(0.0))), node.term(slope)))
    node.emit(op.add(node.emit(op.maximum(x, relax.const(0.0))), below))


def _gate(node: _Maps, x: relax.Var, alpha: float, beta: float) -> relax.Var:
    scaled = node.emit(op.multiply(x, relax.const(alpha)))
    return node.emit(op.clip(node.emit(op.add(scaled, relax.const(beta))), 0.0, 1.0))


def _hard_sigmoid(node: _Maps, x: relax.Var) -> None:
    _gate(node, x, float(node.attributes.get("alpha", 0.2)), float(node.attributes.get("beta", 0.5)))


def _hard_swish(node: _Maps, x: relax.Var) -> None:
    node.emit(op.multiply(x, _gate(node, x, 1 / 6, 0.5)))


def _folding(operate: Callable[..., relax.Expr]) -> Callable[..., None]:
    """A rule for all operands, one after the other."""

    def rule(node: _Maps, *inputs: relax.Var | np.ndarray) -> None:
        functools.reduce(lambda x, y: node.emit(operate(x, y)), map(node.term, inputs))

    return rule


def _softmax(node: _Maps) -> Formula:
    read = node.maps[0]
    if read[3].window != node.shape[3] or math.prod(each.window for each in read[:3]) > 1:
        raise node.refuse("it is not over channels")
    return softmax(node.shape[3])


_UNARY = {"Relu": op.nn.relu, "Sigmoid": op.sigmoid, "Sqrt": op.sqrt, "Tanh": op.tanh}
_BINARY = {
    **{"Add": op.add, "Sum": op.add, "Sub": op.subtract, "Mul": op.multiply, "Div": op.divide},
    **{"Max": op.maximum, "Min": op.minimum},
}
# What Relax has no operator for, or none that `read_layer` knows.
_FORMULAS: dict[str, Callable[[_Maps], Formula]] = {
    "LRN": lambda node: response_normalisation(node.maps[0][3], node.attributes),
    "Softmax": _softmax,
}
_RULES: dict[str, Callable[..., None]] = {
    "Conv": _conv,
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"), _pool),
    **dict.fromkeys(("Gemm", "MatMul"), _product),
    **{"Concat": _concatenation, "Clip": _clip, "HardSigmoid": _hard_sigmoid, "HardSwish": _hard_swish},
    **dict.fromkeys(("LeakyRelu", "PRelu"), _leaking),
    **{name: lambda node, x, make=make: node.emit(make(x)) for name, make in _UNARY.items()},
    **{name: _folding(make) for name, make in _BINARY.items()},
}
