"""Weights from a counter: a graph-only ONNX file becomes a model, the same on every machine.

A graph-only file has no weights. Each weight is a typed graph input whose metadata
``init = rule:fan_in:gain`` says how to draw it; see :data:`RULES`. One that has ``trained = NAME`` too is not
drawn but read, from a file of :data:`TRAINED`, which has it under its name; one that has ``gguf = PATH``,
from that file, by :mod:`.language.gguf_file`.
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
from pimflow.zoo.language import gguf_file
from pimflow.zoo.shapes import dims_of

# rule -> (centre, half width) of a uniform distribution, before gain / sqrt(fan_in). A weight of
# gain 1 has variance 2 / fan_in (He et al. 2015, eq. 10). The others are `assumed`: so far from
# their neutral value that leaving one out shows in the outputs, with E[scale^2 / variance] = 0.99
# so that a chain of batch norms neither grows nor fades.
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
CHUNK = 1 << 17  # values drawn at a time: few enough for the cache, and even, for a word holds two


def rule_of(value: onnx.ValueInfoProto) -> tuple[str, int, float] | None:
    """Read how to draw a weight.

    Parameters
    ----------
    value : onnx.ValueInfoProto
        A graph input.

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
    """Whether a weight is read from the zoo, not drawn."""
    return _metadata(value, "trained") is not None


def forget(value: onnx.ValueInfoProto) -> None:
    """Have a weight drawn, in place, though there is a trained one."""
    kept = [entry for entry in value.metadata_props if entry.key != "trained"]
    del value.metadata_props[:]
    value.metadata_props.extend(kept)


def uniform(name: str, count: int, seed: int) -> np.ndarray:
    """Draw from [-1, 1), bit-identical everywhere: Philox4x64 keyed by (seed, crc32(name)).

    Parameters
    ----------
    name : str
        What is drawn; another name is another stream.
    count : int
        Values wanted.
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
    drawn = np.empty(count, np.float32)
    start = 0
    for chunk in _chunks(name, count, seed):
        drawn[start : start + chunk.size] = chunk
        start += chunk.size
    return drawn


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
        for chunk in drawn(value, seed):
            raw.write(chunk)
        # filled in place: a tensor made elsewhere would be copied
        stored = graph.initializer.add(name=value.name, data_type=onnx.TensorProto.FLOAT)
        stored.dims.extend(dims_of(value))
        stored.raw_data = raw.getvalue()
    del graph.input[:]
    graph.input.extend(data)


def drawn(value: onnx.ValueInfoProto, seed: int = 0) -> Iterator[np.ndarray]:
    """Values of the weight that a graph input with an ``init`` rule stands for, little-endian fp32, in parts.

    `seed` is of no matter to one that was trained.

    Raises
    ------
    ModelError
        As `fill` does.
    """
    known_rule, dims = rule_of(value), dims_of(value)
    single = value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    if known_rule is None or dims is None or None in dims or not single:
        raise ModelError(f"weight '{value.name}': needs a fixed shape and type float32")
    if file := _metadata(value, "gguf"):
        yield gguf_file.weight(file, value.name).astype("<f4", copy=False).ravel()
        return
    if network := _metadata(value, "trained"):
        yield _trained(network, value.name, math.prod(dims))
        return
    rule, fan_in, gain = known_rule
    centre, half_width = RULES[rule]
    scale = np.float32(half_width * gain / math.sqrt(fan_in))
    for chunk in _chunks(value.name, math.prod(dims), seed):
        chunk *= scale
        chunk += np.float32(centre)
        yield chunk.astype("<f4", copy=False)


def _trained(network: str, name: str, count: int) -> np.ndarray:
    """A trained weight, which is kept in fp16."""
    try:
        with np.load(TRAINED / f"{Path(network).name}.npz") as kept:
            values = kept[name].astype("<f4").ravel()
    except (OSError, KeyError, ValueError):
        values = np.empty(0)
    if values.size != count:
        raise ModelError(f"weight '{name}': the zoo has no such trained weight of '{network}'")
    return values


def _chunks(name: str, count: int, seed: int) -> Iterator[np.ndarray]:
    """Draw what :func:`uniform` returns, :data:`CHUNK` values at a time."""
    if not 0 <= seed < 2**64:
        raise UsageError(f"seed {seed} is out of range; use 0 to 2**64 - 1")
    counter = np.random.Philox(key=np.array([seed, zlib.crc32(name.encode())], np.uint64))
    for start in range(0, count, CHUNK):
        wanted = min(CHUNK, count - start)
        words = counter.random_raw((wanted + 1) // 2).astype("<u8", copy=False).view("<u4")[:wanted]
        words >>= 8
        chunk = words.astype(np.float32)
        chunk *= np.float32(2.0**-23)
        chunk -= np.float32(1.0)
        yield chunk


def filled(model: onnx.ModelProto, seed: int = 0) -> onnx.ModelProto:
    """`model` with such weights drawn: itself if there are none."""
    if not any(map(is_weight, model.graph.input)):
        return model
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    fill(whole, seed)
    return whole
