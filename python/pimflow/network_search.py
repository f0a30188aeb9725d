"""The search of a whole network: loaded, put in order, and placed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pimflow import frontend, network_memory
from pimflow.core.plan import Plan
from pimflow.core.region import RegionGraph
from pimflow.decomposed import activation_fusion, skip_optimisation
from pimflow.decomposed.decomposed_network import Decomposing, decomposed, requested
from pimflow.decomposed.decomposition_choice import left, settled
from pimflow.frontend import Network
from pimflow.fused_execution.relax_layers import regions_of
from pimflow.hardware import System, system
from pimflow.layer_order import LayerOrder
from pimflow.placement import Costs, Goal, Profiling, Searched, apply
from pimflow.placement import search as search_graph
from pimflow.primitive_profiles import primitive_options
from pimflow.simulators.timing import timings

if TYPE_CHECKING:
    from pimflow.frontend import Model

AnyPlan = Plan | Searched | str | os.PathLike


def search(
    model: Model,
    target_system: System | None = None,
    *,
    plan: AnyPlan | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    reorder: bool = False,
    decompose: Decomposing | None = None,
    optimize_skips: str | None = None,
    fuse_activations: bool = False,
    fuse: bool = False,
    select: Mapping[str, Any] | None = None,
    profiling: Profiling | None = None,
    **goal: Any,
) -> Searched:
    """The best plan for a network on a system, with the candidates it was chosen from.

    Parameters
    ----------
    model : str, path, ModelProto, IRModule or ExportedProgram
        See `frontend.load`.
    target_system : System, optional
        `pimflow.system()` by default.
    plan : Plan, Searched or path, optional
        Applied instead of searching.
    shapes : mapping of str to tuple of int, optional
        Shapes of inputs that the model leaves open.
    batch : int, optional
        Inferences at once; see `frontend.load`.
    reorder : bool
        See `compile`.
    decompose : Request or str, optional
        Layers to decompose before, such as ``tucker:0.1``; with ``where=pays`` those that a search for the
        same goal finds cheaper as chains. See `decomposition.Request.parse`.
    optimize_skips : str, optional
        See `plan_memory`.
    fuse_activations : bool
        See `compile`.
    fuse : bool
        Whether neighbouring regions may be one GPU kernel over shared memory (`placement.tilings`).
    select : mapping of str to object, optional
        As `compile` has it; what is chosen for a CPU is none of the plan's.
    profiling : Profiling, optional
        How times are found: the analytic GPU model, and the PIM engines with the system's timing, by
        default, and nothing kept on disk.
    **goal
        ``objective``, ``solver``, ``max_latency_ns``, ``max_energy_pj``, ``max_memory_bytes``, ``modes``,
        ``primitives``: see `placement.Goal`.
    """
    goal |= primitive_options.for_plan(select)
    # Refused before the work, not after it.
    Goal(**goal)
    request, plan = requested(decompose), as_plan(plan)
    skip_optimisation.check_criterion(optimize_skips)
    _, searched = search_network(
        frontend.load(model, shapes, batch),
        target_system,
        plan,
        reorder=reorder,
        decompose=request,
        optimize_skips=optimize_skips,
        fuse_activations=fuse_activations,
        fuse=fuse,
        profiling=profiling,
        **goal,
    )
    return searched


def search_network(
    network: Network,
    target_system: System | None = None,
    plan: AnyPlan | None = None,
    *,
    target: str = "llvm+pim",
    reorder: bool = False,
    decompose: Decomposing | None = None,
    optimize_skips: str | None = None,
    fuse_activations: bool = False,
    fuse: bool = False,
    profiling: Profiling | None = None,
    **goal: Any,
) -> tuple[Network, Searched]:
    """`search` for a network that was loaded, and the network that the plan is of: decomposed, in order.

    Parameters
    ----------
    target : str
        Whose pools `reorder` and `optimize_skips` make smaller, as `targets.name_of` says it.
    """
    on, wanted, request, plan = target_system or system(), Goal(**goal), requested(decompose), as_plan(plan)
    skip_optimisation.check_criterion(optimize_skips)
    costs = Costs(on, profiling or Profiling())
    activation_fusion.require_decomposed(fuse_activations, request, network)
    network, change = decomposed(network, request)
    change = settled(change, on, costs, wanted, plan=plan, fuse_activations=fuse_activations)
    network = change.network if change else network
    optimize_skips, fuse_activations = left(change, optimize_skips, fuse_activations)
    if reduced := network_memory.with_reduced_skips(
        network, change, optimize_skips, on, target, fuse_activations=fuse_activations
    ):
        network = reduced.network
    network = activation_fusion.with_phases_apart(network) if fuse_activations else network
    if reorder:
        network = network_memory.reordered(network, on, target, plan).network
    graph = regions(network, on, fuse_activations=fuse_activations, fuse=fuse)
    return network, place(graph, on, plan, costs, wanted)


def as_plan(plan: AnyPlan | None) -> Plan | None:
    """What was found, or is in a file, as a plan."""
    if isinstance(plan, Searched):
        return plan.plan
    return plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)


def regions(
    network: Network,
    target_system: System | None = None,
    *,
    fuse_activations: bool = False,
    fuse: bool = False,
) -> RegionGraph:
    """What the search places of a network; see `search` for `fuse`, `compile` for `fuse_activations`."""
    on = target_system or system()
    graph = regions_of(network.module, network.name, views=on.views, fuse=fuse)
    return activation_fusion.with_runs(graph, network, on) if fuse_activations else graph


def place(
    graph: RegionGraph,
    target_system: System,
    plan: Plan | None,
    costs: Costs,
    goal: Goal,
) -> Searched:
    """Searched, or with `plan` applied; raises `InfeasibleError` if it does not keep to the goal's bounds."""
    if plan is None:
        return search_graph(graph, target_system, costs, goal)
    applied = apply(graph, target_system, plan, costs, primitives=goal.primitives)
    goal.require(graph.name, applied.evaluation)
    return applied


