"""What the layers of an ONNX network compute, element by element: formulas that a kernel is made of.

A layer of `deep_fusion` says what is read; here is what is done with it, and the values of its weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from tvm import tirx

from pimflow.core.ranges import RangeMap
from pimflow.deep_fusion import Layer, LayerGraph
from pimflow.deep_fusion.onnx_layers import VIEWS
from pimflow.errors import UnsupportedOpError

At = tuple[tirx.Expr, ...]  # indices along n, h, w and c
# Of operand `i` at (n, h, w, c); of weight `k` of filter `f`.
Read = Callable[[int, At], tirx.Expr]
Weight = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]

_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A sum or maximum over taps, in their order.

    Attributes
    ----------
    initial : float
    taps : tuple of int
        Extents of the loops.
    valid : callable
        From result index and taps to whether they read anything; None for always.
    term : callable
        From `Read`, `Weight`, result index, taps and the reductions done before to what is combined.
    combine : callable
    """

    initial: float
    taps: tuple[int, ...]
    valid: Callable[[At, At], tirx.Expr | None]
    term: Callable[[Read, Weight, At, At, list[tirx.Expr]], tirx.Expr]
    combine: Callable[[tirx.Expr, tirx.Expr], tirx.Expr] = lambda done, term: done + term


@dataclass(frozen=True, kw_only=True)
class Formula:
    """Results of a run of channels.

    Attributes
    ----------
    channels : tuple of int
        Half-open.
    result : callable
        From `Read`, `Weight`, result index and reductions to the result.
    reductions : tuple of Reduction
    alike : int
        Runs of so many channels have the same taps, so that they can be formed side by side.
    """

    channels: tuple[int, int]
    result: Callable[[Read, Weight, At, list[tirx.Expr]], tirx.Expr]
    reductions: tuple[Reduction, ...] = ()
    alike: int = 1


@dataclass(frozen=True, kw_only=True)
class Computation:
    """A layer's formulas, and its weights as (weights of a filter, filters)."""

    formulas: tuple[Formula, ...]
    weights: np.ndarray


def computations(model: onnx.ModelProto, graph: LayerGraph) -> dict[str, Computation]:
    """By layer of ``unfolded(model)``; `model` has its values.

    Raises
    ------
    UnsupportedOpError
        Naming the first layer for which there is no formula.
    """
    values = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    numbers = {}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            value = onnx.numpy_helper.to_array(node.attribute[0].t)
            numbers |= {node.output[0]: float(value.item())} if value.size == 1 else {}
    layers = {layer.name: layer for layer in graph.layers}
    found = {}
    for node in model.graph.node:
        name = node.output[0]
        if name not in layers or node.op_type in VIEWS:
            continue
        made = _RULES.get(node.op_type, _unknown)(_Node(node, layers[name], graph, values, numbers))
        middle = f"{name}.normalised"
        found |= {middle: made[0], name: made[1]} if isinstance(made, tuple) else {name: made}
    for layer in graph.layers:
        if found[layer.name].weights.size != layer.weight_elements:
            raise UnsupportedOpError(
                f"layer '{layer.name}': its {layer.weight_elements} constants are not those of its formula, "
                f"{found[layer.name].weights.size}; it cannot be executed fused"
            )
    return found


