"""The embedded networks, and the one way that any network gets into pimflow; without TVM."""

from pimflow.zoo.models import (
    GRAPHS,
    ModelInfo,
    describe,
    dims_of,
    example_arrays,
    example_inputs,
    filled,
    index_bounds,
    input_types,
    is_onnx,
    is_weight,
    load,
    load_model,
    names,
    parse_shape,
    weight_values,
)

__all__ = [
    "GRAPHS",
    "ModelInfo",
    "describe",
    "dims_of",
    "example_arrays",
    "example_inputs",
    "filled",
    "index_bounds",
    "input_types",
    "is_onnx",
    "is_weight",
    "load",
    "load_model",
    "names",
    "parse_shape",
    "weight_values",
]
