"""Computations of the regions of a network, in the form that `fusion.kernels` runs.

A region is a convolution or pooling with elementwise operators after it, a concatenation, or elementwise.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax, tirx

from pimflow.core.kernel import ConvGeometry
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.errors import UnsupportedOpError
from pimflow.fusion import layers_from_regions
from pimflow.fusion.kernels.formula import (
    Computation,
    Formula,
    Index,
    Read,
    StoredForm,
    TapReduction,
    Weight,
    no_weights,
)
from pimflow.fusion.kernels.reductions import convolution_sum, mean_divisor, pooling_reduction
from pimflow.fusion.layers import Shape
from pimflow.fusion.region_layers import EXTRA
from pimflow.relay_passes import keep_nan
from pimflow.relay_passes.flat import operator, shape
from pimflow.relay_passes.kernels.activation_chains import region_runs, trailing_moves
from pimflow.relay_passes.operators import POOL
from pimflow.relay_passes.regions.extract_regions import extract_regions, group_region, region_groups
from pimflow.relay_passes.regions.kernel_groups import KernelGroup, free_variables

WINDOWED = ("nn.conv2d", *POOL)


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
BOUNDED = ("clip", "nn.leakyrelu")  # unary operators with scalar parameters


def fusible(mod: tvm.IRModule, graph: RegionGraph, *, views: bool = True) -> tuple[str, ...]:
    """The regions of `graph`, a graph of `mod`, that can be part of a kernel of several regions.

    Each has a formula, and reads its operands and writes its result in the shapes of `fusion.folded`.
    """
    layers = layers_from_regions(graph)
    shapes = layers.shapes
    groups = region_groups(mod, views=views)
    tensor_names = {group.result: name for name, group in groups.items()}
    tensor_names |= {var: name + EXTRA for name, group in groups.items() for var in group.extra_outputs}
    tensor_names |= {param: f"%{param.name}" for param in mod["main"].params}
    names = []
    for region, layer in zip(graph.regions, layers.layers):
        tensors = {**dict(zip(layer.inputs, region.input_shapes)), region.name: region.output_shape}
        copied = region.operator == "concat" and not region.is_view
        if (
            copied
            or region.kernel.extra_output_elements
            or any(shapes[name] != dims for name, dims in tensors.items())
        ):
            continue
        with contextlib.suppress(UnsupportedOpError):
            read_region(region.name, groups[region.name].bindings, tensor_names)
            names.append(region.name)
    return tuple(names)


def regions_of(
    mod: tvm.IRModule, name: str, *, views: bool = True, fuse: bool = False, fuse_activations: bool = False
) -> RegionGraph:
    """The regions of the network `name`.

    With `fuse`, the graph also has the regions that can be fused; with `fuse_activations`, the runs between
    chains that can be one kernel.
    """
    graph = extract_regions(mod, name, views=views)
    if fuse_activations:
        graph = replace(graph, runs=region_runs(mod, views=views))
    return replace(graph, fusible=fusible(mod, graph, views=views)) if fuse else graph


def read_region(
    name: str, bindings: Sequence[relax.VarBinding], tensor_names: Mapping[relax.Var, str]
) -> tuple[Region, Computation]:
    """Read a kernel as a region, and its computation of the region's inputs.

    Parameters
    ----------
    bindings : sequence of VarBinding
        The variable of the last one is the result. There are no casts among them.
    tensor_names : mapping of Var to str
        Names of tensors that may be read from outside.

    Raises
    ------
    UnsupportedOpError
        If the kernel has no formula.
    """
    reading = _RegionReader(name, bindings, tensor_names)
    return reading.region, reading.computation()


class _RegionReader:
    def __init__(
        self, name: str, bindings: Sequence[relax.VarBinding], tensor_names: Mapping[relax.Var, str]
    ) -> None:
        self.name, moves = name, trailing_moves(bindings)
        if len(moves) == len(bindings):
            raise self.unsupported("it computes nothing")
        self.stored = _stored_form(moves) if moves else None
        self.bindings = bindings = bindings[: len(bindings) - len(moves)]
        self.values = {b.var: b.value for b in bindings}
        self.result = bindings[-1].var
        self.shape = self._dims(self.result)
        anchors = [b for b in bindings if operator(b.value) in (*WINDOWED, "concat")]
        if len(anchors) > 1 or (anchors and anchors[0] is not bindings[0]):
            raise self.unsupported("something is before its convolution")
        self.anchor = anchors[0] if anchors else None
        self.kind = operator(self.anchor.value) if anchors else ""
        is_concat = self.kind == "concat"
        computed = [*bindings, *moves]
        group = KernelGroup(bindings=computed, anchor=None if is_concat else self.anchor, view=is_concat)
        self.operands = free_variables(group.bindings)
        if not self.operands or any(var not in tensor_names for var in self.operands):
            raise self.unsupported("it reads what has no name")
        self.region = group_region(name, group, tensor_names)
        self.vectors: list[np.ndarray] = []

    def unsupported(self, reason: str) -> UnsupportedOpError:
        """The error that says why the layer cannot be fused."""
        return UnsupportedOpError(f"layer '{self.name}': {reason}; it cannot be part of a fused group")

    def _dims(self, var: relax.Expr) -> Shape:
        dims = shape(var)
        if len(dims) != 4:
            raise self.unsupported("it is no feature map")
        return dims

    def computation(self) -> Computation:
        """Formulas and weights of the layer."""
        for var in self.operands:
            self._dims(var)
        weights = no_weights()
        if self.anchor is None:
            formulas = self._formulas(lambda index, reduced: None)
        elif self.kind == "concat":
            formulas = self._concatenation()
        else:
            formulas, weights = self._window_formulas(self._window())
        if self.vectors:
            weights = np.vstack([weights, *self.vectors]) if weights.size else np.vstack(self.vectors)
        weights = np.ascontiguousarray(weights, np.float32)
        return Computation(formulas=formulas, weights=weights, stored=self.stored)

    def _window(self) -> ConvGeometry:
        call, window = self.anchor.value, self.region.geometry or self.region.kernel.pooling
        if window is None or self._dims(call.args[0]) != (window.n, window.h, window.w, window.c):
            raise self.unsupported("its window is not known")
        if self.operands[0] is not call.args[0] and not self.operands[0].same_as(call.args[0]):
            raise self.unsupported("its filters are no constants")
        if self._dims(self.anchor.var) != self.shape:
            raise self.unsupported("its result is repeated")
        return window

    def _window_formulas(self, window: ConvGeometry) -> tuple[tuple[Formula, ...], np.ndarray]:
        call, channels = self.anchor.value, self.shape[3]
        if self.kind == "nn.conv2d":
            filters = _array(call.args[1]).reshape(channels, -1).T  # OHWI: taps are rows, columns, channels
            self.rows_before = filters.shape[0]
            total, same_taps = convolution_sum(window)
            return self._formulas(lambda index, reduced: reduced[0], total, same_taps), filters
        is_max, padding = self.kind == "nn.max_pool2d", not ignores_window_size(call)
        if padding and (window.dilation != (1, 1) or (call.attrs.count_include_pad and call.attrs.ceil_mode)):
            raise self.unsupported("how many elements its windows have is not known")
        counts = not padding or bool(call.attrs.count_include_pad)

        def mean(index: Index, reduced: list[tirx.Expr]) -> tirx.Expr:
            return reduced[0] if is_max else reduced[0] / mean_divisor(window, index, counts)

        return self._formulas(mean, pooling_reduction(window, is_max)), no_weights()

    def _concatenation(self) -> tuple[Formula, ...]:
        parts = list(self.anchor.value.args[0].fields)
        axis = int(self.anchor.value.attrs.axis or 0) % 4
        variables = all(isinstance(part, relax.Var) for part in parts)
        if len(self.bindings) > 1 or axis != 3 or not variables or len(set(parts)) != len(parts):
            raise self.unsupported("it is no plain concatenation of channels")
        begin, formulas = 0, []
        for part in parts:
            operand, end = self.operands.index(part), begin + self._dims(part)[3]

            def result(
                read: Read, _, index: Index, __, operand: int = operand, begin: int = begin
            ) -> tirx.Expr:
                return read(operand, (*index[:3], index[3] - begin))

            formulas.append(Formula(channels=(begin, end), result=result, same_taps=end - begin))
            begin = end
        return tuple(formulas)

    def _formulas(
        self,
        anchor_value: Callable[[Index, list[tirx.Expr]], tirx.Expr | None],
        reduction: TapReduction | None = None,
        same_taps: int | None = None,
    ) -> tuple[Formula, ...]:
        """One formula of all channels: the elementwise operators on operands and on the anchor's result."""
        channels = self.shape[3]
        constants = self._constants()

        def result(read: Read, weight: Weight, index: Index, reduced: list[tirx.Expr]) -> tirx.Expr:
            """The result at an index, from the reductions."""

            def value(expr: relax.Expr) -> tirx.Expr:
                """The value of an expression at the index."""
                if isinstance(expr, tvm.ir.GenericConst):
                    constant = constants[expr]
                    return _number(constant) if isinstance(constant, float) else weight(constant, index[3])
                if self.anchor is not None and expr.same_as(self.anchor.var):
                    return anchor_value(index, reduced)
                if expr not in self.values:
                    place = tuple(0 if size == 1 else i for i, size in zip(index, shape(expr)))
                    return read(self.operands.index(expr), place)
                return _apply(self.values[expr], value)

            return value(self.result)

        return (
            Formula(
                channels=(0, channels),
                result=result,
                reductions=(reduction,) if reduction else (),
                same_taps=same_taps or channels,
            ),
        )

    def _constants(self) -> dict[relax.Expr, float | int]:
        """Constants of elementwise operators: scalars, or rows of weights with a value for each channel."""
        constants: dict[relax.Expr, float | int] = {}
        first_row = getattr(self, "rows_before", 0)
        for binding in self.bindings[1 if self.anchor is not None else 0 :]:
            kind = operator(binding.value)
            if kind not in UNARY and kind not in BINARY and kind not in BOUNDED:
                raise self.unsupported(f"there is no formula for {kind or 'a call'}")
            full = self._dims(binding.var)
            if any(size not in (1, extent) for size, extent in zip(full, self.shape)):
                raise self.unsupported("its operand is reshaped")
            if kind == "nn.prelu" and int(binding.value.attrs.axis) % 4 != 3:
                raise self.unsupported("its slopes are no channels'")
            for arg in binding.value.args if kind not in BOUNDED else binding.value.args[:1]:
                if not isinstance(arg, tvm.ir.GenericConst):
                    continue
                array = _array(arg)
                if array.size == 1 and (self.anchor is None or self.shape[3] > 1):
                    constants[arg] = float(array.item())
                elif array.size == self.shape[3] == array.shape[-1]:
                    constants[arg] = first_row + len(self.vectors)
                    self.vectors.append(array.reshape(1, -1))
                else:
                    raise self.unsupported("its constant has a shape of its own")
        return constants


