"""How much each decomposed layer, by itself, changes a network's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pimflow import zoo
from pimflow.core.chains import Decomposed
from pimflow.decomposition.calibration import Calibration
from pimflow.decomposition.network import DecomposedNetwork, with_layers
from pimflow.decomposition.onnx_chains import with_chains
from pimflow.errors import UnsupportedOpError
from pimflow.frontend import onnx_graph, onnx_runtime
from pimflow.frontend.reference import Run
from pimflow.relay_passes.decomposition.decompose import decomposable_layers


def layer_errors(
    changes: Sequence[DecomposedNetwork],
    samples: Calibration | None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, tuple[float, ...]]:
    """By layer, its error in each of `changes`, which decompose the same layers by different rules.

    With `samples`, the error is the relative error (`core.output_error.relative_error`) of the outputs for
    all samples if only that layer is decomposed. Without, it is the reconstruction error of the layer's
    filters. To first order, such errors add up.
    """
    by_layer = list(zip(*(change.layers for change in changes)))
    if samples is None:
        return {forms[0].layer: tuple(form.relative_error for form in forms) for forms in by_layer}
    runs = _Runs(changes[0])
    expected = [output for (output,) in runs.of(None, samples)]
    scale = max(float(np.abs(output).max()) for output in expected) or 1.0
    errors = {}
    for forms in by_layer:
        progress(f"measuring the error of '{forms[0].layer}'")
        known: dict[tuple[int, ...], float] = {}
        for form in forms:
            if form.ranks not in known:
                differences = (
                    np.abs(output.astype(np.float64) - wanted).max()
                    for (output,), wanted in zip(runs.of(form, samples), expected, strict=True)
                )
                known[form.ranks] = float(max(differences)) / scale
        errors[forms[0].layer] = tuple(known[form.ranks] for form in forms)
    return errors


class _Runs:
    """Runs a network with one layer decomposed: by ONNX Runtime if it can, else by TVM's own pipeline."""

    def __init__(self, change: DecomposedNetwork):
        self.change, self.model = change, change.original.reference.model
        if self.model is not None:
            self.model, self.pushed = zoo.filled(self.model), {}
            module = onnx_graph.from_onnx(self.model, self.pushed)
            self.given = {layer.name: layer for layer in decomposable_layers(module)}

    def of(self, layer: Decomposed | None, samples: Calibration) -> Iterator[list[np.ndarray]]:
        """Outputs of the network with `layer` decomposed, batch by batch."""
        run = self._prepared(layer)
        for inputs, _ in samples.batches():
            yield run(inputs)

    def _prepared(self, layer: Decomposed | None) -> Run:
        original = self.change.original
        if layer is None:
            return original.reference.prepared()
        if self.model is not None:
            try:
                written = with_chains(self.model, [layer], self.given, self.pushed)
                return onnx_runtime.reference(written).prepared()
            except UnsupportedOpError:
                pass  # the layer is no node of the model, such as one of an unrolled LSTM
        return with_layers(original, self.change.request, (layer,)).network.reference.prepared()
