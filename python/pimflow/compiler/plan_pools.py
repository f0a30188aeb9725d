"""Plans whose pool, as it is built, keeps to a size.

The search counts the bytes of the pool that is built, but for what schedules alone know: workspaces of the
CPU's kernels, and a few on the GPU. So a plan with a bound on memory is lowered, and its pool is planned. If
that is too large, the search has a smaller bound; at last the plan is the one that takes the least.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import tvm

from pimflow.compiler.build import apply_search_result
from pimflow.compiler.smaller_pool import PoolPlanning
from pimflow.core.candidate import Candidate
from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.core.liveness import ALIGNMENT_BYTES
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import OPERATOR_KERNELS
from pimflow.errors import InfeasibleError
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.placement import Costs, Goal, SearchResult, search
from pimflow.placement.best_plan import with_candidates, with_plan
from pimflow.placement.candidates import fused_groups
from pimflow.placement.solvers.objectives import EvaluatedPlan
from pimflow.relay_passes.flat import main_bindings
from pimflow.relay_passes.memory.pool_bound import stored_bytes

SEARCHES = 3  # with a smaller bound each time


@dataclass(frozen=True, kw_only=True)
class PoolChoice:
    """Pools of the plans that were compared to keep to a size.

    Attributes
    ----------
    searched_bytes : int
        Pool of the plan that the search chose.
    frugal_bytes : int
        Pool of the network on the GPU only, in as little memory as possible: what ``pimflow memory`` plans.
    staged : bool
        Whether the plan is not the one that was searched for the goal, but one that takes the least memory.
    latency_gap : float
        Upper bound on how much faster a plan with this pool could be, over the lower bound of latency.
    """

    searched_bytes: int
    frugal_bytes: int
    pool_bytes: int
    staged: bool
    latency_gap: float


class PlanModules(NamedTuple):
    """A network with a plan applied, and the same as it is lowered up to the planning of memory."""

    applied: tvm.IRModule
    lowered: tvm.IRModule


@dataclass(frozen=True, kw_only=True)
class PlanPools:
    """Pools of plans of one network for one target, each planned once.

    The modules of the plan with the smallest pool so far are kept: mostly it is the plan that is taken.
    """

    network: Network
    target: tvm.target.Target
    system: System
    planning: PoolPlanning = field(default_factory=PoolPlanning)
    _cached_bytes: dict[tuple[object, ...], int] = field(default_factory=dict, repr=False, compare=False)
    _smallest: dict[tuple[object, ...], PlanModules] = field(default_factory=dict, repr=False, compare=False)

    @property
    def kernel_device(self) -> str:
        """The device whose kernels are built, ``gpu`` or its stand-in: tensors have its storage type."""
        return "gpu" if "gpu" in list(self.target.keys) else "cpu"

    @property
    def _storage_dtype(self) -> str:
        return self.system.dtype if self.kernel_device == "gpu" else "fp32"

    def search_bound(self, bound: float) -> float:
        """Bound on bytes that the search counts, in the GPU's type, for a pool of `bound` bytes as built.

        The smaller the type, the larger is the share of bytes that alignment leaves unused: a plan that the
        search counts to exceed this may still be within `bound`.
        """
        return bound * ELEMENT_BYTES[self.system.dtype] / ELEMENT_BYTES[self._storage_dtype]

    @property
    def unused_bytes(self) -> int:
        """By how many bytes a plan may exceed `search_bound` at most, and yet keep to the bound as built."""
        is_converted = self._storage_dtype != self.system.dtype
        return ALIGNMENT_BYTES * len(main_bindings(self.network.module)) if is_converted else 0

    def smallest(self, plans: Iterable[SearchResult]) -> SearchResult:
        """The plan with the smallest pool; of equal ones the fastest, then the first.

        A plan is lowered, which takes long, only if it may be the one.
        """
        best, min_cost = None, (math.inf, math.inf)
        for plan in plans:
            latency_ns = plan.evaluation.latency_ns
            if best is not None and _choices(plan.candidates) not in self._cached_bytes:
                applied = apply_search_result(self.network.module, plan)
                if (self.bound_bytes(applied), latency_ns) >= min_cost:
                    continue
                self._measure(plan, applied)
            cost = self.pool_bytes(plan), latency_ns
            if best is None or cost < min_cost:
                best, min_cost = plan, cost
        assert best is not None, "there are plans"
        return best

    def bound_bytes(self, applied: tvm.IRModule) -> float:
        """A lower bound of the pool of the network with a plan."""
        share = ELEMENT_BYTES[self._storage_dtype] / ELEMENT_BYTES["fp32"]
        return share * stored_bytes(applied, views=self.system.uses_views)

    def pool_bytes(self, search_result: SearchResult) -> int:
        """Bytes of the pool of a plan as it is built."""
        key = _choices(search_result.candidates)
        if key not in self._cached_bytes:
            self._measure(search_result, apply_search_result(self.network.module, search_result))
        return self._cached_bytes[key]

    def _measure(self, search_result: SearchResult, applied: tvm.IRModule) -> None:
        """Lower the network with a plan, and store the bytes of its pool."""
        key, lowered = _choices(search_result.candidates), self._lower(applied)
        pool_bytes = self.planning.module_pool_bytes(lowered)
        if pool_bytes < min(self._cached_bytes.values(), default=math.inf):
            self._smallest.clear()
            self._smallest[key] = PlanModules(applied=applied, lowered=lowered)
        self._cached_bytes[key] = pool_bytes

    def modules(self, search_result: SearchResult) -> PlanModules:
        """The network with a plan, and how it is lowered."""
        modules = self._smallest.get(_choices(search_result.candidates))
        if modules is not None:
            return modules
        applied = apply_search_result(self.network.module, search_result)
        return PlanModules(applied=applied, lowered=self._lower(applied))

    def _lower(self, applied: tvm.IRModule) -> tvm.IRModule:
        return self.planning.lower(applied, self.target, self.system)


def frugal_plan(graph: RegionGraph, system: System, costs: Costs, pools: PlanPools) -> SearchResult:
    """The plan on the GPU only with the smallest pool of three.

    They are: every run as one kernel, every region as a kernel, and the plan that the search finds to have
    the fewest live bytes. None is best for all networks: the workspace of a run may take what the run
    saves.
    """
    min_memory = search(graph, system, costs, Goal(objective="memory", modes="gpu"))
    channels = system.gpu.memory_channels
    singles = {r.name: min_memory.generator.make(r, OPERATOR_KERNELS, channels) for r in graph.regions}
    fused_candidates = fused_groups.group_candidates(min_memory.generator, channels)
    # The fastest tiling of a run comes last and stays in the dictionary.
    by_time = sorted(fused_candidates, key=lambda option: -sum(task.duration_ns for task in option.tasks))
    runs = {option.covers[0]: option for option in by_time if option.covers in graph.runs}
    covered_names = {name for run in runs.values() for name in run.covers[1:]}
    run_candidates = tuple(
        runs.get(name, single) for name, single in singles.items() if name not in covered_names
    )
    plans = [
        min_memory,
        with_candidates(min_memory, run_candidates),
        with_candidates(min_memory, tuple(singles.values())),
    ]
    return with_plan(pools.smallest(plans))


def plan_within_bound(
    graph: RegionGraph,
    system: System,
    costs: Costs,
    goal: Goal,
    pools: PlanPools,
    original: RegionGraph | None = None,
) -> tuple[SearchResult, PoolChoice]:
    """The best plan for `goal`, which minimises or bounds memory, by pools as they are built.

    Raises
    ------
    InfeasibleError
        If no plan keeps to the bounds. The size in the message is the pool of a plan that exists.
    """

    def search_within(max_bytes: float | None, goal: Goal = goal) -> SearchResult:
        """The best plan for `goal` of at most so many bytes, as the search counts them."""
        bounded_goal = replace(goal, max_memory_bytes=max_bytes, kernel_device=pools.kernel_device)
        return search(graph, system, costs, bounded_goal, original)

    def is_allowed(plan: SearchResult) -> bool:
        """Whether a plan keeps to the other bounds."""
        evaluated_plan = EvaluatedPlan(candidates=plan.candidates, evaluation=plan.evaluation, memory_bytes=0)
        return goal.allows(evaluated_plan)

    bound = math.inf if goal.max_memory_bytes is None else goal.max_memory_bytes
    search_result = _search_with_bound(goal.max_memory_bytes, search_within, pools)
    frugal_result = frugal_plan(graph, system, costs, pools)
    chosen, searched_bytes = search_result, pools.pool_bytes(search_result)
    if searched_bytes > bound:
        search_result = search_within(None, replace(goal, objective="memory"))
    if searched_bytes > bound or goal.objective == "memory":
        chosen = pools.smallest(filter(is_allowed, (search_result, frugal_result)))
    if pools.pool_bytes(chosen) > bound:
        raise _infeasible_error(graph, pools.pool_bytes(chosen), goal)
    choice = PoolChoice(
        searched_bytes=searched_bytes,
        frugal_bytes=pools.pool_bytes(frugal_result),
        pool_bytes=pools.pool_bytes(chosen),
        staged=chosen is not search_result or searched_bytes > bound,
        latency_gap=chosen.evaluation.latency_ns / chosen.plan.lower_bound_ns - 1,
    )
    return replace(chosen, goal=goal), choice


def _infeasible_error(graph: RegionGraph, needed_bytes: int, goal: Goal) -> InfeasibleError:
    levers = (f"--memory-budget {needed_bytes}B", "more modes (--modes)")
    subject = f"memory of '{graph.name}'"
    return InfeasibleError(subject, needed_bytes, goal.max_memory_bytes or 0, "bytes", levers)


def _search_with_bound(
    bound: float | None, search: Callable[[float | None], SearchResult], pools: PlanPools
) -> SearchResult:
    """Search a plan whose pool keeps to `bound`: while it is larger, search again with a smaller bound.

    If there is none, the result is that of a search without a bound.
    """
    if bound is None:
        return search(None)
    search_result, search_bytes = None, pools.search_bound(bound)
    for slack_bytes in (0, pools.unused_bytes):
        with contextlib.suppress(InfeasibleError):
            search_result = search_result or search(search_bytes + slack_bytes)
    for _ in range(SEARCHES - 1):
        if search_result is None or (size_bytes := pools.pool_bytes(search_result)) <= bound:
            break
        search_bytes *= bound / size_bytes
        with contextlib.suppress(InfeasibleError):
            search_result = search(search_bytes)
    return search_result or search(None)


def _choices(candidates: Iterable[Candidate]) -> tuple[object, ...]:
    """What a plan says of its candidates."""
    return tuple((c.covers, c.rewrite, c.channels) for c in candidates)
