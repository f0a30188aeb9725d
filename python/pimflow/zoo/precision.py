"""Converts a network to one floating-point type: fp32, in which networks are compiled."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from pimflow.errors import ModelError, UnsupportedOpError
from pimflow.zoo.nodes import bodies

NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
OTHER_TYPES = (*NARROW, TensorProto.DOUBLE)

# Operators whose results are elements of their operands, or exact functions of them, in any type.
_EXACT = {
    "Abs", "Compress", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements",
    "GatherND", "Identity", "Max", "MaxPool", "Min", "Neg", "Pad", "ReduceMax", "ReduceMin", "Relu",
    "Reshape", "ReverseSequence", "ScatterElements", "ScatterND", "Slice", "SpaceToDepth", "Split",
    "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip
# Operators of chains that stay fp64 where they compute with whole numbers (`_whole_numbers`), and `_EXACT`.
_ARITHMETIC = {"Add", "Cast", "Ceil", "Div", "Floor", "Mod", "Mul", "Pow", "Round", "Sign", "Sqrt", "Sub"}
_COMPARISONS = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
_WHOLE = (TensorProto.INT64, TensorProto.UINT64, TensorProto.INT32, TensorProto.UINT32)
# Operators whose results may change completely if an operand changes by a rounding.
_DECIDING = {
    "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Equal", "Floor", "Greater", "GreaterOrEqual", "IsInf",
    "Less", "LessOrEqual", "NonZero", "QuantizeLinear", "Round", "Sign", "TopK", "Unique",
}  # fmt: skip


def require_types(model: onnx.ModelProto, where: str) -> None:
    """Raise :class:`ModelError` for errors of types that `to_single` would hide from ONNX Runtime.

    These are tensors without a type, and operands of different floating-point types where all have to be
    equal. Raise :class:`UnsupportedOpError` for an input that is no tensor.
    """
    for value in model.graph.input:
        kind = (value.type.WhichOneof("value") or "").removesuffix("_type")
        if kind in ("optional", "sequence", "map"):
            raise UnsupportedOpError(f"{where}: input '{value.name}' is of type '{kind}'; make it a tensor")
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    for value in values:
        if value.type.HasField("tensor_type") and not value.type.tensor_type.elem_type:
            raise ModelError(f"{where}: not a valid ONNX model: tensor '{value.name}' has no element type")
    if not has_other_types(model):
        return
    try:
        shape_inference.infer_shapes(_strip_weights(model), check_type=True, strict_mode=True)
    except shape_inference.InferenceError as error:
        if "type" in str(error):
            raise ModelError(
                f"{where}: not a valid ONNX model: {' '.join(str(error).split())[:240]}"
            ) from None


def refuse_bit_casts(model: onnx.ModelProto, where: str) -> None:
    """Raise :class:`UnsupportedOpError` for a BitCast from or to a type that `to_single` makes fp32."""
    casts = [node for node in model.graph.node if node.op_type == "BitCast"]
    kinds: dict[str, int] = {}
    if casts:
        graph = shape_inference.infer_shapes(_strip_weights(model)).graph
        kinds = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info)}
    for node in casts:
        for kind in (kinds.get(node.input[0], 0), _cast_target(node).i):
            if kind in OTHER_TYPES:
                label, name = node.name or node.output[0], TensorProto.DataType.Name(kind)
                raise UnsupportedOpError(
                    f"{where}: BitCast '{label}' of {name} is not supported: it is computed in FLOAT"
                )


def _strip_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with inputs in place of its weights."""
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    graph = light.graph
    for field in ("node", "input", "output", "value_info"):
        getattr(graph, field).extend(getattr(model.graph, field))
    inputs = {value.name for value in graph.input}
    for tensor in model.graph.initializer:
        if tensor.name not in inputs:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return light


