"""The layers of an ONNX network as Deep Fusion counts them: batch norm, scale and ReLU are layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx

from pimflow.core.ranges import RangeMap
from pimflow.errors import ModelError
from pimflow.fusion.layers import Layer, LayerGraph, Maps, Shape, broadcast_maps, elementwise_maps, full_maps
from pimflow.zoo import dims_of, is_weight
from pimflow.zoo.nodes import ACTIVATIONS, ARITHMETIC, VIEWS, attributes

# Axes of NHWC by ONNX axis, for each rank.
# Kind of a layer, the maps of its operands, and further fields of the `Layer`.
_LayerParts = tuple[str, list[Maps], dict[str, Any]]
NHWC_PLACES = {0: (), 1: (3,), 2: (0, 3), 3: (0, 1, 3), 4: (0, 3, 1, 2)}


def layers_from_onnx(model: onnx.ModelProto) -> LayerGraph:
    """Read the layers of `model`, which has inferred shapes; values of weights are not read.

    Padding is a part of its window, reshapes are no layers, and a batch norm is two layers.

    Raises
    ------
    ModelError
        For tensors with an open shape or more than four axes.
    """
    return _OnnxLayerReader(model).graph()


class _OnnxLayerReader:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        graph = model.graph
        values = (*graph.input, *graph.value_info, *graph.output)
        self.dims = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        self.dims |= {value.name: dims_of(value) for value in values}
        self.weights = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
        for value in graph.input:
            if is_weight(value):
                self.weights[value.name] = math.prod(self.dims[value.name])
        for node in graph.node:
            if node.op_type == "Constant" or (node.input and all(map(self._constant, node.input))):
                self.weights |= dict.fromkeys(node.output, 0)
        self.alias: dict[str, str] = {}
        self.shapes: dict[str, Shape] = {}
        self.layers: list[Layer] = []

    def _constant(self, name: str) -> bool:
        return not name or name in self.weights

    def vectors(self, node: onnx.NodeProto) -> int:
        """Number of elements of an elementwise operator's constants; scalars are part of the code."""
        sizes = (self.weights.get(name, 0) for name in node.input)
        return sum(size for size in sizes if size > 1)

    def graph(self) -> LayerGraph:
        """All layers of the model."""
        for value in self.model.graph.input:
            if value.name not in self.weights:
                self.shapes[value.name] = self.shape(value.name)
        for node in self.model.graph.node:
            if node.output[0] not in self.weights:
                self._add(node)
        outputs = tuple(self.alias.get(value.name, value.name) for value in self.model.graph.output)
        layers = tuple(self.layers)
        return LayerGraph(name=self.model.graph.name, layers=layers, shapes=self.shapes, outputs=outputs)

    def shape(self, name: str) -> Shape:
        """NHWC shape of a tensor of the file."""
        dims = self.dims.get(name)
        if dims is None or None in dims or len(dims) not in NHWC_PLACES:
            raise ModelError(
                f"model '{self.model.graph.name}': tensor '{name}' has shape {dims}; fix its shape"
            )
        shape = [1, 1, 1, 1]
        for axis, size in zip(NHWC_PLACES[len(dims)], dims):
            shape[axis] = size
        return tuple(shape)

    def _add(self, node: onnx.NodeProto) -> None:
        data = [name for name in node.input if not self._constant(name)]
        result = node.output[0]
        if node.op_type in VIEWS:
            self.alias[result] = self.alias.get(data[0], data[0])
            return
        if node.op_type == "BatchNormalization":
            self._batch_norm(node, data[0])
            return
        shape = self.shape(result)
        rule = _RULES.get(node.op_type, _opaque)
        kind, maps, counts = rule(self, node, data, shape)
        weights = counts.pop("weight_elements", sum(self.weights.get(name, 0) for name in node.input))
        self._layer(result, kind, data, maps, shape, weight_elements=weights, **counts)
        for extra in node.output[1:]:  # masks and indices that inference does not use
            self.alias[extra] = result

    def _layer(
        self, name: str, kind: str, data: list[str], maps: list[Maps], shape: Shape, **counts: Any
    ) -> None:
        sources = [self.alias.get(tensor, tensor) for tensor in data]
        fitting = [
            axes
            if self.shapes[source] == tuple(m.extent for m in axes)
            else full_maps(self.shapes[source], shape)
            for source, axes in zip(sources, maps)
        ]
        is_replaced = any(a is not b for a, b in zip(fitting, maps))
        counts["is_in_place"] = counts.get("is_in_place", False) and not is_replaced
        self.shapes[name] = shape
        self.layers.append(Layer(name=name, kind=kind, inputs=tuple(sources), maps=tuple(fitting), **counts))

    def _batch_norm(self, node: onnx.NodeProto, source: str) -> None:
        """Caffe's two layers: (x - mean) / deviation, then scale and shift (Table 1)."""
        shape = self.shape(node.output[0])
        weights = 2 * shape[3] if shape[3] > 1 else 0  # a scalar is part of the code
        counts = dict(weight_elements=weights, operations=2 * math.prod(shape), is_in_place=True)
        middle = f"{node.output[0]}.normalised"
        self._layer(middle, "batch_norm", [source], [elementwise_maps(shape)], shape, **counts)
        self._layer(node.output[0], "scale", [middle], [elementwise_maps(shape)], shape, **counts)