class _Node:
    """A node with its layer: by position, weights, numbers that are part of the code, and operands."""

    def __init__(
        self,
        node: onnx.NodeProto,
        layer: Layer,
        graph: LayerGraph,
        values: Mapping[str, np.ndarray],
        numbers: Mapping[str, float],
    ) -> None:
        self.type, self.layer, self.graph = node.op_type, layer, graph
        self.attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        self.shape = graph.shapes[layer.name]
        self.sources = [graph.shapes[name] for name in layer.inputs]
        self.constants: dict[int, np.ndarray] = {}
        self.numbers: dict[int, float] = {}
        self.data: dict[int, int] = {}
        for place, name in enumerate(node.input):
            if name in values:
                self.constants[place] = values[name]
            elif name in numbers:
                self.numbers[place] = numbers[name]
            elif name:
                self.data[place] = len(self.data)
        self.count = len(node.input)
        if len(self.data) != len(self.sources):
            raise self.refuse("an operand is computed from constants")

    def refuse(self, why: str) -> UnsupportedOpError:
        return UnsupportedOpError(
            f"layer '{self.layer.name}' ({self.type}): {why}; it cannot be executed fused"
        )

    def formula(self, result, *reductions: Reduction, alike: int | None = None) -> tuple[Formula, ...]:
        channels = self.shape[3]
        return (
            Formula(channels=(0, channels), result=result, reductions=reductions, alike=alike or channels),
        )


def _no_weights() -> np.ndarray:
    return np.zeros((0, 1), np.float32)


def _flat(*arrays: np.ndarray) -> np.ndarray:
    """Weights that are loaded together: one piece."""
    return np.concatenate([a.astype(np.float32).ravel() for a in arrays]).reshape(-1, 1)


def _inside(position: tirx.Expr, window: RangeMap) -> list[tirx.Expr]:
    padded = window.pad_before > 0 or window.pad_after > 0
    return [position >= 0, position < window.extent] if padded else []


def _window(layer: Layer) -> tuple[Callable[[At, At], tuple], Callable[[At, At], tirx.Expr | None]]:
    """Row and column that taps read, and whether they lie in the map."""
    rows, columns = layer.maps[0][1], layer.maps[0][2]

    def place(at: At, taps: At) -> tuple:
        return tuple(
            at[axis] * m.stride - m.pad_before + tap * m.dilation
            for axis, m, tap in ((1, rows, taps[0]), (2, columns, taps[1]))
        )

    def valid(at: At, taps: At) -> tirx.Expr | None:
        h, w = place(at, taps)
        checks = _inside(h, rows) + _inside(w, columns)
        return tirx.all(*checks) if checks else None

    return place, valid


def _conv(node: _Node) -> Computation:
    layer, filters = node.layer, node.constants.get(1)
    if filters is None or len(node.data) > 1:
        raise node.refuse("its filters are no constants")
    rows, columns, channels = layer.maps[0][1:]
    size, per = channels.window, channels.repeat
    kw, place_valid = columns.window, _window(layer)
    weights = filters.transpose(2, 3, 1, 0).reshape(-1, filters.shape[0])
    if filters.shape[1:] != (size, rows.window, kw) or max(rows.repeat, columns.repeat) > 1:
        raise node.refuse("its operand is reshaped")
    biased = 2 in node.constants
    if biased:
        weights = np.vstack([weights, node.constants[2].reshape(1, -1)])
    depthwise = size == per == 1

    def term(read: Read, weight: Weight, at: At, taps: At, _) -> tirx.Expr:
        h, w = place_valid[0](at, taps)
        group = at[3] if depthwise else 0 if per == node.shape[3] else at[3] // per
        source = read(0, (at[0], h, w, group * size + taps[2]))
        return source * weight((taps[0] * kw + taps[1]) * size + taps[2], at[3])

    def result(read: Read, weight: Weight, at: At, done: list[tirx.Expr]) -> tirx.Expr:
        return done[0] + weight(weights.shape[0] - 1, at[3]) if biased else done[0]

    total = Reduction(initial=0.0, taps=(rows.window, kw, size), valid=place_valid[1], term=term)
    alike = node.shape[3] if depthwise else per
    return Computation(formulas=node.formula(result, total, alike=alike), weights=weights.astype(np.float32))


