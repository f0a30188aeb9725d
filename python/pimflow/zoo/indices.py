"""Which inputs of a network are positions in a table, and how many rows that has."""

from __future__ import annotations

import onnx

from pimflow.zoo.shapes import dims_of

# What changes the shape or width of indices, not their values.
_CARRIERS = frozenset(
    {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)


def index_bounds(model: onnx.ModelProto) -> dict[str, int]:
    """Rows of the smallest table that each input picks from: its values must be below.

    Parameters
    ----------
    model : onnx.ModelProto
        With inferred shapes, as :func:`pimflow.zoo.load_model` returns it.

    Returns
    -------
    dict of str to int
        By input; those that index nothing are left out, and so are those whose table has no known size.
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