def _windows(node: onnx.NodeProto, x: Shape, result: Shape, kernel: list[int]) -> tuple[RangeMap, RangeMap]:
    """Maps of rows and columns; the padding at the end follows from the result, for any rounding rule."""
    attrs = attributes(node)
    strides = attrs.get("strides", [1, 1])
    dilations = attrs.get("dilations", [1, 1])
    pads = attrs.get("pads", [0, 0, 0, 0])
    windows = []
    for axis in (0, 1):
        extent, outputs = x[1 + axis], result[1 + axis]
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        covered = (outputs - 1) * strides[axis] + reach
        before = pads[axis]
        if attrs.get("auto_pad", b"NOTSET").startswith(b"SAME"):
            total = max(0, covered - extent)
            before = total - total // 2 if attrs["auto_pad"] == b"SAME_LOWER" else total // 2
        windows.append(
            RangeMap(
                extent=extent,
                window=kernel[axis],
                stride=strides[axis],
                dilation=dilations[axis],
                pad_before=before,
                pad_after=covered - extent - before,
            )
        )
    return tuple(windows)


def _conv(reader: _OnnxLayerReader, node: onnx.NodeProto, data: list[str], result: Shape) -> _LayerParts:
    x, filters = reader.shape(data[0]), reader.dims.get(node.input[1])
    if filters is None or len(filters) != 4 or len(data) > 1:
        return _opaque(reader, node, data, result)
    groups = attributes(node).get("group", 1)
    rows, columns = _windows(node, x, result, list(filters[2:]))
    maps = (RangeMap.same(x[0]), rows, columns, RangeMap.blocks(x[3], result[3], groups))
    macs = math.prod(result) * math.prod(filters[1:])
    bias = math.prod(result) if len(node.input) > 2 else 0
    return "convolution", [maps], dict(filters=filters[0], macs=macs, operations=2 * macs + bias)


def _pool(reader: _OnnxLayerReader, node: onnx.NodeProto, data: list[str], result: Shape) -> _LayerParts:
    x, kernel = reader.shape(data[0]), attributes(node).get("kernel_shape", ())
    if len(kernel) != 2:
        return _opaque(reader, node, data, result)
    rows, columns = _windows(node, x, result, list(kernel))
    maps = (RangeMap.same(x[0]), rows, columns, RangeMap.same(x[3]))
    return "pooling", [maps], dict(operations=math.prod(result) * math.prod(kernel))


def _global_pool(
    reader: _OnnxLayerReader, node: onnx.NodeProto, data: list[str], result: Shape
) -> _LayerParts:
    x = reader.shape(data[0])
    maps = (RangeMap.same(x[0]), RangeMap.whole(x[1], 1), RangeMap.whole(x[2], 1), RangeMap.same(x[3]))
    return "pooling", [maps], dict(operations=math.prod(x))


