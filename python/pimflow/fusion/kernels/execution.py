"""Fused groups of a network, run on the CPU to verify results, and to compare traffic with the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx
import tvm

from pimflow import frontend, zoo
from pimflow.core.output_error import OUTPUT_BOUND, relative_error
from pimflow.errors import UsageError, VerificationError
from pimflow.fusion import FusionPlan, Group, LayerGraph, Placement, layers_from_onnx, place
from pimflow.fusion.kernels import generator, parameters
from pimflow.fusion.kernels.formula import Computation
from pimflow.fusion.kernels.onnx_formulas import computations
from pimflow.fusion.kernels.region_formulas import CompiledLayers
from pimflow.fusion.onnx_layers import NHWC_PLACES
from pimflow.relay_passes.regions.extract_regions import region_groups

NAME = "fused_group"  # name of every function
CUDA_THREADS = 256
_HALF_ULP = {"fp32": 0.0, "fp16": 2.0**-11}  # of a result rounded to the storage type


@dataclass(frozen=True, kw_only=True)
class GroupRun:
    """Traffic and error of one group.

    Attributes
    ----------
    analytic_bytes : int
        Bytes by the formula of the search.
    error : float
        Largest error of results over their largest magnitude. Results that the file names are compared with
        ONNX Runtime; others have error 0. With folded layers, outputs are compared with the network's
        reference, and other results with TVM's own pipeline.
    """

    loaded_bytes: int
    weight_bytes: int
    stored_bytes: int
    analytic_bytes: int
    error: float

    @property
    def counted_bytes(self) -> int:
        """Traffic that was counted in the run."""
        return self.loaded_bytes + self.weight_bytes + self.stored_bytes


@dataclass(frozen=True, kw_only=True)
class FusedExecution:
    """A run of a fused network: its groups in order, and its outputs in NHWC."""

    groups: tuple[GroupRun, ...]
    outputs: Mapping[str, np.ndarray]

    @property
    def counted_bytes(self) -> int:
        """Traffic of all groups that was counted in the run."""
        return sum(group.counted_bytes for group in self.groups)

    @property
    def error(self) -> float:
        """Largest error of all groups."""
        return max(group.error for group in self.groups)

    def require(self, plan: FusionPlan) -> None:
        """Raise `VerificationError` for the first group with other traffic than planned, or wrong results."""
        for group, ran in zip(plan.groups, self.groups):
            where = f"group '{group.layers[0].name}' .. '{group.layers[-1].name}'"
            if ran.counted_bytes != ran.analytic_bytes:
                raise VerificationError(
                    f"{where}: moved {ran.counted_bytes} B, the search counted {ran.analytic_bytes}"
                )
            if not ran.error <= (bound := _bound(plan, group)):
                raise VerificationError(
                    f"{where}: differs from its reference by {ran.error:.2g} of its largest result, "
                    f"more than {bound:g}"
                )


def _bound(plan: FusionPlan, group: Group) -> float:
    """Error bound of a group: that of outputs; inside the network, at least half an ulp a layer so far."""
    bound, half_ulp = OUTPUT_BOUND[plan.accelerator.dtype], _HALF_ULP[plan.accelerator.dtype]
    if set(group.output_names) & set(plan.graph.outputs):
        return bound
    return max(bound, group.end * half_ulp)


def single_layer_group(group: Group, element_bytes: int) -> tuple[Group, Placement]:
    """An unfused layer as a group of one tile, without a bound on memory.

    Its operands, weights and result then move once, as the search counts an unfused layer.
    """
    weighted = frozenset(layer.name for layer in group.layers if layer.weight_elements)
    group = replace(group, resident=weighted, reuse="lifetime")
    return group, place(group, element_bytes, 1 << 62)


def require_executable(dtype: str) -> None:
    """Raise `UsageError` for a storage type that `execute` does not run, before the search."""
    if dtype not in parameters.STORAGE_TYPES:
        raise UsageError(
            f"--execute stores {' or '.join(parameters.STORAGE_TYPES)}; give one as --dtype, not {dtype}"
        )


@dataclass(frozen=True, kw_only=True)
class ExecutableGraph:
    """Computations of layers, inputs of the network, and expected results of layers; arrays are flat NHWC."""

    computations: Mapping[str, Computation]
    inputs: Mapping[str, np.ndarray]
    expected: Mapping[str, np.ndarray]


def execute(  # public, as `pimflow.execute_fused`: its parameters stay
    model: frontend.Model,
    plan: FusionPlan,
    *,
    baseline: str = "unfolded",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> FusedExecution:
    """Run a plan's groups one after the other, each as one function, on random inputs.

    Parameters
    ----------
    model, baseline, shapes, batch
        The network of `plan`; see `commands.fuse.fuse.layer_graph`.
    plan : FusionPlan
        A plan in fp32 or fp16.
    seed : int
        Seed of random inputs, and of random weights of unfolded layers.

    Raises
    ------
    UsageError
        For a plan of other layers or another storage type.
    UnsupportedOpError
        For the first layer without a formula.
    """
    dtype, element_bytes = plan.accelerator.dtype, plan.accelerator.element_bytes
    require_executable(dtype)
    if baseline == "folded":
        executable = _executable_regions(frontend.load(model, shapes, batch), plan)
    else:
        proto = zoo.load_model(model, dict(shapes or {}), seed, batch=batch)
        executable = _executable_onnx(proto, plan, seed)
    values, runs = dict(executable.inputs), []
    for index, (group, placement) in enumerate(zip(plan.groups, plan.placements)):
        analytic = group.traffic_elements * element_bytes
        group, placement = (group, placement) if placement else single_layer_group(group, element_bytes)
        counts = build(group, placement, executable.computations, dtype).run(values)
        error = _error(group, values, executable.expected)
        runs.append(GroupRun(**counts, analytic_bytes=analytic, error=error))
        for name in [n for n in values if _is_dead(plan.graph, n, group.end)]:
            del values[name]
        if progress:
            progress((index + 1) / len(plan.groups))
    outputs = {name: values[name].reshape(plan.graph.shapes[name]) for name in plan.graph.outputs}
    return FusedExecution(groups=tuple(runs), outputs=outputs)


def _executable_onnx(loaded: onnx.ModelProto, plan: FusionPlan, seed: int) -> ExecutableGraph:
    _require_layers({layer.name for layer in layers_from_onnx(loaded).layers}, plan, "unfolded")
    shapes, arrays = plan.graph.shapes, zoo.example_inputs(loaded, seed)
    return ExecutableGraph(
        computations=computations(loaded, plan.graph),
        inputs={name: to_nhwc(array, shapes[name]) for name, array in arrays.items() if name in shapes},
        expected={
            name: to_nhwc(array, shapes[name]) for name, array in references(loaded, plan, arrays).items()
        },
    )


def _executable_regions(network: frontend.Network, plan: FusionPlan) -> ExecutableGraph:
    _require_layers(set(region_groups(network.module)), plan, "folded")
    layers, arrays = CompiledLayers(network, plan.graph), network.example_inputs()
    stored = [name for group in plan.groups for name in group.output_names]
    return ExecutableGraph(
        computations=layers.computations,
        inputs=layers.inputs(arrays),
        expected=layers.references(stored, arrays),
    )


def _require_layers(names: set[str], plan: FusionPlan, baseline: str) -> None:
    if names != {layer.name for layer in plan.graph.layers}:
        raise UsageError(f"the plan is not of this network's {baseline} layers")


def _error(group: Group, values: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    errors = [
        relative_error(values[name].astype(np.float32), expected[name])
        for name in group.output_names
        if name in expected
    ]
    return max(errors, default=0.0)


def _is_dead(graph: LayerGraph, name: str, end: int) -> bool:
    return name not in graph.outputs and (not graph.readers[name] or graph.readers[name][-1] < end)


@dataclass(frozen=True, kw_only=True)
class GroupFunction:
    """The compiled function of a group, with counters."""

    function: tvm.runtime.Function
    group: Group
    placement: Placement
    computations: Mapping[str, Computation]
    dtype: str = "fp32"

    def run(self, values: dict[str, np.ndarray], device: tvm.runtime.Device | None = None) -> dict[str, int]:
        """Run the group on flat `values` and add its results to them; returns the bytes that it counted.

        Parameters
        ----------
        device : Device, optional
            Where the function runs: the CPU by default.
        """
        streams = parameters.streams(self.group)
        arguments = self._arguments(values)
        arguments.append(np.zeros(len(streams) * (CUDA_THREADS if device else 1), np.int64))
        if not device:
            stored = np.dtype(parameters.STORAGE_TYPES[self.dtype])
            arguments.append(np.full(self.placement.on_chip_bytes // stored.itemsize, np.nan, stored))
        tensors = [tvm.runtime.tensor(array, device or tvm.cpu()) for array in arguments]
        self.function(*tensors)
        bytes_by_kind = dict.fromkeys(("load", "weights", "store"), 0)
        counters = tensors[len(streams) + 1].numpy().reshape(-1, len(streams)).sum(axis=0)
        for (kind, name), tensor, size in zip(streams, tensors, counters):
            bytes_by_kind[kind] += int(size)
            if kind == "store":
                values[name] = tensor.numpy()
        keys = ("loaded_bytes", "weight_bytes", "stored_bytes")
        return dict(zip(keys, bytes_by_kind.values()))

    def _arguments(self, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Tensors that are loaded, weights and tensors that are stored, then the bounds of the group."""
        stored = np.dtype(parameters.STORAGE_TYPES[self.dtype])
        layers, arguments = {layer.name: layer for layer in self.group.layers}, []
        for kind, name in parameters.streams(self.group):
            if kind == "load":
                array = values[name].astype(stored, copy=False)
            elif kind == "weights":
                weights = self.computations[name].weights
                array = parameters.weight_layout(self.group, layers[name], weights).astype(stored)
            else:  # elements that are not written stay NaN
                array = np.full(self.group.graph.elements(name), np.nan, stored)
            arguments.append(array)
        return [*arguments, parameters.bounds(self.group)]


