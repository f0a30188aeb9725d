"""Networks whose layers are decomposed, and how far they are from the original."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from pimflow import decomposition
from pimflow.decomposition import Decomposed, RankRule, Request
from pimflow.errors import UsageError
from pimflow.frontend import Network, relax_module
from pimflow.output_error import relative_error
from pimflow.relay_passes.decompose import Decompose, Layer, decomposable_layers

Decomposing = Request | str


@dataclass(frozen=True, kw_only=True)
class DecomposedNetwork:
    """A network and what became of its layers.

    Attributes
    ----------
    network : Network
        Its reference is what TVM's own pipeline makes of the decomposed module.
    original : Network
    request : Request
    layers : tuple of Decomposed
        In execution order.
    weight_bytes, weight_bytes_original : int
        Of all constants, fp32.
    """

    network: Network
    original: Network
    request: Request
    layers: tuple[Decomposed, ...]
    weight_bytes: int
    weight_bytes_original: int

    def summary(
        self, inputs: Mapping[str, np.ndarray] | None = None, outputs: Sequence[np.ndarray] = ()
    ) -> dict[str, Any]:
        """What a report says of it.

        Parameters
        ----------
        inputs : mapping of str to ndarray, optional
            What the original network is run on, to be compared; it is not without them.
        outputs : sequence of ndarray
            Of the decomposed network for the same inputs.
        """
        difference = None
        if inputs is not None:
            originals = self.original.reference(inputs)
            difference = max(relative_error(y, x) for y, x in zip(outputs, originals, strict=True))
        return {
            "request": self.request.text,
            "weight_bytes": self.weight_bytes,
            "weight_bytes_original": self.weight_bytes_original,
            "max_relative_difference": difference,
            "layers": [
                {
                    "name": layer.layer,
                    "method": layer.method,
                    "ranks": list(layer.ranks),
                    "reconstruction_error": layer.relative_error,
                    "weight_elements": layer.weight_elements,
                    "weight_elements_original": layer.geometry.oc * layer.geometry.reduction,
                    "macs": layer.macs,
                    "macs_original": layer.geometry.macs,
                }
                for layer in self.layers
            ],
        }


def requested(request: Decomposing | None) -> Request | None:
    """`request` in the form that `decomposed` needs: what is wrong with its text is said before the work."""
    return Request.parse(request) if isinstance(request, str) else request


def decomposed(
    network: Network, request: Request | None, progress: Callable[[str], None] = lambda _: None
) -> tuple[Network, DecomposedNetwork | None]:
    """The network that `request` makes of `network`, and how; `network` itself without one."""
    if request is None:
        return network, None
    change = decompose(network, request, progress)
    return change.network, change


def decompose(
    network: Network, request: Request, progress: Callable[[str], None] = lambda _: None
) -> DecomposedNetwork:
    """`network` with layers decomposed as `request` says.

    Parameters
    ----------
    request : Request
    progress : callable
        Told what is being done.

    Raises
    ------
    UsageError
        If there is nothing to decompose.
    DecompositionError
        If the file of `request` does not fit the network.
    """
    rules = _rules(network, request)
    chosen = [layer for layer in decomposable_layers(network.module) if layer.name in rules]
    progress(f"decomposing {len(chosen)} layers")
    found = _factorised(chosen, request.method, rules)
    module = Decompose({each.layer: each for each in found})(network.module)
    return DecomposedNetwork(
        network=replace(network, module=module, reference=relax_module.reference(module)),
        original=network,
        request=request,
        layers=found,
        weight_bytes=relax_module.weight_bytes(module),
        weight_bytes_original=relax_module.weight_bytes(network.module),
    )


def _rules(network: Network, request: Request) -> dict[str, RankRule]:
    """By layer to decompose, its rule."""
    layers = decomposable_layers(network.module)
    if request.rule is None:
        request.require([layer.name for layer in layers])
        return request.layers
    convolutions = [layer.name for layer in layers if not layer.fc]
    chosen = convolutions if request.first else convolutions[1:]
    chosen += [layer.name for layer in layers if layer.fc and request.fc]
    if not chosen:
        products = sum(layer.fc for layer in layers)
        advice = f"; its {products} fully connected layers are with fc=decompose" if products else ""
        left = " but the first" if convolutions else ""
        raise UsageError(f"'{network.name}': nothing to decompose: it has no dense convolution{left}{advice}")
    return dict.fromkeys(chosen, request.rule)


def _factorised(
    layers: Sequence[Layer], method: str, rules: Mapping[str, RankRule]
) -> tuple[Decomposed, ...]:
    """Every layer's chain, a thread a layer: BLAS' own threads only wait on matrices as small as these."""
    for layer in layers:
        decomposition.check(layer.name, method, layer.geometry, rules[layer.name], layer.upsampling)
    largest_first = sorted(layers, key=lambda layer: -layer.filters.size)
    with threadpool_limits(1), ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = [
            pool.submit(
                decomposition.decompose, x.name, x.filters, x.geometry, method, rules[x.name], x.upsampling
            )
            for x in largest_first
        ]
        try:
            found = {future.result().layer: future.result() for future in waiting}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return tuple(found[layer.name] for layer in layers)
