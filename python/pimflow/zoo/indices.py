"""What the graph says of an input's values: which table it indexes, and which values it may have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from pimflow.weight_types import WEIGHT_TYPES
from pimflow.zoo.draws import Draw
from pimflow.zoo.nodes import constant_nodes
from pimflow.zoo.shapes import dims_of
from pimflow.zoo.weights import cache_mark

# Operators that change the shape or the type of values, or choose some of them.
_MOVES = ("Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")
_CARRIERS = frozenset({"Cast", *_MOVES})
# Of operators that combine their operand with a constant: positive operands stay positive.
_POSITIVE_WITH_CONSTANT = frozenset({"Add", "Div", "Mul"})
_POSITIVE_DOMAIN = frozenset({"Acos", "Asin", "Atanh", "Log", "Reciprocal", "Sqrt"})
_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})

# For Sqrt, Log and the like; for Acosh; of divisors, by kind of numbers.
INSIDE_UNIT = Draw("uniform", 0.1, 0.9)  # also for Asin, Atanh and the logarithm of 1 - x
ABOVE_ONE = Draw("uniform", 1.1, 3.0)
DIVISORS = {"i": Draw("int", 1, 9), "f": Draw("uniform", 0.5, 2.0)}
# A network whose first step divides by one of these takes samples of 8 or 16 bits.
_PIXEL_SCALES, _AUDIO_SCALES = (250.0, 256.0), (2.0**14, 2.0**16)
_PIXEL_MEANS = (16.0, 255.0)  # that are subtracted from samples of 8 bits


@dataclass(frozen=True)
class _Use:
    """A node that reads values of an input, unchanged or as positive as they are, at operand `index`."""

    node: onnx.NodeProto
    index: int
    is_unchanged: bool


class _InputUses:
    """What the nodes of a network read: the values of its inputs above all."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        values = (*graph.input, *graph.value_info, *graph.output)
        self.shapes = {value.name: dims_of(value) for value in values}
        self.shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        self.constants: dict[str, onnx.TensorProto] = dict(constant_nodes(graph))
        self.constants |= {tensor.name: tensor for tensor in graph.initializer}
        self.readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in graph.node:
            for index, name in enumerate(node.input):
                self.readers.setdefault(name, []).append((node, index))

    def uses(self, name: str) -> Iterator[_Use]:
        """Nodes that read the values of an input, and those behind nodes that carry them."""
        queue, seen = [(name, True)], {name}
        while queue:
            tensor, is_unchanged = queue.pop(0)
            for node, index in self.readers.get(tensor, ()):
                yield _Use(node, index, is_unchanged)
                carries = node.op_type in _CARRIERS and index == 0
                if carries or self._keeps_sign(node, index):
                    results = [result for result in node.output if result not in seen]
                    queue += [(result, is_unchanged and carries) for result in results]
                    seen.update(results)

    def _keeps_sign(self, node: onnx.NodeProto, index: int) -> bool:
        """Whether positive values of an operand give positive results, since the other is a constant."""
        if node.op_type not in _POSITIVE_WITH_CONSTANT or len(node.input) != 2:
            return False
        constant = self.array(node.input[1 - index])
        return constant is not None and bool((constant > 0).all()) and (node.op_type != "Div" or index == 0)

    def array(self, name: str) -> np.ndarray | None:
        """A small constant; None for other tensors."""
        tensor = self.constants.get(name)
        if tensor is None or np.prod(tensor.dims) > 64 or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        array = numpy_helper.to_array(tensor)
        return array.astype(np.float64) if array.dtype.kind in "iuf" and array.size else None


def index_bounds(model: onnx.ModelProto) -> dict[str, int]:
    """Upper bounds of inputs that are indices: the rows of the smallest table that each indexes.

    Parameters
    ----------
    model : onnx.ModelProto
        With inferred shapes, as :func:`pimflow.zoo.load_model` returns it.

    Returns
    -------
    dict of str to int
        By input. Inputs that index no table, or none of known size, are left out.
    """
    graph = _InputUses(model)
    bounds: dict[str, int] = {}
    for value in model.graph.input:
        sizes = [_rows(graph, use.node, use.index) for use in graph.uses(value.name) if use.is_unchanged]
        if known := [size for size in sizes if size]:
            bounds[value.name] = min(known)
    return bounds


def _rows(graph: _InputUses, node: onnx.NodeProto, index: int) -> int | None:
    """Size of what operand `index` of a node indexes; None if it is no index, or the size is not known."""
    kind, table = node.op_type, graph.shapes.get(node.input[0])
    if kind == "EmbedLayerNormalization" and index in (0, 1):
        words = graph.shapes.get(node.input[2 if index == 0 else 4]) if len(node.input) > 4 else None
        return words[0] if words else None
    if index != 1 or not table:
        return None
    if kind in ("Gather", "GatherElements", "ScatterElements"):
        axis = next((entry.i for entry in node.attribute if entry.name == "axis"), 0)
        return table[axis] if -len(table) <= axis < len(table) else None
    if kind in ("GatherND", "ScatterND"):
        places = graph.shapes.get(node.input[1])
        batch = next((entry.i for entry in node.attribute if entry.name == "batch_dims"), 0)
        indexed = table[batch : batch + places[-1]] if places and places[-1] else ()
        return min(indexed) if indexed and None not in indexed else None
    return None


