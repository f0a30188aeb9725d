"""Nodes of ONNX networks: what kinds of operators there are, and what a node says."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper

# Reshaped tensors stay where they are.
VIEWS = ("Flatten", "Reshape", "Dropout", "Identity", "Squeeze", "Unsqueeze")
# Elementwise: of one operand, by curves or constants; of several.
ACTIVATIONS = (
    *("Abs", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Neg"),
    *("PRelu", "Relu", "Selu", "Sigmoid", "Softplus", "Sqrt", "Tanh"),
)
ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Sum", "Max", "Min", "Pow")
# Their results are elements of their operands: no rounding.
MOVES = (
    *("Abs", "ArgMax", "ArgMin", "Cast", "Clip", "Compress", "Concat", "Constant", "ConstantOfShape"),
    *("DepthToSpace", "Expand", "Gather", "GatherElements", "GatherND"),
    *("GlobalMaxPool", "Max", "MaxPool", "Min", "Neg", "NonMaxSuppression", "Pad"),
    *("ReduceMax", "ReduceMin", "Relu", "ReverseSequence", "ScatterElements", "ScatterND"),
    *("Shape", "Size", "Slice", "SpaceToDepth", "Split", "Tile", "TopK", "Transpose", "Where", *VIEWS),
)
SHAPES = ("Shape", "Size")  # what they give depends on no value
BIASED = ("Conv", "ConvTranspose", "Gemm")  # their third operand is a bias
RECURRENT = ("LSTM", "GRU", "RNN")
PRODUCTS = (*BIASED, "MatMul", *RECURRENT)
REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceL2", "AveragePool", "GlobalAveragePool")


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """By name, the attributes that a node gives."""
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def constant_nodes(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """By result, the tensors of nodes that are constants; changed in place, they change the graph."""
    return {
        node.output[0]: node.attribute[0].t
        for node in graph.node
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value"
    }