def _pool(node: _Node) -> Computation:
    rows, columns = node.layer.maps[0][1:3]
    place, valid = _window(node.layer)
    largest = node.type.endswith("MaxPool")
    if rows.repeat * columns.repeat > 1 and node.shape[1:3] != (1, 1):
        raise node.refuse("its window is not known")

    def term(read: Read, _, at: At, taps: At, __) -> tirx.Expr:
        h, w = place(at, taps) if not node.type.startswith("Global") else taps
        return read(0, (at[0], h, w, at[3]))

    def result(_, __, at: At, done: list[tirx.Expr]) -> tirx.Expr:
        if largest:
            return done[0]
        if node.type.startswith("Global"):
            return done[0] / float(rows.window * columns.window)
        if node.attributes.get("count_include_pad") and not node.attributes.get("ceil_mode"):
            return done[0] / float(rows.window * columns.window)
        return done[0] / tirx.Cast("float32", _taps_inside(at[1], rows) * _taps_inside(at[2], columns))

    reduction = Reduction(
        initial=_LOWEST if largest else 0.0,
        taps=(rows.window, columns.window),
        valid=valid,
        term=term,
        combine=tirx.max if largest else lambda done, value: done + value,
    )
    if node.attributes.get("count_include_pad") and node.attributes.get("ceil_mode"):
        raise node.refuse("an average over padding with ceil_mode")
    return Computation(formulas=node.formula(result, reduction), weights=_no_weights())


def _taps_inside(at: tirx.Expr, window: RangeMap) -> tirx.Expr:
    """How many taps of the window at `at` lie in the map; their dilation is 1."""
    first = at * window.stride - window.pad_before
    last = tirx.min(first + window.window, tirx.const(window.extent, "int32"))
    return last - tirx.max(first, tirx.const(0, "int32"))


def _product(node: _Node) -> Computation:
    matrix = node.constants.get(1)
    if matrix is None or matrix.ndim != 2 or node.data != {0: 0} or node.attributes.get("transA"):
        raise node.refuse("it is no product with a constant matrix")
    scale, n, (_, h, w, c) = node.attributes.get("alpha", 1.0), node.shape[0], node.sources[0]
    matrix = (matrix.T if node.attributes.get("transB") else matrix) * np.float32(scale)
    flattened = matrix.shape[0] == h * w * c and node.sources[0][0] == n and node.shape[1:3] == (1, 1)
    if not flattened and matrix.shape[0] != c:
        raise node.refuse("its operand is reshaped")
    if flattened:  # ONNX flattens channels first
        matrix = matrix.reshape(c, h, w, -1).transpose(1, 2, 0, 3).reshape(h * w * c, -1)
    addend = node.constants.get(2)
    if addend is not None:
        if addend.size != matrix.shape[1]:
            raise node.refuse("its addend is no bias")
        addend = addend.reshape(1, -1) * np.float32(node.attributes.get("beta", 1.0))
        matrix = np.vstack([matrix, addend])

    def term(read: Read, weight: Weight, at: At, taps: At, _) -> tirx.Expr:
        pixel = taps[:2] if flattened else at[1:3]
        return read(0, (at[0], *pixel, taps[2])) * weight((taps[0] * w + taps[1]) * c + taps[2], at[3])

    def result(_, weight: Weight, at: At, done: list[tirx.Expr]) -> tirx.Expr:
        return done[0] if addend is None else done[0] + weight(matrix.shape[0] - 1, at[3])

    taps = (h, w, c) if flattened else (1, 1, c)
    total = Reduction(initial=0.0, taps=taps, valid=lambda at, taps: None, term=term)
    return Computation(formulas=node.formula(result, total), weights=matrix.astype(np.float32))


