"""Loads any ONNX network: reads, checks, and converts it to what pimflow expects."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import TypeGuard

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError, Message
from onnx import TensorProto, external_data_helper, numpy_helper, shape_inference

from pimflow.errors import ModelError, UnknownNameError, UsageError, one_line
from pimflow.zoo import catalogue, foreign, weights
from pimflow.zoo.language.decoder_files import is_decoder_file
from pimflow.zoo.node_checks import require_plain_nodes
from pimflow.zoo.precision import NARROW, OTHER_TYPES, has_double, refuse_bit_casts, require_types, to_single
from pimflow.zoo.shapes import LARGEST, Shape, check_batch, check_sizes, fix_shapes, set_batch
from pimflow.zoo.states import context_shapes, state_pairs

DEFAULT_OPSET = 18  # of ONNX's own operators in a network that has none, but gets some


def load_model(
    model: str | os.PathLike | onnx.ModelProto,
    shapes: dict[str, Shape] | None = None,
    seed: int | None = 0,
    *,
    batch: int | None = None,
    context: int | None = None,
    states: dict[str, str] | None = None,
) -> onnx.ModelProto:
    """Load a network with every shape known, from wherever it is, to be compiled.

    Parameters
    ----------
    model : str, os.PathLike or onnx.ModelProto
        A name of the zoo, else the path of an ``.onnx`` file; or a model, which is not changed.
    shapes : dict of str to tuple of int, optional
        Shapes of inputs with dynamic dimensions. A symbol that is fixed in one input is fixed in all.
    seed : int or None, optional
        Seed of the weights of a graph-only model, see :func:`load`. With None they are not drawn, but stay
        inputs, see :func:`is_weight`.
    batch : int, optional
        Batch size, which replaces the first dimension of every input.
    context : int, optional
        Of a decoder: the context in tokens, from which shapes follow; see `states.context_shapes`.
    states : dict of str to str, optional
        Caches, by input the output, if their names do not say so.

    Returns
    -------
    onnx.ModelProto
        A checked model with inferred shapes. All floating-point tensors are fp32, except outputs that the
        network declares otherwise (see `precision.to_single`). Graph inputs are data and have fixed shapes;
        every node has a name of its own.

    Raises
    ------
    UnknownNameError
        If `model` or a key of `shapes` names nothing.
    UsageError
        If a size in `shapes` or the seed is out of range.
    ModelError
        If the file cannot be read, is no valid ONNX model, has a dynamic input that `shapes` does not
        fix, or contradicts `shapes`.
    """
    return without_double(load_exact(model, shapes, seed, batch=batch, context=context, states=states))


def without_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """A result of `load_exact` in the types that networks are compiled in; itself if it has them."""
    if not has_double(model):
        return model
    single = onnx.ModelProto()
    single.CopyFrom(model)
    to_single(single)
    name_nodes(single)
    return _infer_types(single)


def load_exact(
    model: str | os.PathLike | onnx.ModelProto,
    shapes: dict[str, Shape] | None = None,
    seed: int | None = 0,
    *,
    batch: int | None = None,
    context: int | None = None,
    states: dict[str, str] | None = None,
) -> onnx.ModelProto:
    """As :func:`load_model`, but tensors that are fp64 in the file are fp64: what a reference computes.

    ONNX Runtime rounds after every operator in fp16 and bf16, which are fp32 here too.
    """
    where, new_model = open_copy(model, context)
    try:
        _keep_data_inputs(new_model)
        require_types(new_model, where)
        require_plain_nodes(new_model, where)
        refuse_bit_casts(new_model, where)
        data = [value for value in new_model.graph.input if weights.rule_of(value) is None]
        pairs = {} if context is None else state_pairs(data, new_model.graph.output, states)
        to_single(new_model, pairs.values(), NARROW if context is None else OTHER_TYPES)
        name_nodes(new_model)
        if context is not None:
            if not pairs:
                raise ModelError(
                    f"{where}: has no cache that --context could keep: no output is an input with tokens "
                    "behind it; if there is one, name both: --state past=present"
                )
            shapes = context_shapes(data, new_model.graph.output, pairs, context, shapes or {})
        fix_shapes(new_model, data, shapes or {}, where)
        if batch is not None:
            set_batch(new_model, data, batch, where)
        _type_groups(new_model)
        _write_defaults(new_model)
        foreign_nodes = _mark_foreign(new_model)
        new_model = _infer_types(new_model)
        onnx.checker.check_model(new_model)
        _restore_domains(new_model, foreign_nodes)
        check_sizes(new_model, where)
        if batch is not None:
            check_batch(new_model, batch, where)
        if seed is not None:
            weights.fill(new_model, seed)  # last, since the steps above copy the model several times
        return new_model
    except (onnx.checker.ValidationError, shape_inference.InferenceError) as error:
        raise ModelError(f"{where}: not a valid ONNX model: {_one_line(error)}") from None
    except (EncodeError, ValueError) as error:
        raise ModelError(f"{where}: cannot be checked (2 GiB limit?): {_one_line(error)}") from None


def open_copy(
    model: str | os.PathLike | onnx.ModelProto, context: int | None = None
) -> tuple[str, onnx.ModelProto]:
    """What errors call `model`, and a copy of it that may be changed; its weights are in it."""
    if isinstance(model, onnx.ModelProto):
        where, new_model = f"model '{model.graph.name}'", onnx.ModelProto()
        new_model.CopyFrom(model)
    elif isinstance(model, str) and model in catalogue.all_names():
        where, new_model = f"model '{model}'", catalogue.read_graph(model, context)
    elif isinstance(model, str) and not _is_path(model):
        raise UnknownNameError("model", model, catalogue.all_names())
    elif not isinstance(model, str | os.PathLike):
        raise UsageError(
            f"model is a name, a file, an ONNX model, a Relax module or a program of torch.export, "
            f"not {type(model).__name__}"
        )
    else:
        where, new_model = f"'{os.fspath(model)}'", read_model(Path(model))
    if not new_model.graph.node:
        raise ModelError(f"{where}: has no nodes; give an ONNX model")
    if not any(entry.domain in ("", "ai.onnx") for entry in new_model.opset_import):
        new_model.opset_import.append(onnx.helper.make_opsetid("", DEFAULT_OPSET))
    _store_densely(new_model)
    if any(map(external_data_helper.uses_external_data, new_model.graph.initializer)):
        raise ModelError(f"{where}: its weights are in another file; give the path of the model")
    return where, new_model


def _store_densely(model: onnx.ModelProto) -> None:
    """Replace sparse constants, and those of 4 bits that are only dequantised, by usual ones, in place."""
    graph = model.graph
    graph.initializer.extend(map(_dense, graph.sparse_initializer))
    del graph.sparse_initializer[:]
    readers: dict[str, set[str]] = {}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.HasField("sparse_tensor"):
                attribute.CopyFrom(onnx.helper.make_attribute("value", _dense(attribute.sparse_tensor)))
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    bytes_of = {TensorProto.INT4: np.int8, TensorProto.UINT4: np.uint8}
    for tensor in graph.initializer:
        if tensor.data_type in bytes_of and readers.get(tensor.name) == {"DequantizeLinear"}:
            wide = numpy_helper.to_array(tensor).astype(bytes_of[tensor.data_type])
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))


def _dense(sparse: onnx.SparseTensorProto) -> TensorProto:
    """A sparse tensor with all its elements; raises `ModelError` for one that is damaged or too large."""
    name = sparse.values.name
    if any(size < 0 for size in sparse.dims) or math.prod(sparse.dims) > LARGEST:
        raise ModelError(f"sparse tensor '{name}' has more than {LARGEST} elements")
    values, places = (numpy_helper.to_array(part) for part in (sparse.values, sparse.indices))
    array = np.zeros(tuple(sparse.dims), values.dtype)
    try:
        if places.ndim == 1:
            array.reshape(-1)[places] = values
        else:
            array[tuple(places.T)] = values
    except (IndexError, ValueError):
        raise ModelError(f"sparse tensor '{name}' has indices outside of its shape") from None
    return numpy_helper.from_array(array, sparse.values.name)


def is_onnx(model: object) -> TypeGuard[str | os.PathLike[str] | onnx.ModelProto]:
    """Whether :func:`load_model` accepts `model`: an ONNX model, a name, or a path not ending in .pt2."""
    if isinstance(model, str | os.PathLike):
        return Path(model).suffix != ".pt2"
    return isinstance(model, onnx.ModelProto)


def _is_path(text: str) -> bool:
    separators = {os.sep, os.altsep or os.sep}
    if text.endswith(".onnx") or separators & set(text):
        return True
    return text != "" and Path(text).exists()


def read_model(path: Path, external_data: bool = True) -> onnx.ModelProto:
    """Read an ONNX file, unchanged, with its external data unless told otherwise; raises `ModelError`."""
    try:
        if path.is_char_device():
            raise ModelError(f"'{path}': is a device, which may have no end")
        if is_decoder_file(path):
            raise ModelError(f"'{path}': is a language model; pimflow generate takes it")
        model = onnx.ModelProto.FromString(path.read_bytes())
        if not _is_text(model):
            raise DecodeError("a string is not UTF-8")
        if external_data:
            external_data_helper.load_external_data_for_model(model, str(path.parent))
    except OSError as error:
        place = f" '{error.filename}'" if error.filename not in (None, str(path)) else ""
        raise ModelError(f"'{path}': cannot be read{place}: {error.strerror or error}") from None
    except DecodeError:
        raise ModelError(f"'{path}': is not an ONNX file, or is damaged") from None
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise ModelError(f"'{path}': cannot be read with its data: {_one_line(error)}") from None
    return model


def _is_text(message: Message) -> bool:
    """Whether every string is UTF-8: protobuf parses other strings as bytes without an error."""
    for field, value in message.ListFields():
        items = [value] if isinstance(value, str | bytes | Message) else value
        if field.type == field.TYPE_STRING and any(isinstance(item, bytes) for item in items):
            return False
        if field.type == field.TYPE_MESSAGE and not all(map(_is_text, items)):
            return False
    return True


def _keep_data_inputs(model: onnx.ModelProto) -> None:
    """Remove the inputs that IR versions below 4 declare for initializers, in place."""
    stored = {tensor.name for tensor in model.graph.initializer}
    data = [value for value in model.graph.input if value.name not in stored]
    if len(data) < len(model.graph.input):
        del model.graph.input[:]
        model.graph.input.extend(data)
        model.ir_version = max(model.ir_version, 4)


# Operators of ONNX Runtime that exporters put into ONNX's own domain, which does not have them.
_UNREGISTERED = ("SimplifiedLayerNormalization",)


def _mark_foreign(model: onnx.ModelProto) -> set[str]:
    """Move operators of `_UNREGISTERED` to a domain that is not checked, in place; returns names of nodes."""
    nodes = [node for node in model.graph.node if node.op_type in _UNREGISTERED and not node.domain]
    for node in nodes:
        node.domain = "com.microsoft"
    if nodes and all(opset.domain != "com.microsoft" for opset in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return {node.name for node in nodes}


def _restore_domains(model: onnx.ModelProto, names: set[str]) -> None:
    for node in model.graph.node:
        if node.name in names:
            node.domain = ""


def _infer_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with inferred shapes; declared shapes of outputs that contradict these do not count.

    ONNX Runtime warns of such a declaration, and runs the network.
    """

    def infer(source: onnx.ModelProto) -> onnx.ModelProto:
        """`source` with inferred shapes; raises `InferenceError`."""
        if foreign.has_foreign(source):
            return foreign.infer_types(source)
        return shape_inference.infer_shapes(source, strict_mode=True, data_prop=True)

    try:
        return infer(model)
    except shape_inference.InferenceError:
        undeclared = onnx.ModelProto()
        undeclared.CopyFrom(model)
        for value in undeclared.graph.output:
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")
        try:
            return infer(undeclared)
        except shape_inference.InferenceError:
            pass
        raise


