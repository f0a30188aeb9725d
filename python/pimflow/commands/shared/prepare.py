"""Prepare a network for its search.

The steps: load, decompose, choose the layers that stay decomposed, reduce skip connections, separate phases,
reorder, extract regions. `compile`, `search` and `plan_memory` share them, so that the same options give the
same network.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pimflow import frontend, zoo
from pimflow.commands.shared.options import NetworkOptions
from pimflow.compiler import layer_order
from pimflow.compiler.layer_order import LayerOrder
from pimflow.compiler.plan_pools import PlanModules, PlanPools, frugal_plan
from pimflow.compiler.smaller_pool import PoolPlanning
from pimflow.core.plan import NETWORK_OPTIONS, Plan
from pimflow.core.region_graph import RegionGraph
from pimflow.decomposition import activations, choice, skips
from pimflow.decomposition.calibration import Calibration
from pimflow.decomposition.network import DecomposedNetwork, decompose
from pimflow.decomposition.skips import SkipOptimisation
from pimflow.errors import UsageError
from pimflow.frontend import Network
from pimflow.fusion.kernels.relax_formulas import regions_of
from pimflow.hardware import System, system
from pimflow.memory.reorder import TIME_LIMIT_SECONDS as SEARCH_SECONDS
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Costs, Evaluation, Goal, Profiling, SearchResult
from pimflow.relay_passes.flat import LAYER_ROLES
from pimflow.relay_passes.kernels.activation_chains import activation_chains, region_runs
from pimflow.zoo.language import graph

if TYPE_CHECKING:
    import onnx

    from pimflow.frontend import Model

Progress = Callable[[str], None]
# Called with the network that outputs are verified against, and the decomposed network if there is one.
Inspect = Callable[[Network, DecomposedNetwork | None], None]


# Values of options that a goal or a plan switches on.
_SWITCHED_ON = {"optimize_skips": "pool", "fuse_activations": True, "reorder": True}


def silent(_: str) -> None:
    """Show no progress."""


def ignore(_: Network, __: DecomposedNetwork | None) -> None:
    """Inspect nothing."""


@dataclass(frozen=True, kw_only=True)
class PreparedNetwork:
    """A network that is ready to be searched, and the results of its rewrites.

    Attributes
    ----------
    network : Network
        Without its reference.
    options : NetworkOptions
        Options that were applied: with ``where=pays`` these may be fewer than the requested ones.
    skips : SkipOptimisation, optional
        Result of the optimisation of skip connections, if requested.
    order : LayerOrder, optional
        Order of its layers, if another one was searched for.
    switched_on : tuple of str
        Those of `core.plan.NETWORK_OPTIONS` that were not requested, but that the goal or the plan needs.
    original_regions : dict of bool to RegionGraph
        By `System.uses_views`, the regions of the original network; empty if no rewrite changed it.
    ranks : dict of str to str
        By decomposed layer, its rank, if there were several to choose from; see `core.plan.Plan`.
    mixture : Evaluation, optional
        With ``where=pays``, the best choice of decomposed and original layers on the GPU alone.
    """

    network: Network
    options: NetworkOptions
    system: System
    skips: SkipOptimisation | None = None
    order: LayerOrder | None = None
    switched_on: tuple[str, ...] = ()
    original_regions: dict[bool, RegionGraph] = field(default_factory=dict)
    ranks: dict[str, str] = field(default_factory=dict)
    mixture: Evaluation | None = None

    @functools.cached_property
    def regions(self) -> RegionGraph:
        """The regions that a search places on the system that it was prepared for."""
        return self.regions_for(self.system)

    def regions_for(self, system: System) -> RegionGraph:
        """The regions that a search places on `system`."""
        return regions(
            self.network, system, fuse_activations=self.options.fuse_activations, fuse=self.options.fuse
        )

    def original_regions_for(self, system: System) -> RegionGraph | None:
        """The regions of the original network on `system`; None if no rewrite changed it."""
        return self.original_regions.get(system.uses_views)


def load(model: Model, options: NetworkOptions) -> Network:
    """Load the network of a model with the values, shapes and caches of `options`; see `frontend.load`."""
    if {options.weight_type, options.kv_cache_dtype} != {"fp16"}:
        model = _with_narrow_types(model, options)
    if options.values:
        model = frontend.with_values(model, options.values)
    return frontend.load(model, options.shapes, options.batch, context=options.context, states=options.states)


def _with_narrow_types(model: Model, options: NetworkOptions) -> onnx.ModelProto:
    """The graph of a language model of the zoo with narrow types; raises `UsageError` for other models."""
    weights, caches = options.weight_type, options.kv_cache_dtype
    if not (isinstance(model, str) and model in zoo.decoder_names()):
        option = f"--weight-type {weights}" if weights != "fp16" else f"--kv-cache-dtype {caches}"
        raise UsageError(
            f"{option}: only language models of the zoo are quantised, and a file keeps its own types of "
            "weights; leave it out"
        )
    decoder = zoo.decoder(model).with_types(weights, kv_cache_dtype=caches)
    return graph.zoo_graph(decoder, options.context)


def require_decomposed(network: Network, options: NetworkOptions) -> None:
    """Raise `UsageError` if activations of `network` are to be fused, and no layer is decomposed."""
    activations.require_decomposed(options.fuse_activations, options.decomposition_request, network)


@dataclass(frozen=True, kw_only=True)
class PreparationRequest:
    """What a network is prepared for, beside its options and the system.

    Attributes
    ----------
    target : str
        Target whose pool is to be small, as `targets.target_by_name` takes it.
    plan : Plan, optional
        Determines the decomposed layers of ``where=pays``, and the order of layers.
    costs, goal
        Used by ``where=pays`` to choose layers; analytic costs and the objective latency by default. A goal
        with a bound on memory, or memory as its objective, switches on rewrites that save memory
        (`PreparedNetwork.switched_on`).
    pools : PoolPlanning
        How pools are planned; by default as for a compiled network.
    samples : Calibration, optional
        Samples to measure errors of decomposed layers on; see `decomposition.choice.LayerSelector`.
    inspect : callable, optional
        Called after layers are decomposed, with the network and its decomposition. Later steps do not change
        outputs.
    progress : callable
        Called with a text that says what is being done.
    """

    target: str = "llvm+pim"
    plan: Plan | None = None
    costs: Costs | None = None
    goal: Goal | None = None
    pools: PoolPlanning = field(default_factory=PoolPlanning)
    samples: Calibration | None = None
    inspect: Inspect = ignore
    progress: Progress = silent
    _minimum_pools: list[MinimumPools] = field(init=False, default_factory=list, repr=False, compare=False)

    def minimum_pools(self, system: System) -> MinimumPools:
        """The smallest pools of networks on a system, for the target; those of the last system are kept."""
        if not any(pools.system == system for pools in self._minimum_pools):
            self._minimum_pools[:] = [MinimumPools(system=system, target=self.target, planning=self.pools)]
        return self._minimum_pools[0]


def prepare(
    network: Network,
    options: NetworkOptions,
    target_system: System,
    request: PreparationRequest | None = None,
) -> PreparedNetwork:
    """Prepare a network, a result of `load`, for its search.

    The rewrites that save memory, of skip connections and of the layers' order, are kept if they make the
    smallest pool of the target smaller (`MinimumPools`).

    Raises
    ------
    UsageError
        If a requested option works on decomposed layers only, and there are none; if no activation can be
        fused.
    DecompositionError
        See `decomposition.network.decompose`.
    """
    request = request or PreparationRequest()
    require_decomposed(network, options)
    original_regions = _original_regions(network, options, target_system)
    change = decompose_layers(network, options, target_system, request)
    ranks = change.ranks if change else {}
    mixture = None if change is None else change.on_gpu
    if change is not None:
        network, original_regions = change.network, original_regions if change.layers else {}
    optimize_skips, fuse_activations = choice.remaining_options(
        change, options.optimize_skips, options.fuse_activations
    )
    requested = replace(options, optimize_skips=optimize_skips, fuse_activations=fuse_activations)
    request.inspect(network, change)
    options = _options_for_memory(network, requested, target_system, request)
    if options.optimize_skips is not None:
        request.progress("optimising skip connections")
    skip_optimisation = reduce_skips(network, change, options, request.minimum_pools(target_system))
    change = None  # frees the weights of the original
    network = (skip_optimisation.network if skip_optimisation else network).drop_reference()
    if options.fuse_activations:
        network = activations.with_contiguous_runs(network, target_system)
        activations.require_chains(network)
    order = _reorder(network, options, target_system, request) if options.reorder else None
    return PreparedNetwork(
        network=order.network if order else network,
        options=options,
        system=target_system,
        skips=skip_optimisation,
        order=order,
        switched_on=tuple(
            name for name in NETWORK_OPTIONS if getattr(requested, name) != getattr(options, name)
        ),
        original_regions=original_regions,
        ranks=ranks,
        mixture=mixture,
    )


def _options_for_memory(
    network: Network, options: NetworkOptions, system: System, request: PreparationRequest
) -> NetworkOptions:
    """Return `options` with those switched on that the plan has, or that the goal needs."""
    if request.plan is not None:
        return _switch_on(options, request.plan.options)
    if request.goal is not None:
        return _with_memory_options(network, options, request.goal, request.minimum_pools(system))
    return options


def _switch_on(options: NetworkOptions, names: Sequence[str]) -> NetworkOptions:
    """Return `options` with the options `names` switched on."""
    values: dict[str, Any] = {name: getattr(options, name) or _SWITCHED_ON[name] for name in names}
    return replace(options, **values)


def _with_memory_options(
    network: Network, options: NetworkOptions, goal: Goal, pools: MinimumPools
) -> NetworkOptions:
    """Return `options` with those switched on that save memory for the goal and do not change outputs.

    Fused activations are candidates, so they are switched on whenever memory counts. Reduced skip connections
    and orders are fixed before the search, so a bound on memory switches them on only if the smallest pool
    does not meet it without them.
    """
    bound, is_memory_goal = goal.max_memory_bytes, goal.objective == "memory"
    if not goal.saves_memory:
        return options
    chains = "lconv" in LAYER_ROLES.read(network.module).values()
    if chains and activation_chains(activations.with_separate_phases(network).module):
        options = _switch_on(options, ["fuse_activations"])
    if is_memory_goal or pools.pool_bytes(network, options) > (bound or math.inf):
        options = _switch_on(options, ["optimize_skips", "reorder"] if chains else ["reorder"])
    return options


def decompose_layers(
    network: Network, options: NetworkOptions, target_system: System, request: PreparationRequest
) -> DecomposedNetwork | None:
    """Decompose the requested layers of `network`; None without a request. See `prepare`."""
    if options.decomposition_request is None:
        return None
    selector = choice.LayerSelector(
        system=target_system,
        costs=request.costs or Costs(target_system, Profiling()),
        goal=request.goal or Goal(),
        fuse_activations=options.fuse_activations,
        fuse=options.fuse,
        progress=request.progress,
    )
    change = decompose(network, options.decomposition_request, request.progress)
    return selector.choose(change, request.plan, request.samples)


KEPT_PLANS = 2  # of a network before and after a rewrite; plans hold modules, which are large


class MinimumPool(NamedTuple):
    """The plan with the smallest pool, the bytes of that pool, and the modules in which it is."""

    plan: SearchResult
    pool_bytes: int
    modules: PlanModules


@dataclass(frozen=True, kw_only=True)
class MinimumPools:
    """The smallest pools of networks on the GPU alone, as ``pimflow memory`` plans them.

    With ``--objective memory`` a built pool is never larger (`plan_pools.plan_within_bound`). The last plans
    are kept: a network that a rewrite leaves is asked for again when its memory is planned.
    """

    system: System
    target: str = "llvm+pim"
    planning: PoolPlanning = field(default_factory=PoolPlanning)
    _pools: dict[tuple[object, ...], MinimumPool] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def _costs(self) -> Costs:
        return Costs(self.system, Profiling())

    def pool_bytes(self, network: Network, options: NetworkOptions) -> int:
        """Bytes of the pool of `network`, with the fusion that `options` allow."""
        return self.pool(network, options).pool_bytes

    def pool(self, network: Network, options: NetworkOptions) -> MinimumPool:
        """The smallest pool of `network`, with the fusion that `options` allow."""
        if options.fuse_activations:
            network = activations.with_contiguous_runs(network, self.system)
        fuse_options = {"fuse": options.fuse, "fuse_activations": options.fuse_activations}
        key = network.module["main"], *fuse_options.values()
        if key not in self._pools:
            graph = regions(network, self.system, **fuse_options)
            target = targets.target_by_name(self.target)
            pools = PlanPools(network=network, target=target, system=self.system, planning=self.planning)
            plan = frugal_plan(graph, self.system, self._costs, pools)
            if len(self._pools) == KEPT_PLANS:
                del self._pools[next(iter(self._pools))]
            self._pools[key] = MinimumPool(plan, pools.pool_bytes(plan), pools.modules(plan))
        return self._pools[key]


def reduce_skips(
    network: Network, change: DecomposedNetwork | None, options: NetworkOptions, pools: MinimumPools
) -> SkipOptimisation | None:
    """Optimise the skip connections of `network`, which `change` decomposed; None if not requested."""
    if options.optimize_skips is None:
        return None
    originals, fuse = skips.original_flops(change), options.fuse_activations
    skip_candidates = skips.find(
        network, pools.system, options.optimize_skips, originals, fuse_activations=fuse
    )
    optimisation = skip_candidates.keep_if_smaller(lambda rewritten: pools.pool_bytes(rewritten, options))
    # The reference holds the model's file in memory, and is not run any more.
    changed = optimisation.network.drop_reference() if optimisation.changed else None
    original = optimisation.original.drop_reference()
    return replace(optimisation, original=original, network=changed or original)


def _reorder(
    network: Network, options: NetworkOptions, system: System, request: PreparationRequest
) -> LayerOrder:
    """Find the order of `network`'s layers with the smallest pool, or take that of the plan."""
    request.progress("ordering layers")
    plan, pools = request.plan, request.minimum_pools(system)
    names = None if plan is None else [name for candidate in plan.choices for name in candidate.regions]
    seconds = min(request.pools.seconds, SEARCH_SECONDS)
    runs = region_runs(network.module, views=system.uses_views) if options.fuse_activations else ()
    order = layer_order.find_order(network, system, names=names, runs=runs, seconds=seconds)
    return order.keep_if_smaller(lambda candidate: pools.pool_bytes(candidate, options))


def with_other_copies(system: System) -> System:
    """Return `system` with the other setting of `copies`: parts of tensors as copies, or as views."""
    return replace(system, copies="made" if system.uses_views else "elided")


def regions(
    network: Network,
    target_system: System | None = None,
    *,
    fuse_activations: bool = False,
    fuse: bool = False,
) -> RegionGraph:
    """The regions of a network; see `NetworkOptions` for `fuse_activations` and `fuse`.

    `target_system` is `pimflow.system()` by default.
    """
    views = (target_system or system()).uses_views
    return regions_of(network.module, network.name, views=views, fuse=fuse, fuse_activations=fuse_activations)


def _original_regions(
    network: Network, options: NetworkOptions, target_system: System
) -> dict[bool, RegionGraph]:
    """By `System.uses_views`, the regions of the original network; empty if no option rewrites it."""
    if options.decomposition_request is None and options.optimize_skips is None:
        return {}
    runs = options.fuse_activations and options.decomposition_request is None  # the model itself has chains
    network = activations.with_separate_phases(network) if runs else network
    return {
        view_system.uses_views: regions(network, view_system, fuse_activations=runs, fuse=options.fuse)
        for view_system in (target_system, with_other_copies(target_system))
    }
