"""Which layers are decomposed: those for which a search finds the chain cheaper than the layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pimflow.core.plan import Plan
from pimflow.core.region import RegionGraph
from pimflow.decomposition import activations
from pimflow.decomposition.calibration import Calibration
from pimflow.decomposition.layer_errors import layer_errors
from pimflow.decomposition.network import DecomposedNetwork, combine_alternatives
from pimflow.errors import PlanError
from pimflow.frontend import Network
from pimflow.fusion.kernels.relax_formulas import regions_of
from pimflow.hardware import System
from pimflow.placement import Costs, Evaluation, Goal
from pimflow.placement.decomposition_alternatives import DecompositionAlternatives
from pimflow.placement.decomposition_search import choose
from pimflow.relay_passes.kernels.fuse_groups import activation_chains


def choose_layers(
    decomposed_network: DecomposedNetwork | None,
    system: System,
    costs: Costs,
    goal: Goal,
    *,
    plan: Plan | None = None,
    samples: Calibration | None = None,
    fuse_activations: bool = False,
    fuse: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> DecomposedNetwork | None:
    """Choose which layers of `decomposed_network` are decomposed: with ``where=pays`` those that are cheaper.

    If errors are bounded, or there are several ranks to choose from, the result has the error of each layer.

    Parameters
    ----------
    goal : Goal
        What the search over layers and their chains minimises, and its bounds.
    plan : Plan, optional
        If given, it says which layers are decomposed, and by which rule.
    samples : Calibration, optional
        Samples on which errors of layers are measured if they are bounded. Without them, the error of a layer
        is that of its filters.
    fuse_activations, fuse : bool
        See `pimflow.compile`.

    Raises
    ------
    InfeasibleError
        If no plan is within the bounds of `goal`, or the layers of `plan` are not.
    """
    if decomposed_network is None or (decomposed_network.request.where == "all" and goal.max_error is None):
        return decomposed_network
    decomposed_networks, texts = (
        decomposed_network.alternatives(progress),
        [rule.text for rule in decomposed_network.request.rules],
    )
    samples = samples if goal.max_error is not None else None
    needs_errors = goal.max_error is not None or len(decomposed_networks) > 1
    errors = layer_errors(decomposed_networks, samples, progress) if needs_errors else {}
    alone_ns: Mapping[str, tuple[float, float]] = {}
    on_gpu: Evaluation | None = None
    if decomposed_network.request.where == "all":
        layers = dict.fromkeys(decomposed_network.chains, 0)
    elif plan is not None:
        planned_regions = {name for choice in plan.choices for name in choice.regions}
        layers = {
            layer: _rule_number(plan, layer, texts)
            for layer, chain in decomposed_network.chains.items()
            if planned_regions.intersection(chain)
        }
    else:
        progress("choosing layers to decompose")
        layer_alternatives = DecompositionAlternatives(
            original=_regions(decomposed_network.original, system, fuse_activations, fuse),
            decomposed=tuple(
                _regions(alternative.network, system, fuse_activations, fuse)
                for alternative in decomposed_networks
            ),
            chains=decomposed_network.chains,
            rules=tuple(texts) or ("",),
            errors=errors,
        )
        layer_choice = choose(layer_alternatives, system, costs, goal)
        layers, alone_ns = layer_choice.layers, layer_choice.standalone_ns
        on_gpu = None if layer_choice.on_gpu is None else layer_choice.on_gpu.evaluation
    chosen_errors = {layer: errors[layer][rule] for layer, rule in layers.items()} if needs_errors else {}
    goal.require_error(decomposed_network.original.name, sum(chosen_errors.values()))
    return replace(
        combine_alternatives(decomposed_networks, layers),
        alone_ns=alone_ns,
        on_gpu=on_gpu,
        errors=chosen_errors,
        errors_measured=samples is not None,
    )


def _rule_number(plan: Plan, layer: str, texts: Sequence[str]) -> int:
    """Index in `texts` of the rule by which `plan` decomposes `layer`."""
    if len(texts) < 2:
        return 0
    if plan.ranks.get(layer) not in texts:
        raise PlanError(
            f"the plan has layer '{layer}' decomposed by rank '{plan.ranks.get(layer, '')}', none of "
            f"{', '.join(texts)}: give the request that it was made for"
        )
    return texts.index(plan.ranks[layer])


def remaining_options(
    decomposed_network: DecomposedNetwork | None, optimize_skips: str | None, fuse_activations: bool
) -> tuple[str | None, bool]:
    """The options for chains that still apply after a search has chosen which layers become chains."""
    if decomposed_network is None or decomposed_network.request.where == "all":
        return optimize_skips, fuse_activations
    chains = fuse_activations and activation_chains(decomposed_network.network.module)
    return optimize_skips if decomposed_network.layers else None, bool(chains)


def _regions(network: Network, system: System, fuse_activations: bool, fuse: bool) -> RegionGraph:
    module = activations.with_separate_phases(network).module if fuse_activations else network.module
    return regions_of(
        module, network.name, views=system.uses_views, fuse=fuse, fuse_activations=fuse_activations
    )
