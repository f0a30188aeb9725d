"""The embedded networks, and the one way that any network gets into pimflow.

The files in ``graphs/`` are made by ``scripts/build_zoo.py`` and filled by :mod:`.weights`.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError, Message
from onnx import external_data_helper, helper, shape_inference

from pimflow.errors import ModelError, UnknownNameError, one_line
from pimflow.zoo import weights
from pimflow.zoo.indices import index_bounds
from pimflow.zoo.precision import require_types, to_single
from pimflow.zoo.shapes import (
    Shape,
    check_batch,
    check_sizes,
    dims_of,
    fix_shapes,
    fixed_dims,
    parse_shape,
    set_batch,
)

__all__ = [
    "ModelInfo",
    "describe",
    "dims_of",
    "example_inputs",
    "filled",
    "index_bounds",
    "input_types",
    "is_onnx",
    "is_weight",
    "load",
    "load_model",
    "names",
    "parse_shape",
    "weight_values",
]

GRAPHS = Path(__file__).parent / "graphs"


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Counts of a network of the zoo.

    Parameters
    ----------
    name : str
        Name in the zoo.
    parameters : int
        Trained values; the running means and variances of batch norms do not count.
    macs : int
        Multiply-accumulates of all Conv, ConvTranspose, Gemm and MatMul for one inference.
    inputs : dict of str to tuple of int
        Shape of each data input, in ONNX layout (NCHW).
    nodes : int
        ONNX nodes.
    """

    name: str
    parameters: int
    macs: int
    inputs: dict[str, Shape]
    nodes: int


def names() -> list[str]:
    """List the networks of the zoo, sorted."""
    return sorted(path.stem for path in GRAPHS.glob("*.onnx"))


def load(name: str, seed: int = 0) -> onnx.ModelProto:
    """Make a network of the zoo, complete with weights.

    Parameters
    ----------
    name : str
        One of :func:`names`.
    seed : int, optional
        0 to 2**64 - 1. The same seed gives the same bytes on every machine.

    Returns
    -------
    onnx.ModelProto
        Its graph inputs are data; weights are initializers.

    Raises
    ------
    UnknownNameError, UsageError
        If there is no such network; if the seed is out of range.
    """
    model = _graph(name)
    weights.fill(model, seed)
    return model


def describe(name: str) -> ModelInfo:
    """Count a network of the zoo, from its graph.

    Parameters
    ----------
    name : str
        One of :func:`names`.

    Raises
    ------
    UnknownNameError
        If there is no such network.
    """
    model = _graph(name)
    graph = shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    shapes = {value.name: dims_of(value) for value in values}
    drawn = {value.name: rule[0] for value in graph.input if (rule := weights.rule_of(value))}
    trained = [weight for weight, rule in drawn.items() if rule not in weights.STATISTICS]
    macs = 0
    for node in graph.node:
        result = math.prod(shapes[node.output[0]])
        if node.op_type == "Conv":
            macs += result * math.prod(shapes[node.input[1]][1:])
        elif node.op_type == "ConvTranspose":
            macs += math.prod(shapes[node.input[0]]) * math.prod(shapes[node.input[1]][1:])
        elif node.op_type == "Gemm":
            macs += result * math.prod(shapes[node.input[1]]) // shapes[node.output[0]][-1]
        elif node.op_type == "MatMul":
            macs += result * shapes[node.input[0]][-1]
    return ModelInfo(
        name=name,
        parameters=sum(math.prod(shapes[weight]) for weight in trained),
        macs=macs,
        inputs={value.name: shapes[value.name] for value in graph.input if value.name not in drawn},
        nodes=len(graph.node),
    )


