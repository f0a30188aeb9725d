"""Memory of a network: the pool of its compiled form, compared with other allocators."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax

from pimflow.commands.memory.options import MemoryOptions
from pimflow.commands.shared import prepare
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.inputs import InputOptions, network_keywords
from pimflow.commands.shared.options import NetworkOptions
from pimflow.commands.shared.prepare import MinimumPools, PreparationRequest, PreparedNetwork
from pimflow.commands.shared.search_arguments import as_system
from pimflow.compiler.interface import Interface
from pimflow.compiler.layer_order import LayerOrder
from pimflow.compiler.smaller_pool import PoolPlanning
from pimflow.core.frames import data_frame
from pimflow.core.json_form import Json, fields_form, json_form
from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.core.liveness import Liveness
from pimflow.core.options import split_keywords
from pimflow.decomposition.network import DecomposedNetwork, require_all
from pimflow.decomposition.report import DecompositionReport
from pimflow.decomposition.skips import SkipOptimisation
from pimflow.frontend import Network, relax_module
from pimflow.hardware import System
from pimflow.memory import MemoryPlan
from pimflow.pim_backend.runtime import targets
from pimflow.relay_passes.decomposition.layer_flops import flops
from pimflow.relay_passes.flat import operator, tensor_bytes
from pimflow.relay_passes.memory.buffers import buffers
from pimflow.relay_passes.memory.operator_memory import operator_liveness
from pimflow.relay_passes.regions.kernel_groups import TensorCopy, copies

if TYPE_CHECKING:
    from pandas import DataFrame

    from pimflow.frontend import Model


@dataclass(frozen=True, kw_only=True)
class InternalMemory:
    """Pools of tensors that a network computes, without inputs and weights (TeMCO, sections 2.2, 4.2).

    Attributes
    ----------
    internal_peak_bytes : int
        Of the compiled network.
    internal_peak_bytes_original : int
        Of the original network, with a result for each layer: activations are not fused.
    internal_peak_bytes_original_coalesced : int, optional
        Of the original network compiled, with activations fused; None if no layer was decomposed.
    internal_peak_bytes_decomposed : int, optional
        Of the decomposed network, with a result for each layer; None if no layer was decomposed.
    weight_bytes, weight_bytes_original : int
        Of all constants, fp32.
    flops, flops_original : int
        `layer_flops.flops`.
    """

    internal_peak_bytes: int
    internal_peak_bytes_original: int
    internal_peak_bytes_original_coalesced: int | None
    internal_peak_bytes_decomposed: int | None
    weight_bytes: int
    weight_bytes_original: int
    flops: int
    flops_original: int


@dataclass(frozen=True, kw_only=True)
class NetworkMemory:
    """The planned memory of a network, compared with other allocators.

    Attributes
    ----------
    liveness : Liveness
        Lifetimes of the tensors that the plan places: those that the network computes and, if the system
        streams them, weights. Inputs and resident weights lie elsewhere.
    weights : str
        One of `hardware.systems.WEIGHTS`: whether the plan has weights.
    tvm_pool_bytes : int
        Allocated by TVM's ``StaticPlanBlockMemory`` for the same network, and the same weights.
    eager_bytes : int
        Size of all tensors together (Occamy, section II).
    lazy_peak_bytes : int
        Peak if each tensor is allocated at its first use and freed after its last, without fragmentation.
    eager_allocations, lazy_groups : int
        Number of allocations, and of groups of lazy allocations with no kernel between (Occamy, Table I).
    overwritten : int
        Results that are stored in place of an operand.
    order : LayerOrder, optional
        Order of its layers, if another one was searched for.
    decomposition : DecompositionReport, optional
        Report of the decomposed layers, if there are any.
    skips : SkipOptimisation, optional
        Result of the optimisation of skip connections, if requested.
    fused : list of list of str
        Runs of layers that are fused into one kernel each, if requested.
    """

    liveness: Liveness
    plan: MemoryPlan
    weights: str
    kernels: int
    inputs: int
    input_bytes: int
    tvm_pool_bytes: int
    eager_bytes: int
    lazy_peak_bytes: int
    eager_allocations: int
    lazy_groups: int
    overwritten: int
    copies: tuple[TensorCopy, ...]
    internal: InternalMemory
    decomposition: DecompositionReport | None = None
    order: LayerOrder | None = None
    skips: SkipOptimisation | None = None
    fused: list[list[str]] = field(default_factory=list)

    def __repr__(self) -> str:
        """One line, since there are many lifetimes."""
        return f"NetworkMemory({len(self.plan.offsets_bytes)} tensors in {self.plan.pool_bytes} bytes)"

    def to_json(self) -> dict[str, Json]:
        """The tree that ``pimflow memory --json`` prints, without the comparison of policies."""
        figures = [
            *("weights", "kernels", "inputs", "input_bytes", "tvm_pool_bytes", "eager_bytes"),
            *("lazy_peak_bytes", "eager_allocations", "lazy_groups", "overwritten", "copies"),
        ]
        return {
            **self.plan.to_json(),
            **{name: json_form(getattr(self, name)) for name in figures},
            "order": json_form(self.order and self.order.summary()),
            "decomposition": json_form(self.decomposition),
            "skips": json_form(self.skips and self.skips.summary()),
            **fields_form(self.internal),
            "fused": json_form(self.fused),
        }

    def to_pandas(self) -> DataFrame:
        """A row for each tensor, with its offset; raises `UsageError` if pandas is not installed."""
        offsets = self.plan.offsets_bytes
        return data_frame(
            {"name": life.name, "begin": life.begin, "end": life.end, "bytes": life.size_bytes}
            | {"memory": life.memory, "offset": offsets[life.name]}
            for life in self.plan.lifetimes
        )


@public(MemoryOptions, InputOptions, NetworkOptions)
def plan_memory(
    model: Model,
    system: System | None = None,
    *,
    target: str = "llvm+pim",
    options: NetworkOptions | None = None,
    **keywords: Any,
) -> NetworkMemory:
    """Plan the memory of a network whose layers all run on the GPU, or on the CPU that stands in for it.

    Parameters
    ----------
    target : str
        Target that it is lowered for: kernels and storage type depend on it.
    options : NetworkOptions, optional
        Rewrites of the network before. Layers that may be fused are fused if that makes the pool smaller.
    policy, capacity_bytes, seconds
        See `memory.plan`.
    inputs, input_values
        Arrays whose shapes fix those that the model leaves open; see `pimflow.compile`.
    **keywords
        Fields that replace those of `options`.

    Raises
    ------
    UnknownNameError, UsageError
        For an unknown criterion or keyword, a value of another type, and if skip connections are to be
        reduced while no layer is decomposed.
    InfeasibleError
        If the network does not fit the capacity.
    """
    memory_values, input_values, network_values = split_keywords(
        keywords, MemoryOptions, InputOptions, NetworkOptions
    )
    settings = InputOptions(**input_values)
    network_values = network_keywords(model, settings, network_values | {"options": options})
    del network_values["options"]
    planned = {**vars(MemoryOptions(**memory_values))}
    capacity_bytes = planned.pop("capacity_bytes")
    options = NetworkOptions.from_keywords(network_values, options)
    require_all(options.decomposition_request, "the plan of its memory")
    system, pools = as_system(system), PoolPlanning(**planned)
    planner = _MemoryPlanner(system, targets.target_by_name(target), pools)
    network = prepare.load(model, options)
    if settings.given_arrays() or settings.given_draws:  # raises for inputs that do not fit
        interface = Interface(inputs=network.inputs, table_rows=network.table_rows)
        settings.samples(interface, network.example_inputs)
    request = PreparationRequest(target=target, pools=pools, inspect=planner.inspect)
    prepared = prepare.prepare(network, options, system, request)
    del network  # frees its weights
    return planner.memory(prepared, request.minimum_pools(system), capacity_bytes)


class _MemoryPlanner:
    """Plans the memory of a network, and measures it before it is compiled (`inspect`)."""

    def __init__(self, system: System, lowered_for: tvm.target.Target, pools: PoolPlanning):
        self.system, self.lowered_for, self.pools = system, lowered_for, pools
        self.uncompiled: dict[str, Any] = {}
        self.decomposition: DecompositionReport | None = None

    def inspect(self, network: Network, change: DecomposedNetwork | None) -> None:
        """Measure the original and the decomposed network; `prepare` calls it."""
        original = change.original if change else network
        self.decomposition = change.summary() if change else None
        self.uncompiled = _uncompiled_memory(
            original, network if change else None, self.lowered_for, self.system, self.pools
        )

    def memory(
        self, prepared: PreparedNetwork, minimum_pools: MinimumPools, capacity_bytes: int | None
    ) -> NetworkMemory:
        """Plan the memory of a prepared network in its smallest pool on the GPU alone."""
        network, pools, system = prepared.network, self.pools, self.system
        placed, _, (module, lowered) = minimum_pools.pool(network, prepared.options)
        tensors = buffers(lowered, in_place=pools.in_place)
        liveness = pools.liveness(tensors)
        plan = pools.plan(liveness, capacity_bytes)
        internal_bytes = plan.pool_bytes
        if system.streams_weights:
            computed = replace(system, weights="resident", copy_ahead=0)
            internal_bytes = pools.pool_bytes(module, self.lowered_for, computed)
        separate = pools.liveness(buffers(lowered, in_place=False))
        unaliased = [life for life in separate.lifetimes if not life.alias or life.name == life.alias]
        kernels_before = tensors.kernels_before
        copying = pools.lower(module, self.lowered_for, replace(system, copies="made"))
        return NetworkMemory(
            liveness=liveness,
            plan=plan,
            weights=system.weights,
            kernels=kernels_before[-1],
            inputs=len(lowered["main"].params),
            input_bytes=sum(map(tensor_bytes, lowered["main"].params)),
            tvm_pool_bytes=_tvm_pool_bytes(copying),
            eager_bytes=sum(life.size_bytes for life in unaliased),
            lazy_peak_bytes=separate.peak_bytes,
            eager_allocations=len(unaliased),
            # Each is allocated before its first use, and copies of weights are no kernels.
            lazy_groups=len({kernels_before[life.begin] for life in unaliased}),
            overwritten=len(tensors.overwritten),
            copies=copies(module, views=system.uses_views),
            internal=InternalMemory(
                **self.uncompiled,
                internal_peak_bytes=internal_bytes,
                weight_bytes=relax_module.weight_bytes(network.module),
                flops=flops(network.module),
            ),
            order=prepared.order,
            skips=prepared.skips,
            decomposition=self.decomposition,
            fused=list(map(list, placed.group_tilings())),
        )


def _uncompiled_memory(
    original: Network,
    decomposed: Network | None,
    target: tvm.target.Target,
    system: System,
    pools: PoolPlanning,
) -> dict[str, Any]:
    """The fields of `InternalMemory` that are about the original and the decomposed network.

    `target` and `system` give the storage type. From `pools` only policy and time limit are used, so that
    alignment is the same for all tensors and weights are left out.
    """
    planning = replace(pools, in_place=True, alignment_bytes=None)
    element_bytes = ELEMENT_BYTES[system.dtype if "gpu" in list(target.keys) else "fp32"]
    networks = {"internal_peak_bytes_original": original, "internal_peak_bytes_decomposed": decomposed}
    layers = {
        name: network and planning.plan(operator_liveness(network.module, element_bytes)).pool_bytes
        for name, network in networks.items()
    }
    return layers | {
        "internal_peak_bytes_original_coalesced": decomposed
        and planning.pool_bytes(original.module, target, system),
        "weight_bytes_original": relax_module.weight_bytes(original.module),
        "flops_original": flops(original.module),
    }


def _tvm_pool_bytes(lowered: tvm.IRModule) -> int:
    """Size of the storage that TVM's planner allocates, and of the tensors that it does not place there."""
    planned_module = relax.transform.StaticPlanBlockMemory()(lowered)
    total = 0
    for binding in (b for block in planned_module["main"].body.blocks for b in block.bindings):
        kind = operator(binding.value)
        if kind == "memory.alloc_storage":
            total += int(binding.value.args[0].values[0])
        elif kind == "builtin.alloc_tensor":
            total += tensor_bytes(binding.var)
    return total