def has_other_types(model: onnx.ModelProto, kinds: Collection[int] = OTHER_TYPES) -> bool:
    """Whether an input, output, weight or intermediate tensor of known type is of `kinds`."""
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    stored = {value.type.tensor_type.elem_type for value in values}
    return not stored.union(tensor.data_type for tensor in model.graph.initializer).isdisjoint(kinds)


def has_double(model: onnx.ModelProto) -> bool:
    """Whether an input, output, weight or intermediate tensor of known type is fp64."""
    return has_other_types(model, [TensorProto.DOUBLE])


def to_single(
    model: onnx.ModelProto, caches: Container[str] = (), kinds: Container[int] = OTHER_TYPES
) -> None:
    """Convert fp16, bf16 and fp64 to fp32, in place: inputs, weights, casts and intermediate tensors.

    What is stored in fp16 is decided by the system. ONNX Runtime rounds after every operator in fp16. Outputs
    of these types keep them: a node at the end casts each. Outputs in `caches` become fp32, since they are
    inputs of the next step. Tensors stay fp64 that integers of 32 and 64 bits are cast to, with all that is
    computed from them, if that is elementwise: fp32 would change integers above 2^24.

    Parameters
    ----------
    kinds : container of int
        Types that are converted; without fp64 the file's is kept.

    A cast to fp16 or bf16 usually says in which type the following operators compute; fp32 is more exact, and
    replaces it. But if the result is only cast back or compared, the purpose of the cast is to round. Such a
    cast stays, and a second cast converts its result to fp32.
    """
    kept = _whole_numbers(model) if TensorProto.DOUBLE in kinds else set()
    returned = {
        value.name: value.type.tensor_type.elem_type
        for value in model.graph.output
        if value.type.tensor_type.elem_type in kinds and value.name not in kept and value.name not in caches
    }
    _name_types_of_casts(model)
    rounding = _rounding_casts(model.graph)
    _convert(model.graph, kinds, kept)
    _insert_rounding(model.graph, rounding)
    _cast_outputs(model.graph, returned)


def _whole_numbers(model: onnx.ModelProto) -> set[str]:
    """Names of the fp64 tensors that stay: see `to_single`."""
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    if not any(_cast_target(node).i == TensorProto.DOUBLE for node in casts):
        return set()
    graph = shape_inference.infer_shapes(_strip_weights(model)).graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*graph.input, *graph.value_info, *graph.output)
    }
    inputs = {value.name for value in model.graph.input}
    groups: dict[str, set[str]] = {}  # by tensor, the fp64 tensors that one chain connects
    barred: set[str] = {name for name in inputs if types.get(name) == TensorProto.DOUBLE}
    sources: set[str] = set()
    for node in model.graph.node:
        doubles = [name for name in (*node.input, *node.output) if types.get(name) == TensorProto.DOUBLE]
        group = set(doubles).union(*(groups.get(name, ()) for name in doubles))
        groups |= dict.fromkeys(group, group)
        if node.op_type == "Cast" and types.get(node.input[0]) in _WHOLE:
            sources.update(doubles)
        if node.op_type not in _EXACT | _ARITHMETIC | _COMPARISONS | {"Constant"}:
            barred.update(doubles)
    chains = [group for group in groups.values() if group & sources and not group & barred]
    return set().union(*chains)


