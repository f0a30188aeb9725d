"""Memory of a network: the pool of its compiled form, beside what other ways to allocate would take."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax

from pimflow import memory
from pimflow.api import prepare
from pimflow.api.arguments import public
from pimflow.api.internal_memory import InternalMemory, before
from pimflow.api.options import NetworkKeywords, NetworkOptions, as_system, network_options
from pimflow.api.prepare import Prepared
from pimflow.compiler import phases
from pimflow.compiler.build import planned
from pimflow.compiler.layer_order import LayerOrder
from pimflow.compiler.plan_pools import PlanPools, frugal
from pimflow.compiler.smaller_pool import PoolPlanning
from pimflow.core.frames import frame
from pimflow.core.json_form import Json, json_form
from pimflow.core.liveness import Liveness
from pimflow.decomposition.network import DecomposedNetwork, require_all
from pimflow.decomposition.report import DecompositionReport
from pimflow.decomposition.skips import SkipOptimisation
from pimflow.errors import UsageError
from pimflow.frontend import Network, relax_module
from pimflow.hardware import System
from pimflow.memory import MemoryPlan
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Costs, Profiling
from pimflow.relay_passes.decomposition.layer_flops import flops
from pimflow.relay_passes.flat import fused, operator, tensor_bytes
from pimflow.relay_passes.memory.buffers import buffers
from pimflow.relay_passes.regions.kernel_groups import Copied, copies

if TYPE_CHECKING:
    from pandas import DataFrame
    from typing_extensions import Unpack

    from pimflow.frontend import Model

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
    decomposition : DecompositionReport, optional
        If layers were decomposed.
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
    decomposition: DecompositionReport | None = None
    order: LayerOrder | None = None
    skips: SkipOptimisation | None = None
    fused: list[list[str]] = field(default_factory=list)

    def __repr__(self) -> str:
        """In a line: lifetimes are many."""
        return f"NetworkMemory({len(self.plan.offsets_bytes)} tensors in {self.plan.pool_bytes} bytes)"

    def to_json(self) -> dict[str, Json]:
        """What ``pimflow memory --json`` prints of a network, without the policies that it compares."""
        return {
            **self.plan.to_json(),
            "tvm_pool_bytes": self.tvm_pool_bytes,
            "eager_bytes": self.eager_bytes,
            "lazy_peak_bytes": self.lazy_peak_bytes,
            "eager_allocations": self.eager_allocations,
            "lazy_groups": self.lazy_groups,
            "overwritten": self.overwritten,
            "copies": json_form(self.copies),
            "order": json_form(self.order.summary()) if self.order else None,
            "decomposition": json_form(self.decomposition),
            "skips": json_form(self.skips.summary()) if self.skips else None,
            **self.internal.summary(),
            "fused": json_form(self.fused),
        }

    def to_pandas(self) -> DataFrame:
        """A row a tensor, with its offset in the pool; raises `UsageError` where pandas is not installed."""
        offsets = self.plan.offsets_bytes
        return frame(
            {"name": life.name, "begin": life.begin, "end": life.end, "bytes": life.size_bytes}
            | {"memory": life.memory, "offset": offsets[life.name]}
            for life in self.plan.lifetimes
        )


@public(NetworkKeywords)
def plan_memory(
    model: Model,
    target_system: System | None = None,
    *,
    target: str = "llvm+pim",
    options: NetworkOptions | None = None,
    policy: str = "exact",
    weights: str = "",
    in_place: bool = True,
    capacity_bytes: int | None = None,
    alignment_bytes: int | None = None,
    seconds: float = memory.TIME_LIMIT_SECONDS,
    **keywords: Unpack[NetworkKeywords],
) -> NetworkMemory:
    """Plan the memory of a network whose layers all run on the GPU, or on the CPU that stands in for it.

    Parameters
    ----------
    target : str
        What it is lowered for: kernels, and the type that they store, differ.
    options : NetworkOptions, optional
        What the network becomes before. What may be fused is where that makes the pool smaller.
    policy, capacity_bytes, seconds
        See `memory.plan`.
    alignment_bytes : int, optional
        Of every tensor; `core.liveness.ALIGNMENT_BYTES` by default.
    weights : str
        ``resident``, ``streamed``, or empty; see `relay_passes.memory.buffers.Buffers.liveness`.
    in_place : bool
        Whether elementwise results may take over operands that die with them.
    **keywords
        Fields of `options`, in place of what these say.

    Raises
    ------
    UnknownNameError, UsageError
        For another criterion or keyword; for other `weights`, a value of another type, and if nothing is
        decomposed whose skip connections could be reduced.
    InfeasibleError
        The network does not fit in the capacity.
    """
    if weights not in ("", *WEIGHTS):
        raise UsageError(f"weights '{weights}' is none of {', '.join(WEIGHTS)}")
    options = network_options(keywords, options)
    require_all(options.request, "the plan of its memory")
    target_system = as_system(target_system)
    pools = PoolPlanning(
        in_place=in_place, weights=weights, alignment_bytes=alignment_bytes, policy=policy, seconds=seconds
    )
    planning = _Planned(target_system, targets.named_target(target), pools)
    network = prepare.load(model, options)
    prepared = prepare.prepare(
        network, options, target_system, target=target, pools=pools, inspect=planning.inspect
    )
    del network  # whose weights are not needed any more
    return planning.memory(prepared, capacity_bytes)


class _Planned:
    """Plans the memory of a prepared network; sees it before, to say what it took then."""

    def __init__(self, system: System, lowered_for: tvm.target.Target, pools: PoolPlanning):
        self.system, self.lowered_for, self.pools = system, lowered_for, pools
        self.before: dict[str, Any] = {}
        self.decomposition: DecompositionReport | None = None

    def inspect(self, network: Network, change: DecomposedNetwork | None) -> None:
        original = change.original if change else network
        self.decomposition = change.summary() if change else None
        self.before = before(original, network if change else None, self.lowered_for, self.system, self.pools)

    def memory(self, prepared: Prepared, capacity_bytes: int | None) -> NetworkMemory:
        """All that is said of it."""
        network, pools, system = prepared.network, self.pools, self.system
        module, groups = self._placed(prepared)
        lowered = phases.allocate(module, self.lowered_for, system)
        placed = buffers(lowered, in_place=pools.in_place)
        liveness = pools.liveness(placed)
        plan = pools.plan(liveness, capacity_bytes)
        internal = pools.plan(placed.liveness()) if pools.weights else plan
        separate = pools.liveness(buffers(lowered, in_place=False))
        own = [life for life in separate.lifetimes if not life.alias or life.name == life.alias]
        copying = phases.allocate(module, self.lowered_for, replace(system, copies="made"))
        return NetworkMemory(
            liveness=liveness,
            plan=plan,
            tvm_pool_bytes=_tvm_pool_bytes(copying),
            eager_bytes=sum(life.size_bytes for life in own),
            lazy_peak_bytes=separate.peak_bytes,
            eager_allocations=len(own),
            lazy_groups=len({life.begin for life in own}),  # each before its first use
            overwritten=len(placed.overwritten),
            copies=copies(module, views=system.views),
            internal=InternalMemory(
                **self.before,
                internal_peak_bytes=internal.pool_bytes,
                weight_bytes=relax_module.weight_bytes(network.module),
                flops=flops(network.module),
            ),
            order=prepared.order,
            skips=prepared.skips,
            decomposition=self.decomposition,
            fused=[*fused(module), *map(list, groups)],
        )

    def _placed(self, prepared: Prepared) -> tuple[tvm.IRModule, Collection[tuple[str, ...]]]:
        """The module of the network on the GPU alone, in the least memory; groups of regions in tiles."""
        network = prepared.network
        pools = PlanPools(network=network, target=self.lowered_for, system=self.system, planning=self.pools)
        placed = frugal(prepared.regions, self.system, Costs(self.system, Profiling()), pools)
        return planned(network.module, placed), placed.tiled().keys()


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
