"""ONNX models from their nodes."""

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def onnx_model(
    nodes: Iterable[onnx.NodeProto],
    inputs: Mapping,
    outputs: Mapping,
    weights: Mapping[str, np.ndarray] | Iterable[TensorProto] = (),
    name: str = "net",
    opset: int = 17,
) -> onnx.ModelProto:
    """A model; `inputs` and `outputs` are shapes in fp32, or pairs of a type and a shape, by name."""
    values = [
        [
            helper.make_tensor_value_info(value, *(spec if has_type(spec) else (TensorProto.FLOAT, spec)))
            for value, spec in specs.items()
        ]
        for specs in (inputs, outputs)
    ]
    if isinstance(weights, Mapping):
        weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    graph = helper.make_graph(list(nodes), name, *values, list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def has_type(spec) -> bool:
    """Whether `spec` is a pair of a type and a shape."""
    return isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[1], tuple | list | None)
