"""Recurrent layers of PyTorch, as the nodes that ONNX has for them: both are unrolled by `recurrent`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from tvm import relax

from pimflow.frontend.onnx_graph import import_onnx
from pimflow.relay_passes.flat import main_bindings, shape, substitute
from pimflow.zoo.foreign.builder import NodeBuilder

if TYPE_CHECKING:
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

# By operator: ONNX's node, and which of PyTorch's gates each of its gates is.
_KINDS = {"lstm.input": ("LSTM", (0, 3, 1, 2)), "gru.input": ("GRU", (1, 0, 2))}
_OPSET = 17


def unrolled_operators(program: torch.export.ExportedProgram) -> list[str]:
    """The recurrent operators that are converted here; LSTMs with projections are decomposed by PyTorch."""
    has_projections = any(
        str(node.target) == "aten.lstm.input" and len(node.args[2]) != _weight_count(node)
        for node in program.graph.nodes
    )
    return [name for name in _KINDS if name != "lstm.input" or not has_projections]


def _weight_count(node: torch.fx.Node) -> int:
    """Number of the weights of a layer without projections."""
    has_biases, layers, _, _, is_bidirectional = node.args[3:8]
    return (4 if has_biases else 2) * layers * (1 + is_bidirectional)


def converters(
    program: torch.export.ExportedProgram,
) -> dict[str, Callable[[Any, Any], tuple[relax.Var, ...]]]:
    """Converters of the recurrent layers of `program`, as TVM's importer takes them."""
    values = {**program.state_dict, **program.constants}
    signature = program.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}

    def convert(node: torch.fx.Node, importer: ExportedProgramImporter) -> tuple[relax.Var, ...]:
        """The results of a layer: all hidden values, and its last states."""
        operands = [node.args[0], *(node.args[1] if isinstance(node.args[1], list) else [node.args[1]])]
        weights = [values[targets[weight.name]].detach().numpy() for weight in node.args[2]]
        tensors = [importer.env[operand] for operand in operands]
        model = _model(node, [shape(tensor) for tensor in tensors], weights)
        module = import_onnx(model)
        replacements = dict(zip(module["main"].params, tensors, strict=True))
        for binding in main_bindings(module):
            value = substitute(binding.value, replacements)
            name = f"{node.name}_{binding.var.name}"
            replacements[binding.var] = importer.block_builder.emit(value, name_hint=name)
        results = substitute(module["main"].body.body, replacements)
        if isinstance(results, relax.Var):  # bound to the tuple of all results
            results = importer.block_builder.lookup_binding(results)
        return tuple(results.fields)

    return dict.fromkeys(_KINDS, convert)


def _model(
    node: torch.fx.Node, shapes: Sequence[tuple[int, ...]], weights: Sequence[np.ndarray]
) -> onnx.ModelProto:
    """A network of ONNX's nodes for all layers of `node`; inputs and results are those of PyTorch."""
    kind, gates = _KINDS[node.target.__name__]
    has_biases, layers, _, _, is_bidirectional, batch_first = node.args[3:]
    directions, results = 1 + is_bidirectional, len(shapes)
    count = 4 if has_biases else 2
    names = ["x", "h", "c"][:results]
    builder = NodeBuilder("recurrent")
    (batch, steps, _) = shapes[0] if batch_first else (shapes[0][1], shapes[0][0], 0)
    hidden = shapes[1][2]
    order = [1, 0, 2] if batch_first else [0, 1, 2]
    value = builder.move_axes("x", order)
    states = [builder.split(name, [directions] * layers, 0) for name in names[1:]]
    finals: list[list[str]] = []
    for layer in range(layers):
        first = layer * directions * count
        parts = [weights[first + part :: count][:directions] for part in range(count)]
        w, r, *biases = ([_reorder(part, gates) for part in direction_parts] for direction_parts in parts)
        constants = [builder.constant(np.stack(matrices)) for matrices in (w, r)]
        bias = builder.constant(np.concatenate([np.stack(b) for b in biases], axis=1)) if biases else ""
        operands = [value, *constants, bias, "", *(state[layer] for state in states)]
        direction = "bidirectional" if is_bidirectional else "forward"
        attributes = {"linear_before_reset": 1} if kind == "GRU" else {}
        y, *last = builder.emit_tuple(
            kind, operands, results, hidden_size=hidden, direction=direction, **attributes
        )
        value = builder.reshape(builder.move_axes(y, [0, 2, 1, 3]), [steps, batch, directions * hidden])
        finals.append(last)
    outputs = [builder.move_axes(value, order)]
    outputs += [builder.concat(parts, 0) for parts in zip(*finals)]
    return _network(builder, dict(zip(names, shapes)), outputs)


def _reorder(weights: np.ndarray, gates: Sequence[int]) -> np.ndarray:
    """Weights whose first axis has PyTorch's gates, with those of ONNX."""
    parts = np.split(weights, len(gates))
    return np.concatenate([parts[gate] for gate in gates])


def _network(
    builder: NodeBuilder, inputs: dict[str, tuple[int, ...]], outputs: Sequence[str]
) -> onnx.ModelProto:
    """The network of all nodes of `builder`, with fp32 inputs of these shapes."""
    declared = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(builder.nodes, "recurrent", declared, results, builder.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)])
