"""Write decomposed networks as ONNX models, for training by other tools."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from google.protobuf.message import EncodeError

from pimflow import frontend, zoo
from pimflow.commands.shared import prepare
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.inputs import InputOptions, network_keywords
from pimflow.commands.shared.options import CalibrationOptions, ShapeOptions, ValueOptions
from pimflow.commands.shared.search_arguments import SearchArguments, as_system
from pimflow.compiler.conditioning import OutputReference, output_checks
from pimflow.compiler.interface import Interface
from pimflow.core.goal import GoalOptions
from pimflow.core.output_error import max_error_check
from pimflow.decomposition.calibration import Calibration, agreement
from pimflow.decomposition.network import DecomposedNetwork, DecompositionLike
from pimflow.decomposition.onnx_chains import with_chains
from pimflow.decomposition.report import DecompositionReport, ExportReport
from pimflow.errors import ArtifactError, UsageError, VerificationError
from pimflow.frontend import onnx_graph, onnx_runtime
from pimflow.frontend.reference import Fp16Storage
from pimflow.hardware import System
from pimflow.host.files import MODEL, check_file, replace_file
from pimflow.placement import Costs
from pimflow.relay_passes.decomposition.decompose import decomposable_layers

if TYPE_CHECKING:
    from pimflow.frontend import Model


@public(
    CalibrationOptions,
    InputOptions,
    ShapeOptions,
    ValueOptions,
    SearchArguments,
    GoalOptions,
    without=("target", "plan", "options", "select"),
)
def export_decomposed(
    model: Model,
    request: DecompositionLike,
    out: str | os.PathLike[str],
    *,
    system: System | None = None,
    force: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    **keywords: Any,
) -> ExportReport:
    """Decompose layers of an ONNX model, and write it as an ONNX model.

    Other nodes and weights, batch norms, and open dimensions of the model stay unchanged. The written model
    is run by ONNX Runtime, and compared with the network that pimflow would compile.

    Parameters
    ----------
    model : str, path or ModelProto
        See `frontend.load`.
    request : Request or str
        `decompose` of `pimflow.NetworkOptions`.
    out : path
        Model to write; an existing file is replaced if this function wrote it.
    force : bool
        Whether to replace any file.
    system, profiling, goal
        Used by ``where=pays`` to choose layers; see `pimflow.search`.
    calibration : path, or mapping of str to ndarray, optional
        See `pimflow.compile`.
    inputs, input_values
        What outputs are compared on; drawn by default. See `pimflow.compile`.
    **keywords
        Fields that replace those of `goal`.

    Raises
    ------
    UsageError
        If `model` is no ONNX model, or there is nothing to decompose.
    UnsupportedOpError
        If no chain of ONNX nodes can replace a layer.
    VerificationError
        If the outputs differ; nothing is written.
    """
    calibration = keywords.pop("calibration", None)
    settings = InputOptions.pop_from(keywords)
    keywords = network_keywords(model, settings, keywords)
    arguments = SearchArguments.from_keywords({**keywords, "decompose": request})
    options, system = arguments.options, as_system(system)
    if not zoo.is_onnx(model):
        raise UsageError(f"only ONNX models are written as ONNX, not '{model}'; export it to ONNX first")
    check_file(out, MODEL, force=force)
    progress("loading")
    if options.values:
        model = zoo.with_values(model, options.values)
    proto = zoo.load_model(model, dict(options.shapes or {}), batch=options.batch)
    network = frontend.load(proto)
    interface = Interface(inputs=network.inputs, table_rows=network.table_rows)
    samples = settings.samples(interface, network.example_inputs)
    preparation = prepare.PreparationRequest(
        costs=Costs(system, arguments.profiling),
        goal=arguments.goal,
        samples=None if calibration is None else Calibration.read(calibration, network),
        progress=progress,
    )
    change = prepare.decompose_layers(network, options, system, preparation)
    change = _with_layers(change, network.name)
    exported = _with_chains(proto, change)
    summary, error = _compare(exported, change, samples, preparation.samples, progress)
    _open_dims(model, exported)
    exported.producer_name = "pimflow"  # `check_file` recognises the file by it
    data = _bytes(exported, out)
    replace_file(out, data)
    return ExportReport(
        **vars(summary),
        output=os.fspath(out),
        nodes=len(exported.graph.node),
        bytes=len(data),
        export_error=error,
    )


def _with_chains(proto: onnx.ModelProto, change: DecomposedNetwork) -> onnx.ModelProto:
    """A model with chains in place of the layers that `change` decomposes."""
    constants: dict[str, np.ndarray] = {}
    layers = decomposable_layers(onnx_graph.from_onnx(proto, constants))
    return with_chains(proto, change.layers, {layer.name: layer for layer in layers}, constants)


def _compare(
    exported: onnx.ModelProto,
    change: DecomposedNetwork,
    samples: Sequence[Mapping[str, np.ndarray]],
    calibration: Calibration | None,
    progress: Callable[[str], None],
) -> tuple[DecompositionReport, float]:
    """The report of the decomposed layers, and the error of the exported model against their network."""
    progress("comparing outputs")
    expected = change.network.reference.outputs(samples)
    error = max(_error(exported, change, *sample) for sample in zip(samples, expected, strict=True))
    summary = change.summary(samples, expected)
    if calibration is not None:
        progress(f"comparing {calibration.samples} samples")
        summary = replace(summary, calibration=agreement(calibration, change))
    return summary, error


def _with_layers(change: DecomposedNetwork | None, network: str) -> DecomposedNetwork:
    """Return `change`; raises `UsageError` if it decomposes no layer."""
    if change is None:
        raise UsageError("no decomposition is requested: give one such as 'tucker:0.1'")
    if not change.layers:
        raise UsageError(
            f"'{change.request.text}' leaves all layers of '{network}' as they are: nothing to write"
        )
    return change


def _error(
    exported: onnx.ModelProto,
    change: DecomposedNetwork,
    inputs: Mapping[str, np.ndarray],
    expected: Sequence[np.ndarray],
) -> float:
    """The largest relative error of outputs of `exported`.

    Raises `VerificationError` if it exceeds what roundings in fp32 do to the decomposed network.
    """
    outputs = onnx_runtime.reference(exported)(inputs)
    reference = OutputReference(expected=expected, perturbed=change.network.perturbed)
    check = max_error_check(output_checks(reference, Fp16Storage(), "fp32", inputs, outputs))
    if not check.matches:
        raise VerificationError(
            f"'{change.original.name}': outputs of what was to be written differ from the decomposed "
            f"network's by {check.relative_error:.1e} of the largest value; the bound is {check.bound:.1e}; "
            "decompose fewer layers"
        )
    return check.relative_error


def _open_dims(model: str | os.PathLike[str] | onnx.ModelProto, exported: onnx.ModelProto) -> None:
    """Make those dimensions of inputs and outputs of `exported` open that are open in `model`."""
    if isinstance(model, str) and model in zoo.all_names():
        return  # networks of the zoo have no open dimensions
    declared = model if isinstance(model, onnx.ModelProto) else onnx.load(model, load_external_data=False)
    has_open_dims = any(
        not dim.HasField("dim_value") for x in declared.graph.input for dim in x.type.tensor_type.shape.dim
    )
    for name in ("input", "output"):
        shapes = {value.name: value.type.tensor_type for value in getattr(declared.graph, name)}
        for value in getattr(exported.graph, name):
            kind = shapes.get(value.name)
            if has_open_dims and kind is not None and not kind.HasField("shape"):
                for dim in value.type.tensor_type.shape.dim:
                    dim.Clear()  # inferred for fixed inputs
            for dim, declared_dim in zip(value.type.tensor_type.shape.dim, kind.shape.dim if kind else ()):
                if not declared_dim.HasField("dim_value"):
                    dim.CopyFrom(declared_dim)


def _bytes(exported: onnx.ModelProto, out: str | os.PathLike[str]) -> bytes:
    try:
        return bytes(exported.SerializeToString())
    except (EncodeError, ValueError) as error:
        raise ArtifactError(f"{Path(out)}: cannot be written: ONNX files hold at most 2 GiB") from error
