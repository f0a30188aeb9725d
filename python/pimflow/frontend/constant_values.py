"""Values in ONNX networks that depend on constants and on shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from pimflow.zoo.nodes import SHAPES

_LARGEST_CONE = 500  # operators; what takes more is no shape, size or scale


class ConstantValues:
    """Evaluates tensors of a network by ONNX Runtime, if no input decides them.

    Parameters
    ----------
    model : ModelProto
        With inferred shapes where known.
    weights : mapping of str to TensorProto
        Constants by name.
    """

    def __init__(self, model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> None:
        self.opsets = list(model.opset_import)
        self.ir_version = model.ir_version
        self.weights = dict(weights)
        self.producers: dict[str, onnx.NodeProto] = {}
        self.shapes: dict[str, list[int]] = {}
        self.add_nodes(model.graph.node)
        for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
            dims = value.type.tensor_type.shape.dim
            if value.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
                self.shapes[value.name] = [dim.dim_value for dim in dims]

    def add_nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Let values depend on further nodes too."""
        self.producers |= {name: node for node in nodes for name in node.output if name}

    def value(self, name: str) -> np.ndarray | None:
        """The value of a tensor; None if inputs decide it, or nobody knows how to compute it."""
        if name in self.weights:
            return numpy_helper.to_array(self.weights[name])
        cone = self._cone(name)
        if cone is None:
            return None
        nodes, constants = cone
        graph = helper.make_graph(nodes, "constant", [], [helper.make_empty_tensor_value_info(name)])
        graph.initializer.extend(constants)
        model = helper.make_model(graph, opset_imports=self.opsets, ir_version=self.ir_version)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            return np.asarray(session.run(None, {})[0])
        except Exception:  # errors of ONNX Runtime have no common class
            return None

    def _cone(self, name: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]] | None:
        """The nodes that a tensor depends on, in order, and their constants; None if it depends on inputs."""
        nodes: list[onnx.NodeProto] = []
        constants: dict[str, onnx.TensorProto] = {}
        done: set[int] = set()
        stack = [(name, False)]
        while stack:
            tensor, complete = stack.pop()
            if not tensor or tensor in constants:
                continue
            if tensor in self.weights:
                constants[tensor] = self._rename(tensor)
                continue
            node = self.producers.get(tensor)
            if node is None or len(nodes) > _LARGEST_CONE or any(a.HasField("g") for a in node.attribute):
                return None
            if id(node) in done:
                continue
            if node.op_type in SHAPES and node.input[0] in self.shapes and not node.attribute:
                shape = np.array(self.shapes[node.input[0]], "int64")
                result = shape if node.op_type == "Shape" else shape.prod(dtype="int64")
                constants[tensor] = numpy_helper.from_array(np.asarray(result), tensor)
            elif complete:
                done.add(id(node))
                nodes.append(node)
            else:
                stack.append((tensor, True))
                stack += [(operand, False) for operand in node.input]
        return nodes, list(constants.values())

    def _rename(self, tensor: str) -> onnx.TensorProto:
        """A constant under the name by which nodes read it."""
        stored = self.weights[tensor]
        return (
            stored
            if stored.name == tensor
            else numpy_helper.from_array(numpy_helper.to_array(stored), tensor)
        )
