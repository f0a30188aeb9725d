"""ONNX Runtime as the reference of ONNX networks; it maps weights from a file."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from pimflow import zoo
from pimflow.errors import ModelError, last_line
from pimflow.frontend.control_flow import OPERATORS as CONTROL_FLOW
from pimflow.frontend.onnx_rewrites import strip_weights
from pimflow.frontend.perturbed_onnx import perturb
from pimflow.frontend.recurrent import GATES, unroll
from pimflow.frontend.reference import Fp16Storage, Reference, Run
from pimflow.host.garbage_collection import release_memory
from pimflow.zoo import foreign

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator

WEIGHTS_FILE = "weights"
# What ONNX Runtime says of operators, versions and layouts of the standard that it does not have.
_LACKING = ("NOT_IMPLEMENTED", "is not a registered function/op", "layout_ == 0 was false")
PAGE_BYTES = 4096  # alignment of a mapping


def reference(model: onnx.ModelProto, single: onnx.ModelProto | None = None) -> Reference:
    """Reference of `model`: ONNX Runtime, which maps the weights from a file while it runs.

    Parameters
    ----------
    single : ModelProto, optional
        The same model in fp32, which runs if ONNX Runtime lacks an operator in fp64, such as convolution.
    """

    def prepare() -> Run:
        """Open a session."""
        if single is None or single is model:
            return open_session(model, strip_weights(model))
        try:
            return open_session(model, strip_weights(model), may_be_slow=False)
        except ModelError:
            return open_session(single, strip_weights(single))

    return Reference(prepare, model)


def reference_with_roundings(read: Callable[[], onnx.ModelProto], roundings: Fp16Storage) -> Run:
    """Run the model of `read` by ONNX Runtime with random roundings; see `perturbed_onnx.perturb`.

    The first run rounds to the nearest what is stored, as a build does: where many weights are equal, all of
    them move the same way, which random directions never do. Operators of other domains and recurrent layers
    are expanded first, so that their intermediate results are rounded too.
    """

    def sessions() -> Iterator[Run]:
        """The session of each run; one at a time is held."""
        yield _rounding_session(read(), roundings, to_nearest=True)
        run = _rounding_session(read(), roundings, to_nearest=False)
        while True:
            yield run

    session = sessions()
    return lambda values: next(session)(values)


def _rounding_session(model: onnx.ModelProto, roundings: Fp16Storage, to_nearest: bool) -> Run:
    recurrent = any(node.op_type in GATES for node in model.graph.node)
    if recurrent or foreign.has_foreign(model):
        foreign.expand(model, {tensor.name: tensor for tensor in model.graph.initializer})
        model = onnx.shape_inference.infer_shapes(model)
        model = onnx.shape_inference.infer_shapes(unroll(model)) if recurrent else model
    return open_session(model, perturb(model, roundings, to_nearest))


def open_session(model: onnx.ModelProto, light: onnx.ModelProto, may_be_slow: bool = True) -> Run:
    """Open a session of ONNX Runtime with the graph of `light`, which changes, and the weights of `model`.

    With `may_be_slow`, the evaluator of the package `onnx` computes what ONNX Runtime does not have.
    """
    types = [value.type.tensor_type.elem_type for value in light.graph.output]
    scores = {node.output[3] for node in light.graph.node if node.op_type == "Attention" and node.output[3:]}
    are_scores = [value.name in scores for value in light.graph.output]
    input_types = {
        value.name: helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        for value in light.graph.input
        if value.type.tensor_type.elem_type
    }
    _widen_bf16_outputs(light.graph)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # warnings do not concern the user
    options.add_session_config_entry("session.disable_prepacking", "1")  # it would copy all weights
    if any(node.op_type in CONTROL_FLOW for node in light.graph.node):  # the optimiser may end the process
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False  # it keeps the memory of a run, in powers of two
    bare = onnx.ModelProto()
    bare.CopyFrom(light)
    session: onnxruntime.InferenceSession | ReferenceEvaluator
    try:
        with convert_runtime_errors(), tempfile.TemporaryDirectory() as folder:
            path = write_model(model, Path(folder), light)  # the file is mapped, so its name may be deleted
            release_memory()
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except ModelError as error:
        if not may_be_slow or not any(text in str(error) for text in _LACKING):
            raise
        bare.graph.initializer.extend(model.graph.initializer)
        from onnx.reference import ReferenceEvaluator  # reads the schemas of all operators

        with convert_runtime_errors():
            session = ReferenceEvaluator(bare)

    def run(values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Results of the model for inputs by name."""
        with convert_runtime_errors():
            typed = {
                name: value.astype(input_types.get(name, value.dtype), copy=False)
                for name, value in values.items()
            }
            outputs = session.run(None, typed)
        outputs = [
            _hide_scores(y) if is_score else y for y, is_score in zip(outputs, are_scores, strict=True)
        ]
        return [
            y.astype(ml_dtypes.bfloat16) if kind == TensorProto.BFLOAT16 else y
            for y, kind in zip(outputs, types, strict=True)
        ]

    return run


def _hide_scores(scores: np.ndarray) -> np.ndarray:
    """The scores of an Attention hidden by infinity, as in the standard, not by the lowest number."""
    return np.where(scores == np.finfo(scores.dtype).min, -np.inf, scores).astype(scores.dtype)


def _widen_bf16_outputs(graph: onnx.GraphProto) -> None:
    """Cast bf16 outputs to fp32, which is exact, since ONNX Runtime does not return bf16."""
    for value in graph.output:
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            single = f"{value.name}.readable"
            graph.node.append(helper.make_node("Cast", [value.name], [single], to=TensorProto.FLOAT))
            value.name, value.type.tensor_type.elem_type = single, TensorProto.FLOAT


@contextlib.contextmanager
def convert_runtime_errors() -> Iterator[None]:
    """Context in which errors of ONNX Runtime become `ModelError`."""
    try:
        yield
    except Exception as error:  # errors of ONNX Runtime, or of a full disk
        reason = last_line(error)
        raise ModelError(f"ONNX Runtime, the reference, cannot run the model: {reason}") from error


def write_model(model: onnx.ModelProto, folder: Path, light: onnx.ModelProto) -> Path:
    """Write `light` to `folder`, and the weights of `model` to a file beside it, one at a time.

    `onnx.save` would change `model`. `light` is the same model without weights; small weights are added to
    it.
    """
    with open(folder / WEIGHTS_FILE, "wb") as file:
        for tensor in model.graph.initializer:
            values = tensor.raw_data  # a copy; another way to find its size would serialise the whole tensor
            large = len(values) >= PAGE_BYTES
            tensor_info = (tensor.name, tensor.dims, tensor.data_type)
            light.graph.initializer.append(_external(file, [values], *tensor_info) if large else tensor)
        for value in filter(zoo.is_weight, model.graph.input):
            tensor_info = (value.name, zoo.dims_of(value), onnx.TensorProto.FLOAT)
            light.graph.initializer.append(_external(file, zoo.weight_values(value), *tensor_info))
    path = folder / "model.onnx"
    path.write_bytes(light.SerializeToString())
    return path


def _external(
    file: BinaryIO, parts: Iterable[bytes | np.ndarray], name: str, dims: Sequence[int], data_type: int
) -> onnx.TensorProto:
    """Write `parts`, the bytes of a tensor, to `file`, and make a tensor that refers to them."""
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