def build(
    group: Group, placement: Placement, computations_by_layer: Mapping[str, Computation], dtype: str = "fp32"
) -> GroupFunction:
    """Compile the function of a group for the CPU, with counters."""
    target = parameters.KernelTarget(counts_bytes=True, dtype=dtype)
    function = generator.generate(NAME, group, placement, computations_by_layer, target)
    return GroupFunction(
        function=tvm.compile(tvm.IRModule({NAME: function}), target="llvm")[NAME],
        group=group,
        placement=placement,
        computations=computations_by_layer,
        dtype=dtype,
    )


def references(
    model: onnx.ModelProto, plan: FusionPlan, inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Results of ONNX Runtime for all tensors that groups store and the file names."""
    from pimflow.frontend.onnx_runtime import reference

    extended_model = onnx.ModelProto()
    extended_model.CopyFrom(model)
    values_by_name = {value.name: value for value in (*model.graph.value_info, *model.graph.output)}
    names = [name for group in plan.groups for name in group.output_names if name in values_by_name]
    del extended_model.graph.output[:]
    extended_model.graph.output.extend(values_by_name[name] for name in names)
    return dict(zip(names, reference(extended_model)(inputs)))


def to_nhwc(array: np.ndarray, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Convert a tensor of the file to flat NHWC."""
    order = sorted(range(array.ndim), key=NHWC_PLACES[array.ndim].__getitem__)
    if array.size != math.prod(shape):
        raise UsageError(f"a tensor of shape {array.shape} is not one of {shape}")
    return np.ascontiguousarray(array.transpose(order), np.float32).ravel()
