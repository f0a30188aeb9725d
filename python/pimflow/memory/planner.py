"""Memory planning: one pool a memory region, an offset for every buffer, and the gap to the best plan.

`plan` places buffers, given as lifetimes (`core.liveness`), by one of Occamy's policies, by the best of the
four, or by a search that proves the smallest pool. `validator.check` certifies every plan that it returns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pimflow.core.liveness import Lifetime
from pimflow.errors import InfeasibleError, UnknownNameError
from pimflow.memory import exact, ortools_solver, validator
from pimflow.memory.policies import POLICIES, place
from pimflow.memory.pools import (
    MemoryPlan,
    Pool,
    alias_class,
    lifetimes_by_memory,
    lower_bound_bytes,
    merge_aliases,
    pool_end_bytes,
)

__all__ = ["PLANNERS", "POLICIES", "MemoryPlan", "Pool", "merge_pools", "plan", "policy_bytes"]

# Solvers improve the best plan of the policies.
_SOLVERS = {"exact": exact.solve, "ortools": ortools_solver.solve}
PLANNERS = ("best", *_SOLVERS, *POLICIES)
TIME_LIMIT_SECONDS = 60.0


def plan(
    lifetimes: Sequence[Lifetime],
    policy: str = "exact",
    *,
    capacity_bytes: int | Mapping[str, int] | None = None,
    seconds: float = TIME_LIMIT_SECONDS,
) -> MemoryPlan:
    """Place every buffer in the pool of its memory region.

    Parameters
    ----------
    lifetimes : sequence of Lifetime
        Alias classes are placed once, at their largest size, from their first step to their last.
    policy : str
        ``"first-fit"``, ``"best-fit"``, ``"longer-first"`` or ``"bigger-first"``; ``"best"``: the best of the
        four; ``"exact"``: the smallest pool, by search from there; ``"ortools"``: the same with CP-SAT.
    capacity_bytes : int or mapping, optional
        Largest pool of every memory region, or by its name. Exact planners stop as soon as the buffers fit.
    seconds : float
        Time limit of exact planners. When it is up, the result is the best plan so far, with its gap.

    Raises
    ------
    InfeasibleError
        If the buffers do not fit in the capacity, or no plan was found that does.
    LifetimeError
        For inconsistent lifetimes (`pools.lifetimes_by_memory`, `pools.merge_aliases`).
    UnknownNameError
        For another policy.
    KeyboardInterrupt
        On Ctrl-C, also during a search in C++.
    """
    if policy not in PLANNERS:
        raise UnknownNameError("policy", policy, PLANNERS)
    start = time.monotonic()
    regions = lifetimes_by_memory(lifetimes)
    capacities = _capacities(capacity_bytes, regions)
    pools: list[Pool] = []
    offsets: dict[str, int] = {}
    for memory, members in regions.items():
        remaining_seconds = max(start + seconds - time.monotonic(), 0.0)
        pool, pool_offsets = _plan_region(memory, members, policy, remaining_seconds, capacities.get(memory))
        pools.append(pool)
        offsets |= pool_offsets
    validator.check(lifetimes, offsets, {pool.memory: pool.pool_bytes for pool in pools}, capacities)
    return MemoryPlan(
        policy=policy,
        pools=tuple(pools),
        offsets_bytes=offsets,
        seconds=time.monotonic() - start,
        lifetimes=tuple(lifetimes),
    )


def merge_pools(plan: MemoryPlan) -> MemoryPlan:
    """Lay the pools of a plan one behind the other in one allocation; offsets count from its begin.

    Raises
    ------
    VerificationError
        If the validator, which shares no code with this function, rejects the plan.
    """
    if len(plan.pools) < 2:
        return plan
    ranges: list[Pool] = []
    begin = 0
    for pool in plan.pools:
        members = [life for life in plan.lifetimes if life.memory == pool.memory]
        unit = math.lcm(*(life.alignment_bytes for life in members))
        begin = -(-begin // unit) * unit
        ranges.append(replace(pool, begin_bytes=begin))
        begin += pool.pool_bytes
    begins = {pool.memory: pool.begin_bytes for pool in ranges}
    offsets = {life.name: begins[life.memory] + plan.offsets_bytes[life.name] for life in plan.lifetimes}
    merged_plan = replace(plan, pools=tuple(ranges), offsets_bytes=offsets)
    validator.check_ranges(
        plan.lifetimes,
        offsets,
        {pool.memory: (pool.begin_bytes, pool.end_bytes) for pool in ranges},
        merged_plan.pool_bytes,
    )
    return merged_plan


def _plan_region(
    memory: str, members: Sequence[Lifetime], policy: str, seconds: float, limit: int | None
) -> tuple[Pool, dict[str, int]]:
    buffers = merge_aliases(members)
    bound = lower_bound_bytes(buffers)
    _check_capacity(memory, bound, bound, limit)
    buffer_offsets, bound, used_policy = _place_buffers(buffers, policy, seconds, limit)
    end = pool_end_bytes(buffers, buffer_offsets)
    _check_capacity(memory, end, bound, limit)
    by_class = {alias_class(block): offset for block, offset in zip(buffers, buffer_offsets)}
    offsets = {
        life.name: by_class[alias_class(life)] + life.within_bytes
        if alias_class(life) in by_class
        else life.offset_bytes or 0
        for life in members
    }
    return Pool(memory=memory, pool_bytes=end, lower_bound_bytes=bound, policy=used_policy), offsets


def policy_bytes(lifetimes: Sequence[Lifetime]) -> dict[str, int]:
    """Pool bytes under each of Occamy's policies, over all memory regions."""
    regions = [merge_aliases(members) for members in lifetimes_by_memory(lifetimes).values()]
    return {
        policy: sum(pool_end_bytes(buffers, place(buffers, policy)) for buffers in regions)
        for policy in POLICIES
    }


