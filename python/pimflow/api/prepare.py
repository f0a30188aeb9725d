"""The one way from a model to the network that is searched.

Load, decompose, settle which layers stay decomposed, reduce skip connections, set phases apart, reorder,
extract regions: `compile`, `search` and `plan_memory` all go this way, so that the same options give the same
network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pimflow import frontend
from pimflow.api.options import NetworkOptions
from pimflow.compiler import layer_order
from pimflow.compiler.layer_order import LayerOrder
from pimflow.compiler.smaller_pool import PoolPlanning
from pimflow.core.plan import Plan
from pimflow.core.region import RegionGraph
from pimflow.decomposition import activations, choice, skips
from pimflow.decomposition.network import DecomposedNetwork, decompose
from pimflow.decomposition.skips import SkipOptimisation
from pimflow.frontend import Network
from pimflow.fusion.kernels.relax_formulas import regions_of
from pimflow.hardware import System, system
from pimflow.memory.reorder import TIME_LIMIT_SECONDS as SEARCH_SECONDS
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Costs, Goal, Profiling
from pimflow.relay_passes.kernels.fuse_groups import activation_chains

if TYPE_CHECKING:
    from pimflow.frontend import Model

Progress = Callable[[str], None]
# Sees the network that outputs are verified against, and what it was made of if layers were decomposed.
Inspect = Callable[[Network, DecomposedNetwork | None], None]


def silent(_: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A network as it is searched, and what became of it on the way.

    Attributes
    ----------
    network : Network
        Without its reference.
    options : NetworkOptions
        What was done: with ``where=pays``, less than was asked for where few layers are decomposed.
    system : System
        What it was prepared for.
    skips : SkipOptimisation, optional
        What became of its skip connections, where that was asked for.
    order : LayerOrder, optional
        In which order its layers run, where another one was looked for.
    given : dict of bool to RegionGraph
        By `System.views`, the regions of the network as the user gave it; empty if it is the same network.
    """

    network: Network
    options: NetworkOptions
    system: System
    skips: SkipOptimisation | None = None
    order: LayerOrder | None = None
    given: dict[bool, RegionGraph] = field(default_factory=dict)

    @functools.cached_property
    def regions(self) -> RegionGraph:
        """What a search places on the system that it was prepared for."""
        return self.regions_for(self.system)

    def regions_for(self, system: System) -> RegionGraph:
        """What a search places on `system`."""
        return regions(
            self.network, system, fuse_activations=self.options.fuse_activations, fuse=self.options.fuse
        )

    def given_for(self, system: System) -> RegionGraph | None:
        """`given` on `system`; None if it is the same network."""
        return self.given.get(system.views)


def load(model: Model, options: NetworkOptions) -> Network:
    """The network of a model, as `options` say its shapes and batch; see `frontend.load`."""
    return frontend.load(model, options.shapes, options.batch)


def require_decomposed(network: Network, options: NetworkOptions) -> None:
    """Raise `UsageError` if activations of `network` are to be fused, and there are no chains."""
    activations.require_decomposed(options.fuse_activations, options.request, network)


def prepare(
    network: Network,
    options: NetworkOptions,
    target_system: System,
    *,
    target: str = "llvm+pim",
    plan: Plan | None = None,
    costs: Costs | None = None,
    goal: Goal | None = None,
    pools: PoolPlanning | None = None,
    inspect: Inspect | None = None,
    progress: Progress = silent,
) -> Prepared:
    """The network that is searched, placed and built.

    Both rewrites that are to save memory, of skip connections and of the layers' order, are judged by the
    pool of `target`, and with activations fused if they may be: `plan_memory` plans that network in the end.

    Parameters
    ----------
    network : Network
        As `load` gives it.
    target : str
        Whose pool is to be small, as `targets.named_target` takes it.
    plan : Plan, optional
        Says which layers are decomposed with ``where=pays``, and their order.
    costs, goal
        By what ``where=pays`` chooses layers; analytic costs and the least latency by default.
    pools : PoolPlanning, optional
        How pools are planned; as a compiled network has them by default.
    inspect : callable, optional
        Called once layers are decomposed, with the network whose outputs are those of the prepared one, and
        what it was made of. All further steps keep outputs as they are.
    progress : callable
        Told what is being done.

    Raises
    ------
    UsageError
        If something is asked for that works on decomposed layers, and there are none; if no activation can be
        fused.
    DecompositionError
        See `decomposition.network.decompose`.
    """
    require_decomposed(network, options)
    given = _given(network, options, target_system)
    change = decomposed(network, options, target_system, plan=plan, costs=costs, goal=goal, progress=progress)
    if change is not None:
        network, given = change.network, given if change.layers else {}
    optimize_skips, fuse_activations = choice.left(change, options.optimize_skips, options.fuse_activations)
    options = replace(options, optimize_skips=optimize_skips, fuse_activations=fuse_activations)
    if inspect is not None:
        inspect(network, change)
    pools = pools or PoolPlanning()
    if options.optimize_skips is not None:
        progress("optimising skip connections")
    reduced = reduced_skips(network, change, options, target_system, target, pools)
    change = None  # the original's weights are not needed any more
    network = (reduced.network if reduced else network).without_reference()
    if options.fuse_activations:
        network = activations.with_phases_apart(network)
        runs = activations.require_chains(network)
        network = layer_order.with_runs_together(network, runs, target_system)
    order = None
    if options.reorder:
        progress("ordering layers")
        order = _reordered(network, options, target_system, target, pools, plan)
        network = order.network
    return Prepared(
        network=network, options=options, system=target_system, skips=reduced, order=order, given=given
    )


