"""The search of a whole network: loaded, put in order, and placed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pimflow import frontend
from pimflow.api import memory
from pimflow.api.option_pairs import require_effect
from pimflow.compiler.layer_order import LayerOrder
from pimflow.core.plan import Plan
from pimflow.core.region import RegionGraph
from pimflow.decomposition import activations, skips
from pimflow.decomposition.choice import left, settled
from pimflow.decomposition.network import Decomposing, decomposed, requested
from pimflow.frontend import Network
from pimflow.fusion.kernels.relax_formulas import regions_of
from pimflow.hardware import System, system
from pimflow.placement import Costs, Goal, Profiling, Searched, apply
from pimflow.placement import search as search_graph
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.primitive_selection import options as primitive_options
from pimflow.primitives.launches import computes
from pimflow.simulators.pim.timing import timings

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
        same goal finds cheaper as chains. See `decomposition.request.Request.parse`.
    optimize_skips : str, optional
        See `plan_memory`.
    fuse_activations : bool
        See `compile`.
    fuse : bool
        Whether neighbouring regions may be one GPU kernel over shared memory
        (`placement.candidates.tilings`).
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
    wanted = Goal(**goal)
    require_effect(wanted, plan=plan)
    skips.check_criterion(optimize_skips)
    on, profiling = target_system or system(), profiling or Profiling()
    profiling.require(on, planned_modes(wanted, plan))
    _, searched = search_network(
        frontend.load(model, shapes, batch),
        on,
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
    require_effect(wanted, plan=plan)
    skips.check_criterion(optimize_skips)
    profiling = profiling or Profiling()
    profiling.require(on, planned_modes(wanted, plan))
    costs = Costs(on, profiling)
    activations.require_decomposed(fuse_activations, request, network)
    fusing = {"fuse_activations": fuse_activations, "fuse": fuse}
    given = given_regions(network, on, request, optimize_skips, **fusing)
    network, change = decomposed(network, request)
    change = settled(change, on, costs, wanted, plan=plan, **fusing)
    network, given = (change.network, given if change.layers else None) if change else (network, given)
    optimize_skips, fuse_activations = left(change, optimize_skips, fuse_activations)
    if reduced := memory.with_reduced_skips(
        network, change, optimize_skips, on, target, fuse_activations=fuse_activations
    ):
        network = reduced.network
    network = activations.with_phases_apart(network) if fuse_activations else network
    if reorder:
        network = memory.reordered(network, on, target, plan).network
    graph = regions(network, on, fuse_activations=fuse_activations, fuse=fuse)
    return network, place(graph, on, plan, costs, wanted, given)


def planned_modes(goal: Goal, plan: Plan | None) -> Sequence[str]:
    """What regions may be done by: what the goal allows, or what a plan says."""
    return goal.modes if plan is None else tuple({choice.mode for choice in plan.choices})


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
    return activations.with_runs(graph, network, on) if fuse_activations else graph


def given_regions(
    network: Network,
    target_system: System,
    decompose: Decomposing | None,
    optimize_skips: str | None,
    *,
    fuse_activations: bool = False,
    fuse: bool = False,
) -> RegionGraph | None:
    """`regions` of a network as the user gave it; None if nothing is asked for that changes it."""
    if decompose is None and optimize_skips is None:
        return None
    runs = fuse_activations and decompose is None  # it came with chains
    network = activations.with_phases_apart(network) if runs else network
    return regions(network, target_system, fuse_activations=runs, fuse=fuse)


def place(
    graph: RegionGraph,
    target_system: System,
    plan: Plan | None,
    costs: Costs,
    goal: Goal,
    given: RegionGraph | None = None,
) -> Searched:
    """Searched, or with `plan` applied; raises `InfeasibleError` if it does not keep to the goal's bounds.

    `given` is the network as the user gave it, if it was changed: what plans are compared with.
    """
    if plan is None:
        return search_graph(graph, target_system, costs, goal, given)
    of_the_gpu = {"primitives": goal.primitives, "max_memory_bytes": goal.max_memory_bytes}
    applied = apply(graph, target_system, plan, costs, given=given, **of_the_gpu)
    memory_bytes = PlanMemory(graph, target_system.dtype).of(applied.candidates)
    goal.require(graph.name, applied.evaluation, memory_bytes)
    return applied


def speedups(
    searched: Searched,
    plan: Plan | None,
    other_graph: RegionGraph,
    other_copies: System,
    other_given: RegionGraph | None = None,
) -> dict[str, float]:
    """Speed-ups of the same network under other conventions, searched (or applied) anew, without bounds.

    All against the network as the user gave it: with `other_copies`, `other_given` if it was changed.
    """
    own = searched.goal
    goal = Goal(objective=own.objective, modes=own.modes, primitives=own.primitives)

    def speedup(
        other: System,
        shares: bool,
        graph: RegionGraph = searched.graph,
        given: RegionGraph | None = searched.given,
    ) -> float:
        own = searched.maker.costs
        costs = own if shares else Costs(other, replace(own.profiling, pim=None))
        carried = plan and plan.carried_to(graph, computes, other.views)
        found = place(graph, other, carried, costs, goal, given)
        return found.baseline.latency_ns / found.evaluation.latency_ns

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
        f"copies {other_copies.copies}": speedup(other_copies, True, other_graph, other_given),
    }


def by_operators(searched: Searched, plan: Plan | None) -> Searched:
    """The same searched, or `plan` applied, with operators in place of the GPU's primitives."""
    if plan is not None:
        plan = replace(plan, choices=tuple(replace(choice, primitive="") for choice in plan.choices))
    goal = replace(searched.goal, primitives=False)
    return place(searched.graph, searched.system, plan, searched.maker.costs, goal, searched.given)


def order_part(order: LayerOrder, searched: Searched, plan: Plan | None, costs: Costs) -> dict[str, Any]:
    """What the report says of the layers' order, and how long the network takes in the given one."""
    given = searched
    if order.changed:
        options = {"fuse_activations": bool(searched.graph.runs), "fuse": bool(searched.graph.fusible)}
        graph = regions(order.given, searched.system, **options)
        given = place(graph, searched.system, plan and plan.carried_to(graph, computes), costs, searched.goal)
    return order.summary() | {
        "latency_given_ns": given.evaluation.latency_ns,
        "latency_ns": searched.evaluation.latency_ns,
    }