def _place_buffers(
    buffers: Sequence[Lifetime], policy: str, seconds: float, limit: int | None
) -> tuple[list[int], int, str]:
    """Offsets, the proved lower bound, and the policy that gave the offsets."""
    bound = lower_bound_bytes(buffers)
    if policy in POLICIES:
        return place(buffers, policy), bound, policy
    plans = [(place(buffers, name), name) for name in POLICIES]
    offsets, best_policy = min(plans, key=lambda candidate: pool_end_bytes(buffers, candidate[0]))
    if policy == "best" or pool_end_bytes(buffers, offsets) == bound:
        return offsets, bound, best_policy
    solution = _SOLVERS[policy](buffers, offsets, seconds, limit)
    improved = solution.pool_bytes < pool_end_bytes(buffers, offsets)
    return solution.offsets, solution.lower_bound_bytes, policy if improved else best_policy


def _capacities(
    capacity_bytes: int | Mapping[str, int] | None, regions: Mapping[str, object]
) -> dict[str, int]:
    if capacity_bytes is None:
        return {}
    if isinstance(capacity_bytes, int):
        return dict.fromkeys(regions, capacity_bytes)
    for name in capacity_bytes:
        if name not in regions:
            raise UnknownNameError("memory region", name, regions)
    return dict(capacity_bytes)


def _check_capacity(memory: str, demand: int, bound: int, limit: int | None) -> None:
    if limit is None or demand <= limit:
        return
    if bound > limit:
        subject = (
            f"every plan of memory '{memory}' (lower bound {bound} B, {bound - limit} B above the capacity)"
        )
        raise InfeasibleError(subject, bound, limit, "B", [f"a capacity from {bound} B on (--capacity)"])
    subject = f"the best plan found of memory '{memory}' (lower bound {bound} B, gap {demand - bound} B)"
    levers = ["--policy exact", "a longer --time-limit", f"a capacity of {demand} B (--capacity)"]
    raise InfeasibleError(subject, demand, limit, "B", levers)
