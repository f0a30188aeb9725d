"""Tensors of ONNX networks that hold nothing, and what is computed from them alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from pimflow.frontend.constant_values import ConstantValues


def fold_empty_tensors(model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> None:
    """Replace nodes that read only constants, one of them without elements, by their results, in place.

    An input without elements is such a constant. So a sum of nothing is 0, and no kernel reads nothing.

    Parameters
    ----------
    model : ModelProto
        With fixed shapes of inputs, and without its weights.
    """
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    tensors = {tensor.name: tensor for tensor in model.graph.initializer} | weights
    tensors |= {
        name: numpy_helper.from_array(
            np.zeros(
                [dim.dim_value for dim in kind.shape.dim], helper.tensor_dtype_to_np_dtype(kind.elem_type)
            ),
            name,
        )
        for name, kind in inputs.items()
        if any(dim.HasField("dim_value") and not dim.dim_value for dim in kind.shape.dim)
    }
    if not any(0 in tensor.dims for tensor in tensors.values()):
        return
    values = ConstantValues(shape_inference.infer_shapes(model, data_prop=True), tensors)
    kept = []
    for node in model.graph.node:
        operands = [name for name in node.input if name]
        reads_nothing = any(name in values.weights and 0 in values.weights[name].dims for name in operands)
        results: dict[str, np.ndarray | None] = {}
        if reads_nothing and values.weights.keys() >= set(operands):
            results = {name: values.value(name) for name in node.output if name}
        if not results or any(value is None for value in results.values()):
            kept.append(onnx.NodeProto.FromString(node.SerializeToString()))
            continue
        for name, value in results.items():
            values.weights[name] = numpy_helper.from_array(np.asarray(value), name)
            model.graph.initializer.append(values.weights[name])
    del model.graph.node[:]
    model.graph.node.extend(kept)
