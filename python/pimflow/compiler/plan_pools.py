"""Plans whose pool, as it is built, keeps to a size.

The search counts bytes that are live while each candidate runs, in the storage type of the GPU. The build
may need fewer, where results overwrite their operands, or more, where a kernel has a workspace that no
candidate knows. So a plan with a bound on memory is lowered, and its pool is planned. If the pool is too
large, parts of the fastest plan are replaced by parts of a GPU plan that needs little memory. This is a
stage after the search; `PoolChoice` has its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import tvm

from pimflow.compiler.build import planned
from pimflow.compiler.smaller_pool import PoolPlanning, thinned
from pimflow.core.candidate import Candidate
from pimflow.core.liveness import ALIGNMENT_BYTES
from pimflow.core.region import ELEMENT_BYTES, RegionGraph
from pimflow.errors import InfeasibleError
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.placement import Costs, Goal, Searched, search
from pimflow.placement.best_plan import as_planned, tried
from pimflow.placement.candidates import channel_modes, fused_groups
from pimflow.relay_passes.flat import main_bindings

SEARCHES = 3  # with a smaller bound each time


@dataclass(frozen=True, kw_only=True)
class PoolChoice:
    """Pools of the plans that were compared to keep to a size.

    Attributes
    ----------
    searched_bytes : int
        Pool of the plan that the search chose by live bytes.
    frugal_bytes : int
        Pool of the network on the GPU only, in as little memory as possible: what ``pimflow memory`` plans.
    pool_bytes : int
        Pool of the plan.
    staged : bool
        Whether the plan is not from the search but mixed from the fastest plan and the one in little memory.
    latency_gap : float
        Upper bound on how much faster a plan with this pool could be, over the lower bound of latency.
    """

    searched_bytes: int
    frugal_bytes: int
    pool_bytes: int
    staged: bool
    latency_gap: float


@dataclass(frozen=True, kw_only=True)
class PlanPools:
    """Pools of plans of one network for one target, each planned once."""

    network: Network
    target: tvm.target.Target
    system: System
    planning: PoolPlanning = field(default_factory=PoolPlanning)
    _known: dict[tuple[object, ...], int] = field(default_factory=dict, repr=False, compare=False)

    def as_counted(self, bound: float) -> float:
        """Bound on bytes that the search counts, in the GPU's type, for a pool of `bound` bytes as built."""
        own = self.system.dtype
        stored = own if "gpu" in list(self.target.keys) else "fp32"
        if stored == own:
            return bound
        # The smaller the type, the larger is the share of bytes that alignment leaves unused.
        unused = ALIGNMENT_BYTES * len(main_bindings(self.network.module))
        return bound * ELEMENT_BYTES[own] / ELEMENT_BYTES[stored] + unused

    def of(self, searched: Searched) -> int:
        """Bytes of the pool of a plan as it is built."""
        key = tuple((candidate.covers, candidate.rewrite) for candidate in searched.candidates)
        if key not in self._known:
            module = planned(self.network.module, searched)
            self._known[key] = self.planning.pool_bytes(module, self.target, self.system)
        return self._known[key]


def frugal(graph: RegionGraph, system: System, costs: Costs, pools: PlanPools) -> Searched:
    """The plan on the GPU only with the smallest pool of three.

    They are: every run as one kernel, every region as a kernel, and the plan that the search finds to have
    the fewest live bytes. None is best for all networks: the workspace of a run may take what the run
    saves.
    """
    least = search(graph, system, costs, Goal(objective="memory", modes="gpu"))
    channels = system.gpu.memory_channels
    singles = {r.name: least.maker.make(r, "GPU", gpu_channels=channels) for r in graph.regions}
    several = fused_groups.several(least.maker, channels)
    # The fastest tiling of a run comes last and stays in the dictionary.
    by_time = sorted(several, key=lambda each: -sum(task.duration_ns for task in each.tasks))
    runs = {each.covers[0]: each for each in by_time if each.covers in graph.runs}
    inside = {name for run in runs.values() for name in run.covers[1:]}
    every = tuple(runs.get(name, single) for name, single in singles.items() if name not in inside)
    ways = [least, tried(least, every), tried(least, tuple(singles.values()))]
    return as_planned(min(ways, key=lambda each: (pools.of(each), each.evaluation.latency_ns)))


