"""Inputs of a network that are indices into tables, and how many rows the tables have."""

from __future__ import annotations

import onnx

from pimflow.zoo.shapes import dims_of

# Operators that change the shape or the width of indices, not their values.
_CARRIERS = frozenset(
    {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)


def index_bounds(model: onnx.ModelProto) -> dict[str, int]:
    """Upper bounds of inputs that are indices: the rows of the smallest table that each indexes.

    Parameters
    ----------
    model : onnx.ModelProto
        With inferred shapes, as :func:`pimflow.zoo.load_model` returns it.

    Returns
    -------
    dict of str to int
        By input. Inputs that index no table, or none of known size, are left out.
    """
    graph = model.graph
    shapes = {value.name: dims_of(value) for value in (*graph.input, *graph.value_info, *graph.output)}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    carried = {node.output[0]: node.input[0] for node in graph.node if node.op_type in _CARRIERS}
    inputs = {value.name for value in graph.input}
    bounds: dict[str, int] = {}
    for node in graph.node:
        if node.op_type != "Gather":
            continue
        source = node.input[1]
        while source in carried:
            source = carried[source]
        axis = next((entry.i for entry in node.attribute if entry.name == "axis"), 0)
        table = shapes.get(node.input[0])
        if source in inputs and table and (rows := table[axis]):
            bounds[source] = min(rows, bounds.get(source, rows))
    return bounds
