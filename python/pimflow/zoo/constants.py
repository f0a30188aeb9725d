"""Inputs of a network that become constants before it is loaded, and which of its inputs have open shapes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from pimflow.errors import ModelError, UnknownNameError, UsageError
from pimflow.zoo import catalogue, models, weights
from pimflow.zoo.shapes import Shape, dims_of


def with_values(
    model: str | os.PathLike[str] | onnx.ModelProto, values: Mapping[str, np.ndarray]
) -> onnx.ModelProto:
    """A copy of an ONNX model in which inputs are constants.

    Parameters
    ----------
    model : str, path or ModelProto
        See :func:`pimflow.zoo.load_model`. The copy is called as the network of a name or file would be.
    values : mapping of str to ndarray
        By input: an array of its shape, or one number for all of its elements. An open dimension of an input
        that gets one number has the size 1.

    Raises
    ------
    UnknownNameError
        If the model has no such input.
    UsageError
        If a value has another shape, or the type of the input does not hold it.
    """
    _, copy = models.open_copy(model)
    if not isinstance(model, onnx.ModelProto):
        text = os.fspath(model)
        copy.graph.name = text if text in catalogue.all_names() else Path(text).stem
    stored = {tensor.name for tensor in copy.graph.initializer}
    data = {
        value.name: value
        for value in copy.graph.input
        if value.name not in stored and not weights.is_weight(value)
    }
    for name, value in values.items():
        if name not in data:
            raise UnknownNameError("input", name, data)
        copy.graph.initializer.append(numpy_helper.from_array(_constant(data[name], value), name))
    if not data.keys() - values.keys():
        raise UsageError(f"values for all inputs ({', '.join(data)}): a network needs an input")
    others = [value for value in copy.graph.input if value.name not in values]
    del copy.graph.input[:]
    copy.graph.input.extend(others)
    copy.ir_version = max(copy.ir_version, 4)  # older ones declare every initializer as an input
    return copy


def _constant(declared: onnx.ValueInfoProto, value: np.ndarray) -> np.ndarray:
    """A value in type and shape of an input."""
    name, array, dims = declared.name, np.asarray(value), dims_of(declared)
    kind = declared.type.tensor_type.elem_type
    if kind in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING) or array.dtype.kind not in "biuf":
        raise UsageError(f"value of input '{name}': it holds no numbers")
    with np.errstate(all="ignore"):
        converted = array.astype(helper.tensor_dtype_to_np_dtype(kind))
    exact = converted.dtype.kind not in "biu" or np.array_equal(converted.astype(np.float64), array)
    if not exact or (np.isinf(converted.astype(np.float64)) & np.isfinite(array)).any():
        text = str(array) if array.ndim == 0 else f"an array of {array.dtype}"
        raise UsageError(f"value of input '{name}': {converted.dtype} does not hold {text}")
    if dims is None:
        return converted
    if array.ndim == 0:
        return np.array(np.broadcast_to(converted, tuple(size or 1 for size in dims)))
    if len(dims) != array.ndim or any(size not in (None, given) for size, given in zip(dims, array.shape)):
        expected = "x".join(str(size or "?") for size in dims) or "of one number"
        raise UsageError(f"value of input '{name}' has shape {list(array.shape)}; the input is {expected}")
    return converted


def open_ranks(model: object) -> dict[str, int]:
    """Number of dimensions of each input of an ONNX model that leaves the size of one open.

    Empty for other models, and for one that cannot be read, which `load_model` says.
    """
    if isinstance(model, str | os.PathLike) and Path(model).suffix == ".onnx" and Path(model).is_file():
        try:
            model = models.read_model(Path(model), external_data=False)
        except ModelError:
            return {}
    if not isinstance(model, onnx.ModelProto):
        return {}
    dims = {value.name: dims_of(value) for value in model.graph.input}
    return {name: len(sizes) for name, sizes in dims.items() if sizes is not None and None in sizes}


def shapes_from_arrays(ranks: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> dict[str, Shape]:
    """Shapes of inputs by arrays of them; one more dimension than in `ranks`, the first, is of samples."""
    return {
        name: np.shape(arrays[name])[-rank:] if rank else ()
        for name, rank in ranks.items()
        if name in arrays and np.ndim(arrays[name]) in (rank, rank + 1) and np.size(arrays[name])
    }
