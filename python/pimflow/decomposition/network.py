"""Networks with decomposed layers, and how far their outputs are from those of the original."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from threadpoolctl import threadpool_limits

from pimflow.core.chains import LayerChain
from pimflow.core.output_error import relative_error
from pimflow.decomposition import factorisation
from pimflow.decomposition.ranks import RankRule
from pimflow.decomposition.report import AloneTimes, DecomposedLayer, DecompositionReport
from pimflow.decomposition.request import DecompositionRequest
from pimflow.errors import DecompositionError, ModelError, UsageError
from pimflow.frontend import Network, perturbed_relax, relax_module
from pimflow.placement import Evaluation
from pimflow.relay_passes.decomposition.decompose import DecomposableLayer, Decompose, decomposable_layers

DecompositionLike = DecompositionRequest | str


@dataclass(frozen=True, kw_only=True)
class DecomposedNetwork:
    """A network with decomposed layers.

    Attributes
    ----------
    network : Network
        The decomposed network; its reference is the decomposed module, run by TVM's own pipeline.
    layers : tuple of LayerChain
        In execution order.
    weight_bytes, weight_bytes_original : int
        Bytes of all constants in fp32.
    kept : tuple of str
        Layers that were requested but stay original, because that is cheaper.
    alone_ns : dict of str to (float, float)
        By layer that a search compared: the time that it takes by itself, original and as a chain.
    errors : dict of str to float
        By decomposed layer, its error (`decomposition.layer_errors`), if a search computed it.
    errors_measured : bool
        Whether errors are those of outputs; else they are those of the layers' filters.
    on_gpu : Evaluation, optional
        If a search chose the layers, the best plan on the GPU only, with its own choice of layers.
    """

    network: Network
    original: Network
    request: DecompositionRequest
    layers: tuple[LayerChain, ...]
    weight_bytes: int
    weight_bytes_original: int
    kept: tuple[str, ...] = ()
    alone_ns: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    errors_measured: bool = False
    on_gpu: Evaluation | None = None

    @property
    def chains(self) -> dict[str, tuple[str, ...]]:
        """By decomposed layer, the names of the layers of its chain."""
        return {x.layer: tuple(f"{x.layer}.{link.name}" for link in x.links) for x in self.layers}

    @property
    def ranks(self) -> dict[str, str]:
        """By decomposed layer, the text of its rule, if there are several rules."""
        return {x.layer: x.rule for x in self.layers} if len(self.request.rules) > 1 else {}

    def alternatives(self, progress: Callable[[str], None] = lambda _: None) -> tuple[DecomposedNetwork, ...]:
        """The network decomposed by each rule of its request; the first is this one."""
        others = (decompose(self.original, self.request, progress, rule) for rule in self.request.rules[1:])
        return (self, *others)

    def summary(
        self,
        samples: Sequence[Mapping[str, np.ndarray]] = (),
        sample_outputs: Sequence[Sequence[np.ndarray]] = (),
    ) -> DecompositionReport:
        """What a report says of the decomposition.

        Parameters
        ----------
        samples : sequence of mappings of str to ndarray
            Inputs on which the original network is run for comparison; without them nothing is compared.
        sample_outputs : sequence of sequences of ndarray
            Outputs of the decomposed network for the same inputs.
        """
        difference = None
        if samples:
            original_outputs = self.original.reference.outputs(samples)
            difference = max(
                relative_error(y, x)
                for outputs, originals in zip(sample_outputs, original_outputs, strict=True)
                for y, x in zip(outputs, originals, strict=True)
            )
        return DecompositionReport(
            request=self.request.text,
            weight_bytes=self.weight_bytes,
            weight_bytes_original=self.weight_bytes_original,
            max_relative_difference=difference,
            calibration=None,
            error_sum=sum(self.errors.values()) if self.errors else None,
            errors_measured=self.errors_measured,
            layers=tuple(
                DecomposedLayer(
                    name=layer.layer,
                    chain=self.chains[layer.layer],
                    method=layer.method,
                    rule=layer.rule,
                    ranks=tuple(layer.ranks),
                    reconstruction_error=layer.relative_error,
                    error=self.errors.get(layer.layer),
                    weight_elements=layer.weight_elements,
                    weight_elements_original=layer.geometry.oc * layer.geometry.reduction,
                    macs=layer.macs,
                    macs_original=layer.geometry.macs,
                )
                for layer in self.layers
            ),
            kept=self.kept,
            alone_ns={
                name: AloneTimes(original=original_ns, decomposed=chain_ns)
                for name, (original_ns, chain_ns) in self.alone_ns.items()
            },
        )


def parse_request(request: DecompositionLike | None) -> DecompositionRequest | None:
    """Parse `request` into the type that `decompose` needs; early, so that errors come before the work."""
    return DecompositionRequest.parse(request) if isinstance(request, str) else request


def require_all(request: DecompositionRequest | None, command: str) -> None:
    """Raise `UsageError` if `request` lets a search choose the layers.

    The command `command` has no search.
    """
    if request is not None and request.where != "all":
        raise UsageError(
            f"decomposition '{request.text}': where={request.where} is what a search chooses, which "
            f"{command} "
            "does without; leave it out, or give 'pimflow compile'"
        )


def combine_alternatives(
    decomposed_networks: Sequence[DecomposedNetwork], rule_numbers: Mapping[str, int]
) -> DecomposedNetwork:
    """The network in which each layer of `rule_numbers` is decomposed as in `changes[chosen[layer]]`."""
    for number, decomposed_network in enumerate(decomposed_networks):
        if all(rule_numbers.get(layer) == number for layer in decomposed_network.chains):
            return decomposed_network
    first = decomposed_networks[0]
    layers = tuple(
        decomposed_networks[rule_numbers[decomposed_layer.layer]].layers[position]
        for position, decomposed_layer in enumerate(first.layers)
        if decomposed_layer.layer in rule_numbers
    )
    original_names = tuple(name for name in first.chains if name not in rule_numbers)
    return replace(with_layers(first.original, first.request, layers), kept=original_names)


def decompose(
    network: Network,
    request: DecompositionRequest,
    progress: Callable[[str], None] = lambda _: None,
    rule: RankRule | None = None,
) -> DecomposedNetwork:
    """`network` with layers decomposed as `request` says.

    Parameters
    ----------
    progress : callable
        Called with a text that says what is being done.
    rule : RankRule, optional
        One of those of `request`; the first by default.

    Raises
    ------
    UsageError
        If there is nothing to decompose.
    DecompositionError
        If the file of `request` does not match the network.
    ModelError
        If filters are not finite.
    """
    rules = _layer_rules(network, request, rule)
    selected = [layer for layer in decomposable_layers(network.module) if layer.name in rules]
    progress(f"decomposing {len(selected)} layers")
    for layer in selected:
        if not np.isfinite(layer.filters).all():
            raise ModelError(
                f"layer '{layer.name}': its filters have NaN or infinity, which no chain approximates; "
                "correct the weights, or keep the layer by a .toml file of ranks"
            )
    try:
        for layer in selected:
            factorisation.check_ranks(
                layer.name, request.method, layer.geometry, rules[layer.name], layer.upsampling
            )
    except DecompositionError as error:  # only ranks from a file can be wrong
        raise DecompositionError(f"{request.path}: {error}") from error
    chains = _factorise_layers(selected, request.method, rules)
    return with_layers(network, request, chains)


def with_layers(
    network: Network, request: DecompositionRequest, layers: tuple[LayerChain, ...]
) -> DecomposedNetwork:
    """`network` with `layers`, as chains, in place of the original layers of these names."""
    new_network = network
    if layers:
        module = Decompose({layer.layer: layer for layer in layers})(network.module)
        new_network = replace(
            network,
            module=module,
            reference=relax_module.reference(module),
            perturbed=functools.partial(perturbed_relax.reference_with_roundings, module),
        )
    return DecomposedNetwork(
        network=new_network,
        original=network,
        request=request,
        layers=layers,
        weight_bytes=relax_module.weight_bytes(new_network.module),
        weight_bytes_original=relax_module.weight_bytes(network.module),
    )


def _layer_rules(
    network: Network, request: DecompositionRequest, rule: RankRule | None
) -> dict[str, RankRule]:
    """The rule of each layer to decompose, by name."""
    layers = decomposable_layers(network.module)
    if not request.rules:
        request.require_layers([layer.name for layer in layers])
        return request.layers
    convolutions = [layer.name for layer in layers if not layer.fc]
    selected = convolutions if request.first else convolutions[1:]
    selected += [layer.name for layer in layers if layer.fc and request.fc]
    if not selected:
        products = sum(layer.fc for layer in layers)
        advice = f"; its {products} fully connected layers are with fc=decompose" if products else ""
        except_first = " but the first" if convolutions else ""
        raise UsageError(
            f"'{network.name}': nothing to decompose: it has no dense convolution{except_first}{advice}"
        )
    return dict.fromkeys(selected, rule or request.rules[0])


def _factorise_layers(
    layers: Sequence[DecomposableLayer], method: str, rules: Mapping[str, RankRule]
) -> tuple[LayerChain, ...]:
    """The chain of every layer, a thread a layer: matrices are too small for the threads of BLAS."""
    largest_first = sorted(layers, key=lambda layer: -layer.filters.size)
    with threadpool_limits(1), ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [
            pool.submit(
                factorisation.decompose, x.name, x.filters, x.geometry, method, rules[x.name], x.upsampling
            )
            for x in largest_first
        ]
        try:
            by_layer = {future.result().layer: future.result() for future in futures}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return tuple(by_layer[layer.name] for layer in layers)