def _stored_form(moves: Sequence[relax.VarBinding]) -> StoredForm:
    """Where `moves`, permutations and reshapes, put the elements of the map that they read."""

    def place(index: Index) -> Index:
        """The index behind all moves."""
        for binding in moves:
            if operator(binding.value) == "permute_dims":
                index = tuple(index[int(axis)] for axis in binding.value.attrs.axes)
                continue
            number: tirx.Expr | int = 0
            for extent, i in zip(shape(binding.value.args[0]), index, strict=True):
                number = number * extent + i
            index = ()
            for extent in reversed(shape(binding.var)):
                index, number = (tirx.floormod(number, extent), *index), tirx.floordiv(number, extent)
        return index

    return StoredForm(shape=shape(moves[-1].var), place=place)


def ignores_window_size(call: relax.Call) -> bool:
    """Whether windows need no count of elements: for a maximum, or a mean without padding."""
    return operator(call) == "nn.max_pool2d" or (
        not any(map(int, call.attrs.padding)) and not call.attrs.ceil_mode
    )


def _apply(call: relax.Call, value: Callable[[relax.Expr], tirx.Expr]) -> tirx.Expr:
    """The formula of an elementwise operator; `value` gives those of its operands."""
    kind = operator(call)
    if kind == "clip":
        return keep_nan.clamp(value(call.args[0]), *map(_scalar, call.args[1:]))
    if kind == "nn.leakyrelu":
        x, slope = value(call.args[0]), float(call.attrs.alpha)
        return tirx.Select(x < 0.0, x * slope if slope else _number(0.0), x)  # for slope 0, -inf gives 0
    if kind in UNARY:
        return UNARY[kind](value(call.args[0]))
    return BINARY[kind](*map(value, call.args))


def _scalar(expr: relax.Expr) -> float:
    """A bound of a clip."""
    return float(expr.value.value) if hasattr(expr.value, "value") else float(expr.value)


def _array(expr: relax.Expr) -> np.ndarray:
    return expr.value.numpy()
