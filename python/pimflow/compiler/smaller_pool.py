"""The pool of a module as it is built; networks rewritten so that it is smaller.

A rewrite is kept only if the pool shrinks, or it is demanded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import tvm

from pimflow import memory
from pimflow.compiler import phases
from pimflow.core.liveness import Liveness
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.memory import MemoryPlan
from pimflow.relay_passes.memory.buffers import MainBuffers, buffers


@dataclass(frozen=True, kw_only=True)
class PoolPlanning:
    """How the pool of a network is planned: by default, as its executable has it.

    Each attribute is as `api.memory.plan_memory` says.
    """

    in_place: bool = True
    weights: str = ""
    alignment_bytes: int | None = None
    policy: str = "exact"
    seconds: float = memory.TIME_LIMIT_SECONDS

    def buffers(self, module: tvm.IRModule, target: tvm.target.Target, system: System) -> MainBuffers:
        """What `module`, canonical or with a plan applied, allocates once it is lowered for `target`."""
        return buffers(phases.allocate(module, target, system), in_place=self.in_place)

    def liveness(self, found: MainBuffers) -> Liveness:
        """Lifetimes of buffers, with weights and alignment as asked for."""
        liveness = found.liveness(self.weights)
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
        return memory.in_one_pool(
            memory.plan(liveness.lifetimes, self.policy, capacity_bytes=capacity_bytes, seconds=self.seconds)
        )

    def pool_bytes(self, module: tvm.IRModule, target: tvm.target.Target, system: System) -> int:
        """The pool of `module` for `target`."""
        return self.plan(self.liveness(self.buffers(module, target, system))).pool_bytes


Own = TypeVar("Own", bound="Rewritten")
Form = TypeVar("Form", bound="Priced")
Part = TypeVar("Part")
# Sets of parts that are tried at the most to leave out what saves nothing; each takes seconds for a network
# with as many layers as DenseNet.
TRIALS = 12


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """A network before and after.

    Attributes
    ----------
    given, network : Network
        As it came, and as it is to be.
    demanded : bool
        Whether it is to be so whatever memory that takes.
    kept_because : str
        Why it stays as it came; empty if it does not.
    pool_given_bytes, pool_bytes : int, optional
        Pools of both, of the whole network on the GPU, once `settled`.
    """

    given: Network
    network: Network
    demanded: bool = False
    kept_because: str = ""
    pool_given_bytes: int | None = None
    pool_bytes: int | None = None

    @property
    def changed(self) -> bool:
        """Whether the rewrite changed the network."""
        return self.network is not self.given

    def settled(self: Own, pool_bytes: Callable[[Network], int]) -> Own:
        """The rewrite with both pools. Unless demanded, it is kept only if its pool is smaller."""
        given_bytes = pool_bytes(self.given)
        found_bytes = pool_bytes(self.network) if self.changed else given_bytes
        pools = replace(self, pool_given_bytes=given_bytes, pool_bytes=found_bytes)
        if not self.changed or self.demanded or found_bytes < given_bytes:
            return pools
        return pools.undone(f"the pool would not shrink: {given_bytes} to {found_bytes} B")

    def undone(self: Own, why: str) -> Own:
        """The rewrite undone: the given network."""
        return replace(self, network=self.given, kept_because=why, pool_bytes=self.pool_given_bytes)


class Priced(Protocol):
    """What has a cost that is compared."""

    @property
    def cost(self) -> tuple[float, ...]: ...


def thinned(
    form: Form,
    parts: Sequence[Part],
    without: Callable[[Form, Sequence[Part]], Form],
    order: Callable[[Part], float] = lambda _: 0,
) -> Form:
    """`form` without those of its `parts` that save nothing: halves in `order`, then halves of halves.

    Parameters
    ----------
    without : callable
        Makes the form with the parts that it is given. It is taken unless it costs more.
    """
    kept, pending = list(parts), [sorted(parts, key=order)]
    for _ in range(TRIALS):
        dropped = pending.pop(0) if pending else []
        if not dropped:
            break
        left = [part for part in kept if part not in dropped]
        trial = without(form, left)
        if trial.cost <= form.cost:
            form, kept = trial, left
        elif len(dropped) > 1:
            middle = len(dropped) // 2
            pending += [dropped[:middle], dropped[middle:]]
    return form