def load_model(
    model: str | os.PathLike | onnx.ModelProto,
    shapes: dict[str, Shape] | None = None,
    seed: int = 0,
    *,
    batch: int | None = None,
    filled: bool = True,
) -> onnx.ModelProto:
    """Load a network with every shape known, from wherever it is.

    Parameters
    ----------
    model : str, os.PathLike or onnx.ModelProto
        A name of the zoo, else the path of an ``.onnx`` file; or a model, which is left unchanged.
    shapes : dict of str to tuple of int, optional
        Fixes the dynamic dimensions of inputs. A symbol fixed in one input is fixed in all.
    seed : int, optional
        Seed of the weights of a graph-only model, see :func:`load`.
    batch : int, optional
        Inferences at once, in place of the first dimension of every input.
    filled : bool, optional
        Whether weights of a graph-only model are drawn; else they stay inputs, see :func:`is_weight`.

    Returns
    -------
    onnx.ModelProto
        Checked, with inferred shapes, fp32 its only floating-point type but of outputs that the network
        declares otherwise, which are cast in the end (see `precision.to_single`); its graph inputs are data
        and have fixed shapes, its nodes names of their own.

    Raises
    ------
    UnknownNameError
        If `model` or a key of `shapes` names nothing.
    UsageError
        If a size in `shapes` or the seed is out of range.
    ModelError
        If the file cannot be read, is no valid ONNX model, has two nodes of one name, keeps a dynamic input
        or contradicts `shapes`.
    """
    if isinstance(model, onnx.ModelProto):
        where, loaded = f"model '{model.graph.name}'", onnx.ModelProto()
        loaded.CopyFrom(model)
    elif isinstance(model, str) and model in names():
        where, loaded = f"model '{model}'", _graph(model)
    elif isinstance(model, str) and not _is_path(model):
        raise UnknownNameError("model", model, names())
    else:
        where, loaded = f"'{os.fspath(model)}'", _read(Path(model))
    if not loaded.graph.node:
        raise ModelError(f"{where}: has no nodes; give an ONNX model")
    if any(map(external_data_helper.uses_external_data, loaded.graph.initializer)):
        raise ModelError(f"{where}: its weights are in another file; give the path of the model")
    try:
        _keep_data_inputs(loaded)
        refuse_shared_names(loaded, where)
        require_types(loaded, where)
        to_single(loaded)
        _name_nodes(loaded)
        data = [value for value in loaded.graph.input if weights.rule_of(value) is None]
        fix_shapes(loaded, data, shapes or {}, where)
        if batch is not None:
            set_batch(loaded, data, batch, where)
        _type_groups(loaded)
        loaded = shape_inference.infer_shapes(loaded, strict_mode=True, data_prop=True)
        onnx.checker.check_model(loaded)
        check_sizes(loaded, where)
        if batch is not None:
            check_batch(loaded, batch, where)
        if filled:
            weights.fill(loaded, seed)  # last, for onnx copies a model several times over to do the above
        return loaded
    except (onnx.checker.ValidationError, shape_inference.InferenceError) as error:
        raise ModelError(f"{where}: not a valid ONNX model: {_one_line(error)}") from None
    except (EncodeError, ValueError) as error:
        raise ModelError(f"{where}: cannot be checked (2 GiB limit?): {_one_line(error)}") from None


def is_onnx(model: object) -> TypeGuard[str | os.PathLike[str] | onnx.ModelProto]:
    """Whether :func:`load_model` may take it: a model, a name, or a path other than of a PyTorch program."""
    if isinstance(model, str | os.PathLike):
        return Path(model).suffix != ".pt2"
    return isinstance(model, onnx.ModelProto)


def is_weight(value: onnx.ValueInfoProto) -> bool:
    """Whether an input of a graph-only model is a weight to be drawn."""
    return weights.rule_of(value) is not None


def weight_values(value: onnx.ValueInfoProto, seed: int = 0) -> Iterator[np.ndarray]:
    """Values of a weight in fp32, in parts along one axis; raises :class:`ModelError` if they are unknown."""
    return weights.drawn(value, seed)


def filled(model: onnx.ModelProto, seed: int = 0) -> onnx.ModelProto:
    """`model` with such weights drawn: itself if there are none."""
    if not any(map(is_weight, model.graph.input)):
        return model
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    weights.fill(whole, seed)
    return whole


