"""Products along an axis, and determinants, of ONNX in simpler operators."""

from __future__ import annotations

import itertools

import numpy as np

from pimflow.zoo.foreign.builder import ExpandedNode

LARGEST_DETERMINANT = 10  # rows; twice as many products for each further one


def cumulative_product(node: ExpandedNode) -> None:
    """Expand CumProd: each step multiplies by what lies a power of two before, or behind if reversed."""
    dims, builder = node.shape(0), node.builder
    axis = int(node.value(1).item()) % len(dims)
    length, reverse = dims[axis], bool(node.attrs.get("reverse", 0))

    def shifted(value: str, steps: int) -> str:
        """`value`, moved by `steps` along the axis, with ones at the end that becomes free."""
        ones = np.ones([steps if place == axis else size for place, size in enumerate(dims)], "float32")
        free = builder.emit("CastLike", [builder.constant(ones), value])
        if steps == length:
            return free
        begin, end = (steps, length) if reverse else (0, length - steps)
        bounds = (builder.constant(np.array([number])) for number in (begin, end, axis))
        rest = builder.emit("Slice", [value, *bounds])
        return builder.concat([rest, free] if reverse else [free, rest], axis)

    result = node.operand(0)
    if node.attrs.get("exclusive", 0):
        result = shifted(result, 1)
    steps = 1
    while steps < length:
        result = builder.emit("Mul", [result, shifted(result, steps)])
        steps *= 2
    node.bind(result)


def determinant(node: ExpandedNode) -> None:
    """Expand Det: minors of the last rows, by growing sets of columns (Laplace's expansion)."""
    *outer, rows, columns = node.shape(0)
    builder = node.builder
    if rows != columns or not 0 < rows <= LARGEST_DETERMINANT:
        raise node.unsupported(
            f"of {rows} x {columns} is not supported: up to {LARGEST_DETERMINANT} rows, as many columns"
        )
    elements = builder.reshape(node.operand(0), [*outer, rows * rows])
    sets: list[tuple[int, ...]] = [()]
    minors = ""
    for size in range(1, rows + 1):
        numbers = {columns_of_minor: number for number, columns_of_minor in enumerate(sets)}
        sets = list(itertools.combinations(range(rows), size))
        entries = builder.constant(np.array(sets) + (rows - size) * rows)
        factors = builder.emit("Gather", [elements, entries], axis=-1)
        if minors:
            smaller = [[numbers[chosen[:p] + chosen[p + 1 :]] for p in range(size)] for chosen in sets]
            signs = builder.constant((-1) ** np.arange(size).astype("float32"))
            below = builder.emit("Gather", [minors, builder.constant(np.array(smaller))], axis=-1)
            factors = builder.emit("Mul", [builder.emit("Mul", [factors, signs]), below])
        minors = node.reduce("ReduceSum", factors, [-1], keepdims=0)
    node.bind(builder.reshape(minors, outer))