def decomposed(
    network: Network,
    options: NetworkOptions,
    target_system: System,
    *,
    plan: Plan | None = None,
    costs: Costs | None = None,
    goal: Goal | None = None,
    progress: Progress = silent,
) -> DecomposedNetwork | None:
    """`network` with the layers decomposed that are to be; None if nothing is asked for. See `prepare`."""
    if options.request is None:
        return None
    return choice.settled(
        decompose(network, options.request, progress),
        target_system,
        costs or Costs(target_system, Profiling()),
        goal or Goal(),
        plan=plan,
        fuse_activations=options.fuse_activations,
        fuse=options.fuse,
        progress=progress,
    )


def reduced_skips(
    network: Network,
    change: DecomposedNetwork | None,
    options: NetworkOptions,
    target_system: System,
    target: str = "llvm+pim",
    pools: PoolPlanning | None = None,
) -> SkipOptimisation | None:
    """What `options.optimize_skips` makes of `network`, which `change` decomposed; None without it."""
    if options.optimize_skips is None:
        return None
    fuse = options.fuse_activations
    originals = skips.original_flops(change)
    found = skips.find(network, target_system, options.optimize_skips, originals, fuse_activations=fuse)
    settled = found.settled(_judge(pools or PoolPlanning(), target_system, target, fuse))
    # The reference holds the model's file: nobody runs it any more.
    after = settled.network.without_reference() if settled.changed else None
    before = settled.given.without_reference()
    return replace(settled, given=before, network=after or before)


def _reordered(
    network: Network,
    options: NetworkOptions,
    target_system: System,
    target: str,
    pools: PoolPlanning,
    plan: Plan | None,
) -> LayerOrder:
    """The order of `network`'s layers with the smallest pool, or that of `plan`."""
    names = None if plan is None else [name for each in plan.choices for name in each.regions]
    seconds, fuse = min(pools.seconds, SEARCH_SECONDS), options.fuse_activations
    runs = activation_chains(network.module) if fuse else ()
    found = layer_order.find(network, target_system, names=names, runs=runs, seconds=seconds)
    return found.settled(_judge(pools, target_system, target, fuse))


def _judge(pools: PoolPlanning, system: System, target: str, fuse: bool) -> Callable[[Network], int]:
    """What finds the pool of a network on the GPU, in bytes: with activations fused, if they may be."""
    lowered_for = targets.named_target(target)

    def pool_bytes(network: Network) -> int:
        module = activations.fused_module(network.module) if fuse else network.module
        return pools.pool_bytes(module, lowered_for, system)

    return pool_bytes


def with_other_copies(system: System) -> System:
    """`system` where parts of tensors are copied if they lie inside them, and the other way round."""
    return replace(system, copies="made" if system.views else "elided")


def regions(
    network: Network,
    target_system: System | None = None,
    *,
    fuse_activations: bool = False,
    fuse: bool = False,
) -> RegionGraph:
    """What a search places of a network; see `NetworkOptions` for `fuse_activations` and `fuse`.

    `target_system` is `pimflow.system()` by default.
    """
    target_system = target_system or system()
    graph = regions_of(network.module, network.name, views=target_system.views, fuse=fuse)
    return activations.with_runs(graph, network, target_system) if fuse_activations else graph


def _given(network: Network, options: NetworkOptions, on: System) -> dict[bool, RegionGraph]:
    """By `System.views`, the regions of a network as the user gave it; empty if nothing changes them."""
    if options.request is None and options.optimize_skips is None:
        return {}
    runs = options.fuse_activations and options.request is None  # it came with chains
    network = activations.with_phases_apart(network) if runs else network
    return {
        each.views: regions(network, each, fuse_activations=runs, fuse=options.fuse)
        for each in (on, with_other_copies(on))
    }
