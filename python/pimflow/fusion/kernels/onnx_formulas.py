"""Formulas of the layers of an ONNX network, from a network in which every layer is separate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from pimflow.errors import UnsupportedOpError
from pimflow.frontend.onnx_graph import from_onnx
from pimflow.fusion import Layer, LayerGraph
from pimflow.fusion.kernels.formula import Computation, no_weights
from pimflow.fusion.kernels.reductions import response_normalisation, softmax
from pimflow.fusion.kernels.region_formulas import MapLayers
from pimflow.zoo import dims_of
from pimflow.zoo.nodes import ARITHMETIC, VIEWS, attributes, constant_nodes


def computations(model: onnx.ModelProto, graph: LayerGraph) -> dict[str, Computation]:
    """Computations by layer of ``unfolded(model)``; `model` has the values of its weights.

    Raises
    ------
    UnsupportedOpError
        For the first layer without a formula, or with another number of weights than was counted.
    """
    apart = _Apart(model, graph)
    if not apart.layers:
        return apart.direct
    return apart.direct | MapLayers.of_results(from_onnx(apart.model()), apart.graph()).computations


class _Apart:
    """A network in which every layer has inputs of its own, which are maps in NHWC.

    Attributes
    ----------
    direct : dict of str to Computation
        Computations of layers that are not in this network, since Relax has no operator for them.
    """

    def __init__(self, model: onnx.ModelProto, graph: LayerGraph) -> None:
        self.given, self.counted = model, graph
        self.constants = {each.name: each for each in model.graph.initializer}
        self.constants |= constant_nodes(model.graph)
        values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
        self.dims = {value.name: dims_of(value) for value in values}
        self.maps: dict[str, tuple[int, ...]] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.layers: list[Layer] = []
        self.direct: dict[str, Computation] = {}
        for node in model.graph.node:
            if node.output[0] in graph.index and node.op_type not in VIEWS:
                self._add(node)

    def model(self) -> onnx.ModelProto:
        """The network as an ONNX model; its outputs are the results of all layers."""
        values = [helper.make_tensor_value_info(name, 1, dims) for name, dims in self.maps.items()]
        results = [helper.make_tensor_value_info(layer.name, 1, None) for layer in self.layers]
        graph = helper.make_graph(self.nodes, self.counted.name, values, results, [*self.constants.values()])
        version = self.given.ir_version
        return helper.make_model(graph, opset_imports=self.given.opset_import, ir_version=version)

    def graph(self) -> LayerGraph:
        """The layers of `model`, with its inputs as operands."""
        shapes = {f"%{name}": dims for name, dims in self.maps.items()}
        return replace(self.counted, layers=tuple(self.layers), shapes=shapes | {**self.counted.shapes})

    def _add(self, node: onnx.NodeProto) -> None:
        name, data = node.output[0], [each for each in node.input if each and each not in self.constants]
        layer = self.counted.layers[self.counted.index[name]]
        if node.op_type in ("LRN", "Softmax"):
            self.direct[name] = self._direct(node, layer)
        elif node.op_type == "BatchNormalization" and len(data) == 1:
            self._batch_norm(node, layer, data)
        elif len(data) != len(layer.inputs):
            raise _refused(node, "an operand is computed from constants")
        else:
            operands, alike = iter(self._operands(layer, data)), node.op_type in (*ARITHMETIC, "PRelu")
            constants = {each: self._of_rank(each, node) if alike else each for each in node.input}
            inputs = [next(operands) if each in data else constants[each] for each in node.input]
            self._layer(layer, node.op_type, inputs, **attributes(node))

    def _batch_norm(self, node: onnx.NodeProto, layer: Layer, data: Sequence[str]) -> None:
        """Add the two layers of a batch norm: (x - mean) / deviation, then scale and shift."""
        dims = (1, -1, *[1] * (len(self.dims[layer.name]) - 2))
        arrays = (numpy_helper.to_array(self.constants[each]).reshape(dims) for each in node.input[1:])
        scale, shift, mean, variance = arrays
        deviation = np.sqrt(variance + np.float32(attributes(node).get("epsilon", 1e-5)))
        normalised = self.counted.layers[self.counted.index[f"{layer.name}.normalised"]]
        steps = ((normalised, "Sub", mean, "Div", deviation), (layer, "Mul", scale, "Add", shift))
        for each, first, left, second, right in steps:
            between = self._node(first, [*self._operands(each, data), self._constant(left)])
            self._layer(each, second, [between, self._constant(right)])

    def _direct(self, node: onnx.NodeProto, layer: Layer) -> Computation:
        maps, channels = layer.maps[0], self.counted.shapes[layer.name][3]
        if node.op_type == "LRN":
            formula = response_normalisation(maps[3], attributes(node))
        elif maps[3].window != channels or math.prod(each.window for each in maps[:3]) > 1:
            raise _refused(node, "it is not over channels")
        else:
            formula = softmax(channels)
        return Computation(formulas=(formula,), weights=no_weights())

    def _of_rank(self, name: str, node: onnx.NodeProto) -> str:
        """A constant reshaped to the rank of the result, so that its layout can change with it."""
        if name not in self.constants:
            return name
        array = numpy_helper.to_array(self.constants[name])
        missing = len(self.dims[node.output[0]]) - array.ndim
        return self._constant(array.reshape(*[1] * missing, *array.shape))

    def _operands(self, layer: Layer, data: Sequence[str]) -> list[str]:
        """Add inputs for a layer, and the nodes that turn these maps into the tensors of the file."""
        names = [f"pimflow_map{len(self.maps) + place}" for place in range(len(data))]
        self.maps |= {name: self.counted.shapes[source] for name, source in zip(names, layer.inputs)}
        self.layers.append(replace(layer, inputs=tuple(f"%{name}" for name in names)))
        return [self._of_map(*each) for each in zip(names, layer.inputs, data)]

    def _of_map(self, map_name: str, source: str, tensor: str) -> str:
        given, wanted = self.dims[source.removesuffix(".normalised")], self.dims[tensor]
        if len(given) == 4:
            map_name = self._node("Transpose", [map_name], perm=(0, 3, 1, 2))
        if len(given) != 4 or given != wanted:
            map_name = self._node("Reshape", [map_name, self._constant(np.array(wanted, np.int64))])
        return map_name

    def _layer(self, layer: Layer, kind: str, inputs: Sequence[str], **given: object) -> None:
        file = layer.name.removesuffix(".normalised")
        made = self._node(kind, inputs, name=layer.name, **given)
        if len(self.dims[file]) == 4:
            made = self._node("Transpose", [made], perm=(0, 2, 3, 1))
        self.nodes[-1].output[0] = layer.name

    def _node(self, kind: str, inputs: Sequence[str], **given: object) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [f"pimflow_made{len(self.nodes)}"], **given))
        return self.nodes[-1].output[0]

    def _constant(self, array: np.ndarray) -> str:
        name = f"pimflow_constant{len(self.constants)}"
        self.constants[name] = numpy_helper.from_array(array, name)
        return name


def _refused(node: onnx.NodeProto, why: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"layer '{node.output[0]}' ({node.op_type}): {why}; it cannot be executed fused"
    )
