"""Scores of decomposed networks against their ranks, before and after more training (TeMCO, Figure 12)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from papers.temco_variants import DecompositionVariants, with_fused_runs
from papers.trained_networks import TASKS, TrainingTask, scores, task_scores, train
from pimflow import frontend, zoo
from pimflow.commands.shared import prepare
from pimflow.commands.shared.options import NetworkOptions
from pimflow.compiler import phases
from pimflow.core.output_error import relative_error
from pimflow.decomposition.calibration import Calibration, agreement
from pimflow.decomposition.layer_errors import layer_errors
from pimflow.decomposition.network import DecomposedNetwork, decompose
from pimflow.decomposition.onnx_chains import with_chains
from pimflow.decomposition.request import DecompositionRequest
from pimflow.frontend import Network, onnx_graph
from pimflow.frontend.reference import Run
from pimflow.hardware import System
from pimflow.pim_backend.runtime.network_module import infer, pack
from pimflow.relay_passes.decomposition.decompose import decomposable_layers

NETWORK = "glyphs"  # whose ranks are compared
METHODS, RANKS = ("tucker", "cp", "tt"), ("0.1", "0.25", "0.5", "vbmf")
PAPER_REQUEST = "tucker:0.1"  # section 4.1
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
    before, after, optimised : dict of str to float
        Scores by name on held-out pictures: decomposed; retrained; and retrained, compiled with skip
        connections reduced and activations fused.
    """

    request: str
    weights: float
    macs: float
    error_sum: float
    error: float
    before: dict[str, float]
    after: dict[str, float]
    optimised: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class PassEffect:
    """What TeMCO's passes change of a network that was decomposed and trained further.

    Attributes
    ----------
    network : str
    request : str
        How it was decomposed.
    original, before, after, optimised : dict of str to float
        Scores by name on held-out pictures: of the original network; decomposed; trained further, by ONNX
        Runtime; and compiled with skip connections reduced and activations fused.
    difference : float
        `relative_error` of the compiled network's outputs with the passes against those without, in fp32,
        at most over the held-out pictures.
    pool_bytes : dict of str to int
        Of a batch of `BATCH` pictures, by variant (`temco_variants.DecompositionVariants.pools`).
    """

    network: str
    request: str
    original: dict[str, float]
    before: dict[str, float]
    after: dict[str, float]
    optimised: dict[str, float]
    difference: float
    pool_bytes: dict[str, int]


class _DecomposedModel:
    """A network of the zoo, and what is asked of decompositions of it."""

    def __init__(self, name: str):
        self.task: TrainingTask = TASKS[name]
        self.model = zoo.load_model(name, batch=BATCH)
        self.network = frontend.load(self.model)
        self.pushed: dict[str, np.ndarray] = {}
        graph = onnx_graph.from_onnx(self.model, self.pushed)
        self.layers = {layer.name: layer for layer in decomposable_layers(graph)}

    def decompose(self, request: str) -> tuple[DecomposedNetwork, onnx.ModelProto]:
        """The network decomposed, and the model that has its chains."""
        change = decompose(self.network, DecompositionRequest.parse(request))
        return change, with_chains(self.model, change.layers, self.layers, self.pushed)

    def retrain(self, model: onnx.ModelProto, steps: int) -> onnx.ModelProto:
        return train(model, self.task, steps, learning_rate=LEARNING_RATE, seed=RETRAINING)


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
    subject = _DecomposedModel(NETWORK)
    images, _ = subject.task.pictures(MEASURED, zoo.glyphs.HELD_OUT)
    calibration = Calibration.read({next(iter(subject.network.inputs)): images}, subject.network)
    macs = sum(layer.geometry.macs for layer in subject.layers.values())
    yield Accuracy(
        request="",
        weights=1.0,
        macs=1.0,
        error_sum=0.0,
        error=0.0,
        before=scores(subject.model, subject.task, samples),
        after=scores(subject.retrain(subject.model, steps), subject.task, samples),
        optimised={},
    )
    for request in requests:
        progress(request)
        change, written = subject.decompose(request)
        errors = layer_errors([change], calibration)
        tuned = subject.retrain(written, steps)
        network = frontend.load(tuned)
        run = _compile(with_passes(network, system), system)
        saved = sum(layer.geometry.macs - layer.macs for layer in change.layers)
        yield Accuracy(
            request=request,
            weights=change.weight_bytes / change.weight_bytes_original,
            macs=(macs - saved) / macs,
            error_sum=sum(error for (error,) in errors.values()),
            error=agreement(calibration, change).max_relative_difference,
            before=scores(written, subject.task, samples),
            after=scores(tuned, subject.task, samples),
            optimised=task_scores(run, next(iter(network.inputs)), subject.task, samples, BATCH),
        )


def pass_effect(name: str, system: System, *, samples: int, steps: int, request: str) -> PassEffect:
    """Compile a trained network, decomposed by `request` and trained further, with and without the passes.

    Parameters
    ----------
    name : str
        One of `trained_networks.TASKS`.
    samples : int
        Held-out pictures, a multiple of `BATCH`.

    Raises
    ------
    UsageError
        If PyTorch is not installed.
    """
    subject = _DecomposedModel(name)
    change, written = subject.decompose(request)
    tuned = subject.retrain(written, steps)
    network = frontend.load(tuned)
    variants = {"original": subject.network, "decomposed": network}
    variants["skip-opt+fusion"] = with_passes(network, system)
    plain, optimised = (_compile(variants[form], system) for form in ("decomposed", "skip-opt+fusion"))
    recorder = _DifferenceRecorder(plain, optimised)
    input_name = next(iter(network.inputs))
    return PassEffect(
        network=name,
        request=request,
        original=scores(subject.model, subject.task, samples),
        before=scores(written, subject.task, samples),
        after=scores(tuned, subject.task, samples),
        optimised=task_scores(recorder, input_name, subject.task, samples, BATCH),
        difference=recorder.difference,
        pool_bytes=DecompositionVariants(change=change, networks=variants).pools(system),
    )


class _DifferenceRecorder:
    """Runs a network beside its variant; keeps the largest `relative_error` between their outputs."""

    def __init__(self, plain: Run, variant: Run):
        self.plain, self.variant = plain, variant
        self.difference = 0.0

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs of the variant."""
        outputs = self.variant(inputs)
        for output, expected in zip(outputs, self.plain(inputs), strict=True):
            self.difference = max(self.difference, relative_error(output, expected))
        return outputs


def with_passes(network: Network, system: System) -> Network:
    """A decomposed network with skip connections reduced where the pool shrinks, and activations fused."""
    options = NetworkOptions(optimize_skips="pool", fuse_activations=True)
    reduced = prepare.reduce_skips(network, None, options, prepare.MinimumPools(system=system))
    return with_fused_runs(replace(network, module=(reduced.network if reduced else network).module))


def _compile(network: Network, system: System) -> Run:
    """The network compiled for the CPU."""
    executable = phases.build(network.module, system=system)
    return functools.partial(infer, pack(executable, network.inputs, network.outputs))
