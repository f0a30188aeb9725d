"""Memory of a network: the pool of its compiled form, beside what other ways to allocate would take."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm
from tvm import relax

from pimflow import frontend, memory
from pimflow.api.internal_memory import Before, InternalMemory
from pimflow.compiler import layer_order, phases
from pimflow.compiler.layer_order import LayerOrder
from pimflow.core.liveness import Lifetime, Liveness
from pimflow.core.plan import Plan
from pimflow.decomposition import skips as skip_optimisation
from pimflow.decomposition.activations import (
    fused_module,
    fused_runs,
    require_decomposed,
    with_fused_activations,
)
from pimflow.decomposition.network import DecomposedNetwork, Decomposing, decomposed, requested, require_all
from pimflow.decomposition.skips import SkipOptimisation
from pimflow.errors import UsageError
from pimflow.fusion.kernels.relax_formulas import regions_of
from pimflow.hardware import System
from pimflow.memory import MemoryPlan
from pimflow.memory.reorder import TIME_LIMIT_SECONDS as SEARCH_SECONDS
from pimflow.pim_backend.runtime import targets
from pimflow.placement.candidates import fused_groups
from pimflow.placement.candidates.candidates import Candidates
from pimflow.relay_passes.flat import operator, tensor_bytes
from pimflow.relay_passes.kernels.outline_groups import OutlineGroups
from pimflow.relay_passes.memory.buffers import buffers
from pimflow.relay_passes.regions.kernel_groups import Copied, copies

WEIGHTS = ("resident", "streamed")


@dataclass(frozen=True, kw_only=True)
class NetworkMemory:
    """The planned memory of a network, and what it would take otherwise.

    Attributes
    ----------
    liveness : Liveness
        Of what the plan places.
    plan : MemoryPlan
    tvm_pool_bytes : int
        What TVM's ``StaticPlanBlockMemory`` allocates for the same network; without weights.
    eager_bytes : int
        All tensors at once (Occamy, section II).
    lazy_peak_bytes : int
        Each tensor from its first use to its last, in memory that never fragments.
    eager_allocations, lazy_groups : int
        Allocations of both, and runs of allocations that no kernel interrupts when lazy (Occamy, Table I).
    overwritten : int
        Results that take over the bytes of an operand.
    copies : tuple of Copied
        What is copied although it is part of a tensor.
    order : LayerOrder, optional
        In which order its layers run, where another one was looked for.
    decomposition : dict, optional
        What `DecomposedNetwork.summary` says, if layers were decomposed.
    skips : SkipOptimisation, optional
        What became of its skip connections, where that was asked for.
    internal : InternalMemory
        Of the network as it came, beside that as it is.
    fused : list of list of str
        Runs of layers that are one kernel each because it was asked for.
    """

    liveness: Liveness
    plan: MemoryPlan
    tvm_pool_bytes: int
    eager_bytes: int
    lazy_peak_bytes: int
    eager_allocations: int
    lazy_groups: int
    overwritten: int
    copies: tuple[Copied, ...]
    internal: InternalMemory
    decomposition: dict[str, Any] | None = None
    order: LayerOrder | None = None
    skips: SkipOptimisation | None = None
    fused: list[list[str]] = field(default_factory=list)


def plan_memory(
    model: frontend.Model,
    target_system: System,
    *,
    target: str = "llvm+pim",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    decompose: Decomposing | None = None,
    optimize_skips: str | None = None,
    fuse_activations: bool = False,
    fuse: bool = False,
    policy: str = "exact",
    weights: str = "",
    in_place: bool = True,
    reorder: bool = False,
    capacity_bytes: int | None = None,
    alignment_bytes: int | None = None,
    seconds: float = memory.TIME_LIMIT_SECONDS,
) -> NetworkMemory:
    """Plan the memory of a network whose layers all run on the GPU, or on the CPU that stands in for it.

    Parameters
    ----------
    target : str
        What it is lowered for: kernels, and the type that they store, differ.
    shapes, batch
        See `frontend.load`.
    decompose : Request or str, optional
        Layers to decompose before; see `decomposition.request.Request.parse`.
    optimize_skips : str, optional
        One of `decomposition.skips.CRITERIA`: skip connections of a decomposed network wait in their reduced
        form.
    fuse_activations : bool
        Of a decomposed network: whether what lies between two chains is one kernel; see
        `relay_passes.kernels.fuse_groups.activation_chains`.
    fuse : bool
        Whether neighbouring layers are one kernel over shared memory, where that is faster on the GPU alone
        by its model; see `placement.candidates.tilings`.
    policy, capacity_bytes, seconds
        See `memory.plan`.
    alignment_bytes : int, optional
        Of every tensor; `core.liveness.ALIGNMENT_BYTES` by default.
    weights : str
        ``resident``, ``streamed``, or empty; see `relay_passes.memory.buffers.Buffers.liveness`.
    in_place : bool
        Whether elementwise results may take over operands that die with them.
    reorder : bool
        Whether layers may run in another order, if its pool is smaller; see `layer_order`.

    Raises
    ------
    UnknownNameError, UsageError
        For another criterion; for other `weights`, and if nothing is decomposed whose skip connections
        could be reduced.
    InfeasibleError
        The network does not fit in the capacity.
    """
    if weights not in ("", *WEIGHTS):
        raise UsageError(f"weights '{weights}' is none of {', '.join(WEIGHTS)}")
    skip_optimisation.check_criterion(optimize_skips)
    request = requested(decompose)
    require_all(request, "the plan of its memory")
    original = frontend.load(model, shapes, batch)
    require_decomposed(fuse_activations, request, original)
    network, change = decomposed(original, request)
    summary, originals = change.summary() if change else None, skip_optimisation.original_flops(change)
    on = targets.named_target(target)
    planner = functools.partial(memory.plan, policy=policy, seconds=seconds)
    placing = dict(in_place=in_place, weights=weights, alignment_bytes=alignment_bytes, plan=planner)
    placing["fuse_activations"] = fuse_activations
    pool_bytes = _pool_bytes(target_system, target, **placing)
    before = Before.of(original, network if change else None, on, target_system, planner)
    original = change = None  # whose weights are not needed any more
    skips = order = None
    if optimize_skips is not None:
        skips = skip_optimisation.find(
            network, target_system, optimize_skips, originals, fuse_activations=fuse_activations
        ).settled(pool_bytes)
        network = skips.network
    network = with_fused_activations(network) if fuse_activations else network
    if reorder:
        order = layer_order.find(network, target_system, seconds=min(seconds, SEARCH_SECONDS))
        order = order.settled(pool_bytes)
        network = order.network
    groups = _groups(network, target_system) if fuse else {}
    module = OutlineGroups(groups, target_system.views)(network.module)
    lowered = phases.allocate(module, on, target_system)
    found = buffers(lowered, in_place=in_place)
    liveness = _aligned(found.liveness(weights), alignment_bytes)
    plan = memory.plan(liveness.lifetimes, policy, capacity_bytes=capacity_bytes, seconds=seconds)
    internal = planner(found.liveness().lifetimes) if weights else plan
    separate = _aligned(buffers(lowered, in_place=False).liveness(weights), alignment_bytes)
    own = [life for life in separate.lifetimes if not life.alias or life.name == life.alias]
    return NetworkMemory(
        liveness=liveness,
        plan=plan,
        tvm_pool_bytes=_tvm_pool_bytes(phases.allocate(module, on, replace(target_system, copies="made"))),
        eager_bytes=sum(life.size_bytes for life in own),
        lazy_peak_bytes=separate.peak_bytes,
        eager_allocations=len(own),
        lazy_groups=_allocation_groups(own),
        overwritten=len(found.overwritten),
        copies=copies(module, views=target_system.views),
        internal=before.beside(network, internal.pool_bytes),
        order=order,
        skips=skips,
        decomposition=summary,
        fused=[*fused_runs(network), *map(list, groups)],
    )


def _groups(network: frontend.Network, target_system: System) -> dict[tuple[str, ...], str]:
    """Groups of regions, with their tilings, that are faster as one kernel on all channels of the GPU."""
    views, channels = target_system.views, target_system.gpu.memory_channels
    maker = Candidates(regions_of(network.module, network.name, views=views, fuse=True), target_system)
    chosen = fused_groups.on_gpu(maker, channels)
    return {each.covers: each.rewrite.schedule for each in chosen if each.rewrite.schedule}


def reordered(
    network: frontend.Network, target_system: System, target: str = "llvm+pim", plan: Plan | None = None
) -> LayerOrder:
    """The order of `network`'s layers with the smallest pool, as `plan_memory` has it, or that of `plan`."""
    names = None if plan is None else [choice.region for choice in plan.choices]
    return layer_order.find(network, target_system, names=names).settled(_pool_bytes(target_system, target))


