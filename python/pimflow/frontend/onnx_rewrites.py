"""Rewrites of ONNX networks for TVM's importer."""

from __future__ import annotations

from collections.abc import Container

import onnx
from google.protobuf.message import Message
from onnx import helper, inliner, numpy_helper, version_converter
from tvm.relax.frontend.onnx import onnx_frontend

from pimflow import zoo
from pimflow.errors import UnsupportedOpError
from pimflow.frontend.constant_values import fold_constants
from pimflow.frontend.control_flow import inline_control_flow
from pimflow.frontend.onnx_attention import CONVERTERS
from pimflow.frontend.optimiser import optimise
from pimflow.frontend.recurrent import unroll
from pimflow.zoo import foreign
from pimflow.zoo.nodes import RECURRENT

# Operators that only `NamingImporter` supports.
EXTRA_OPERATORS = ("BitCast", "ConvInteger", "LpNormalization")


def operator_names() -> set[str]:
    """Names of operators in ONNX's own domain that the importer supports."""
    ours = {kind for domain, kind in CONVERTERS if not domain}
    return set(onnx_frontend._get_convert_map()) | {"Constant", *EXTRA_OPERATORS} | ours


def is_supported(node: onnx.NodeProto) -> bool:
    """Whether the importer supports an operator, in its domain."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return (domain, node.op_type) in CONVERTERS or (not domain and node.op_type in operator_names())


def simplify(model: onnx.ModelProto) -> onnx.ModelProto:
    """The network in a newer opset and simpler operators, with operators on shapes folded.

    Returns
    -------
    ModelProto
        With inferred shapes.

    Raises
    ------
    UnsupportedOpError
        For a recurrent layer or a loop that cannot be unrolled, and for branches that cannot both be
        computed.
    """
    simple = inline_control_flow(_inline_unknown(_upgrade_opset(model)))  # bodies of operators have loops
    folded = inline_control_flow(optimise(simple) or simple)  # ONNX Runtime inlines bodies too
    return drop_empty_operands(unroll(fold_constants(folded)))


def opset_of(model: onnx.ModelProto) -> int:
    """Version of ONNX's own operators in `model`."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)