def speedups(
    searched: Searched, plan: Plan | None, other_graph: RegionGraph, other_copies: System
) -> dict[str, float]:
    """Speed-ups of the same network under other conventions, searched (or applied) anew, without bounds."""
    own = searched.goal
    goal = Goal(objective=own.objective, modes=own.modes, primitives=own.primitives)

    def speedup(other: System, shares: bool, graph: RegionGraph = searched.graph) -> float:
        own = searched.maker.costs
        costs = own if shares else Costs(other, replace(own.profiling, pim=None))
        found = place(graph, other, plan and plan.carried_to(graph, other.views), costs, goal)
        return found.gpu_only.latency_ns / found.evaluation.latency_ns

    base = searched.system
    gpu_ns = base.gpu.launch_ns
    other = "paper" if base.accounting == "full" else "full"
    timing = "ramulator-pimflow" if other == "paper" else "strict"
    timing = timing if timing in timings(base.pim) else "strict"
    converted = replace(base, accounting=other, timing=timing)
    return {
        "launches set to zero": speedup(base.with_launches(gpu_ns=0.0, pim_ns=0.0), True),
        "PIM launch 0": speedup(base.with_launches(gpu_ns=gpu_ns, pim_ns=0.0), True),
        "PIM launch as the GPU's": speedup(base.with_launches(gpu_ns=gpu_ns, pim_ns=gpu_ns), True),
        f"accounting {other}, timing {timing}": speedup(converted, False),
        f"copies {other_copies.copies}": speedup(other_copies, True, other_graph),
    }


def by_operators(searched: Searched, plan: Plan | None) -> Searched:
    """The same searched, or `plan` applied, with operators in place of the GPU's primitives."""
    if plan is not None:
        plan = replace(plan, choices=tuple(replace(choice, primitive="") for choice in plan.choices))
    goal = replace(searched.goal, primitives=False)
    return place(searched.graph, searched.system, plan, searched.maker.costs, goal)


def order_part(order: LayerOrder, searched: Searched, plan: Plan | None, costs: Costs) -> dict[str, Any]:
    """What the report says of the layers' order, and how long the network takes in the given one."""
    given = searched
    if order.changed:
        options = {"fuse_activations": bool(searched.graph.runs), "fuse": bool(searched.graph.fusible)}
        graph = regions(order.given, searched.system, **options)
        given = place(graph, searched.system, plan and plan.carried_to(graph), costs, searched.goal)
    return order.summary() | {
        "latency_given_ns": given.evaluation.latency_ns,
        "latency_ns": searched.evaluation.latency_ns,
    }
