"""The choice of layers to decompose: those for which a search finds the chain cheaper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pimflow.core.plan import Plan
from pimflow.core.region import RegionGraph
from pimflow.decomposition import activations
from pimflow.decomposition.network import DecomposedNetwork
from pimflow.frontend import Network
from pimflow.fusion.kernels.relax_formulas import regions_of
from pimflow.hardware import System
from pimflow.placement import Costs, Goal
from pimflow.placement.forms import Forms, choose
from pimflow.relay_passes.kernels.fuse_groups import activation_chains, region_runs


def settled(
    change: DecomposedNetwork | None,
    system: System,
    costs: Costs,
    goal: Goal,
    *,
    plan: Plan | None = None,
    fuse_activations: bool = False,
    fuse: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> DecomposedNetwork | None:
    """`change` with its final choice of decomposed layers: with ``where=pays`` those that are cheaper.

    Parameters
    ----------
    goal : Goal
        What the plan that both forms are candidates of is to minimise, and its bounds.
    plan : Plan, optional
        Says which layers are, if given.
    fuse_activations, fuse : bool
        See `api.compile.compile`.
    """
    if change is None or change.request.where == "all":
        return change
    if plan is not None:
        named = {name for choice in plan.choices for name in choice.regions}
        return change.only([layer for layer, chain in change.chains.items() if named.intersection(chain)])
    progress("choosing layers to decompose")
    forms = Forms(
        given=_regions(change.original, system, fuse_activations, fuse),
        decomposed=_regions(change.network, system, fuse_activations, fuse),
        chains=change.chains,
    )
    chosen = choose(forms, system, costs, goal)
    on_gpu = None if chosen.on_gpu is None else chosen.on_gpu.evaluation
    return replace(change.only(chosen.layers, chosen.alone_ns), on_gpu=on_gpu)


def left(
    change: DecomposedNetwork | None, optimize_skips: str | None, fuse_activations: bool
) -> tuple[str | None, bool]:
    """What is left to do of what works on chains, where a search has chosen that there are few of them."""
    if change is None or change.request.where == "all":
        return optimize_skips, fuse_activations
    chains = fuse_activations and activation_chains(change.network.module)
    return optimize_skips if change.layers else None, bool(chains)


def _regions(network: Network, system: System, fuse_activations: bool, fuse: bool) -> RegionGraph:
    module = activations.with_phases_apart(network).module if fuse_activations else network.module
    graph = regions_of(module, network.name, views=system.views, fuse=fuse)
    return replace(graph, runs=region_runs(module, views=system.views)) if fuse_activations else graph
