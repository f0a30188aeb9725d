"""Buffers placed in pools: policies, the exact planner, orders of steps, the validator; without TVM."""

from pimflow.memory.planner import (
    PLANNERS,
    POLICIES,
    TIME_LIMIT_SECONDS,
    MemoryPlan,
    Pool,
    merge_pools,
    plan,
    policy_bytes,
)

__all__ = [
    "PLANNERS",
    "POLICIES",
    "TIME_LIMIT_SECONDS",
    "MemoryPlan",
    "Pool",
    "merge_pools",
    "plan",
    "policy_bytes",
]
