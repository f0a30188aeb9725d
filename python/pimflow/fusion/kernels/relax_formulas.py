"""Layers of Relax operators, and what they compute: a network's regions as `fusion.kernels` runs them.

A region is a convolution or pooling with what is elementwise behind it, a concatenation, or elementwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax, tirx

from pimflow.core.ranges import RangeMap
from pimflow.core.region import ConvGeometry, RegionGraph
from pimflow.errors import UnsupportedOpError
from pimflow.fusion import Layer, folded
from pimflow.fusion.kernels.formula import At, Computation, Formula, Read, Reduction, Weight, no_weights
from pimflow.fusion.kernels.reductions import convolved, pooled, taps_counted
from pimflow.fusion.layers import Maps, Shape, broadcast
from pimflow.fusion.region_layers import window_maps
from pimflow.relay_passes.flat import operator, shape
from pimflow.relay_passes.kernels import keep_nan
from pimflow.relay_passes.operators import POOL
from pimflow.relay_passes.regions.extract_regions import (
    extract_regions,
    layer_geometry,
    pooling_geometry,
    region_groups,
)

ANCHORS = ("nn.conv2d", "concat", *POOL)


def _number(value: float) -> tirx.Expr:
    return tirx.const(float(value), "float32")


UNARY: dict[str, Callable[[tirx.Expr], tirx.Expr]] = {
    "nn.relu": keep_nan.relu,
    "nn.silu": lambda x: x / (_number(1.0) + tirx.exp(-x)),
    "sigmoid": lambda x: _number(1.0) / (_number(1.0) + tirx.exp(-x)),
    "nn.gelu": lambda x: x * (_number(0.5) + tirx.erf(x * _number(math.sqrt(0.5))) * _number(0.5)),
    "tanh": tirx.tanh,
    "exp": tirx.exp,
    "log": tirx.log,
    "erf": tirx.erf,
    "sqrt": tirx.sqrt,
    "rsqrt": tirx.rsqrt,
    "abs": tirx.abs,
    "ceil": tirx.ceil,
    "floor": tirx.floor,
    "round": tirx.round,
    "sign": keep_nan.sign,
    "negative": lambda x: -x,
}
BINARY: dict[str, Callable[[tirx.Expr, tirx.Expr], tirx.Expr]] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
    "maximum": keep_nan.larger,
    "minimum": keep_nan.smaller,
    "power": tirx.power,
    "nn.prelu": lambda x, slope: tirx.Select(x < 0.0, x * slope, x),
}
BOUNDED = ("clip", "nn.leakyrelu")  # unary, with numbers besides


def fusible(mod: tvm.IRModule, graph: RegionGraph, *, views: bool = True) -> tuple[str, ...]:
    """The regions of `graph`, which is of `mod`, that a kernel of several regions may do.

    There is a formula for each, and it reads just what `fusion.folded` counts.
    """
    counted = folded(graph)
    layers = dict(zip((layer.name for layer in counted.layers), counted.layers))
    groups = region_groups(mod, views=views)
    made = {group.result: name for name, group in groups.items()}
    made |= {param: f"%{param.name}" for param in mod["main"].params}
    names = []
    for region in graph.regions:
        try:
            layer, _ = read_layer(region.name, groups[region.name].bindings, made)
        except UnsupportedOpError:
            continue
        wanted, result = layers[region.name], groups[region.name].result
        alike = dict(zip(wanted.inputs, wanted.maps)) == dict(zip(layer.inputs, layer.maps))
        if alike and counted.shapes[region.name] == shape(result) and not region.kept_elements:
            names.append(region.name)
    return tuple(names)


def regions_of(mod: tvm.IRModule, name: str, *, views: bool = True, fuse: bool = False) -> RegionGraph:
    """The regions of the network `name`; with `fuse`, with those that kernels of several may do."""
    graph = extract_regions(mod, name, views=views)
    return replace(graph, fusible=fusible(mod, graph, views=views)) if fuse else graph


def read_layer(
    name: str, bindings: Sequence[relax.VarBinding], made: Mapping[relax.Var, str]
) -> tuple[Layer, Computation]:
    """A region as a layer, and its computation.

    Parameters
    ----------
    bindings : sequence of VarBinding
        The last one's variable is the result. Casts are left out.
    made : mapping of Var to str
        Names of what may be read from outside.

    Raises
    ------
    UnsupportedOpError
        If there is no formula for it.
    """
    return _Reading(name, bindings, made).layer()


class _Reading:
    def __init__(
        self, name: str, bindings: Sequence[relax.VarBinding], made: Mapping[relax.Var, str]
    ) -> None:
        self.name, self.bindings, self.made = name, bindings, made
        self.values = {b.var: b.value for b in bindings}
        self.result = bindings[-1].var
        self.shape = self._dims(self.result)
        anchors = [b for b in bindings if operator(b.value) in ANCHORS]
        if len(anchors) > 1 or (anchors and anchors[0] is not bindings[0]):
            raise self.refuse("something is before its convolution")
        self.anchor = anchors[0] if anchors else None
        self.kind = operator(self.anchor.value) if anchors else ""
        self.operands: list[relax.Var] = []
        for binding in bindings:
            for var in relax.analysis.free_vars(binding.value):
                if var not in self.values and var not in self.operands:
                    self.operands.append(var)
        unknown = [var for var in self.operands if var not in made]
        if unknown or not self.operands:
            raise self.refuse("it reads what has no name")
        self.vectors: list[np.ndarray] = []

    def refuse(self, why: str) -> UnsupportedOpError:
        return UnsupportedOpError(f"layer '{self.name}': {why}; it cannot be part of a fused group")

    def _dims(self, var: relax.Expr) -> Shape:
        dims = shape(var)
        if len(dims) != 4:
            raise self.refuse("it is no feature map")
        return dims

    def layer(self) -> tuple[Layer, Computation]:
        maps = tuple(broadcast(self._dims(var), self.shape) for var in self.operands)
        weights = no_weights()
        if self.anchor is None:
            formulas = self._formulas(lambda at, done: None)
            layer = self._layer("eltwise", maps)
        elif self.kind == "concat":
            layer, formulas = self._concatenation()
        else:
            window = self._window()
            layer = self._layer("convolution", (window_maps(window), *maps[1:]))
            layer, formulas, weights = self._windowed(layer, window)
        if self.vectors:
            weights = np.vstack([weights, *self.vectors]) if weights.size else np.vstack(self.vectors)
        return layer, Computation(formulas=formulas, weights=np.ascontiguousarray(weights, np.float32))

    def _layer(self, kind: str, maps: Sequence[Maps]) -> Layer:
        inputs = tuple(self.made[var] for var in self.operands)
        return Layer(name=self.name, kind=kind, inputs=inputs, maps=tuple(maps))

    def _window(self) -> ConvGeometry:
        call = self.anchor.value
        window = layer_geometry(self.name, call) or pooling_geometry(self.anchor)
        if window is None or self._dims(call.args[0]) != (window.n, window.h, window.w, window.c):
            raise self.refuse("its window is not known")
        if self.operands[0] is not call.args[0] and not self.operands[0].same_as(call.args[0]):
            raise self.refuse("its filters are no constants")
        if self._dims(self.anchor.var) != self.shape:
            raise self.refuse("its result is repeated")
        return window

    def _windowed(self, layer: Layer, window: ConvGeometry) -> tuple[Layer, tuple[Formula, ...], np.ndarray]:
        call, channels = self.anchor.value, self.shape[3]
        if self.kind == "nn.conv2d":
            filters = _array(call.args[1]).reshape(channels, -1).T  # OHWI: taps are rows, columns, channels
            self.rows_before = filters.shape[0]
            total, alike = convolved(layer, channels)
            return layer, self._formulas(lambda at, done: done[0], total, alike), filters
        largest, padding = self.kind == "nn.max_pool2d", not largest_or_exact(call)
        if padding and (window.dilation != (1, 1) or (call.attrs.count_include_pad and call.attrs.ceil_mode)):
            raise self.refuse("how many elements its windows have is not known")
        counts = not padding or bool(call.attrs.count_include_pad)

        def mean(at: At, done: list[tirx.Expr]) -> tirx.Expr:
            return done[0] if largest else done[0] / taps_counted(layer, at, counts)

        return layer, self._formulas(mean, pooled(layer, largest)), no_weights()

    def _concatenation(self) -> tuple[Layer, tuple[Formula, ...]]:
        parts = list(self.anchor.value.args[0].fields)
        axis = int(self.anchor.value.attrs.axis or 0) % 4
        variables = all(isinstance(part, relax.Var) for part in parts)
        if len(self.bindings) > 1 or axis != 3 or not variables or len(set(parts)) != len(parts):
            raise self.refuse("it is no plain concatenation of channels")
        self.operands = parts
        begin, formulas, maps = 0, [], []
        for operand, part in enumerate(parts):
            dims = self._dims(part)

            def result(read: Read, _, at: At, __, operand=operand, begin=begin) -> tirx.Expr:
                return read(operand, (*at[:3], at[3] - begin))

            channels = (begin, begin + dims[3])
            formulas.append(Formula(channels=channels, result=result, alike=dims[3]))
            along = RangeMap.part_of(dims[3], begin, self.shape[3])
            maps.append((*map(RangeMap.same, dims[:3]), along))
            begin += dims[3]
        return self._layer("concat", maps), tuple(formulas)

    def _formulas(
        self,
        anchored: Callable[[At, list[tirx.Expr]], tirx.Expr | None],
        reduction: Reduction | None = None,
        alike: int | None = None,
    ) -> tuple[Formula, ...]:
        """One formula of all channels: what is elementwise, of operands and of what the anchor gives."""
        channels = self.shape[3]
        constants = self._constants()

        def result(read: Read, weight: Weight, at: At, done: list[tirx.Expr]) -> tirx.Expr:
            def value(expr: relax.Expr) -> tirx.Expr:
                if isinstance(expr, tvm.ir.GenericConst):
                    known = constants[expr]
                    return _number(known) if isinstance(known, float) else weight(known, at[3])
                if self.anchor is not None and expr.same_as(self.anchor.var):
                    return anchored(at, done)
                if expr not in self.values:
                    place = tuple(0 if size == 1 else i for i, size in zip(at, shape(expr)))
                    return read(self.operands.index(expr), place)
                return _applied(self.values[expr], value)

            return value(self.result)

        return (
            Formula(
                channels=(0, channels),
                result=result,
                reductions=(reduction,) if reduction else (),
                alike=alike or channels,
            ),
        )

    def _constants(self) -> dict[relax.Expr, float | int]:
        """Constants of elementwise operators: numbers, or rows of weights that hold one value a channel."""
        constants: dict[relax.Expr, float | int] = {}
        before = getattr(self, "rows_before", 0)
        for binding in self.bindings[1 if self.anchor is not None else 0 :]:
            kind = operator(binding.value)
            if kind not in UNARY and kind not in BINARY and kind not in BOUNDED:
                raise self.refuse(f"there is no formula for {kind or 'a call'}")
            full = self._dims(binding.var)
            if any(size not in (1, whole) for size, whole in zip(full, self.shape)):
                raise self.refuse("its operand is reshaped")
            if kind == "nn.prelu" and int(binding.value.attrs.axis) % 4 != 3:
                raise self.refuse("its slopes are no channels'")
            for arg in binding.value.args if kind not in BOUNDED else binding.value.args[:1]:
                if not isinstance(arg, tvm.ir.GenericConst):
                    continue
                array = _array(arg)
                if array.size == 1 and (self.anchor is None or self.shape[3] > 1):
                    constants[arg] = float(array.item())
                elif array.size == self.shape[3] == array.shape[-1]:
                    constants[arg] = before + len(self.vectors)
                    self.vectors.append(array.reshape(1, -1))
                else:
                    raise self.refuse("its constant has a shape of its own")
        return constants


def largest_or_exact(call: relax.Call) -> bool:
    """Whether it does not matter how many elements a window has: a maximum, or a mean without padding."""
    return operator(call) == "nn.max_pool2d" or (
        not any(map(int, call.attrs.padding)) and not call.attrs.ceil_mode
    )


def _applied(call: relax.Call, value: Callable[[relax.Expr], tirx.Expr]) -> tirx.Expr:
    kind = operator(call)
    if kind == "clip":
        return keep_nan.clamp(value(call.args[0]), *map(_scalar, call.args[1:]))
    if kind == "nn.leakyrelu":
        x, slope = value(call.args[0]), float(call.attrs.alpha)
        return tirx.Select(x < 0.0, x * slope if slope else _number(0.0), x)  # without one -inf gives 0
    if kind in UNARY:
        return UNARY[kind](value(call.args[0]))
    return BINARY[kind](*map(value, call.args))


def _scalar(expr: relax.Expr) -> float:
    """A bound of a clip."""
    return float(expr.value.value) if hasattr(expr.value, "value") else float(expr.value)


def _array(expr: relax.Expr) -> np.ndarray:
    return expr.value.numpy()
