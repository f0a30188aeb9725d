"""Formulas of the layers of an ONNX network, element by element.

A layer of `fusion` says what is read; here is what is done with it, and the values of its weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
from tvm import tirx

from pimflow.core.ranges import RangeMap
from pimflow.errors import UnsupportedOpError
from pimflow.fusion import Layer, LayerGraph
from pimflow.fusion.kernels.elementwise import (
    ACTIVATIONS,
    BINARY,
    activation,
    batch_norm,
    concatenation,
    elementwise,
)
from pimflow.fusion.kernels.formula import LOWEST, At, Computation, Node, Read, Reduction, Weight, no_weights
from pimflow.fusion.onnx_layers import VIEWS


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
    by_layer = {}
    for node in model.graph.node:
        name = node.output[0]
        if name not in layers or node.op_type in VIEWS:
            continue
        made = _RULES.get(node.op_type, _unknown)(Node(node, layers[name], graph, values, numbers))
        middle = f"{name}.normalised"
        by_layer |= {middle: made[0], name: made[1]} if isinstance(made, tuple) else {name: made}
    for layer in graph.layers:
        if by_layer[layer.name].weights.size != layer.weight_elements:
            raise UnsupportedOpError(
                f"layer '{layer.name}': its {layer.weight_elements} constants are not those of its formula, "
                f"{by_layer[layer.name].weights.size}; it cannot be executed fused"
            )
    return by_layer


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


def convolved(layer: Layer, outputs: int) -> tuple[Reduction, int]:
    """The sum of a convolution, and how many neighbouring channels have the same taps.

    Weights of a filter are in the order of the taps: rows, columns, channels of the first operand.
    """
    rows, columns, channels = layer.maps[0][1:]
    size, per, kw = channels.window, channels.repeat, columns.window
    place, valid = _window(layer)
    depthwise = size == per == 1

    def term(read: Read, weight: Weight, at: At, taps: At, _) -> tirx.Expr:
        h, w = place(at, taps)
        group = at[3] if depthwise else 0 if per == outputs else at[3] // per
        source = read(0, (at[0], h, w, group * size + taps[2]))
        return source * weight((taps[0] * kw + taps[1]) * size + taps[2], at[3])

    total = Reduction(initial=0.0, taps=(rows.window, kw, size), valid=valid, term=term)
    return total, outputs if depthwise else per


def _conv(node: Node) -> Computation:
    layer, filters = node.layer, node.constants.get(1)
    if filters is None or len(node.data) > 1:
        raise node.refuse("its filters are no constants")
    rows, columns, channels = layer.maps[0][1:]
    weights = filters.transpose(2, 3, 1, 0).reshape(-1, filters.shape[0])
    taps = (channels.window, rows.window, columns.window)
    if filters.shape[1:] != taps or max(rows.repeat, columns.repeat) > 1:
        raise node.refuse("its operand is reshaped")
    biased = 2 in node.constants
    if biased:
        weights = np.vstack([weights, node.constants[2].reshape(1, -1)])

    def result(read: Read, weight: Weight, at: At, done: list[tirx.Expr]) -> tirx.Expr:
        return done[0] + weight(weights.shape[0] - 1, at[3]) if biased else done[0]

    total, alike = convolved(layer, node.shape[3])
    return Computation(formulas=node.formula(result, total, alike=alike), weights=weights.astype(np.float32))


def pooled(layer: Layer, largest: bool) -> Reduction:
    """The maximum, or the sum, of what a pooling's windows read."""
    rows, columns = layer.maps[0][1:3]
    place, valid = _window(layer)

    def term(read: Read, _, at: At, taps: At, __) -> tirx.Expr:
        return read(0, (at[0], *place(at, taps), at[3]))

    return Reduction(
        initial=LOWEST if largest else 0.0,
        taps=(rows.window, columns.window),
        valid=valid,
        term=term,
        combine=tirx.max if largest else lambda done, value: done + value,
    )


def taps_counted(layer: Layer, at: At, padding_counts: bool) -> tirx.Expr | float:
    """The divisor of a mean over a window: how many taps are counted."""
    rows, columns = layer.maps[0][1:3]
    if padding_counts:
        return float(rows.window * columns.window)
    return tirx.Cast("float32", _taps_inside(at[1], rows) * _taps_inside(at[2], columns))


def _pool(node: Node) -> Computation:
    rows, columns = node.layer.maps[0][1:3]
    whole, largest = node.type.startswith("Global"), node.type.endswith("MaxPool")
    if rows.repeat * columns.repeat > 1 and node.shape[1:3] != (1, 1):
        raise node.refuse("its window is not known")
    padded = bool(node.attributes.get("count_include_pad"))
    if padded and node.attributes.get("ceil_mode"):
        raise node.refuse("an average over padding with ceil_mode")

    def result(_, __, at: At, done: list[tirx.Expr]) -> tirx.Expr:
        return done[0] if largest else done[0] / taps_counted(node.layer, at, whole or padded)

    reduction = pooled(node.layer, largest)
    if whole:
        reduction = replace(reduction, term=lambda read, _, at, taps, __: read(0, (at[0], *taps, at[3])))
    return Computation(formulas=node.formula(result, reduction), weights=no_weights())


def _taps_inside(at: tirx.Expr, window: RangeMap) -> tirx.Expr:
    """How many taps of the window at `at` lie in the map; their dilation is 1."""
    first = at * window.stride - window.pad_before
    last = tirx.min(first + window.window, tirx.const(window.extent, "int32"))
    return last - tirx.max(first, tirx.const(0, "int32"))


def _product(node: Node) -> Computation:
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


def _lrn(node: Node) -> Computation:
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
    return Computation(formulas=node.formula(result, squares, alike=1), weights=no_weights())


def _softmax(node: Node) -> Computation:
    maps = node.layer.maps[0]
    if maps[3].window != node.shape[3] or math.prod(m.window for m in maps[:3]) > 1:
        raise node.refuse("it is not over channels")

    def term(read: Read, _, at: At, taps: At, done: list[tirx.Expr]) -> tirx.Expr:
        x = read(0, (*at[:3], taps[0]))
        return tirx.exp(x - done[0]) if done else x

    def result(read: Read, _, at: At, done: list[tirx.Expr]) -> tirx.Expr:
        return tirx.exp(read(0, at) - done[0]) / done[1]

    common = dict(taps=(node.shape[3],), valid=lambda at, taps: None, term=term)
    steps = (Reduction(initial=LOWEST, combine=tirx.max, **common), Reduction(initial=0.0, **common))
    return Computation(formulas=node.formula(result, *steps, alike=1), weights=no_weights())


def _unknown(node: Node) -> Computation:
    raise node.refuse("there is no formula for it")


_RULES: dict[str, Callable[[Node], Computation | tuple[Computation, Computation]]] = {
    "Conv": _conv,
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"), _pool),
    **dict.fromkeys(("Gemm", "MatMul"), _product),
    **dict.fromkeys(ACTIVATIONS, activation),
    **dict.fromkeys(BINARY, elementwise),
    "BatchNormalization": batch_norm,
    "LRN": _lrn,
    "Softmax": _softmax,
    "Concat": concatenation,
}
