"""Inputs of networks, drawn at random."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

import numpy as np
import onnx
from onnx import helper

from pimflow.errors import ModelError
from pimflow.zoo import weights
from pimflow.zoo.draws import Draw
from pimflow.zoo.indices import index_bounds, input_draws
from pimflow.zoo.shapes import Shape, fixed_dims


def example_inputs(model: onnx.ModelProto, seed: int = 0, *, positive: bool = False) -> dict[str, np.ndarray]:
    """Draw an input for each data input of a network, bit-identical everywhere.

    Parameters
    ----------
    seed : int, optional
        See :func:`load`.
    positive : bool, optional
        Whether floats are drawn as :func:`positive_draws` says.

    Returns
    -------
    dict of str to numpy.ndarray
        Arrays of the inputs' shapes and types. Floats have mean 0 and variance 1, and are in [-3, 3] (a sum
        of three uniforms). Integers are 0, 1 or 2; indices into a table are any of its rows. Booleans are
        true with probability 1/2. Values that the graph restricts are drawn as :func:`input_draws` says.

    Raises
    ------
    ModelError
        If an input has a dynamic dimension or does not hold numbers.
    """
    types, rows, draws = input_types(model), index_bounds(model), input_draws(model)
    draws |= positive_draws(types, {*rows, *draws}) if positive else {}
    return example_arrays(types, seed, rows, draws)


def positive_draws(types: Mapping[str, tuple[Shape, str]], known: Container[str]) -> dict[str, Draw]:
    """Distributions above zero of the floating-point inputs that are not in `known`.

    For a network whose reference is NaN for usual inputs: it takes roots or logarithms of what it computes.
    """
    return {
        name: Draw("uniform", 0.1, 0.9)
        for name, (_, dtype) in types.items()
        if name not in known and np.issubdtype(dtype, np.floating)
    }


# Ranges of samples of 8 and 16 bits, by what holds them; those of 16 bits as `input_draws` draws them.
RANGES = {"pixels of 8 bits": Draw("uniform", 0, 255), "samples of 16 bits": Draw("normal", 0, 3276)}


# Ranges of inputs for which fewer values leave fp16.
SMALL_RANGES = {"numbers from 0 to 1": Draw("uniform", 0, 1), "small numbers": Draw("normal", 0, 1 / 64)}


def ranged_draws(
    types: Mapping[str, tuple[Shape, str]], known: Container[str], ranges: Mapping[str, Draw]
) -> dict[str, dict[str, Draw]]:
    """By key of `ranges`, distributions of the floating-point tensors of several elements not in `known`."""
    names = [
        name
        for name, (dims, dtype) in types.items()
        if name not in known and np.issubdtype(dtype, np.floating) and math.prod(dims) > 1
    ]
    return {kind: dict.fromkeys(names, draw) for kind, draw in ranges.items() if names}


def input_types(model: onnx.ModelProto) -> dict[str, tuple[Shape, str]]:
    """Shape and dtype of each data input, in order; raises what :func:`example_inputs` does."""
    stored = {tensor.name for tensor in model.graph.initializer}
    types = {}
    for value in model.graph.input:
        if value.name in stored or weights.is_weight(value):
            continue
        kind = value.type.tensor_type.elem_type
        if kind in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
            raise ModelError(f"input '{value.name}': holds no numbers; only tensors can be drawn")
        dims = fixed_dims(value, f"model '{model.graph.name}'")
        types[value.name] = (dims, str(helper.tensor_dtype_to_np_dtype(kind)))
    return types


def example_arrays(
    types: Mapping[str, tuple[tuple[int, ...], object]],
    seed: int = 0,
    rows: Mapping[str, int] | None = None,
    draws: Mapping[str, Draw] | None = None,
) -> dict[str, np.ndarray]:
    """Draw what :func:`example_inputs` draws, for inputs given by name as (shape, dtype).

    Parameters
    ----------
    rows : mapping of str to int, optional
        The sizes of tables that inputs index, as :func:`index_bounds` returns them.
    draws : mapping of str to Draw, optional
        By input, another distribution.
    """
    arrays = {}
    for name, (dims, dtype) in types.items():
        if draws and name in draws:
            arrays[name] = draws[name].array(name, dims, dtype, seed)
            continue
        first, second, third = weights.uniform(name, 3 * math.prod(dims), seed).reshape(3, -1)
        normal = (first + second + third).reshape(dims)
        if np.issubdtype(dtype, np.bool_):
            normal = normal > 0
        elif np.issubdtype(dtype, np.integer):
            if bound := (rows or {}).get(name):
                normal = np.floor((first.astype(np.float64).reshape(dims) + 1) / 2 * bound)
            else:
                normal = np.abs(normal).clip(max=2)
        arrays[name] = np.asarray(normal, dtype)  # an array also of rank 0
    return arrays
