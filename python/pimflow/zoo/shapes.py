"""Shapes of a network's inputs: given by the user, or dynamic in the file."""

from __future__ import annotations

import math
from collections.abc import Iterable

import onnx
from onnx import numpy_helper

from pimflow.errors import ModelError, UnknownNameError, UsageError
from pimflow.zoo.nodes import constant_nodes

Shape = tuple[int, ...]
LARGEST = (1 << 31) - 1  # elements of a tensor: kernels and PIM programs count them in 32 bits


def parse_shape(text: str) -> tuple[str, Shape]:
    """Read ``name=1,3,224,224``.

    Parameters
    ----------
    text : str
        An input's name (which may hold ``=``) and its sizes.

    Raises
    ------
    UsageError
        If `text` is anything else.
    """
    name, equals, sizes = text.rpartition("=")
    parts = sizes.split(",")
    if not (name.strip() and equals and all(p.strip().isdecimal() for p in parts)):
        raise UsageError(f"shape '{text}' is not NAME=SIZES; write it as input=1,3,224,224")
    return name.strip(), tuple(map(int, parts))


def fix_shapes(
    model: onnx.ModelProto, data: Iterable[onnx.ValueInfoProto], shapes: dict[str, Shape], where: str
) -> None:
    """Fix the dynamic dimensions of the inputs `data`, in place; see :func:`pimflow.zoo.load_model`."""
    inputs = {value.name: value for value in data}
    symbols: dict[str, int] = {}
    for name, shape in shapes.items():
        if name not in inputs:
            raise UnknownNameError("input", name, inputs)
        if any(size < 0 for size in shape):
            raise UsageError(f"shape of input '{name}': every size must be 0 or more, not {shape}")
        declared = dims_of(inputs[name])
        tensor = inputs[name].type.tensor_type
        if declared is None:
            declared = (None,) * len(shape)
            tensor.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in shape)
        if len(declared) != len(shape) or any(a not in (None, b) for a, b in zip(declared, shape)):
            difference = f"has shape {_shape_text(declared)}, not {_shape_text(shape)}"
            raise ModelError(f"{where}: input '{name}' {difference}")
        for dim, size in zip(tensor.shape.dim, shape):
            named = dim.dim_param not in ("", "?")  # Paddle's exporter calls every open dimension "?"
            if named and symbols.setdefault(dim.dim_param, size) != size:
                raise ModelError(
                    f"{where}: input '{name}': '{dim.dim_param}' is both {symbols[dim.dim_param]} "
                    f"and {size}; give one value"
                )
            dim.dim_value = size
    for value in inputs.values():
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in symbols:
                dim.dim_value = symbols[dim.dim_param]
        if value.type.HasField("tensor_type") and value.name not in shapes:
            require_fixed_dims(value, where)
    del model.graph.value_info[:]
    # Results of these nodes get no inferred shapes, so they are fixed here. All others do, which is right
    # even if one symbol stands for several sizes.
    foreign = {name for node in model.graph.node if node.domain == "com.microsoft" for name in node.output}
    for value in model.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            if value.name in foreign and dim.dim_param in symbols:
                dim.dim_value = symbols[dim.dim_param]
            dim.ClearField("dim_param")


