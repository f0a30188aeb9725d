"""The one way from a model to the network that is searched.

Load, decompose, settle which layers stay decomposed, reduce skip connections, set phases apart, reorder,
extract regions: `compile`, `search` and `plan_memory` all go this way, so that the same options give the same
network.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pimflow import frontend
from pimflow.api.options import NetworkOptions
from pimflow.compiler import layer_order
from pimflow.compiler.layer_order import LayerOrder
from pimflow.compiler.plan_pools import PlanPools, frugal
from pimflow.compiler.smaller_pool import PoolPlanning
from pimflow.core.plan import NETWORK_OPTIONS, Plan
from pimflow.core.region import RegionGraph
from pimflow.decomposition import activations, choice, skips
from pimflow.decomposition.calibration import Calibration
from pimflow.decomposition.network import DecomposedNetwork, decompose
from pimflow.decomposition.skips import SkipOptimisation
from pimflow.frontend import Network
from pimflow.fusion.kernels.relax_formulas import regions_of
from pimflow.hardware import System, system
from pimflow.memory.reorder import TIME_LIMIT_SECONDS as SEARCH_SECONDS
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Costs, Evaluation, Goal, Profiling
from pimflow.relay_passes.flat import roles
from pimflow.relay_passes.kernels.fuse_groups import activation_chains, region_runs

if TYPE_CHECKING:
    from pimflow.frontend import Model

Progress = Callable[[str], None]
# Sees the network that outputs are verified against, and what it was made of if layers were decomposed.
Inspect = Callable[[Network, DecomposedNetwork | None], None]


# What they are where a goal or a plan needs them.
_SWITCHED_ON = {"optimize_skips": "pool", "fuse_activations": True, "reorder": True}


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
    switched_on : tuple of str
        Those of `core.plan.NETWORK_OPTIONS` that nobody asked for, and the goal or the plan needs.
    given : dict of bool to RegionGraph
        By `System.views`, the regions of the network as the user gave it; empty if it is the same network.
    ranks : dict of str to str
        By decomposed layer, its rank, where there were several to choose from; see `core.plan.Plan`.
    mixture : Evaluation, optional
        With ``where=pays``, the best mixture of both forms of layers on the GPU alone.
    """

    network: Network
    options: NetworkOptions
    system: System
    skips: SkipOptimisation | None = None
    order: LayerOrder | None = None
    switched_on: tuple[str, ...] = ()
    given: dict[bool, RegionGraph] = field(default_factory=dict)
    ranks: dict[str, str] = field(default_factory=dict)
    mixture: Evaluation | None = None

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
    """The network of a model, as `options` say its shapes, batch and caches; see `frontend.load`."""
    return frontend.load(model, options.shapes, options.batch, context=options.context, states=options.states)


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
    samples: Calibration | None = None,
    inspect: Inspect | None = None,
    progress: Progress = silent,
) -> Prepared:
    """The network that is searched, placed and built.

    Both rewrites that are to save memory, of skip connections and of the layers' order, are judged by the
    least pool of `target` with and without them (`LeastPools`).

    Parameters
    ----------
    network : Network
        As `load` gives it.
    target : str
        Whose pool is to be small, as `targets.named_target` takes it.
    plan : Plan, optional
        Says which layers are decomposed with ``where=pays``, and their order.
    costs, goal
        By what ``where=pays`` chooses layers; analytic costs and the least latency by default. A goal that is
        about memory switches on what saves some (`Prepared.switched_on`).
    pools : PoolPlanning, optional
        How pools are planned; as a compiled network has them by default.
    samples : Calibration, optional
        On what errors of decomposed layers are measured; see `decomposition.choice.settled`.
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
    change = decomposed(
        network,
        options,
        target_system,
        plan=plan,
        costs=costs,
        goal=goal,
        samples=samples,
        progress=progress,
    )
    ranks = change.ranks if change else {}
    mixture = None if change is None else change.on_gpu
    if change is not None:
        network, given = change.network, given if change.layers else {}
    optimize_skips, fuse_activations = choice.left(change, options.optimize_skips, options.fuse_activations)
    options = replace(options, optimize_skips=optimize_skips, fuse_activations=fuse_activations)
    if inspect is not None:
        inspect(network, change)
    asked = options
    least = LeastPools(system=target_system, target=target, planning=pools or PoolPlanning())
    if plan is not None:
        options = _with(options, plan.options)
    elif goal is not None:
        options = _saving(network, options, goal, least)
    switched_on = tuple(each for each in NETWORK_OPTIONS if getattr(asked, each) != getattr(options, each))
    if options.optimize_skips is not None:
        progress("optimising skip connections")
    reduced = reduced_skips(network, change, options, least)
    change = None  # the original's weights are not needed any more
    network = (reduced.network if reduced else network).without_reference()
    if options.fuse_activations:
        network = activations.with_runs_apart(network, target_system)
        activations.require_chains(network)
    order = None
    if options.reorder:
        progress("ordering layers")
        order = _reordered(network, options, least, plan)
        network = order.network
    return Prepared(
        network=network,
        options=options,
        system=target_system,
        skips=reduced,
        order=order,
        switched_on=switched_on,
        given=given,
        ranks=ranks,
        mixture=mixture,
    )


def _with(options: NetworkOptions, names: Sequence[str]) -> NetworkOptions:
    """`options` with those of `NETWORK_OPTIONS` switched on."""
    values: dict[str, Any] = {name: getattr(options, name) or _SWITCHED_ON[name] for name in names}
    return replace(options, **values)


def _saving(network: Network, options: NetworkOptions, goal: Goal, pools: LeastPools) -> NetworkOptions:
    """`options` with what the goal needs of those that keep outputs and save memory.

    Runs are candidates: they may be there whenever memory counts. Skip connections in reduced form and orders
    are decided before a plan is searched, so a bound on memory has them only if it is not met otherwise.
    """
    bound, least = goal.max_memory_bytes, goal.objective == "memory"
    if not goal.saves_memory:
        return options
    chains = "lconv" in roles(network.module).values()
    if chains and activation_chains(activations.with_phases_apart(network).module):
        options = _with(options, ["fuse_activations"])
    if least or pools.of(network, options) > (bound or math.inf):
        options = _with(options, ["optimize_skips", "reorder"] if chains else ["reorder"])
    return options


def decomposed(
    network: Network,
    options: NetworkOptions,
    target_system: System,
    *,
    plan: Plan | None = None,
    costs: Costs | None = None,
    goal: Goal | None = None,
    samples: Calibration | None = None,
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
        samples=samples,
        fuse_activations=options.fuse_activations,
        fuse=options.fuse,
        progress=progress,
    )


@dataclass(frozen=True, kw_only=True)
class LeastPools:
    """Least pools of networks on the GPU alone, as ``pimflow memory`` plans them.

    With ``--objective memory`` no larger ones are built (`plan_pools.keeping`).
    """

    system: System
    target: str = "llvm+pim"
    planning: PoolPlanning = field(default_factory=PoolPlanning)

    def of(self, network: Network, options: NetworkOptions) -> int:
        """Bytes of the pool of `network`, of which may be fused what `options` say."""
        if options.fuse_activations:
            network = activations.with_runs_apart(network, self.system)
        fused = {"fuse": options.fuse, "fuse_activations": options.fuse_activations}
        graph = regions_of(network.module, network.name, views=self.system.views, **fused)
        target, costs = targets.named_target(self.target), Costs(self.system, Profiling())
        pools = PlanPools(network=network, target=target, system=self.system, planning=self.planning)
        return pools.of(frugal(graph, self.system, costs, pools))


def reduced_skips(
    network: Network,
    change: DecomposedNetwork | None,
    options: NetworkOptions,
    pools: LeastPools,
) -> SkipOptimisation | None:
    """What `options.optimize_skips` makes of `network`, which `change` decomposed; None without it."""
    if options.optimize_skips is None:
        return None
    originals, fuse = skips.original_flops(change), options.fuse_activations
    found = skips.find(network, pools.system, options.optimize_skips, originals, fuse_activations=fuse)
    settled = found.settled(lambda each: pools.of(each, options))
    # The reference holds the model's file: nobody runs it any more.
    after = settled.network.without_reference() if settled.changed else None
    before = settled.given.without_reference()
    return replace(settled, given=before, network=after or before)


def _reordered(network: Network, options: NetworkOptions, pools: LeastPools, plan: Plan | None) -> LayerOrder:
    """The order of `network`'s layers with the smallest pool, or that of `plan`."""
    names = None if plan is None else [name for each in plan.choices for name in each.regions]
    system, seconds = pools.system, min(pools.planning.seconds, SEARCH_SECONDS)
    runs = region_runs(network.module, views=system.views) if options.fuse_activations else ()
    found = layer_order.find(network, system, names=names, runs=runs, seconds=seconds)
    return found.settled(lambda each: pools.of(each, options))


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
    views = (target_system or system()).views
    return regions_of(network.module, network.name, views=views, fuse=fuse, fuse_activations=fuse_activations)


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