def input_draws(model: onnx.ModelProto) -> dict[str, Draw]:
    """Distributions of the inputs whose values the graph restricts.

    Divisors are not zero, arguments of Sqrt, Log and the like are positive, lengths of sequences are at most
    their steps. An input that is first divided by 255 or has means subtracted that are as large holds pixels,
    one that is divided by 32768 holds audio, as numbers of 16 bits. Other inputs are left out.

    Parameters
    ----------
    model : onnx.ModelProto
        As for :func:`index_bounds`; so are indices, which are left out too.
    """
    graph, indices, draws = _InputUses(model), index_bounds(model), {}
    for value in model.graph.input:
        element_type = value.type.tensor_type.elem_type
        if value.name in indices or not element_type or element_type == onnx.TensorProto.STRING:
            continue
        if cache_type := cache_mark(value):
            draws[value.name] = _cache_draw(value, cache_type)
            continue
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(element_type)).kind.replace("V", "f")
        uses = list(graph.uses(value.name)) if kind in "iuf" else []
        restrictions = (_domain(graph, use, kind) for use in uses)
        scales = (_scale(graph, use, kind) for use in uses if use.is_unchanged)
        draw = next(filter(None, restrictions), None) or next(filter(None, scales), None)
        if draw is not None:
            draws[value.name] = draw
    return draws


def _cache_draw(value: onnx.ValueInfoProto, kind: str) -> Draw:
    """Integers of a cache, or their scales, which lie beside them one a token and head."""
    dims = dims_of(value)
    if dims is not None and dims[-1] == 1:
        return Draw("uniform", 1 / 256, 1 / 128)
    largest = (1 << (WEIGHT_TYPES[kind].bits - 1)) - 1
    return Draw("int", -largest, largest)


def _domain(graph: _InputUses, use: _Use, kind: str) -> Draw | None:
    """The distribution of an input of dtype kind `kind` for which a node that reads it is defined."""
    operator = use.node.op_type
    if operator in ("Div", "Mod") and use.index == 1:
        return DIVISORS["f" if kind == "f" else "i"]
    if operator in _RECURRENT and use.index == 4 and (steps := graph.shapes.get(use.node.input[0])):
        return Draw("int", 1, steps[0] or 1)
    if operator == "MaxUnpool" and use.index == 1 and (pooled := graph.shapes.get(use.node.input[0])):
        return Draw("distinct", 0, math.prod(size or 1 for size in pooled) - 1)  # places, of one value each
    if kind != "f":  # 0 to a negative power is no integer
        return DIVISORS["i"] if operator == "Pow" and use.index == 0 else None
    if operator in _POSITIVE_DOMAIN or (operator == "Pow" and use.index == 0 and _is_fractional(graph, use)):
        return INSIDE_UNIT
    return ABOVE_ONE if operator == "Acosh" else None


def _is_fractional(graph: _InputUses, use: _Use) -> bool:
    exponents = graph.array(use.node.input[1])
    return exponents is not None and bool((exponents != np.floor(exponents)).any())


def _scale(graph: _InputUses, use: _Use, kind: str) -> Draw | None:
    """The distribution of samples of 8 or 16 bits, if the first arithmetic on them tells."""
    node = use.node
    operator, whole = node.op_type, kind != "f"
    if operator == "DequantizeLinear" and use.index == 0:
        return Draw("int", 0, 255) if kind == "u" else Draw("int", -128, 127)
    constant = graph.array(node.input[1 - use.index]) if len(node.input) == 2 and use.index < 2 else None
    if constant is None or not (constant > 0).all() or (operator in ("Div", "Sub") and use.index):
        return None
    pixels = Draw("int", 0, 255) if whole else Draw("uniform", 0, 255)
    if operator == "Sub":
        low, high = _PIXEL_MEANS
        return pixels if (constant >= low).all() and (constant <= high).all() else None
    if operator not in ("Div", "Mul") or constant.size != 1:
        return None
    divisor = float(constant.item() if operator == "Div" else 1 / constant.item())
    if _PIXEL_SCALES[0] <= divisor <= _PIXEL_SCALES[1]:
        return pixels
    if _AUDIO_SCALES[0] <= divisor <= _AUDIO_SCALES[1]:
        loudness = np.floor(divisor / 10)  # of speech, whose peaks are then within the range
        return Draw("int", -3 * loudness, 3 * loudness) if whole else Draw("normal", 0, loudness)
    return None
