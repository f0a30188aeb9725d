"""Nodes of ONNX networks: kinds of operators, and the attributes of a node."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper

# Operators whose result is a view of their operand.
VIEWS = ("Flatten", "Reshape", "Dropout", "Identity", "Squeeze", "Unsqueeze")
# Elementwise operators: of one operand, and of several.
ACTIVATIONS = (
    *("Abs", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Neg"),
    *("PRelu", "Relu", "Selu", "Sigmoid", "Softplus", "Sqrt", "Tanh"),
)
ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Sum", "Max", "Min", "Pow")
# Results are elements of the operands, without rounding.
MOVES = (
    *("Abs", "ArgMax", "ArgMin", "Cast", "Clip", "Compress", "Concat", "Constant", "ConstantOfShape"),
    *("DepthToSpace", "Expand", "Gather", "GatherElements", "GatherND"),
    *("GlobalMaxPool", "Max", "MaxPool", "Min", "Neg", "NonMaxSuppression", "Pad"),
    *("ReduceMax", "ReduceMin", "Relu", "ReverseSequence", "ScatterElements", "ScatterND"),
    *("Shape", "Size", "Slice", "SpaceToDepth", "Split", "Tile", "TopK", "Transpose", "Where", *VIEWS),
)
SHAPES = ("Shape", "Size")  # their results depend only on shapes, not on values
BIASED = ("Conv", "ConvTranspose", "Gemm")  # their third operand is a bias
RECURRENT = ("LSTM", "GRU", "RNN")
PRODUCTS = (*BIASED, "MatMul", *RECURRENT)
REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceL2", "AveragePool", "GlobalAveragePool")


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a node, by name; those that it does not set are missing."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs among the attributes of a node: bodies of loops, branches of conditions."""
    return [attribute.g for attribute in node.attribute if attribute.HasField("g")]


def constant_nodes(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """The tensors of Constant nodes, by result; changing one in place changes the graph."""
    return {
        node.output[0]: node.attribute[0].t
        for node in graph.node
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value"
    }