def example_inputs(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw an input for each data input of a network, bit-identical everywhere.

    Parameters
    ----------
    model : onnx.ModelProto
        A network with fixed input shapes.
    seed : int, optional
        See :func:`load`.

    Returns
    -------
    dict of str to numpy.ndarray
        Each of its input's shape and type. Floats have mean 0, variance 1 and lie in [-3, 3]
        (a sum of three uniforms); integers are 0, 1 or 2, those that pick rows of a table any of its
        rows; booleans are fair.

    Raises
    ------
    ModelError
        If an input has a dynamic dimension or does not hold numbers.
    """
    return example_arrays(input_types(model), seed, index_bounds(model))


def input_types(model: onnx.ModelProto) -> dict[str, tuple[Shape, str]]:
    """Shape and dtype of each data input, in order; raises what :func:`example_inputs` does."""
    stored = {tensor.name for tensor in model.graph.initializer}
    wanted = {}
    for value in model.graph.input:
        if value.name in stored or is_weight(value):
            continue
        kind = value.type.tensor_type.elem_type
        if kind in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
            raise ModelError(f"input '{value.name}': holds no numbers; only tensors can be drawn")
        dims = fixed_dims(value, f"model '{model.graph.name}'")
        wanted[value.name] = (dims, str(helper.tensor_dtype_to_np_dtype(kind)))
    return wanted


def example_arrays(
    wanted: Mapping[str, tuple[tuple[int, ...], object]], seed: int = 0, rows: dict[str, int] | None = None
) -> dict[str, np.ndarray]:
    """What :func:`example_inputs` draws, for inputs given by name as (shape, dtype).

    `rows` has the sizes of tables that inputs pick from, as :func:`index_bounds` finds them.
    """
    drawn = {}
    for name, (dims, dtype) in wanted.items():
        first, second, third = weights.uniform(name, 3 * math.prod(dims), seed).reshape(3, -1)
        normal = (first + second + third).reshape(dims)
        if np.issubdtype(dtype, np.bool_):
            normal = normal > 0
        elif np.issubdtype(dtype, np.integer):
            if bound := (rows or {}).get(name):
                normal = np.floor((first.astype(np.float64).reshape(dims) + 1) / 2 * bound)
            else:
                normal = np.abs(normal).clip(max=2)
        drawn[name] = np.asarray(normal, dtype)  # an array also of rank 0
    return drawn


def _graph(name: str) -> onnx.ModelProto:
    if name not in (known := names()):
        raise UnknownNameError("model", name, known)
    return onnx.load(GRAPHS / f"{name}.onnx")


def _is_path(text: str) -> bool:
    separators = {os.sep, os.altsep or os.sep}
    if text.endswith(".onnx") or separators & set(text):
        return True
    return text != "" and Path(text).exists()


def _read(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.ModelProto.FromString(path.read_bytes())
        if not _is_text(model):
            raise DecodeError("a string is not UTF-8")
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
    """Tell whether every string is UTF-8: protobuf parses other strings as bytes and does not report it."""
    for field, value in message.ListFields():
        items = [value] if isinstance(value, str | bytes | Message) else value
        if field.type == field.TYPE_STRING and any(isinstance(item, bytes) for item in items):
            return False
        if field.type == field.TYPE_MESSAGE and not all(map(_is_text, items)):
            return False
    return True


def _keep_data_inputs(model: onnx.ModelProto) -> None:
    """Drop the inputs that IR versions below 4 declare for initializers."""
    stored = {tensor.name for tensor in model.graph.initializer}
    data = [value for value in model.graph.input if value.name not in stored]
    if len(data) < len(model.graph.input):
        del model.graph.input[:]
        model.graph.input.extend(data)
        model.ir_version = max(model.ir_version, 4)


def _type_groups(model: onnx.ModelProto) -> None:
    """Give results of GroupNormalization the types of their operands, in place: onnx infers none."""
    groups = [node for node in model.graph.node if node.op_type == "GroupNormalization"]
    for _ in groups:  # one follows from another
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


def refuse_shared_names(model: onnx.ModelProto, where: str) -> None:
    """Raise :class:`ModelError` for a name that two nodes bear, which ONNX Runtime refuses too."""
    counts = Counter(node.name for node in model.graph.node if node.name)
    for name, count in counts.items():
        if count > 1:
            raise ModelError(f"{where}: {count} nodes are named '{name}'; rename them")


def _name_nodes(model: onnx.ModelProto) -> None:
    """Name every node that has no name by its first result, in place.

    What does not print in a name, such as a line break, becomes an escape.
    """
    for node in model.graph.node:
        if not node.name.isprintable():
            node.name = one_line(node.name)
    taken = {node.name for node in model.graph.node}
    for node in model.graph.node:
        if not node.name:
            name = f"{node.op_type}_{next(filter(None, node.output), '')}"
            while name in taken:
                name += "_"
            node.name = name
            taken.add(name)


def _one_line(error: Exception, limit: int = 240) -> str:
    line = " ".join(str(error).split())
    return line if len(line) <= limit else f"{line[:limit]}..."
