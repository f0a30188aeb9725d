"""ONNX Runtime, the reference of ONNX networks; it maps weights from a file."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from pimflow import zoo
from pimflow.errors import ModelError, last_line
from pimflow.frontend.onnx_rewrites import without_weights
from pimflow.frontend.perturbed_onnx import perturbed
from pimflow.frontend.reference import Reference, Run, Stored
from pimflow.host.garbage_collection import give_back

WEIGHTS_FILE = "weights"
PAGE_BYTES = 4096  # where a mapping may begin


def reference(model: onnx.ModelProto) -> Reference:
    """Outputs of `model` by ONNX Runtime, which maps the weights from a file into memory for the time."""

    return Reference(lambda: session_of(model, without_weights(model)), model)


def perturbed_reference(read: Callable[[], onnx.ModelProto], roundings: Stored) -> Run:
    """Outputs of what `read` gives by ONNX Runtime, with random roundings; see `perturbed_onnx.perturbed`."""
    model = read()
    return session_of(model, perturbed(model, roundings))


def session_of(model: onnx.ModelProto, light: onnx.ModelProto) -> Run:
    """ONNX Runtime with the graph of `light`, which is changed, and the weights of `model`."""
    types = [value.type.tensor_type.elem_type for value in light.graph.output]
    _readable(light.graph)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its warnings are not the user's
    options.add_session_config_entry("session.disable_prepacking", "1")  # a copy of all for one run
    options.enable_cpu_mem_arena = False  # it keeps what one run took, in powers of two
    with own_errors(), tempfile.TemporaryDirectory() as folder:
        path = stored(model, Path(folder), light)  # mapped, so that it may lose its name
        give_back()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        with own_errors():
            outputs = session.run(None, dict(values))
        return [
            y.astype(ml_dtypes.bfloat16) if kind == TensorProto.BFLOAT16 else y
            for y, kind in zip(outputs, types, strict=True)
        ]

    return run


def _readable(graph: onnx.GraphProto) -> None:
    """Outputs of bf16 as fp32, which has all their values: ONNX Runtime hands over no bf16."""
    for value in graph.output:
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            single = f"{value.name}.readable"
            graph.node.append(helper.make_node("Cast", [value.name], [single], to=TensorProto.FLOAT))
            value.name, value.type.tensor_type.elem_type = single, TensorProto.FLOAT


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raises what ONNX Runtime does as `ModelError`."""
    try:
        yield
    except Exception as error:  # ONNX Runtime's own hierarchy; a full disk
        reason = last_line(error)
        raise ModelError(f"ONNX Runtime, the reference, cannot run the model: {reason}") from error


def stored(model: onnx.ModelProto, folder: Path, light: onnx.ModelProto) -> Path:
    """Write `light` to `folder`, the weights of `model` beside it, one at a time.

    `onnx.save` would change `model`; `light`, made of it, has no weights, and gets those that are small.
    """
    with open(folder / WEIGHTS_FILE, "wb") as file:
        for tensor in model.graph.initializer:
            values = tensor.raw_data  # a copy; its size alone would be found by writing the whole tensor
            large = len(values) >= PAGE_BYTES
            described = (tensor.name, tensor.dims, tensor.data_type)
            light.graph.initializer.append(_external(file, [values], *described) if large else tensor)
        for value in filter(zoo.is_weight, model.graph.input):
            described = (value.name, zoo.dims_of(value), onnx.TensorProto.FLOAT)
            light.graph.initializer.append(_external(file, zoo.weight_values(value), *described))
    path = folder / "model.onnx"
    path.write_bytes(light.SerializeToString())
    return path


def _external(
    file: BinaryIO, parts: Iterable[bytes | np.ndarray], name: str, dims: Sequence[int], data_type: int
) -> onnx.TensorProto:
    """A tensor of which `parts` are the bytes, written to `file`."""
    file.write(bytes(-file.tell() % PAGE_BYTES))
    begin = file.tell()
    for part in parts:
        file.write(part)
    place = {"location": WEIGHTS_FILE, "offset": begin, "length": file.tell() - begin}
    light = onnx.TensorProto(name=name, dims=dims, data_type=data_type)
    light.data_location = onnx.TensorProto.EXTERNAL
    for key, value in place.items():
        light.external_data.add(key=key, value=str(value))
    return light
