"""Which layers are decomposed: those for which a search finds the chain cheaper than the layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pimflow.core.plan import Plan
from pimflow.core.region import RegionGraph
from pimflow.decomposition import activations
from pimflow.decomposition.calibration import Calibration
from pimflow.decomposition.layer_errors import layer_errors
from pimflow.decomposition.network import DecomposedNetwork, mixed
from pimflow.errors import PlanError
from pimflow.frontend import Network
from pimflow.fusion.kernels.relax_formulas import regions_of
from pimflow.hardware import System
from pimflow.placement import Costs, Evaluation, Goal
from pimflow.placement.form_choice import choose
from pimflow.placement.forms import Forms
from pimflow.relay_passes.kernels.fuse_groups import activation_chains


def settled(
    change: DecomposedNetwork | None,
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
    """Choose which layers of `change` are decomposed: with ``where=pays`` those that are cheaper.

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
        See `api.compile.compile`.

    Raises
    ------
    InfeasibleError
        If no plan is within the bounds of `goal`, or the layers of `plan` are not.
    """
    if change is None or (change.request.where == "all" and goal.max_error is None):
        return change
    changes, texts = change.alternatives(progress), [rule.text for rule in change.request.rules]
    samples = samples if goal.max_error is not None else None
    counted = goal.max_error is not None or len(changes) > 1
    errors = layer_errors(changes, samples, progress) if counted else {}
    alone_ns: Mapping[str, tuple[float, float]] = {}
    on_gpu: Evaluation | None = None
    if change.request.where == "all":
        layers = dict.fromkeys(change.chains, 0)
    elif plan is not None:
        named = {name for choice in plan.choices for name in choice.regions}
        layers = {
            layer: _rule(plan, layer, texts)
            for layer, chain in change.chains.items()
            if named.intersection(chain)
        }
    else:
        progress("choosing layers to decompose")
        forms = Forms(
            given=_regions(change.original, system, fuse_activations, fuse),
            decomposed=tuple(_regions(each.network, system, fuse_activations, fuse) for each in changes),
            chains=change.chains,
            rules=tuple(texts) or ("",),
            errors=errors,
        )
        chosen = choose(forms, system, costs, goal)
        layers, alone_ns = chosen.layers, chosen.alone_ns
        on_gpu = None if chosen.on_gpu is None else chosen.on_gpu.evaluation
    own = {layer: errors[layer][rule] for layer, rule in layers.items()} if counted else {}
    goal.require_error(change.original.name, sum(own.values()))
    return replace(
        mixed(changes, layers),
        alone_ns=alone_ns,
        on_gpu=on_gpu,
        errors=own,
        errors_measured=samples is not None,
    )


def _rule(plan: Plan, layer: str, texts: Sequence[str]) -> int:
    """Index in `texts` of the rule by which `plan` decomposes `layer`."""
    if len(texts) < 2:
        return 0
    if plan.ranks.get(layer) not in texts:
        raise PlanError(
            f"the plan has layer '{layer}' decomposed by rank '{plan.ranks.get(layer, '')}', none of "
            f"{', '.join(texts)}: give the request that it was made for"
        )
    return texts.index(plan.ranks[layer])


def left(
    change: DecomposedNetwork | None, optimize_skips: str | None, fuse_activations: bool
) -> tuple[str | None, bool]:
    """The options for chains that still apply after a search has chosen which layers become chains."""
    if change is None or change.request.where == "all":
        return optimize_skips, fuse_activations
    chains = fuse_activations and activation_chains(change.network.module)
    return optimize_skips if change.layers else None, bool(chains)


def _regions(network: Network, system: System, fuse_activations: bool, fuse: bool) -> RegionGraph:
    module = activations.with_phases_apart(network).module if fuse_activations else network.module
    return regions_of(module, network.name, views=system.views, fuse=fuse, fuse_activations=fuse_activations)
