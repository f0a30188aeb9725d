"""One floating-point type for a network: fp32, in which its reference is computed."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

_OTHERS = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def to_single(model: onnx.ModelProto) -> None:
    """Make fp16, bf16 and fp64 fp32, in place: inputs, outputs, weights and casts.

    What is stored in fp16 is the system's matter; ONNX Runtime has no fp64 convolution, and rounds after
    every operator in fp16.
    """
    _convert(model.graph)


def _convert(graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type in _OTHERS:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for tensor in graph.initializer:
        _convert_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _convert_tensor(attribute.t)
            elif attribute.HasField("g"):
                _convert(attribute.g)
            elif attribute.name in ("to", "dtype") and attribute.i in _OTHERS:
                attribute.i = TensorProto.FLOAT


def _convert_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _OTHERS:
        array = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
