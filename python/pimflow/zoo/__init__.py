"""The embedded networks, and the one way that any network gets into pimflow; without TVM."""

from pimflow.zoo.catalogue import GRAPHS, ModelInfo, describe, load, names
from pimflow.zoo.examples import example_arrays, example_inputs, input_types
from pimflow.zoo.indices import index_bounds
from pimflow.zoo.models import is_onnx, load_model, refuse_shared_names
from pimflow.zoo.shapes import dims_of, parse_shape
from pimflow.zoo.weights import drawn as weight_values
from pimflow.zoo.weights import filled, is_weight

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
    "refuse_shared_names",
    "weight_values",
]
