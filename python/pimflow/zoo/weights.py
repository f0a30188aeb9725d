"""Weights of graph-only ONNX files, drawn by a counter-based generator, the same on every machine.

A graph-only file has no weights. Each weight is a typed graph input whose metadata
``init = rule:fan_in:gain`` says how to draw it; see :data:`RULES`. If it also has ``trained = NAME``, it is
read from a file in :data:`TRAINED`. If it has ``file = PATH``, it is read from there, by
:mod:`.language.decoder_files`. If it has ``stored = TYPE``, it is stored in one of
:data:`pimflow.weight_types.WEIGHT_TYPES`: its values are those that this type has, once they are drawn. If it
has ``blank``, it is zero.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from pimflow.errors import ModelError, UsageError
from pimflow.weight_types import WEIGHT_TYPES, WeightType
from pimflow.zoo.language import decoder_files
from pimflow.zoo.shapes import dims_of

# rule -> (centre, half width) of a uniform distribution, before gain / sqrt(fan_in). A weight of
# gain 1 has variance 2 / fan_in (He et al. 2015, eq. 10). The others are `assumed`. They are so far
# from their neutral values that outputs change if one is forgotten, and E[scale^2 / variance] = 0.99,
# so that values neither grow nor vanish along a chain of batch norms.
RULES = {
    "weight": (0.0, math.sqrt(6.0)),
    "bias": (0.0, 0.1),
    "scale": (0.94, 0.25),
    "mean": (0.0, 0.1),
    "variance": (1.0, 0.5),
    "slope": (0.25, 0.2),  # of a PReLU, which starts at 0.25 (He et al. 2015, section 2.1)
    "embedding": (0.0, 1.0),
}
TRAINED = Path(__file__).parent / "trained"  # written by scripts/train_small_network.py
STATISTICS = frozenset({"mean", "variance"})
TABLE_VALUES = 1 << 20  # of a table that are rounded at once
CHUNK = 1 << 17  # values drawn at a time: few enough for the cache, and even, since a word gives two


def rule_of(value: onnx.ValueInfoProto) -> tuple[str, int, float] | None:
    """Read how to draw a weight.

    Returns
    -------
    tuple of (str, int, float) or None
        Rule, fan-in and gain; None where the input is data.

    Raises
    ------
    ModelError
        If the metadata is there but is not ``rule:fan_in:gain``.
    """
    init = _metadata(value, "init")
    if init is None:
        return None
    try:
        rule, fan_in, gain = init.split(":")
        if rule in RULES and int(fan_in) > 0 and math.isfinite(float(gain)):
            return rule, int(fan_in), float(gain)
    except ValueError:
        pass
    raise ModelError(
        f"weight '{value.name}': init {init!r} is not rule:fan_in:gain with rule one of "
        f"{', '.join(RULES)}; rebuild the file with scripts/build_zoo.py"
    )


def is_weight(value: onnx.ValueInfoProto) -> bool:
    """Whether an input of a graph-only model is a weight to be drawn."""
    return rule_of(value) is not None


def _metadata(value: onnx.ValueInfoProto, key: str) -> str | None:
    return next((entry.value for entry in value.metadata_props if entry.key == key), None)


def is_trained(value: onnx.ValueInfoProto) -> bool:
    """Whether a weight is trained, and read from the zoo, not drawn."""
    return _metadata(value, "trained") is not None


def weight_types(model: onnx.ModelProto) -> dict[str, str]:
    """By node, the type in which the weight that it multiplies with is stored, if it is marked."""
    return _marks_by_product(model, "stored")


def activation_types(model: onnx.ModelProto) -> dict[str, str]:
    """By node, the type of integers that it multiplies with a weight, if that is marked."""
    return _marks_by_product(model, "activations")


def cache_mark(value: onnx.ValueInfoProto) -> str:
    """The type of the integers, or of those beside the scales, of an input that is marked as a cache."""
    return _metadata(value, "cache") or ""


def cache_types(model: onnx.ModelProto) -> dict[str, str]:
    """By input that is marked as a cache, the type of its integers."""
    return {value.name: kind for value in model.graph.input if (kind := cache_mark(value))}


def _marks_by_product(model: onnx.ModelProto, key: str) -> dict[str, str]:
    types = {value.name: kind for value in model.graph.input if (kind := _metadata(value, key))}
    by_node: dict[str, str] = {}
    for node in model.graph.node if types else ():
        kind = next((types[name] for name in node.input if name in types), None)
        if kind and node.op_type == "Transpose":
            types[node.output[0]] = kind
        elif kind and node.op_type == "MatMul":
            by_node[node.name] = kind
    return by_node


def blank_matrices(model: onnx.ModelProto) -> onnx.ModelProto:
    """Mark the matrices of a graph-only model, in place, as zeros that are not drawn; returns the model.

    This is for a search, which depends on the sizes of weights alone.
    """
    for value in model.graph.input:
        dims = dims_of(value)
        if is_weight(value) and dims is not None and len(dims) > 1:
            value.metadata_props.add(key="blank", value="yes")
    return model


def uniform(name: str, count: int, seed: int) -> np.ndarray:
    """Draw from [-1, 1), bit-identical everywhere: Philox4x64 keyed by (seed, crc32(name)).

    Parameters
    ----------
    seed : int
        0 to 2**64 - 1.

    Returns
    -------
    numpy.ndarray
        Shape (count,), float32, multiples of 2**-23.

    Raises
    ------
    UsageError
        If `seed` is out of range.
    """
    values = np.empty(count, np.float32)
    start = 0
    for chunk in _chunks(name, count, seed):
        values[start : start + chunk.size] = chunk
        start += chunk.size
    return values


def fill(model: onnx.ModelProto, seed: int) -> None:
    """Turn every graph input that carries an ``init`` rule into an initializer, in place.

    Parameters
    ----------
    model : onnx.ModelProto
        Graph-only; a model without such inputs is left as it is.
    seed : int
        See :func:`uniform`.

    Raises
    ------
    ModelError
        If a rule is malformed or its weight is not a float32 tensor of known shape.
    """
    graph = model.graph
    data = []
    for value in graph.input:
        if rule_of(value) is None:
            data.append(value)
            continue
        raw = io.BytesIO()
        for chunk in weight_chunks(value, seed):
            raw.write(chunk)
        # written in place: adding a finished tensor would copy it
        stored = graph.initializer.add(name=value.name, data_type=onnx.TensorProto.FLOAT)
        stored.dims.extend(dims_of(value))
        stored.raw_data = raw.getvalue()
    del graph.input[:]
    graph.input.extend(data)


def weight_chunks(value: onnx.ValueInfoProto, seed: int = 0) -> Iterator[np.ndarray]:
    """Yield the values of a weight, given by its graph input with an ``init`` rule, in parts.

    Values are little-endian fp32. `seed` has no effect on trained weights.

    Raises
    ------
    ModelError
        In the same cases as `fill`.
    """
    parsed_rule, dims = rule_of(value), dims_of(value)
    single = value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    if parsed_rule is None or dims is None or None in dims or not single:
        raise ModelError(f"weight '{value.name}': needs a fixed shape and type float32")
    if _metadata(value, "blank"):
        for start in range(0, math.prod(dims), CHUNK):
            yield np.zeros(min(CHUNK, math.prod(dims) - start), "<f4")
        return
    if file := _metadata(value, "file"):
        yield decoder_files.weight(file, value.name).astype("<f4", copy=False).ravel()
        return
    if network := _metadata(value, "trained"):
        chunks = iter([_read_trained(network, value.name, math.prod(dims))])
    else:
        chunks = _draw_chunks(value.name, parsed_rule, math.prod(dims), seed)
    kind = _metadata(value, "stored")
    yield from chunks if kind is None else _read_chunks(chunks, WEIGHT_TYPES[kind], dims, parsed_rule[0])


def _draw_chunks(name: str, rule: tuple[str, int, float], count: int, seed: int) -> Iterator[np.ndarray]:
    """Draw a weight by a rule, in parts."""
    kind, fan_in, gain = rule
    centre, half_width = RULES[kind]
    scale = np.float32(half_width * gain / math.sqrt(fan_in))
    for chunk in _chunks(name, count, seed):
        chunk *= scale
        chunk += np.float32(centre)
        yield chunk.astype("<f4", copy=False)


def _read_chunks(
    chunks: Iterator[np.ndarray], kind: WeightType, dims: tuple[int, ...], rule: str
) -> Iterator[np.ndarray]:
    """What is stored of a matrix, in parts of whole blocks; blocks lie along its inputs.

    These are the rows of a product, and the columns of a table (rule ``embedding``).
    """
    is_table = rule == "embedding"
    rows = max(1, TABLE_VALUES // dims[1]) if is_table else kind.block or dims[0]
    for values in _regroup(chunks, rows * dims[1]):
        part = values.reshape(-1, dims[1])
        yield (kind.round(part.T).T if is_table else kind.round(part)).astype("<f4", copy=False).ravel()


def _regroup(chunks: Iterator[np.ndarray], count: int) -> Iterator[np.ndarray]:
    """The values of `chunks`, `count` at a time; at the end there may be fewer."""
    values, filled = np.empty(count, np.float32), 0
    for chunk in chunks:
        while len(chunk):
            taken = min(len(chunk), count - filled)
            values[filled : filled + taken] = chunk[:taken]
            chunk, filled = chunk[taken:], filled + taken
            if filled == count:
                yield values
                values, filled = np.empty(count, np.float32), 0
    if filled:
        yield values[:filled]


def _read_trained(network: str, name: str, count: int) -> np.ndarray:
    """Read a trained weight, which is stored in fp16."""
    try:
        with np.load(TRAINED / f"{Path(network).name}.npz") as archive:
            values = archive[name].astype("<f4").ravel()
    except (OSError, KeyError, ValueError):
        values = np.empty(0)
    if values.size != count:
        raise ModelError(f"weight '{name}': the zoo has no trained weight of this name for '{network}'")
    return values


def _chunks(name: str, count: int, seed: int) -> Iterator[np.ndarray]:
    """Draw the values that :func:`uniform` returns, :data:`CHUNK` at a time."""
    if not 0 <= seed < 2**64:
        raise UsageError(f"seed {seed} is out of range; use 0 to 2**64 - 1")
    counter = np.random.Philox(key=np.array([seed, zlib.crc32(name.encode())], np.uint64))
    for start in range(0, count, CHUNK):
        chunk_size = min(CHUNK, count - start)
        words = counter.random_raw((chunk_size + 1) // 2).astype("<u8", copy=False).view("<u4")[:chunk_size]
        words >>= 8
        chunk = words.astype(np.float32)
        chunk *= np.float32(2.0**-23)
        chunk -= np.float32(1.0)
        yield chunk


def with_weights(model: onnx.ModelProto, seed: int = 0) -> onnx.ModelProto:
    """A copy of a graph-only `model` with its weights; `model` itself if it has no weights to draw."""
    if not any(map(is_weight, model.graph.input)):
        return model
    new_model = onnx.ModelProto()
    new_model.CopyFrom(model)
    fill(new_model, seed)
    return new_model