def _name_types_of_casts(model: onnx.ModelProto) -> None:
    """Replace each CastLike to the type of an fp16 or bf16 tensor by a Cast."""
    if not any(node.op_type == "CastLike" for graph in _graphs(model.graph) for node in graph.node):
        return
    types: dict[str, int] = {}
    for graph in _graphs(shape_inference.infer_shapes(_strip_weights(model)).graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            types[value.name] = value.type.tensor_type.elem_type
        types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in (node for graph in _graphs(model.graph) for node in graph.node):
        if node.op_type == "CastLike" and (to := types.get(node.input[1])) in NARROW:
            node.op_type = "Cast"
            node.attribute.append(helper.make_attribute("to", to))
            del node.input[1:]


def _rounding_casts(graph: onnx.GraphProto) -> dict[str, int]:
    """The casts to fp16 and bf16 whose purpose is to round: type by name of the result."""
    narrow, readers = {}, {}
    for node in (node for subgraph in _graphs(graph) for node in subgraph.node):
        if node.op_type == "Cast":
            target = _cast_target(node).i
            narrow |= {node.output[0]: target} if target in NARROW else {}
        for name in node.input:
            readers.setdefault(name, []).append(node)
    rounding = {}
    for cast, kind in narrow.items():
        queue, seen = [cast], {cast}
        while queue and cast not in rounding:
            for node in readers.get(queue.pop(), ()):
                if node.op_type in _DECIDING:
                    rounding[cast] = kind
                elif node.op_type in _EXACT:
                    queue += set(node.output) - seen
                    seen.update(node.output)
    return rounding


def _cast_target(cast: onnx.NodeProto) -> onnx.AttributeProto:
    return next(attribute for attribute in cast.attribute if attribute.name == "to")


def _insert_rounding(graph: onnx.GraphProto, kinds: Mapping[str, int]) -> None:
    """Let the casts that write the tensors `kinds` round to these types; a second cast makes results fp32."""
    rounded = _unused_names(kinds, ".rounded", graph)
    for subgraph in _graphs(graph) if kinds else ():
        for place, node in reversed(list(enumerate(subgraph.node))):
            (name, *_) = (*node.output, "")
            if name in kinds:
                subgraph.node.insert(
                    place + 1, helper.make_node("Cast", [rounded[name]], [name], to=TensorProto.FLOAT)
                )
                node.output[0] = rounded[name]
                _cast_target(node).i = kinds[name]


def _cast_outputs(graph: onnx.GraphProto, kinds: Mapping[str, int]) -> None:
    """Cast the outputs in `kinds` to their types, under their old names, by a node each."""
    written = {name for node in graph.node for name in node.output}
    single = _unused_names(written & kinds.keys(), ".single", graph)
    for node in (node for subgraph in _graphs(graph) for node in subgraph.node):
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = single.get(name, name)
    for value in graph.output:
        if value.name in single:
            value.type.tensor_type.elem_type = kinds[value.name]
            graph.node.append(
                helper.make_node("Cast", [single[value.name]], [value.name], to=kinds[value.name])
            )


def _unused_names(names: Iterable[str], end: str, graph: onnx.GraphProto) -> dict[str, str]:
    """By name, the name with an `end` that no tensor of a graph has, for which underscores may follow."""
    nodes = (node for subgraph in _graphs(graph) for node in subgraph.node)
    used_names = {name for node in nodes for name in (*node.input, *node.output)}
    unused = {}
    for name in names:
        unused[name] = f"{name}{end}"
        while unused[name] in used_names:
            unused[name] += "_"
    return unused


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """`graph`, and the subgraphs of its control flow."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from _graphs(body)


def _convert(graph: onnx.GraphProto, kinds: Container[int], kept: Container[str]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = _tensor_type(value.type)
        if kind.elem_type in kinds and value.name not in kept:
            kind.elem_type = TensorProto.FLOAT
    for tensor in graph.initializer:
        if tensor.name not in kept:
            _convert_tensor(tensor, kinds)
    for node in graph.node:
        is_kept = any(name in kept for name in node.output)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _convert(attribute.g, kinds, kept)
            elif attribute.HasField("t") and not is_kept:
                _convert_tensor(attribute.t, kinds)
            elif attribute.name in ("to", "dtype") and attribute.i in kinds and not is_kept:
                attribute.i = TensorProto.FLOAT


def _tensor_type(kind: onnx.TypeProto) -> onnx.TypeProto.Tensor:
    """The type of a tensor, or of the tensors in a sequence or an optional value."""
    while (field := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, field).elem_type
    return kind.tensor_type


def _convert_tensor(tensor: TensorProto, kinds: Container[int]) -> None:
    if tensor.data_type in kinds:
        array = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
