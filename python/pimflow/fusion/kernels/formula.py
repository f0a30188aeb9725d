"""Formulas that a layer's kernel is made of, and the ONNX node that they come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from tvm import tirx

from pimflow.errors import UnsupportedOpError
from pimflow.fusion import Layer, LayerGraph

At = tuple[tirx.Expr, ...]  # indices along n, h, w and c
# Element of operand `i` at (n, h, w, c); weight `k` of filter `f`.
Read = Callable[[int, At], tirx.Expr]
Weight = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]

LOWEST = float(np.finfo(np.float32).min)


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

    @property
    def terms(self) -> int:
        """Terms that are combined for each result; at least 1."""
        return max(1, sum(math.prod(each.taps) for formula in self.formulas for each in formula.reductions))


class Node:
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
        """The error for a layer that has no formula."""
        return UnsupportedOpError(
            f"layer '{self.layer.name}' ({self.type}): {why}; it cannot be executed fused"
        )

    def formula(self, result, *reductions: Reduction, alike: int | None = None) -> tuple[Formula, ...]:
        """One formula of all channels; `alike` is all of them by default."""
        channels = self.shape[3]
        return (
            Formula(channels=(0, channels), result=result, reductions=reductions, alike=alike or channels),
        )


def no_weights() -> np.ndarray:
    """The empty weights of a layer that has none."""
    return np.zeros((0, 1), np.float32)


def flat(*arrays: np.ndarray) -> np.ndarray:
    """Weights that are loaded together: one piece."""
    return np.concatenate([a.astype(np.float32).ravel() for a in arrays]).reshape(-1, 1)
