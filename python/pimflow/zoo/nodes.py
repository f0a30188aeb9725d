"""Nodes of ONNX networks: what kinds of operators there are, and what a node says."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper

# Reshaped tensors stay where they are.
VIEWS = ("Flatten", "Reshape", "Dropout", "Identity", "Squeeze", "Unsqueeze")
ACTIVATIONS = (
    "Relu", "Clip", "LeakyRelu", "PRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Elu", "Erf", "Sqrt",
)  # fmt: skip
ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Sum", "Max", "Min", "Pow")


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """By name, the attributes that a node gives."""
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def constant_nodes(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """By result, the tensors of nodes that are constants."""
    return {
        node.output[0]: node.attribute[0].t
        for node in graph.node
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value"
    }
