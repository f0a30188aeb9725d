"""Formulas of layers without sums: activations, arithmetic, batch norms, concatenations."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tvm import tirx

from pimflow.fusion.kernels.formula import (
    LOWEST,
    At,
    Computation,
    Formula,
    Node,
    Read,
    Weight,
    flat,
    no_weights,
)
from pimflow.relay_passes.kernels.keep_nan import clamp, larger, relu, smaller


def elementwise(node: Node) -> Computation:
    """Operands and constants in their order; a constant is a number, or one for each channel."""
    operate = BINARY[node.type]
    begin, places = 0, {}
    for place, value in sorted(node.constants.items()):
        if value.size > 1 and not _along_channels(node, value):
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

    weights = flat(*(node.constants[place] for place in sorted(places))) if places else no_weights()
    return Computation(formulas=node.formula(result), weights=weights)


def _along_channels(node: Node, value: np.ndarray) -> bool:
    """Whether a constant is one number for each channel: behind that axis are rows and columns, if any."""
    behind = 0 if node.shape[1:3] == (1, 1) else 2
    return value.size == node.shape[3] and (
        behind == 0 or (value.ndim > behind and value.shape[-1 - behind] == value.size)
    )


def activation(node: Node) -> Computation:
    slopes = node.constants.get(1) if node.type == "PRelu" else None
    if slopes is not None and slopes.size not in (1, node.shape[3]):
        raise node.refuse("its slopes are no channels'")
    bounds = node.numbers | {place: float(value.item()) for place, value in node.constants.items()
                             if value.size == 1}  # fmt: skip
    function = ACTIVATIONS[node.type]

    def result(read: Read, weight: Weight, at: At, _) -> tirx.Expr:
        x = read(0, at)
        if slopes is not None:
            return tirx.Select(x < 0.0, x * weight(at[3] if slopes.size > 1 else 0, 0), x)
        if node.type == "Clip" and bounds:
            return clamp(x, bounds.get(1, LOWEST), bounds.get(2, -LOWEST))
        return function(x, node.attributes)

    weights = flat(slopes) if slopes is not None else no_weights()
    return Computation(formulas=node.formula(result), weights=weights)


def batch_norm(node: Node) -> tuple[Computation, Computation]:
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
        Computation(formulas=node.formula(normalised), weights=flat(mean, variance)),
        Computation(formulas=node.formula(scaled), weights=flat(scale, shift)),
    )


def concatenation(node: Node) -> Computation:
    formulas = []
    for operand, (shape, maps) in enumerate(zip(node.sources, node.layer.maps)):
        if shape[:3] != node.shape[:3]:
            raise node.refuse("it is not over channels")
        begin = max(0, maps[3].pad_before)

        def result(read: Read, _, at: At, __, operand=operand, begin=begin) -> tirx.Expr:
            return read(operand, (*at[:3], at[3] - begin))

        channels = (begin, begin + shape[3])
        formulas.append(Formula(channels=channels, result=result, alike=shape[3]))
    return Computation(formulas=tuple(formulas), weights=no_weights())


def _hard_sigmoid(x: tirx.Expr, attributes: Mapping[str, float]) -> tirx.Expr:
    return clamp(x * float(attributes.get("alpha", 0.2)) + float(attributes.get("beta", 0.5)), 0.0, 1.0)


ACTIVATIONS = {
    "Relu": lambda x, a: relu(x),
    "LeakyRelu": lambda x, a: tirx.Select(x < 0.0, x * float(a.get("alpha", 0.01)), x),
    "PRelu": None,
    "Clip": lambda x, a: clamp(x, a.get("min", LOWEST), a.get("max", -LOWEST)),
    "Sigmoid": lambda x, a: 1.0 / (1.0 + tirx.exp(-x)),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda x, a: x * clamp(x / 6.0 + 0.5, 0.0, 1.0),
    "Tanh": lambda x, a: tirx.tanh(x),
    "Sqrt": lambda x, a: tirx.sqrt(x),
}


BINARY = {
    "Add": lambda a, b: a + b,
    "Sum": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a / b,
    "Max": larger,
    "Min": smaller,
}