def replace_outdated(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model`, which has no weights, in a newer opset if the importer misreads an operator of the old one."""
    outdated = any(node.op_type == "Upsample" for node in model.graph.node)
    return _upgrade_opset(model) if outdated else model


def _upgrade_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """The network in an opset that the importer supports; it misreads some older operators."""
    if opset_of(model) >= 13:
        return model
    try:
        newer = version_converter.convert_version(model, 17)
    except Exception:  # the converter has no adapter for an operator
        return model
    if opset_of(model) < 11:  # the converter does not keep the old defaults of Resize
        old_defaults = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        for node in newer.graph.node:
            if node.op_type == "Resize":
                node.attribute.extend(helper.make_attribute(*item) for item in old_defaults.items())
    return newer


def _inline_unknown(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace operators that the importer does not support by their definition in the standard."""
    previous: list[tuple[str, str]] = []
    while True:
        unknown = {foreign.operator_key(node) for node in model.graph.node if not is_supported(node)}
        functions = sorted(pair for pair in unknown if onnx.defs.has(pair[1], domain=pair[0]))
        if functions == previous:
            return model  # what is left has no definition
        typed = onnx.ModelProto()
        typed.CopyFrom(model)
        _write_defaults(typed, functions)
        for tensor in model.graph.initializer:  # the inliner does not read types of initializers
            typed.graph.value_info.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
        try:
            inlined = inliner.inline_selected_functions(typed, functions, inline_schema_functions=True)
        except RuntimeError:  # the importer then names the unsupported operator
            return model
        zoo.name_nodes(inlined)  # those of definitions have no names
        model, previous = inlined, functions  # definitions may contain operators that are not supported


def _write_defaults(model: onnx.ModelProto, operators: Container[tuple[str, str]]) -> None:
    """Write the default values of attributes of `operators`, in place: the inliner does not know them."""
    versions = {
        "" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in model.opset_import
    }
    for node in model.graph.node:
        domain, kind = foreign.operator_key(node)
        if (domain, kind) not in operators:
            continue
        schema = onnx.defs.get_schema(kind, versions.get(domain, 1), domain)
        names = {attribute.name for attribute in node.attribute}
        node.attribute.extend(
            attribute.default_value
            for name, attribute in schema.attributes.items()
            if name not in names and attribute.default_value.name
        )


def drop_empty_operands(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove operands of each Concat that hold nothing, in place."""
    empty = {tensor.name for tensor in model.graph.initializer if 0 in tensor.dims}
    for value in model.graph.value_info:
        dims = value.type.tensor_type.shape.dim
        if any(dim.HasField("dim_value") and not dim.dim_value for dim in dims):
            empty.add(value.name)
    for node in model.graph.node:
        kept = [name for name in node.input if name not in empty]
        if node.op_type == "Concat" and 0 < len(kept) < len(node.input):
            node.input[:] = kept
    return model


# Their further results are mostly for training; the importer supports some only without them.
_OPTIONAL_RESULTS = ("BatchNormalization", "LayerNormalization", "MaxPool", *RECURRENT)


def strip_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without initializers and without weights to be drawn, which may fill the machine's memory."""
    light = onnx.ModelProto()
    for field, value in model.ListFields():
        if field.name != "graph":
            _set_field(light, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name == "input":
            light.graph.input.extend(graph_input for graph_input in value if not zoo.is_weight(graph_input))
        elif field.name != "initializer":
            _set_field(light.graph, field.name, value)
    return light


def _set_field(message: Message, field: str, value: object) -> None:
    if isinstance(value, str | bytes | int):
        setattr(message, field, value)
    else:
        getattr(message, field).MergeFrom(value)


def refuse_training(model: onnx.ModelProto) -> None:
    """Raise `UnsupportedOpError` for a node in training mode, whose results are random or of the batch."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].HasField("t"):
            constants[node.output[0]] = node.attribute[0].t
        trains = any(
            node.op_type == "BatchNormalization" and attribute.name == "training_mode" and attribute.i
            for attribute in node.attribute
        )
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
            mode, ratio = (constants.get(name) for name in (node.input[2], node.input[1]))
            drops = ratio is None or bool(numpy_helper.to_array(ratio).any())
            trains = drops and (mode is None or bool(numpy_helper.to_array(mode).any()))
        if trains:
            raise UnsupportedOpError(
                f"{node.op_type} of node '{node.name}' is in training mode; export the model for inference"
            )


def drop_unread_results(graph: onnx.GraphProto) -> None:
    """Remove further results of nodes that nobody reads, in place."""
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    used.discard("")
    for node in graph.node:
        while node.op_type in _OPTIONAL_RESULTS and len(node.output) > 1 and node.output[-1] not in used:
            node.output.pop()


def inference_graph(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without weights, with sums as additions, and without nodes that do nothing at inference.

    The importer stacks the operands of a Sum, which hides a residual connection, and makes a tuple of a
    Dropout, which TVM's layout pass cannot handle.
    """
    copy = strip_weights(model)
    graph = copy.graph
    drop_unread_results(graph)
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    used.discard("")
    outputs = {value.name for value in graph.output}
    source_by_name: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = source_by_name.get(name, name)
        skipped = (node.op_type in ("Identity", "Sum") and len(node.input) == 1) or (
            node.op_type == "Dropout" and not any(name in used for name in node.output[1:])
        )
        if skipped and node.output[0] not in outputs:
            source_by_name[node.output[0]] = node.input[0]
        elif skipped:
            nodes.append(helper.make_node("Identity", node.input[:1], node.output[:1], name=node.name))
        elif node.op_type == "Sum":
            nodes += _additions(node)
        else:
            nodes.append(node)
    new_nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(new_nodes)
    return copy


def _additions(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    nodes, total = [], node.input[0]
    for index, operand in enumerate(node.input[1:], 1):
        last = index == len(node.input) - 1
        out = node.output[0] if last else f"{node.output[0]}.{index}"
        name = node.name if last else f"{node.name}.{index}"
        nodes.append(helper.make_node("Add", [total, operand], [out], name=name))
        total = out
    return nodes