def _product(reader: _OnnxLayerReader, node: onnx.NodeProto, data: list[str], result: Shape) -> _LayerParts:
    x = reader.shape(data[0])
    if len(data) > 1 or data[0] != node.input[0] or len(reader.dims[data[0]]) > 3:
        return _opaque(reader, node, data, result)
    maps = (*map(RangeMap.same, x[:3]), RangeMap.whole(x[3], result[3]))
    macs = math.prod(result) * x[3]
    return "inner_product", [maps], dict(filters=result[3], macs=macs, operations=2 * macs)


def _activation(
    reader: _OnnxLayerReader, node: onnx.NodeProto, data: list[str], result: Shape
) -> _LayerParts:
    weights = reader.vectors(node) if node.op_type == "PRelu" else 0
    counts = dict(weight_elements=weights, operations=math.prod(result), is_in_place=True)
    return "relu", [elementwise_maps(result)], counts


def _elementwise(
    reader: _OnnxLayerReader, node: onnx.NodeProto, data: list[str], result: Shape
) -> _LayerParts:
    maps = [broadcast_maps(reader.shape(name), result) for name in data]
    counts = dict(
        weight_elements=reader.vectors(node),
        operations=math.prod(result) * max(1, len(node.input) - 1),
        is_in_place=all(reader.shape(name) == result for name in data),
    )
    return "eltwise" if len(data) > 1 else "scale", maps, counts


def _softmax(reader: _OnnxLayerReader, node: onnx.NodeProto, data: list[str], result: Shape) -> _LayerParts:
    rank = len(reader.dims[data[0]])
    axis = NHWC_PLACES[rank][attributes(node).get("axis", -1) % rank]
    maps = [RangeMap.whole(s, s) if place == axis else RangeMap.same(s) for place, s in enumerate(result)]
    return "softmax", [tuple(maps)], dict(operations=3 * math.prod(result))  # exponential, sum, quotient


def _lrn(reader: _OnnxLayerReader, node: onnx.NodeProto, data: list[str], result: Shape) -> _LayerParts:
    size = attributes(node)["size"]
    channels = RangeMap(extent=result[3], window=size, pad_before=(size - 1) // 2, pad_after=size // 2)
    maps = (*map(RangeMap.same, result[:3]), channels)
    return "lrn", [maps], dict(operations=math.prod(result) * (2 * size + 2))  # squares, sum; power, quotient


def _concat(reader: _OnnxLayerReader, node: onnx.NodeProto, data: list[str], result: Shape) -> _LayerParts:
    rank = len(reader.dims[node.output[0]])
    axis = NHWC_PLACES[rank][attributes(node)["axis"] % rank]
    if len(data) < len(node.input):
        return _opaque(reader, node, data, result)
    maps, begin = [], 0
    for name in data:
        x = reader.shape(name)
        part = list(map(RangeMap.same, x))
        part[axis] = RangeMap.concat_operand(x[axis], begin, result[axis])
        begin += x[axis]
        maps.append(tuple(part))
    return "concat", maps, {}


def _opaque(reader: _OnnxLayerReader, node: onnx.NodeProto, data: list[str], result: Shape) -> _LayerParts:
    """An operator that is not known in detail: every result may read all elements."""
    return (
        "other",
        [full_maps(reader.shape(name), result) for name in data],
        dict(operations=math.prod(result)),
    )


_RULES: dict[str, Callable[..., _LayerParts]] = {
    "Conv": _conv,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "GlobalAveragePool": _global_pool,
    "GlobalMaxPool": _global_pool,
    "Gemm": _product,
    "MatMul": _product,
    "Softmax": _softmax,
    "LRN": _lrn,
    "Concat": _concat,
    **dict.fromkeys(ACTIVATIONS, _activation),
    **dict.fromkeys(ARITHMETIC, _elementwise),
}