def with_reduced_skips(
    network: frontend.Network,
    change: DecomposedNetwork | None,
    criterion: str | None,
    target_system: System,
    target: str = "llvm+pim",
    *,
    fuse_activations: bool = False,
) -> SkipOptimisation | None:
    """What `criterion`, if there is one, makes of `network`, which `change` decomposed; see `plan_memory`."""
    if criterion is None:
        return None
    originals = skip_optimisation.original_flops(change)
    found = skip_optimisation.find(
        network, target_system, criterion, originals, fuse_activations=fuse_activations
    )
    return found.settled(_pool_bytes(target_system, target, fuse_activations=fuse_activations))


def _pool_bytes(
    target_system: System,
    target: str,
    *,
    in_place: bool = True,
    weights: str = "",
    alignment_bytes: int | None = None,
    fuse_activations: bool = False,
    plan: Callable[[Sequence[Lifetime]], MemoryPlan] = memory.plan,
) -> Callable[[frontend.Network], int]:
    """What finds the pool of a network; see `plan_memory`."""
    on = targets.named_target(target)

    def pool_bytes(candidate: frontend.Network) -> int:
        module = fused_module(candidate.module) if fuse_activations else candidate.module
        found = buffers(phases.allocate(module, on, target_system), in_place=in_place)
        return plan(_aligned(found.liveness(weights), alignment_bytes).lifetimes).pool_bytes

    return pool_bytes


def _aligned(liveness: Liveness, alignment_bytes: int | None) -> Liveness:
    if alignment_bytes is None:
        return liveness
    lifetimes = tuple(
        replace(life, alignment_bytes=math.gcd(alignment_bytes, life.within_bytes or alignment_bytes))
        for life in liveness.lifetimes
    )
    return replace(liveness, lifetimes=lifetimes)


def _allocation_groups(lifetimes: list[Lifetime]) -> int:
    """Runs of allocations, each before its first use, that no kernel interrupts."""
    return len({life.begin for life in lifetimes})


def _tvm_pool_bytes(lowered: tvm.IRModule) -> int:
    """Storage that TVM's planner allocates, and tensors that it leaves outside of it."""
    planned = relax.transform.StaticPlanBlockMemory()(lowered)
    total = 0
    for binding in (b for block in planned["main"].body.blocks for b in block.bindings):
        kind = operator(binding.value)
        if kind == "memory.alloc_storage":
            total += int(binding.value.args[0].values[0])
        elif kind == "builtin.alloc_tensor":
            total += tensor_bytes(binding.var)
    return total
