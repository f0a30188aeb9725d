"""Memory of a network: the pool of its compiled form, beside what other ways to allocate would take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import tvm
from tvm import relax

from pimflow import frontend, layer_order, memory, pipeline, targets
from pimflow.activation_fusion import fused_runs, require_decomposed, with_fused_activations
from pimflow.core.liveness import Lifetime, Liveness
from pimflow.core.plan import Plan
from pimflow.decomposed_network import Decomposing, decomposed, requested
from pimflow.errors import UsageError
from pimflow.hardware import System
from pimflow.layer_order import LayerOrder
from pimflow.memory import MemoryPlan
from pimflow.memory.reorder import TIME_LIMIT_SECONDS as SEARCH_SECONDS
from pimflow.relay_passes.buffers import buffers
from pimflow.relay_passes.flat import operator, tensor_bytes
from pimflow.relay_passes.kernel_groups import Copied, copies

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
    decomposition: dict[str, Any] | None = None
    order: LayerOrder | None = None
    fused: list[list[str]] = field(default_factory=list)


def plan_memory(
    model: frontend.Model,
    target_system: System,
    *,
    target: str = "llvm+pim",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    decompose: Decomposing | None = None,
    fuse_activations: bool = False,
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
        Layers to decompose before; see `decomposition.Request.parse`.
    fuse_activations : bool
        Of a decomposed network: whether what lies between two chains is one kernel; see
        `relay_passes.fuse_groups.activation_chains`.
    policy, capacity_bytes, seconds
        See `memory.plan`.
    alignment_bytes : int, optional
        Of every tensor; `core.liveness.ALIGNMENT_BYTES` by default.
    weights : str
        ``resident``, ``streamed``, or empty; see `relay_passes.buffers.Buffers.liveness`.
    in_place : bool
        Whether elementwise results may take over operands that die with them.
    reorder : bool
        Whether layers may run in another order, if its pool is smaller; see `layer_order`.

    Raises
    ------
    UsageError
        For other `weights`.
    InfeasibleError
        The network does not fit in the capacity.
    """
    if weights not in ("", *WEIGHTS):
        raise UsageError(f"weights '{weights}' is none of {', '.join(WEIGHTS)}")
    request = requested(decompose)
    require_decomposed(fuse_activations, request)
    network, change = decomposed(frontend.load(model, shapes, batch), request)
    summary, change = change.summary() if change else None, None  # which holds the original's weights
    network = with_fused_activations(network) if fuse_activations else network
    on = targets.named_target(target)
    order = None
    if reorder:

        def pool_bytes(candidate: frontend.Network) -> int:
            found = buffers(pipeline.allocate(candidate.module, on, target_system), in_place=in_place)
            lifetimes = _aligned(found.liveness(weights), alignment_bytes).lifetimes
            return memory.plan(lifetimes, policy, seconds=seconds).pool_bytes

        order = layer_order.find(network, target_system, seconds=min(seconds, SEARCH_SECONDS))
        order = order.settled(pool_bytes)
        network = order.network
    lowered = pipeline.allocate(network.module, on, target_system)
    found = buffers(lowered, in_place=in_place)
    liveness = _aligned(found.liveness(weights), alignment_bytes)
    plan = memory.plan(liveness.lifetimes, policy, capacity_bytes=capacity_bytes, seconds=seconds)
    separate = _aligned(buffers(lowered, in_place=False).liveness(weights), alignment_bytes)
    own = [life for life in separate.lifetimes if not life.alias or life.name == life.alias]
    return NetworkMemory(
        liveness=liveness,
        plan=plan,
        tvm_pool_bytes=_tvm_pool_bytes(
            pipeline.allocate(network.module, on, replace(target_system, copies="made"))
        ),
        eager_bytes=sum(life.size_bytes for life in own),
        lazy_peak_bytes=separate.peak_bytes,
        eager_allocations=len(own),
        lazy_groups=_allocation_groups(own),
        overwritten=len(found.overwritten),
        copies=copies(network.module, views=target_system.views),
        order=order,
        decomposition=summary,
        fused=fused_runs(network),
    )


def reordered(
    network: frontend.Network, target_system: System, target: str = "llvm+pim", plan: Plan | None = None
) -> LayerOrder:
    """The order of `network`'s layers with the smallest pool, as `plan_memory` has it, or that of `plan`."""
    names = None if plan is None else [choice.region for choice in plan.choices]
    on = targets.named_target(target)

    def pool_bytes(candidate: frontend.Network) -> int:
        liveness = buffers(pipeline.allocate(candidate.module, on, target_system)).liveness()
        return memory.plan(liveness.lifetimes).pool_bytes

    return layer_order.find(network, target_system, names=names).settled(pool_bytes)


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