def _elementwise(node: _Node) -> Computation:
    """Operands and constants in their order; a constant is a number, or one for each channel."""
    operate = _BINARY[node.type]
    begin, places = 0, {}
    for place, value in sorted(node.constants.items()):
        if value.size not in (1, node.shape[3]) or (value.size > 1 and _channel_axis(node, value)):
            raise node.refuse("its constant has a shape of its own")
        places[place], begin = (begin, value.size), begin + value.size
    for shape in node.sources:
        if any(size not in (1, full) for size, full in zip(shape, node.shape)):
            raise node.refuse("its operand is reshaped")

    def result(read: Read, weight: Weight, at: At, _) -> tirx.Expr:
        terms = []
        for place in range(node.count):
            if place in places:
                first, size = places[place]
                terms.append(weight(first + (at[3] if size > 1 else 0), 0))
            elif place in node.numbers:
                terms.append(tirx.const(node.numbers[place], "float32"))
            else:
                source = node.data[place]
                shape = node.sources[source]
                terms.append(read(source, tuple(i if s > 1 else 0 for i, s in zip(at, shape))))
        total = terms[0]
        for term in terms[1:]:
            total = operate(total, term)
        return total

    weights = _flat(*(node.constants[place] for place in sorted(places))) if places else _no_weights()
    return Computation(formulas=node.formula(result), weights=weights)


def _channel_axis(node: _Node, value: np.ndarray) -> bool:
    """Whether the constant does not lie along the channels: behind them are rows and columns, if any."""
    behind = 2 if node.shape[1:3] != (1, 1) else None
    if behind is None:
        return False
    return value.ndim < 3 or value.shape[-3] != value.size


def _activation(node: _Node) -> Computation:
    slopes = node.constants.get(1) if node.type == "PRelu" else None
    if slopes is not None and slopes.size not in (1, node.shape[3]):
        raise node.refuse("its slopes are no channels'")
    bounds = node.numbers | {place: float(value.item()) for place, value in node.constants.items()
                             if value.size == 1}  # fmt: skip
    function = _ACTIVATIONS[node.type]

    def result(read: Read, weight: Weight, at: At, _) -> tirx.Expr:
        x = read(0, at)
        if slopes is not None:
            return tirx.Select(x < 0.0, x * weight(at[3] if slopes.size > 1 else 0, 0), x)
        if node.type == "Clip" and bounds:
            return _clipped(x, bounds.get(1, _LOWEST), bounds.get(2, -_LOWEST))
        return function(x, node.attributes)

    weights = _flat(slopes) if slopes is not None else _no_weights()
    return Computation(formulas=node.formula(result), weights=weights)


def _batch_norm(node: _Node) -> tuple[Computation, Computation]:
    """(x - mean) / deviation, then scale and shift; constants are scale, shift, mean, variance."""
    channels = node.shape[3]
    if set(node.constants) != {1, 2, 3, 4}:
        raise node.refuse("its statistics are no constants")
    scale, shift, mean, variance = (node.constants[place] for place in (1, 2, 3, 4))
    epsilon = float(node.attributes.get("epsilon", 1e-5))

    def normalised(read: Read, weight: Weight, at: At, _) -> tirx.Expr:
        return (read(0, at) - weight(at[3], 0)) / tirx.sqrt(weight(channels + at[3], 0) + epsilon)

    def scaled(read: Read, weight: Weight, at: At, _) -> tirx.Expr:
        return read(0, at) * weight(at[3], 0) + weight(channels + at[3], 0)

    return (
        Computation(formulas=node.formula(normalised), weights=_flat(mean, variance)),
        Computation(formulas=node.formula(scaled), weights=_flat(scale, shift)),
    )


def _lrn(node: _Node) -> Computation:
    window, get = node.layer.maps[0][3], node.attributes.get
    alpha, beta, bias = get("alpha", 1e-4), get("beta", 0.75), get("bias", 1.0)

    def channel(at: At, taps: At) -> tirx.Expr:
        return at[3] - window.pad_before + taps[0]

    def term(read: Read, _, at: At, taps: At, __) -> tirx.Expr:
        x = read(0, (*at[:3], channel(at, taps)))
        return x * x

    def result(read: Read, _, at: At, done: list[tirx.Expr]) -> tirx.Expr:
        base = done[0] * float(alpha / window.window) + float(bias)
        return read(0, at) / tirx.power(base, tirx.const(beta, "float32"))

    def valid(at: At, taps: At) -> tirx.Expr:
        return tirx.all(channel(at, taps) >= 0, channel(at, taps) < window.extent)

    squares = Reduction(initial=0.0, taps=(window.window,), valid=valid, term=term)
    return Computation(formulas=node.formula(result, squares, alike=1), weights=_no_weights())


