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
    separate = _SeparateLayers(model, graph)
    if not separate.layers:
        return separate.direct
    return (
        separate.direct | MapLayers.from_results(from_onnx(separate.model()), separate.graph()).computations
    )


class _SeparateLayers:
    """A network in which every layer has inputs of its own, which are maps in NHWC.

    Attributes
    ----------
    direct : dict of str to Computation
        Computations of layers that are not in this network, since Relax has no operator for them.
    """

    def __init__(self, model: onnx.ModelProto, graph: LayerGraph) -> None:
        self.original, self.layer_graph = model, graph
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
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
        graph = helper.make_graph(
            self.nodes, self.layer_graph.name, values, results, [*self.constants.values()]
        )
        version = self.original.ir_version
        return helper.make_model(graph, opset_imports=self.original.opset_import, ir_version=version)

    def graph(self) -> LayerGraph:
        """The layers of `model`, with its inputs as operands."""
        shapes = {f"%{name}": dims for name, dims in self.maps.items()}
        return replace(
            self.layer_graph, layers=tuple(self.layers), shapes=shapes | {**self.layer_graph.shapes}
        )

    def _add(self, node: onnx.NodeProto) -> None:
        name = node.output[0]
        data = [operand for operand in node.input if operand and operand not in self.constants]
        layer = self.layer_graph.layers[self.layer_graph.index[name]]
        if node.op_type in ("LRN", "Softmax"):
            self.direct[name] = self._direct(node, layer)
        elif node.op_type == "BatchNormalization" and len(data) == 1:
            self._batch_norm(node, layer, data)
        elif len(data) != len(layer.inputs):
            raise _unsupported(node, "an operand is computed from constants")
        else:
            operands = iter(self._operands(layer, data))
            is_elementwise = node.op_type in (*ARITHMETIC, "PRelu")
            constants = {
                operand: self._expand_rank(operand, node) if is_elementwise else operand
                for operand in node.input
            }
            inputs = [next(operands) if operand in data else constants[operand] for operand in node.input]
            self._layer(layer, node.op_type, inputs, **attributes(node))

    def _batch_norm(self, node: onnx.NodeProto, layer: Layer, data: Sequence[str]) -> None:
        """Add the two layers of a batch norm: (x - mean) / deviation, then scale and shift."""
        dims = (1, -1, *[1] * (len(self.dims[layer.name]) - 2))
        arrays = (numpy_helper.to_array(self.constants[item]).reshape(dims) for item in node.input[1:])
        scale, shift, mean, variance = arrays
        deviation = np.sqrt(variance + np.float32(attributes(node).get("epsilon", 1e-5)))
        normalised = self.layer_graph.layers[self.layer_graph.index[f"{layer.name}.normalised"]]
        steps = ((normalised, "Sub", mean, "Div", deviation), (layer, "Mul", scale, "Add", shift))
        for item, first, first_operand, second, second_operand in steps:
            between = self._node(first, [*self._operands(item, data), self._constant(first_operand)])
            self._layer(item, second, [between, self._constant(second_operand)])

    def _direct(self, node: onnx.NodeProto, layer: Layer) -> Computation:
        maps, channels = layer.maps[0], self.layer_graph.shapes[layer.name][3]
        if node.op_type == "LRN":
            formula = response_normalisation(maps[3], attributes(node))
        elif maps[3].window != channels or math.prod(axis_map.window for axis_map in maps[:3]) > 1:
            raise _unsupported(node, "it is not over channels")
        else:
            formula = softmax(channels)
        return Computation(formulas=(formula,), weights=no_weights())

    def _expand_rank(self, name: str, node: onnx.NodeProto) -> str:
        """A constant reshaped to the rank of the result, so that its layout can change with it."""
        if name not in self.constants:
            return name
        array = numpy_helper.to_array(self.constants[name])
        missing = len(self.dims[node.output[0]]) - array.ndim
        return self._constant(array.reshape(*[1] * missing, *array.shape))

    def _operands(self, layer: Layer, data: Sequence[str]) -> list[str]:
        """Add inputs for a layer, and the nodes that turn these maps into the tensors of the file."""
        names = [f"pimflow_map{len(self.maps) + place}" for place in range(len(data))]
        self.maps |= {name: self.layer_graph.shapes[source] for name, source in zip(names, layer.inputs)}
        self.layers.append(replace(layer, inputs=tuple(f"%{name}" for name in names)))
        return [self._file_tensor(*arguments) for arguments in zip(names, layer.inputs, data)]

    def _file_tensor(self, map_name: str, source: str, tensor: str) -> str:
        source_dims, dims = self.dims[source.removesuffix(".normalised")], self.dims[tensor]
        if len(source_dims) == 4:
            map_name = self._node("Transpose", [map_name], perm=(0, 3, 1, 2))
        if len(source_dims) != 4 or source_dims != dims:
            map_name = self._node("Reshape", [map_name, self._constant(np.array(dims, np.int64))])
        return map_name

    def _layer(self, layer: Layer, kind: str, inputs: Sequence[str], **attrs: object) -> None:
        file_name = layer.name.removesuffix(".normalised")
        result = self._node(kind, inputs, name=layer.name, **attrs)
        if len(self.dims[file_name]) == 4:
            result = self._node("Transpose", [result], perm=(0, 2, 3, 1))
        self.nodes[-1].output[0] = layer.name

    def _node(self, kind: str, inputs: Sequence[str], **attrs: object) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [f"pimflow_made{len(self.nodes)}"], **attrs))
        return self.nodes[-1].output[0]

    def _constant(self, array: np.ndarray) -> str:
        name = f"pimflow_constant{len(self.constants)}"
        self.constants[name] = numpy_helper.from_array(array, name)
        return name


def _unsupported(node: onnx.NodeProto, reason: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"layer '{node.output[0]}' ({node.op_type}): {reason}; it cannot be executed fused"
    )