def set_batch(model: onnx.ModelProto, data: Iterable[onnx.ValueInfoProto], batch: int, where: str) -> None:
    """Set the batch size, which is the first dimension of all inputs `data`, in place.

    Constant shapes of Reshape and Expand that begin with the old batch size are changed too, if their operand
    depends on the inputs. See :func:`check_batch`.
    """
    if batch < 1:
        raise UsageError(f"--batch {batch}: give 1 or more")
    old_batches = set()
    for value in data:
        dims = value.type.tensor_type.shape.dim
        if not dims:
            raise ModelError(f"{where}: input '{value.name}' has no dimension for a batch")
        old_batches.add(dims[0].dim_value)
        dims[0].dim_value = batch
    if len(old_batches) != 1:
        raise ModelError(
            f"{where}: inputs have batches {sorted(old_batches)}; give one with --shape instead of --batch"
        )
    moving = {value.name for value in data}
    shapes = {tensor.name: tensor for tensor in model.graph.initializer}
    constants = constant_nodes(model.graph)
    changed_shapes: set[str] = set()
    for node in model.graph.node:
        if moving.isdisjoint(node.input):
            continue
        moving.update(node.output)
        if (
            node.op_type in ("Reshape", "Expand")
            and node.input[0] in moving
            and node.input[1] not in changed_shapes
        ):
            shape_tensor = shapes.get(node.input[1]) or constants.get(node.input[1])
            dims = None if shape_tensor is None else numpy_helper.to_array(shape_tensor).copy()
            if dims is not None and dims.size and dims[0] == min(old_batches):
                dims[0] = batch
                shape_tensor.CopyFrom(numpy_helper.from_array(dims, shape_tensor.name))
                changed_shapes.add(node.input[1])
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")


def check_batch(model: onnx.ModelProto, batch: int, where: str) -> None:
    """Raise :class:`ModelError` unless the first dimension of every output is `batch`."""
    for value in model.graph.output:
        dims = dims_of(value)
        if not dims or dims[0] != batch:
            raise ModelError(
                f"{where}: output '{value.name}' has shape {_shape_text(dims)} with a batch of {batch}: "
                "the graph has a fixed batch; export it with a dynamic one"
            )


def check_sizes(model: onnx.ModelProto, where: str) -> None:
    """Raise :class:`ModelError` for a tensor of more than `LARGEST` elements."""
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        dims = dims_of(value)
        if dims is not None and None not in dims and math.prod(dims) > LARGEST:
            raise ModelError(
                f"{where}: tensor '{value.name}' of {_shape_text(dims)} has more than {LARGEST} elements"
            )


def dims_of(value: onnx.ValueInfoProto) -> tuple[int | None, ...] | None:
    """Return a value's shape, with None for each dynamic dimension; None if its rank is unknown."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in tensor.shape.dim)


def fixed_dims(value: onnx.ValueInfoProto, where: str) -> Shape:
    """Return a value's shape, also one that holds nothing; raise :class:`ModelError` if a size is open."""
    sizes = value.type.tensor_type.shape.dim
    if any(map(_is_zero, sizes)) and all(dim.HasField("dim_value") for dim in sizes):
        return tuple(dim.dim_value for dim in sizes)
    return require_fixed_dims(value, where)


def require_fixed_dims(value: onnx.ValueInfoProto, where: str) -> Shape:
    """Return a value's shape; raise :class:`ModelError` if a dimension is dynamic or 0."""
    dims = dims_of(value)
    if dims is None or None in dims:
        empty = any(_is_zero(dim) for dim in value.type.tensor_type.shape.dim)
        usual = (1, 3, 224, 224) if dims is None or len(dims) == 4 else (1,) * len(dims)
        example = ",".join(str(size or likely) for size, likely in zip(dims or usual, usual))
        advice = f"for example --shape {value.name}={example}"
        if empty:
            sizes = "x".join(
                "0" if _is_zero(dim) else str(size or "?")
                for dim, size in zip(value.type.tensor_type.shape.dim, dims)
            )
            raise ModelError(
                f"{where}: input '{value.name}' has shape {sizes}: with a dimension of 0 it holds nothing; "
                f"if the size is meant to be open, fix it, {advice}"
            )
        raise ModelError(
            f"{where}: input '{value.name}' has dynamic shape {_shape_text(dims)}; fix it, {advice}"
        )
    return dims


def _is_zero(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Whether a dimension is 0, not dynamic."""
    return dim.HasField("dim_value") and dim.dim_value == 0


def _shape_text(dims: tuple[int | None, ...] | None) -> str:
    if dims is None:
        return "of unknown rank"
    return "x".join(str(size or "?") for size in dims) or "()"
