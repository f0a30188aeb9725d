"""Checks of single nodes of ONNX networks, whose faults other readers pass over, or end the process by."""

from __future__ import annotations

import onnx
from onnx import TensorProto, numpy_helper

from pimflow.errors import ModelError, UnsupportedOpError
from pimflow.zoo.nodes import constant_nodes


def require_plain_nodes(model: onnx.ModelProto, where: str) -> None:
    """Raise `ModelError` for a node that is wrong, or `UnsupportedOpError` for one that is not supported."""
    _check_split_outputs(model, where)
    _check_flags(model, where)
    _check_casts(model, where)
    _check_divisors(model, where)


def _check_split_outputs(model: onnx.ModelProto, where: str) -> None:
    """Raise :class:`ModelError` for a Split into more parts than it has results, or with a nameless result.

    onnx would infer the shapes of all parts; ONNX Runtime crashes if a result has no name.
    """
    for node in (node for node in model.graph.node if node.op_type == "Split"):
        if not all(node.output):
            raise ModelError(
                f"{where}: not a valid ONNX model: Split '{node.name}' has a result without a name; name it, "
                "also if nothing reads it"
            )
        for attribute in node.attribute:
            if attribute.name == "num_outputs" and attribute.i != len(node.output):
                raise ModelError(
                    f"{where}: not a valid ONNX model: Split '{node.name}' has {len(node.output)} results, "
                    f"and num_outputs is {attribute.i}"
                )


# Attributes that are 0 or 1: readers disagree about the meaning of other values.
_FLAGS = {
    *("keepdims", "noop_with_empty_axes", "select_last_index", "transA", "transB", "exclusive", "reverse"),
    *("ceil_mode", "count_include_pad", "align_corners", "antialias", "largest", "sorted", "upper", "fmod"),
}


def _check_flags(model: onnx.ModelProto, where: str) -> None:
    for node in (node for node in model.graph.node if node.domain in ("", "ai.onnx")):
        for attribute in node.attribute:
            if attribute.name in _FLAGS and attribute.i not in (0, 1):
                raise ModelError(
                    f"{where}: not a valid ONNX model: {attribute.name} of {node.op_type} '{node.name}' is "
                    f"{attribute.i}, not 0 or 1"
                )


def _check_casts(model: onnx.ModelProto, where: str) -> None:
    """Raise `UnsupportedOpError` for narrow types: casts to those of 4 or 6 bits, inputs of FLOAT8."""
    for node in (node for node in model.graph.node if node.op_type == "Cast"):
        target = next(TensorProto.DataType.Name(entry.i) for entry in node.attribute if entry.name == "to")
        if target.startswith(("FLOAT4", "FLOAT6", "FLOAT8E8M0")):
            raise UnsupportedOpError(
                f"{where}: Cast '{node.name}' to {target} (attribute 'to') is not supported: TVM rounds to "
                "that type otherwise than the standard"
            )
    for what, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            kind = TensorProto.DataType.Name(value.type.tensor_type.elem_type)
            if kind.startswith("FLOAT8"):
                raise UnsupportedOpError(
                    f"{where}: {what} '{value.name}' of type {kind} is not supported: NumPy has none; make "
                    "it FLOAT, and cast it in the network"
                )


_INTEGERS = tuple(
    TensorProto.DataType.Value(f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)
)


def _check_divisors(model: onnx.ModelProto, where: str) -> None:
    """Raise `ModelError` for a division of integers by a constant with a 0, by which ONNX Runtime ends."""
    nodes = [node for node in model.graph.node if node.op_type in ("Div", "Mod") and len(node.input) == 2]
    if not nodes:
        return
    constants = constant_nodes(model.graph) | {tensor.name: tensor for tensor in model.graph.initializer}
    for node in nodes:
        divisor = constants.get(node.input[1])
        if divisor is None or divisor.data_type not in _INTEGERS or divisor.data_location == divisor.EXTERNAL:
            continue
        if not numpy_helper.to_array(divisor).all():
            raise ModelError(
                f"{where}: {node.op_type} '{node.name or node.output[0]}' divides integers by "
                f"'{node.input[1]}', which has a 0"
            )
