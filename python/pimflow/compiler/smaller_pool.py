"""The pool of a module as it is built, and rewrites of networks that make it smaller.

A rewrite is kept only if the pool shrinks, or if the rewrite is required.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import tvm

from pimflow import memory
from pimflow.compiler import phases
from pimflow.core.liveness import Liveness
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.memory import MemoryPlan
from pimflow.relay_passes.memory.buffers import MainBuffers, buffers
from pimflow.relay_passes.structure_cache import StructureCache


@dataclass(frozen=True, kw_only=True)
class PoolPlanning:
    """Options for planning the pool of a network; the defaults are those of an executable.

    See `pimflow.plan_memory` for each attribute.
    """

    in_place: bool = True
    alignment_bytes: int | None = None
    policy: str = "exact"
    seconds: float = memory.TIME_LIMIT_SECONDS
    _cache: StructureCache = field(default_factory=StructureCache, repr=False, compare=False)

    def lower(self, module: tvm.IRModule, target: tvm.target.Target, system: System) -> tvm.IRModule:
        """Lower `module` up to the planning of memory; kernels of earlier modules are not made again."""
        return phases.allocate(module, target, system, self._cache)

    def liveness(self, main_buffers: MainBuffers) -> Liveness:
        """Lifetimes of buffers, with the alignment of these options."""
        liveness = main_buffers.liveness()
        if self.alignment_bytes is None:
            return liveness
        lifetimes = tuple(
            replace(
                life,
                alignment_bytes=math.gcd(self.alignment_bytes, life.within_bytes or self.alignment_bytes),
            )
            for life in liveness.lifetimes
        )
        return replace(liveness, lifetimes=lifetimes)

    def plan(self, liveness: Liveness, capacity_bytes: int | None = None) -> MemoryPlan:
        """Plan offsets of all buffers in one pool."""
        return memory.merge_pools(
            memory.plan(liveness.lifetimes, self.policy, capacity_bytes=capacity_bytes, seconds=self.seconds)
        )

    def pool_bytes(self, module: tvm.IRModule, target: tvm.target.Target, system: System) -> int:
        """Bytes of the pool of `module`, canonical or with a plan, for `target`."""
        return self.module_pool_bytes(self.lower(module, target, system))

    def module_pool_bytes(self, lowered: tvm.IRModule) -> int:
        """Bytes of the pool of a module that was lowered."""
        return self.plan(self.liveness(buffers(lowered, in_place=self.in_place))).pool_bytes


Own = TypeVar("Own", bound="NetworkRewrite")
Form = TypeVar("Form", bound="HasCost")
Part = TypeVar("Part")
# Upper bound on the sets of parts that `drop_useless_parts` tries; each takes seconds for a network with as
# many layers as DenseNet.
TRIALS = 12


@dataclass(frozen=True, kw_only=True)
class NetworkRewrite:
    """A network before and after a rewrite.

    Attributes
    ----------
    demanded : bool
        Whether the rewrite is required, whatever memory it takes.
    kept_because : str
        Why the network stays as it was; empty if it does not.
    pool_given_bytes, pool_bytes : int, optional
        Pools before and after, of the whole network on the GPU, once `keep_if_smaller`.
    """

    original: Network
    network: Network
    demanded: bool = False
    kept_because: str = ""
    pool_given_bytes: int | None = None
    pool_bytes: int | None = None

    @property
    def changed(self) -> bool:
        """Whether the rewrite changed the network."""
        return self.network is not self.original

    def keep_if_smaller(self: Own, pool_bytes: Callable[[Network], int]) -> Own:
        """Add both pools; undo the rewrite if its pool is not smaller, unless it is required."""
        original_bytes = pool_bytes(self.original)
        new_bytes = pool_bytes(self.network) if self.changed else original_bytes
        rewrite = replace(self, pool_given_bytes=original_bytes, pool_bytes=new_bytes)
        if not self.changed or self.demanded or new_bytes < original_bytes:
            return rewrite
        return rewrite.revert(f"the pool would not shrink: {original_bytes} to {new_bytes} B")

    def revert(self: Own, reason: str) -> Own:
        """Undo the rewrite: the original network, with the reason."""
        return replace(self, network=self.original, kept_because=reason, pool_bytes=self.pool_given_bytes)


class HasCost(Protocol):
    """A value with a cost that can be compared."""

    @property
    def cost(self) -> tuple[float, ...]: ...


def drop_useless_parts(
    item: Form,
    parts: Sequence[Part],
    rebuild: Callable[[Form, Sequence[Part]], Form],
    order: Callable[[Part], float] = lambda _: 0,
) -> Form:
    """Drop those `parts` of `item` that save nothing: first halves in `order`, then halves of halves.

    Parameters
    ----------
    rebuild : callable
        Makes the form with only the parts that it gets. The result is accepted unless it costs more.
    """
    remaining, queue = list(parts), [sorted(parts, key=order)]
    for _ in range(TRIALS):
        dropped = queue.pop(0) if queue else []
        if not dropped:
            break
        trial_parts = [part for part in remaining if part not in dropped]
        trial = rebuild(item, trial_parts)
        if trial.cost <= item.cost:
            item, remaining = trial, trial_parts
        elif len(dropped) > 1:
            middle = len(dropped) // 2
            queue += [dropped[:middle], dropped[middle:]]
    return item