def keeping(
    graph: RegionGraph,
    system: System,
    costs: Costs,
    goal: Goal,
    pools: PlanPools,
    given: RegionGraph | None = None,
) -> tuple[Searched, PoolChoice]:
    """The best plan for `goal`, which minimises or bounds memory, by pools as they are built.

    Parameters
    ----------
    given : RegionGraph, optional
        See `Searched`.

    Raises
    ------
    InfeasibleError
        If no plan keeps to the bounds. The size in the message is the pool of a plan that exists.
    """
    bound = goal.max_memory_bytes

    def within(most: float | None) -> Searched:
        return search(graph, system, costs, replace(goal, max_memory_bytes=most), given)

    found = _within(bound, within, pools)
    least = frugal(graph, system, costs, pools)
    searched_bytes, frugal_bytes = pools.of(found), pools.of(least)
    least_bytes = min(searched_bytes, frugal_bytes)
    if bound is not None and least_bytes > bound:
        free = replace(goal, objective="memory", max_memory_bytes=None)
        smallest, choice = keeping(graph, system, costs, free, pools, given)
        if choice.pool_bytes > bound:
            raise _infeasible(graph, choice.pool_bytes, goal)
        return replace(smallest, goal=goal), choice
    most = least_bytes if goal.objective == "memory" or bound is None else bound
    taken: Searched | None = found
    if searched_bytes > most:
        objective = "latency" if goal.objective == "memory" else goal.objective
        fast = search(graph, system, costs, replace(goal, objective=objective, max_memory_bytes=None), given)
        taken = _mixed(fast, least, pools, most, goal)
    if taken is None and bound is not None:
        raise _infeasible(graph, searched_bytes, goal)
    taken = taken or found
    choice = PoolChoice(
        searched_bytes=searched_bytes,
        frugal_bytes=frugal_bytes,
        pool_bytes=pools.of(taken),
        staged=taken is not found,
        latency_gap=taken.evaluation.latency_ns / taken.plan.lower_bound_ns - 1,
    )
    return replace(taken, goal=goal), choice


def _infeasible(graph: RegionGraph, needed_bytes: int, goal: Goal) -> InfeasibleError:
    levers = (f"--memory-budget {needed_bytes}B", "more modes (--modes)")
    what = f"memory of '{graph.name}'"
    return InfeasibleError(what, needed_bytes, goal.max_memory_bytes or 0, "bytes", levers)


def _within(bound: float | None, search: Callable[[float | None], Searched], pools: PlanPools) -> Searched:
    """Search a plan whose pool keeps to `bound`: while it is larger, search again with a smaller bound."""
    found, at_most = None, bound and pools.as_counted(bound)
    for _ in range(SEARCHES):
        try:
            found = search(at_most)
        except InfeasibleError:
            break
        if bound is None or at_most is None or (size_bytes := pools.of(found)) <= bound:
            break
        at_most *= bound / size_bytes
    return found or search(None)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Neighbouring regions, with their candidates in a fast plan and in one that needs little memory."""

    fast: tuple[Candidate, ...]
    least: tuple[Candidate, ...]
    gain_ns: float

    @property
    def differs(self) -> bool:
        """Whether the two plans have different candidates here."""
        return [(c.covers, c.rewrite) for c in self.fast] != [(c.covers, c.rewrite) for c in self.least]


@dataclass(frozen=True, kw_only=True)
class _Mixed:
    """A plan, with the bytes by which it exceeds the bound, and the value of the objective."""

    searched: Searched
    cost: tuple[float, float]


def _mixed(fast: Searched, least: Searched, pools: PlanPools, most: float, goal: Goal) -> Searched | None:
    """Mix a plan from `least`, and from `fast` as far as the pool stays within `most`.

    None if no such plan keeps to the bounds on latency and energy.
    """
    parts = _parts(fast, least)

    def plan(kept: Sequence[_Part]) -> _Mixed:
        chosen = [c for part in parts for c in (part.least if part in kept else part.fast)]
        searched = tried(fast, _on_their_channels(fast, chosen))
        evaluation = searched.evaluation
        over = max(pools.of(searched) - most, 0) if goal.allows(evaluation) else math.inf
        return _Mixed(searched=searched, cost=(over, goal.value(evaluation)))

    odd = [part for part in parts if part.differs]
    mixed = thinned(plan(odd), odd, lambda _, kept: plan(kept), lambda part: -part.gain_ns)
    return None if mixed.cost[0] else as_planned(mixed.searched)


def _parts(fast: Searched, least: Searched) -> list[_Part]:
    """Both plans in parts, cut where candidates of both begin at the same region."""
    begins = {c.covers[0] for c in fast.candidates} & {c.covers[0] for c in least.candidates}

    def cut(searched: Searched) -> list[list[Candidate]]:
        ways: list[list[Candidate]] = []
        for candidate in searched.candidates:
            ways += [[]] if candidate.covers[0] in begins else []
            ways[-1].append(candidate)
        return ways

    def region_ns(searched: Searched, way: Sequence[Candidate]) -> float:
        return sum(searched.evaluation.region_ns[name] for c in way for name in c.covers)

    return [
        _Part(fast=tuple(a), least=tuple(b), gain_ns=region_ns(least, b) - region_ns(fast, a))
        for a, b in zip(cut(fast), cut(least), strict=True)
    ]


def _on_their_channels(searched: Searched, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Give GPU candidates all memory channels if none is on PIM, else the channels that PIM leaves."""
    maker, system = searched.maker, searched.system
    if all(c.rewrite.mode == "GPU" for c in candidates):
        return tuple(fused_groups.on_channels(maker, c, system.gpu.memory_channels) for c in candidates)
    return tuple(channel_modes.at_channels_left(maker, c) for c in candidates)
