"""Formulas of the regions of a compiled network, in which all tensors are maps, as Deep Fusion needs.

A transposed input is in DRAM as NHWC, a flattened map is the map before flattening, and a fully connected
layer is a convolution whose window is that map.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from pimflow.errors import UnsupportedOpError
from pimflow.frontend import Network, relax_module
from pimflow.fusion import LayerGraph
from pimflow.fusion.kernels.formula import Computation
from pimflow.fusion.kernels.relax_formulas import read_region
from pimflow.relay_passes.flat import main_bindings, operator, shape, substitute
from pimflow.relay_passes.regions.extract_regions import region_groups
from pimflow.relay_passes.regions.kernel_groups import KernelGroup, kernel_groups

TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
_POOLINGS = {"mean": op.nn.avg_pool2d, "max": op.nn.max_pool2d}


@dataclass(frozen=True)
class FlatTensor:
    """The map that a flat tensor is made from, and whether its elements are in the order of NCHW."""

    map: relax.Var
    channels_first: bool


class MapLayers:
    """Computations of the layers of `graph`.

    Raises
    ------
    UnsupportedOpError
        For the first layer without a formula, or with another number of weights than was counted.
    """

    def __init__(self, module: tvm.IRModule, graph: LayerGraph, groups: Mapping[str, KernelGroup]) -> None:
        self.module, self.graph, self.groups = module, graph, groups
        self.tensor_names: dict[relax.Var, str] = {}
        self.maps: dict[relax.Var, relax.Expr] = {}  # by variable, its replacement
        self.flat: dict[relax.Var, FlatTensor] = {}
        self.map_variables: dict[str, relax.Var] = {}  # by layer, the variable of its map
        self.transposed: set[relax.Var] = set()  # parameters in NCHW
        for param in module["main"].params:
            self._input(param)
        self.computations = {name: self._computation(name) for name in self.groups}

    @classmethod
    def from_results(cls, module: tvm.IRModule, graph: LayerGraph) -> MapLayers:
        """Computations of a network that returns the results of all layers, in order."""
        groups = {var: group for group in kernel_groups(module) for var in (b.var for b in group.bindings)}
        result_by_layer = dict(zip((layer.name for layer in graph.layers), _results(module), strict=True))
        return cls(module, graph, {name: groups[var] for name, var in result_by_layer.items()})

    def _input(self, param: relax.Var) -> None:
        name = f"%{param.name}"
        self.tensor_names[param] = name
        if len(shape(param)) == 2 and name in self.graph.shapes:
            self._substitute_map(param, self.graph.shapes[name], name)

    def _substitute_map(self, var: relax.Var, dims: Sequence[int], name: str) -> relax.Var:
        """Replace a matrix by a map with its elements."""
        replacement = relax.Var(var.name, relax.TensorType(dims, "float32"))
        self.maps[var], self.flat[var], self.tensor_names[replacement] = (
            replacement,
            FlatTensor(replacement, False),
            name,
        )
        return replacement

    def _unsupported(self, name: str, reason: str) -> UnsupportedOpError:
        return UnsupportedOpError(f"layer '{name}': {reason}; it cannot be executed fused")

    def _computation(self, name: str) -> Computation:
        group = self.groups[name]
        layer = self.graph.layers[self.graph.index[name]]
        if group.extra_outputs or layer.is_view:
            reason = (
                "it stores what is inside, too"
                if group.extra_outputs
                else "its operands lie inside its result"
            )
            raise self._unsupported(name, reason)
        bindings = self._as_maps(name, group.bindings)
        if not bindings:
            raise self._unsupported(name, "it only moves elements")
        region, computation = read_region(name, bindings, self.tensor_names)
        if computation.weights.size != layer.weight_elements:
            reason = f"{computation.weights.size} weights are needed, {layer.weight_elements} counted"
            raise self._unsupported(name, reason)
        self.tensor_names[bindings[-1].var] = name
        return computation.with_operand_order([layer.inputs.index(operand) for operand in region.inputs])

    def _as_maps(self, name: str, bindings: Sequence[relax.VarBinding]) -> list[relax.VarBinding]:
        builder, renamed = relax.BlockBuilder(), list[relax.VarBinding]()
        for binding in bindings:
            if self._record_move(binding):
                continue
            kind, value = operator(binding.value), substitute(binding.value, self.maps)
            if kind == "matmul":
                value = self._product(name, binding.value)
            elif any(self._is_flattened(var) for var in relax.analysis.free_vars(binding.value)):
                raise self._unsupported(name, "it reads a flattened map")
            elif kind in _POOLINGS:
                value = self._pooling(name, value)
            value = builder.normalize(value)
            map_var = relax.Var(binding.var.name, value.ty)
            self.maps[binding.var] = map_var
            if len(shape(binding.var)) == 2:
                self.flat[binding.var] = FlatTensor(map_var, False)
            self.map_variables[name] = binding.var
            renamed.append(relax.VarBinding(map_var, value))
        return renamed

    def _is_flattened(self, var: relax.Var) -> bool:
        return var in self.flat and math.prod(shape(self.flat[var].map)[1:3]) > 1

    def _record_move(self, binding: relax.VarBinding) -> bool:
        """Record a binding that leaves elements where they are; False if it is another."""
        value, kind = binding.value, operator(binding.value)
        if kind not in ("permute_dims", "reshape") or not isinstance(value.args[0], relax.Var):
            return False
        source = value.args[0]
        map_var = self.maps.get(source, source)
        axes = tuple(map(int, value.attrs.axes)) if kind == "permute_dims" and value.attrs.axes else ()
        if source in self.tensor_names and axes == TO_NHWC:
            self.tensor_names[binding.var] = self.tensor_names[source]
            self.transposed.add(source)
        elif axes == tuple(range(4)) and source not in self.flat:
            self.maps[binding.var] = map_var
        elif axes == TO_NCHW and source not in self.flat:
            self.flat[binding.var], self.maps[binding.var] = FlatTensor(map_var, True), map_var
        elif kind == "reshape" and len(shape(binding.var)) == 2:
            if shape(binding.var)[0] != shape(source)[0]:
                return False
            self.flat[binding.var] = self.flat.get(source, FlatTensor(map_var, False))
            self.maps[binding.var] = map_var
        else:
            return False
        return True

    def _product(self, name: str, call: relax.Call) -> relax.Expr:
        """Write a matrix product as a convolution of the whole map."""
        source, matrix = call.args
        if source not in self.flat or not isinstance(matrix, tvm.ir.GenericConst):
            raise self._unsupported(name, "it is no product with a constant matrix")
        operand = self.flat[source]
        _, h, w, c = shape(operand.map)
        weights = matrix.value.numpy()
        if weights.ndim != 2 or weights.shape[0] != h * w * c:
            raise self._unsupported(name, "its operand is reshaped")
        filters = weights.T.reshape(-1, c, h, w) if operand.channels_first else weights.T.reshape(-1, h, w, c)
        filters = filters.transpose(0, 2, 3, 1) if operand.channels_first else filters
        constant = relax.const(np.ascontiguousarray(filters))
        return op.nn.conv2d(operand.map, constant, data_layout="NHWC", kernel_layout="OHWI")

    def _pooling(self, name: str, call: relax.Call) -> relax.Expr:
        """Write a mean or maximum of each channel as a pooling."""
        dims = shape(call.args[0])
        if len(dims) != 4 or sorted(int(a) % 4 for a in call.attrs.axis) != [1, 2] or not call.attrs.keepdims:
            raise self._unsupported(name, f"it is no {operator(call)} of each channel")
        return _POOLINGS[operator(call)](call.args[0], dims[1:3], layout="NHWC")


class CompiledLayers(MapLayers):
    """Computations of a compiled network, with its inputs and the expected results of its layers."""

    def __init__(self, network: Network, graph: LayerGraph) -> None:
        super().__init__(network.module, graph, region_groups(network.module))
        self.network = network

    def inputs(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Network inputs as flat NHWC."""
        maps = {}
        for param, array in zip(self.module["main"].params, arrays.values(), strict=True):
            array = array.transpose(TO_NHWC) if param in self.transposed else array
            maps[f"%{param.name}"] = np.ascontiguousarray(array, np.float32).ravel()
        return maps

    def references(self, names: Sequence[str], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Flat results of layers from TVM's own pipeline; outputs are from the network's reference."""
        module = _with_results(self.module, [self.map_variables[name] for name in names])
        outputs = relax_module.reference(module)(arrays)
        expected = {name: array.ravel() for name, array in zip(names, outputs, strict=True)}
        results = self.network.reference(arrays)
        for var, array in zip(_results(self.module), results, strict=True):
            name = next(name for name, group in self.groups.items() if var in {b.var for b in group.bindings})
            is_transposed = array.ndim == 4 and var in self.flat and self.flat[var].channels_first
            expected[name] = np.ascontiguousarray(
                array.transpose(TO_NHWC) if is_transposed else array
            ).ravel()
        return expected


def _results(mod: tvm.IRModule) -> list[relax.Var]:
    """Variables that ``main`` returns, in order."""
    body = mod["main"].body.body
    value = next((b.value for b in main_bindings(mod) if b.var.same_as(body)), body)
    return list(value.fields) if isinstance(value, relax.Tuple) else [body]


def _with_results(mod: tvm.IRModule, results: Sequence[relax.Var]) -> tvm.IRModule:
    """``main`` with these results instead of its own."""
    function, builder = mod["main"], relax.BlockBuilder()
    env: dict[relax.Var, relax.Expr] = {}
    with builder.function("main", list(function.params)):
        with builder.dataflow():
            for binding in main_bindings(mod):
                if not isinstance(binding.value, relax.Tuple):
                    env[binding.var] = builder.emit(substitute(binding.value, env))
            output = builder.emit_output(relax.Tuple([env[var] for var in results]))
        builder.emit_func_output(output)
    return builder.get()
