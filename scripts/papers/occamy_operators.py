"""Memory of a network whose ONNX operators run unfused, counted as in Occamy's Table I."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import onnx
from onnx import helper

from papers import onnx_torch
from pimflow import memory, zoo
from pimflow.core.liveness import ALIGNMENT_BYTES, Liveness
from pimflow.memory import MemoryPlan


@dataclass(frozen=True, kw_only=True)
class OperatorMemory:
    """Variables of a network at the level of ONNX operators, none fused.

    Variables are inputs, outputs of operators, and weights: floating-point constants other than scalars.
    Weights are copied before their first use and dead after their last.

    Attributes
    ----------
    lazy_groups : int
        Runs of allocations that no operator interrupts, each variable allocated before its first use.
    in_place_groups : int
        The same where a batch norm writes over its operand, and so allocates nothing.
    idle_share : float
        Of the bytes of all variables, each times the number of operators: the share that is allocated while
        its variable is not live, if all are allocated before the first operator (Figure 2a, the gray area).
    eager_bytes : int
        Sum over all variables.
    lazy_peak_bytes : int
        Maximum of the bytes that are live at once.
    """

    operators: int
    variables: int
    lazy_groups: int
    in_place_groups: int
    idle_share: float
    eager_bytes: int
    lazy_peak_bytes: int
    plan: MemoryPlan


def count_operators(model: str | onnx.ModelProto, batch: int | None = None) -> OperatorMemory:
    """Count and plan what the operators of an ONNX model allocate."""
    graph = zoo.load_model(model, {}, batch=batch).graph
    liveness = operator_liveness(graph)
    lifetimes = liveness.lifetimes
    groups = {life.begin for life in lifetimes}
    batch_norms = {step for step, node in enumerate(graph.node) if node.op_type == "BatchNormalization"}
    used = sum(life.size_bytes * (life.end - life.begin) for life in lifetimes)
    return OperatorMemory(
        operators=len(graph.node),
        variables=len(lifetimes),
        lazy_groups=len(groups),
        in_place_groups=len(groups - batch_norms),
        idle_share=1 - used / (liveness.steps * sum(life.size_bytes for life in lifetimes)),
        eager_bytes=sum(life.size_bytes for life in lifetimes),
        lazy_peak_bytes=liveness.peak_bytes,
        plan=memory.plan(lifetimes),
    )


def torch_peak_bytes(model: str | onnx.ModelProto, batch: int | None = None) -> int:
    """Peak of what PyTorch allocates on the CPU for the same operators, measured; see `onnx_torch`."""
    loaded = zoo.load_model(model, {}, batch=batch)
    inputs = zoo.example_arrays(zoo.input_types(loaded), rows=zoo.index_bounds(loaded))
    return onnx_torch.peak_bytes(loaded, inputs)


def torch_ns(model: str | onnx.ModelProto, batch: int | None = None, runs: int = 3) -> float:
    """Median time of an inference by PyTorch on the CPU, operator by operator, weights resident."""
    from pimflow.compiler.timing import call_times_ns  # loads TVM

    loaded = zoo.load_model(model, {}, batch=batch)
    torch = onnx_torch.import_torch()
    weights = onnx_torch.weight_tensors(loaded)
    inputs = onnx_torch.tensors(zoo.example_arrays(zoo.input_types(loaded), rows=zoo.index_bounds(loaded)))
    with torch.inference_mode():
        onnx_torch.outputs(loaded.graph, weights, inputs)  # warms up
        return median(call_times_ns(lambda: onnx_torch.outputs(loaded.graph, weights, inputs), runs))


def operator_liveness(graph: onnx.GraphProto) -> Liveness:
    """Lifetimes of the variables of `graph`, a step an operator; all shapes must be known."""
    values = (*graph.input, *graph.value_info, *graph.output)
    size_bytes = {value.name: _size_bytes(value) for value in values}
    weights = {tensor.name for tensor in graph.initializer if tensor.dims and _is_float(tensor.data_type)}
    constants = {tensor.name for tensor in graph.initializer} - weights | {""}
    size_bytes |= {tensor.name: 4 * math.prod(tensor.dims) for tensor in graph.initializer}
    steps = []
    for node in graph.node:
        copied = [name for name in node.input if name in weights]  # before its first use
        reads = set(node.input) - constants - weights
        steps.append((sorted(reads), [*filter(None, node.output), *copied]))
    outputs = [tensor.name for tensor in graph.output]
    liveness = Liveness.from_steps(
        steps, size_bytes, inputs=[tensor.name for tensor in graph.input], outputs=outputs
    )
    aligned = tuple(replace(life, alignment_bytes=ALIGNMENT_BYTES) for life in liveness.lifetimes)
    return replace(liveness, lifetimes=aligned)


def _size_bytes(value: onnx.ValueInfoProto) -> int:
    tensor = value.type.tensor_type
    dims = [dim.dim_value for dim in tensor.shape.dim]
    return int(math.prod(dims)) * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)).itemsize


def _is_float(elem_type: int) -> bool:
    return np.issubdtype(helper.tensor_dtype_to_np_dtype(elem_type), np.floating)
