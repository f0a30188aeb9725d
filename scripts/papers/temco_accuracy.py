"""Accuracy of a decomposed network against its ranks, before and after more training (TeMCO, Figure 12)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from papers.trained_networks import accuracy, shares, train
from pimflow import frontend, zoo
from pimflow.commands.shared import prepare
from pimflow.commands.shared.options import NetworkOptions
from pimflow.compiler import phases
from pimflow.decomposition.activations import fuse_runs
from pimflow.decomposition.calibration import Calibration, agreement
from pimflow.decomposition.layer_errors import layer_errors
from pimflow.decomposition.network import decompose
from pimflow.decomposition.onnx_chains import with_chains
from pimflow.decomposition.request import DecompositionRequest
from pimflow.frontend import onnx_graph
from pimflow.hardware import System
from pimflow.pim_backend.runtime.network_module import infer, pack
from pimflow.relay_passes.decomposition.decompose import decomposable_layers
from pimflow.zoo import glyphs

NETWORK = "glyphs"
METHODS, RANKS = ("tucker", "cp", "tt"), ("0.1", "0.25", "0.5", "vbmf")
RETRAINING = 3  # the seed of its pictures: neither those of the training nor those held out
STEPS, LEARNING_RATE = 400, 1e-3  # of the retraining: a tenth of the training
BATCH = 100  # pictures at once
MEASURED = 200  # pictures on which errors of outputs are measured


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Accuracy, size and errors of the network for one decomposition.

    Attributes
    ----------
    request : str
        ``METHOD:RANK``; empty for the original network.
    weights, macs : float
        Relative to the original network, all layers counted.
    error_sum, error : float
        Errors of outputs (`relative_error`): the sum over layers decomposed one at a time; all at once.
    before, after, optimised : dict of int to float
        Top-n accuracy by n on held-out pictures: decomposed; retrained; and retrained, compiled with skip
        connections reduced and activations fused.
    """

    request: str
    weights: float
    macs: float
    error_sum: float
    error: float
    before: dict[int, float]
    after: dict[int, float]
    optimised: dict[int, float]


def accuracies(
    system: System,
    requests: Sequence[str],
    *,
    samples: int,
    steps: int = STEPS,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Accuracy]:
    """Accuracy of the original network, then of one decomposed by each of `requests`.

    Parameters
    ----------
    samples : int
        Held-out pictures, a multiple of `BATCH`.
    steps : int
        Of the retraining, with `trained_networks.BATCH` pictures each.

    Raises
    ------
    UsageError
        If PyTorch is not installed.
    """
    model = zoo.load_model(NETWORK, batch=BATCH)
    network = frontend.load(model)
    images, _ = glyphs.pictures(MEASURED)
    calibration = Calibration.read({next(iter(network.inputs)): images}, network)
    pushed: dict[str, np.ndarray] = {}
    original_layers = {
        layer.name: layer for layer in decomposable_layers(onnx_graph.from_onnx(model, pushed))
    }
    macs = sum(layer.geometry.macs for layer in original_layers.values())
    original = accuracy(model, samples)
    yield Accuracy(
        request="",
        weights=1.0,
        macs=1.0,
        error_sum=0.0,
        error=0.0,
        before=original,
        after=accuracy(_retrain(model, steps), samples),
        optimised={},
    )
    for request in requests:
        progress(request)
        change = decompose(network, DecompositionRequest.parse(request))
        errors = layer_errors([change], calibration)
        written = with_chains(model, change.layers, original_layers, pushed)
        tuned = _retrain(written, steps)
        saved = sum(layer.geometry.macs - layer.macs for layer in change.layers)
        yield Accuracy(
            request=request,
            weights=change.weight_bytes / change.weight_bytes_original,
            macs=(macs - saved) / macs,
            error_sum=sum(error for (error,) in errors.values()),
            error=agreement(calibration, change).max_relative_difference,
            before=accuracy(written, samples),
            after=accuracy(tuned, samples),
            optimised=_accuracy_with_passes(tuned, samples, system),
        )


def _retrain(model: onnx.ModelProto, steps: int) -> onnx.ModelProto:
    return train(model, steps, learning_rate=LEARNING_RATE, seed=RETRAINING)


def _accuracy_with_passes(model: onnx.ModelProto, samples: int, system: System) -> dict[int, float]:
    """Accuracy of a decomposed model compiled for the CPU with TeMCO's passes."""
    network = frontend.load(model)
    options = NetworkOptions(optimize_skips="pool", fuse_activations=True)
    reduced = prepare.reduce_skips(network, None, options, prepare.MinimumPools(system=system))
    module = fuse_runs((reduced.network if reduced else network).module)
    executable = phases.build(module, system=system)
    return shares(
        functools.partial(infer, pack(executable, network.inputs, network.outputs)),
        next(iter(network.inputs)),
        samples,
        BATCH,
    )
