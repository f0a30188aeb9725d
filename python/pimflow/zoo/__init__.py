"""The embedded networks, and how any ONNX network is loaded; without TVM."""

from pimflow.zoo.catalogue import GRAPHS, ModelInfo, all_names, decoder_weights, describe, load, names
from pimflow.zoo.constants import open_ranks, shapes_from_arrays, with_values
from pimflow.zoo.draws import Draw
from pimflow.zoo.examples import (
    RANGES,
    SMALL_RANGES,
    example_arrays,
    example_inputs,
    input_types,
    positive_draws,
    ranged_draws,
)
from pimflow.zoo.indices import index_bounds, input_draws
from pimflow.zoo.language.graph_builder import past_name, present_name
from pimflow.zoo.language.shapes import decoder
from pimflow.zoo.language.shapes import names as decoder_names
from pimflow.zoo.models import is_onnx, load_exact, load_model, name_nodes, read_model, without_double
from pimflow.zoo.precision import has_double
from pimflow.zoo.shapes import dims_of, parse_shape
from pimflow.zoo.states import context_shapes, state_pairs
from pimflow.zoo.weights import (
    activation_types,
    blank_matrices,
    cache_mark,
    cache_types,
    is_weight,
    weight_types,
    with_weights,
)
from pimflow.zoo.weights import weight_chunks as weight_values

__all__ = [
    "RANGES",
    "SMALL_RANGES",
    "GRAPHS",
    "Draw",
    "ModelInfo",
    "blank_matrices",
    "context_shapes",
    "decoder",
    "decoder_names",
    "decoder_weights",
    "describe",
    "dims_of",
    "all_names",
    "example_arrays",
    "example_inputs",
    "with_values",
    "without_double",
    "with_weights",
    "has_double",
    "index_bounds",
    "input_draws",
    "input_types",
    "is_onnx",
    "is_weight",
    "load",
    "load_exact",
    "load_model",
    "name_nodes",
    "names",
    "open_ranks",
    "parse_shape",
    "shapes_from_arrays",
    "past_name",
    "positive_draws",
    "present_name",
    "ranged_draws",
    "read_model",
    "state_pairs",
    "activation_types",
    "cache_mark",
    "cache_types",
    "weight_types",
    "weight_values",
]