def _write_defaults(model: onnx.ModelProto) -> None:
    """Write the default axes of each MeanVarianceNormalization, in place: onnx infers no shapes without."""
    for node in model.graph.node:
        if node.op_type == "MeanVarianceNormalization" and not node.attribute:
            node.attribute.append(onnx.helper.make_attribute("axes", [0, 2, 3]))


def _type_groups(model: onnx.ModelProto) -> None:
    """Give results of GroupNormalization the types of their operands, in place: onnx infers none."""
    groups = [node for node in model.graph.node if node.op_type == "GroupNormalization"]
    for _ in groups:  # the type of one may depend on that of another
        typed = shape_inference.infer_shapes(model).graph
        values = {value.name: value for value in (*typed.input, *typed.value_info)}
        results = {value.name: value for value in (*model.graph.value_info, *model.graph.output)}
        for node in groups:
            operand, result = values.get(node.input[0]), node.output[0]
            if operand is None or not operand.type.tensor_type.HasField("shape"):
                continue
            if result not in results:
                model.graph.value_info.add(name=result).type.CopyFrom(operand.type)
            elif not results[result].type.tensor_type.HasField("shape"):
                results[result].type.CopyFrom(operand.type)


def name_nodes(model: onnx.ModelProto) -> None:
    """Give every node a printable name of its own, in place.

    Names are optional in ONNX and may be shared. A node without a name is called after its first result;
    nodes that share one get numbers; characters that cannot be printed, such as line breaks, are escaped.
    """
    for node in model.graph.node:
        node.name = node.name if node.name.isprintable() else one_line(node.name)
    names = {node.name for node in model.graph.node}
    used_names: set[str] = set()
    for node in model.graph.node:
        if node.name and node.name in used_names:
            numbered = (f"{node.name}.{number}" for number in itertools.count(2))
            node.name = next(name for name in numbered if name not in names)
            names.add(node.name)
        elif not node.name:
            node.name = one_line(f"{node.op_type}_{next(filter(None, node.output), '')}")
            while node.name in names:
                node.name += "_"
            names.add(node.name)
        used_names.add(node.name)


def _one_line(error: Exception, limit: int = 240) -> str:
    line = " ".join(str(error).split())
    return line if len(line) <= limit else f"{line[:limit]}..."