def _softmax(node: _Node) -> Computation:
    maps = node.layer.maps[0]
    if maps[3].window != node.shape[3] or math.prod(m.window for m in maps[:3]) > 1:
        raise node.refuse("it is not over channels")

    def term(read: Read, _, at: At, taps: At, done: list[tirx.Expr]) -> tirx.Expr:
        x = read(0, (*at[:3], taps[0]))
        return tirx.exp(x - done[0]) if done else x

    def result(read: Read, _, at: At, done: list[tirx.Expr]) -> tirx.Expr:
        return tirx.exp(read(0, at) - done[0]) / done[1]

    common = dict(taps=(node.shape[3],), valid=lambda at, taps: None, term=term)
    steps = (Reduction(initial=_LOWEST, combine=tirx.max, **common), Reduction(initial=0.0, **common))
    return Computation(formulas=node.formula(result, *steps, alike=1), weights=_no_weights())


def _concat(node: _Node) -> Computation:
    formulas = []
    for operand, (shape, maps) in enumerate(zip(node.sources, node.layer.maps)):
        if shape[:3] != node.shape[:3]:
            raise node.refuse("it is not over channels")
        begin = max(0, maps[3].pad_before)

        def result(read: Read, _, at: At, __, operand=operand, begin=begin) -> tirx.Expr:
            return read(operand, (*at[:3], at[3] - begin))

        channels = (begin, begin + shape[3])
        formulas.append(Formula(channels=channels, result=result, alike=shape[3]))
    return Computation(formulas=tuple(formulas), weights=_no_weights())


def _unknown(node: _Node) -> Computation:
    raise node.refuse("there is no formula for it")


def _clipped(x: tirx.Expr, low: float, high: float) -> tirx.Expr:
    return tirx.min(tirx.max(x, tirx.const(low, "float32")), tirx.const(high, "float32"))


def _hard_sigmoid(x: tirx.Expr, attributes: Mapping[str, float]) -> tirx.Expr:
    return _clipped(x * float(attributes.get("alpha", 0.2)) + float(attributes.get("beta", 0.5)), 0.0, 1.0)


_ACTIVATIONS = {
    "Relu": lambda x, a: tirx.max(x, tirx.const(0.0, "float32")),
    "LeakyRelu": lambda x, a: tirx.Select(x < 0.0, x * float(a.get("alpha", 0.01)), x),
    "PRelu": None,
    "Clip": lambda x, a: _clipped(x, a.get("min", _LOWEST), a.get("max", -_LOWEST)),
    "Sigmoid": lambda x, a: 1.0 / (1.0 + tirx.exp(-x)),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda x, a: x * _clipped(x / 6.0 + 0.5, 0.0, 1.0),
    "Tanh": lambda x, a: tirx.tanh(x),
    "Sqrt": lambda x, a: tirx.sqrt(x),
}
_BINARY = {
    "Add": lambda a, b: a + b,
    "Sum": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a / b,
    "Max": tirx.max,
    "Min": tirx.min,
}
_RULES: dict[str, Callable[[_Node], Computation | tuple[Computation, Computation]]] = {
    "Conv": _conv,
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"), _pool),
    **dict.fromkeys(("Gemm", "MatMul"), _product),
    **dict.fromkeys(_ACTIVATIONS, _activation),
    **dict.fromkeys(_BINARY, _elementwise),
    "BatchNormalization": _batch_norm,
    "LRN": _lrn,
    "Softmax": _softmax,
    "Concat": _concat,
}
