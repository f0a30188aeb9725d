"""How much each decomposed layer, by itself, changes a network's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pimflow import zoo
from pimflow.core.chains import LayerChain
from pimflow.decomposition.calibration import Calibration
from pimflow.decomposition.network import DecomposedNetwork, with_layers
from pimflow.decomposition.onnx_chains import with_chains
from pimflow.errors import UnsupportedOpError
from pimflow.frontend import onnx_graph, onnx_runtime
from pimflow.frontend.reference import Run
from pimflow.relay_passes.decomposition.decompose import decomposable_layers


def layer_errors(
    decomposed_networks: Sequence[DecomposedNetwork],
    samples: Calibration | None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, tuple[float, ...]]:
    """By layer, its error in each of `decomposed_networks`, which decompose the same layers by different
    rules.

    With `samples`, the error is the relative error (`core.output_error.relative_error`) of the outputs for
    all samples if only that layer is decomposed. Without, it is the reconstruction error of the layer's
    filters. To first order, such errors add up.
    """
    by_layer = list(zip(*(decomposed_network.layers for decomposed_network in decomposed_networks)))
    if samples is None:
        return {
            layer_alternatives[0].layer: tuple(
                alternative.relative_error for alternative in layer_alternatives
            )
            for layer_alternatives in by_layer
        }
    runs = _DecomposedRuns(decomposed_networks[0])
    expected = [output for (output,) in runs.outputs(None, samples)]
    scale = max(float(np.abs(output).max()) for output in expected) or 1.0
    errors = {}
    for layer_alternatives in by_layer:
        progress(f"measuring the error of '{layer_alternatives[0].layer}'")
        errors_by_ranks: dict[tuple[int, ...], float] = {}
        for alternative in layer_alternatives:
            if alternative.ranks not in errors_by_ranks:
                differences = (
                    np.abs(output.astype(np.float64) - reference).max()
                    for (output,), reference in zip(runs.outputs(alternative, samples), expected, strict=True)
                )
                errors_by_ranks[alternative.ranks] = float(max(differences)) / scale
        errors[layer_alternatives[0].layer] = tuple(
            errors_by_ranks[alternative.ranks] for alternative in layer_alternatives
        )
    return errors


class _DecomposedRuns:
    """Runs a network with one layer decomposed: by ONNX Runtime if it can, else by TVM's own pipeline."""

    def __init__(self, decomposed_network: DecomposedNetwork):
        self.decomposed_network, reference = decomposed_network, decomposed_network.original.reference
        self.model = reference.model
        if self.model is not None:
            self.model, self.pushed_biases = zoo.with_weights(self.model), {}
            module = onnx_graph.from_onnx(self.model, self.pushed_biases)
            self.original_layers = {layer.name: layer for layer in decomposable_layers(module)}

    def outputs(self, layer: LayerChain | None, samples: Calibration) -> Iterator[list[np.ndarray]]:
        """Outputs of the network with `layer` decomposed, batch by batch."""
        run = self._prepare_run(layer)
        for inputs, _ in samples.batches():
            yield run(inputs)

    def _prepare_run(self, layer: LayerChain | None) -> Run:
        original = self.decomposed_network.original
        if layer is None:
            return original.reference.prepared()
        if self.model is not None:
            try:
                rewritten_model = with_chains(self.model, [layer], self.original_layers, self.pushed_biases)
                return onnx_runtime.reference(rewritten_model).prepared()
            except UnsupportedOpError:
                pass  # the layer is no node of the model, such as one of an unrolled LSTM
        return with_layers(original, self.decomposed_network.request, (layer,)).network.reference.prepared()
