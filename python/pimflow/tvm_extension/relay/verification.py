"""Verification of modules that ``relay.build`` made of ONNX models."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
import tvm

from pimflow import zoo
from pimflow.compiler.build import Build
from pimflow.compiler.conditioning import OutputReference, output_checks
from pimflow.compiler.verification import nan_count, verify
from pimflow.core.output_error import max_error_check
from pimflow.frontend import Network, onnx_runtime, perturbed_relax, relax_module
from pimflow.frontend.reference import Fp16Storage, Perturbed
from pimflow.pim_backend.runtime.network_module import infer
from pimflow.pim_backend.runtime.targets import target_device
from pimflow.placement import SearchResult


def verify_build(
    model: onnx.ModelProto, mod: tvm.IRModule, network: Network, built: Build, search_result: SearchResult
) -> None:
    """Compare a build for PIM with the model that `mod` is from, on drawn inputs.

    If layers were decomposed, the decomposed network, run by TVM's own pipeline, is the reference. Nothing is
    compared if the device is not here, or if `mod` has other inputs or outputs than the model.

    Raises
    ------
    VerificationError
        If outputs or PIM regions differ from their references.
    """
    if not built.can_run_here or not _is_of_model(mod, model):
        return
    if search_result.original is None:
        inputs, expected = _reference_run(model)
        perturbed = _reference_with_roundings(model)
    else:
        inputs = zoo.example_inputs(zoo.without_double(model))
        expected = relax_module.reference(network.module)(inputs)
        perturbed = functools.partial(perturbed_relax.reference_with_roundings, network.module)
    network = replace(network, perturbed=perturbed)
    verify(network, built, search_result.system, inputs, expected).require()


def verify_module(
    model: onnx.ModelProto, mod: tvm.IRModule, module: tvm.runtime.Module, target: tvm.target.Target
) -> None:
    """As `verify_build`, for a module without PIM, which computes in fp32."""
    device = target_device(target)
    if not device.exist or not _is_of_model(mod, model):
        return
    inputs, expected = _reference_run(model)
    reference = OutputReference(expected=expected, perturbed=_reference_with_roundings(model))
    checks = output_checks(reference, Fp16Storage(), "fp32", inputs, infer(module, inputs, device))
    max_error_check(checks).require_match("outputs")


def _is_of_model(mod: tvm.IRModule, model: onnx.ModelProto) -> bool:
    """Whether a module has the inputs, and as many outputs, as a model: a user may have changed it."""
    single = zoo.without_double(model)
    return relax_module.inputs(mod) == zoo.input_types(single) and relax_module.outputs(mod) == len(
        model.graph.output
    )


def _reference_run(model: onnx.ModelProto) -> tuple[dict[str, np.ndarray], Sequence[np.ndarray]]:
    """Drawn inputs, and the outputs of the reference; positive inputs if it has NaN for the usual ones."""
    single = zoo.without_double(model)
    run = onnx_runtime.reference(model, single).prepared()
    inputs = zoo.example_inputs(single)
    expected = run(inputs)
    if nan_count(expected):
        positive = zoo.example_inputs(single, positive=True)
        positive_outputs = run(positive)
        if nan_count(positive_outputs) < nan_count(expected):
            inputs, expected = positive, positive_outputs
    return inputs, expected


def _reference_with_roundings(model: onnx.ModelProto) -> Perturbed:
    def read() -> onnx.ModelProto:
        """A copy, which the reference with roundings changes."""
        copy = onnx.ModelProto()
        copy.CopyFrom(zoo.without_double(model))
        return copy

    return functools.partial(onnx_runtime.reference_with_roundings, read)
