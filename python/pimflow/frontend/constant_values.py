"""Values in ONNX networks that depend on constants and on shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from pimflow.zoo.nodes import SHAPES, attributes, bodies

_LARGEST_CONE = 500  # operators; what takes more is no shape, size or scale


class ConstantValues:
    """Evaluates tensors of a network by ONNX Runtime, if no input decides them.

    Parameters
    ----------
    model : ModelProto
        With inferred shapes where known.
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
        results = self.values([name], _LARGEST_CONE)
        return None if results is None else results[0]

    def values(self, names: Sequence[str], largest_cone: int = 10**9) -> list[np.ndarray] | None:
        """The values of tensors that nodes compute; None if inputs decide one, or nobody knows how.

        Parameters
        ----------
        largest_cone : int
            Upper bound on the nodes that they may depend on.
        """
        cone = self._cone(names, largest_cone)
        if cone is None:
            return None
        nodes, constants = cone
        outputs = [helper.make_empty_tensor_value_info(name) for name in names]
        graph = helper.make_graph(nodes, "constant", [], outputs)
        graph.initializer.extend(constants)
        model = helper.make_model(graph, opset_imports=self.opsets, ir_version=self.ir_version)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            results = session.run(None, {})
        except Exception:  # errors of ONNX Runtime have no common class
            return None
        is_sequence = any(isinstance(value, list) for value in results)
        return None if is_sequence else [np.asarray(value) for value in results]

    def _cone(
        self, names: Sequence[str], largest: int
    ) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]] | None:
        """The nodes that tensors depend on, in order, and their constants; None if they depend on inputs."""
        nodes: list[onnx.NodeProto] = []
        constants: dict[str, onnx.TensorProto] = {}
        done: set[int] = set()
        stack = [(name, False) for name in names]
        while stack:
            tensor, complete = stack.pop()
            if not tensor or tensor in constants:
                continue
            if tensor in self.weights:
                constants[tensor] = self._rename(tensor)
                continue
            node = self.producers.get(tensor)
            if node is None or len(nodes) > largest or bodies(node):
                return None
            if id(node) in done:
                continue
            if node.op_type in SHAPES and node.input[0] in self.shapes:
                shape, attrs = np.array(self.shapes[node.input[0]], "int64"), attributes(node)
                part = shape[attrs.get("start", 0) : attrs.get("end")]
                result = part if node.op_type == "Shape" else shape.prod(dtype="int64")
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


# They stay: dequantised weights take four times the memory, and sequences are no tensors.
_SEQUENCES = ("SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SplitToSequence")
_NEVER_FOLDED = ("DequantizeLinear", "QuantizeLinear", *_SEQUENCES)


def fold_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model`, which has its weights, with what depends on constants and known shapes alone as weights.

    Returns
    -------
    ModelProto
        With inferred shapes.
    """
    count = len(model.graph.node) + 1
    while len(model.graph.node) < count:  # what is folded makes further shapes known
        count = len(model.graph.node)
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        _fold_once(model.graph, ConstantValues(model, {t.name: t for t in model.graph.initializer}))
    return model


def _names_read(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node and the nodes of its bodies read; tensors inside the bodies are among them."""
    yield from node.input
    for body in bodies(node):
        yield from (value.name for value in body.output)
        for inner in body.node:
            yield from _names_read(inner)


def _fold_once(graph: onnx.GraphProto, values: ConstantValues) -> None:
    """Replace the nodes that depend on constants and known shapes alone, in place."""
    constants, folded = set(values.weights), set[int]()
    for index, node in enumerate(graph.node):
        has_known_shape = node.op_type in SHAPES and node.input[0] in values.shapes
        is_constant = constants.issuperset(filter(None, node.input)) and bool(node.input)
        if node.op_type in _NEVER_FOLDED or bodies(node):
            continue
        if node.op_type == "Constant" or has_known_shape or is_constant:
            constants.update(node.output)
            folded.add(index)
    read = {
        name for index, node in enumerate(graph.node) if index not in folded for name in _names_read(node)
    }
    read.update(value.name for value in graph.output)
    read.discard("")
    names = [name for index in sorted(folded) for name in graph.node[index].output if name in read]
    results = values.values(names) if names else []
    if results is None:
        return  # nobody knows how to compute one of them
    nodes = [
        onnx.NodeProto.FromString(n.SerializeToString()) for i, n in enumerate(graph.node) if i not in folded
    ]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in zip(names, results, strict=True)
    )
