"""Memory plans: an offset for every buffer, and a pool for every memory region."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pimflow.core.json_form import Json
from pimflow.core.liveness import Lifetime
from pimflow.errors import InfeasibleError, LifetimeError

# Sums of sizes stay below this bound, so that no planner overflows 64 bits.
LARGEST_POOL_BYTES = 2**61


@dataclass(frozen=True, kw_only=True)
class Pool:
    """One allocation that holds all buffers of a memory region.

    Attributes
    ----------
    pool_bytes : int
        End of its highest buffer.
    lower_bound_bytes : int
        No plan takes less.
    begin_bytes : int
        Where the pool begins, if it is a range of one allocation (`merge_pools`).
    """

    memory: str
    pool_bytes: int
    lower_bound_bytes: int
    policy: str
    begin_bytes: int = 0

    @property
    def end_bytes(self) -> int:
        """Where the pool ends in the allocation."""
        return self.begin_bytes + self.pool_bytes

    @property
    def optimal(self) -> bool:
        """Whether it is proved that no plan is smaller."""
        return self.pool_bytes == self.lower_bound_bytes

    @property
    def gap(self) -> float:
        """Bytes above the bound, as a fraction of the bound; 0 for an empty pool."""
        return (self.pool_bytes - self.lower_bound_bytes) / max(self.lower_bound_bytes, 1)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The offset of every buffer.

    Attributes
    ----------
    policy : str
        The requested policy; each pool says what placed its buffers.
    pools : tuple of Pool
        Sorted by the name of the memory region.
    """

    policy: str
    pools: tuple[Pool, ...]
    offsets_bytes: dict[str, int]
    seconds: float
    lifetimes: tuple[Lifetime, ...]

    def __repr__(self) -> str:
        """One line without the buffers, which are many."""
        proof = "the smallest" if self.optimal else f"at least {self.lower_bound_bytes}"
        return f"MemoryPlan({len(self.offsets_bytes)} buffers in {self.pool_bytes} bytes, {proof})"

    def to_json(self) -> dict[str, Json]:
        """The plan as ``pimflow memory --json`` prints it: its pools, and the offset of each buffer."""
        size_bytes = {life.name: life.size_bytes for life in self.lifetimes}
        figures = ("memory", "pool_bytes", "lower_bound_bytes", "optimal", "policy")
        return {
            "pool_bytes": self.pool_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "optimal": self.optimal,
            "seconds": self.seconds,
            "pools": [{name: getattr(pool, name) for name in figures} for pool in self.pools],
            "allocations": [
                {"id": name, "offset": offset, "bytes": size_bytes[name]}
                for name, offset in self.offsets_bytes.items()
            ],
        }

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools; if they are ranges of one allocation, the bytes of that."""
        ends = (pool.end_bytes for pool in self.pools)
        return max(sum(pool.pool_bytes for pool in self.pools), *ends, 0)

    @property
    def lower_bound_bytes(self) -> int:
        """Sum of the lower bounds of all pools."""
        return sum(pool.lower_bound_bytes for pool in self.pools)

    @property
    def optimal(self) -> bool:
        """Whether it is proved that no pool can be smaller."""
        return all(pool.optimal for pool in self.pools)


def lifetimes_by_memory(lifetimes: Sequence[Lifetime]) -> dict[str, list[Lifetime]]:
    """Lifetimes by memory region, in the order of the regions' names.

    Raises
    ------
    LifetimeError
        For two buffers of one name, an empty lifetime, or a size, alignment or offset out of range.
    """
    seen: set[str] = set()
    for life in lifetimes:
        if life.name in seen:
            raise LifetimeError(f"buffer '{life.name}' occurs twice; give every buffer its own name")
        seen.add(life.name)
        _check(life)
    names = sorted({life.memory for life in lifetimes})
    return {name: [life for life in lifetimes if life.memory == name] for name in names}


def _check(life: Lifetime) -> None:
    where = f"buffer '{life.name}'"
    if life.end <= life.begin:
        raise LifetimeError(f"{where} ends at step {life.end}, not after it begins ({life.begin})")
    if life.size_bytes < 0:
        raise LifetimeError(f"{where}: size {life.size_bytes} B is negative")
    if life.alignment_bytes < 1:
        raise LifetimeError(f"{where}: alignment {life.alignment_bytes} B is not positive")
    if life.within_bytes < 0 or life.within_bytes % life.alignment_bytes:
        raise LifetimeError(
            f"{where} begins {life.within_bytes} B into what it shares, which is negative or no multiple of "
            f"its alignment, {life.alignment_bytes} B"
        )
    if life.offset_bytes is not None and (life.offset_bytes < 0 or life.offset_bytes % life.alignment_bytes):
        raise LifetimeError(
            f"{where}: required offset {life.offset_bytes} B is negative or no multiple of its alignment, "
            f"{life.alignment_bytes} B"
        )


def alias_class(life: Lifetime) -> tuple[str, str]:
    """Key of the alias class: equal for two lifetimes of one memory region that share their bytes."""
    return ("alias", life.alias) if life.alias else ("name", life.name)


def merge_aliases(lifetimes: Sequence[Lifetime]) -> list[Lifetime]:
    """The buffers to place in one memory region: a buffer for each alias class.

    The buffer of a class has room for all of its members, from their first step to their last. Buffers of 0
    bytes are left out.

    Raises
    ------
    LifetimeError
        If members of one class have different required offsets, or required offsets make buffers overlap.
    InfeasibleError
        If all buffers together have more bytes than 64-bit offsets can address.
    """
    classes: dict[tuple[str, str], Lifetime] = {}
    for life in lifetimes:
        key, block = alias_class(life), _class_buffer(life)
        classes[key] = _merge(classes[key], block) if key in classes else block
    buffers = [life for life in classes.values() if life.size_bytes > 0]
    alignment = max((life.alignment_bytes for life in buffers), default=1)
    demand = sum(life.size_bytes + alignment for life in buffers)
    demand += max((life.offset_bytes or 0 for life in buffers), default=0)
    if demand > LARGEST_POOL_BYTES:
        subject = f"buffers of memory '{buffers[0].memory}' side by side"
        raise InfeasibleError(subject, demand, LARGEST_POOL_BYTES, "B", ["smaller buffers"])
    _check_required_offsets([life for life in buffers if life.offset_bytes is not None])
    return buffers


def _class_buffer(life: Lifetime) -> Lifetime:
    """The buffer of the alias class of `life`, if `life` were its only member."""
    if life.offset_bytes is not None and life.offset_bytes < life.within_bytes:
        raise LifetimeError(
            f"buffer '{life.name}' lies {life.within_bytes} B into what it shares, which would begin before "
            f"the pool if it had to lie at {life.offset_bytes} B"
        )
    if not life.size_bytes:
        return life
    return replace(
        life,
        size_bytes=life.within_bytes + life.size_bytes,
        within_bytes=0,
        offset_bytes=None if life.offset_bytes is None else life.offset_bytes - life.within_bytes,
    )


def _merge(a: Lifetime, b: Lifetime) -> Lifetime:
    if None not in (a.offset_bytes, b.offset_bytes) and a.offset_bytes != b.offset_bytes:
        raise LifetimeError(
            f"buffers '{a.name}' and '{b.name}' share their bytes, but have offsets "
            f"{a.offset_bytes} and {b.offset_bytes}; give one offset"
        )
    return replace(
        a,
        begin=min(a.begin, b.begin),
        end=max(a.end, b.end),
        size_bytes=max(a.size_bytes, b.size_bytes),
        alignment_bytes=math.lcm(a.alignment_bytes, b.alignment_bytes),
        offset_bytes=b.offset_bytes if a.offset_bytes is None else a.offset_bytes,
    )


def _check_required_offsets(fixed: Sequence[Lifetime]) -> None:
    required = [(life.offset_bytes, life) for life in fixed if life.offset_bytes is not None]
    by_offset = sorted(required, key=lambda pair: pair[0])
    for index, (low_bytes, low) in enumerate(by_offset):
        end = low_bytes + low.size_bytes
        for high_bytes, high in by_offset[index + 1 :]:
            if high_bytes >= end:
                break
            if low.begin < high.end and high.begin < low.end:
                raise LifetimeError(
                    f"buffers '{low.name}' and '{high.name}' are live at once, and their required offsets "
                    f"{low_bytes} and {high_bytes} B make them overlap"
                )


def live_sections(buffers: Sequence[Lifetime]) -> tuple[list[int], list[int], int]:
    """Sections in order of time: the maximal sets of buffers that are live at once.

    Returns
    -------
    first, last : list of int
        Each buffer is live in the sections [first, last).
    count : int
        Number of sections.
    """
    begins = sorted({life.begin for life in buffers})
    ends = sorted({life.end for life in buffers})
    times = []
    for time, next_begin in zip(begins, [*begins[1:], math.inf]):
        # If nothing ends before the next begin, the set at the next begin contains this one.
        if ends[bisect.bisect_right(ends, time)] <= next_begin:
            times.append(time)
    first = [bisect.bisect_left(times, life.begin) for life in buffers]
    last = [bisect.bisect_left(times, life.end) for life in buffers]
    return first, last, len(times)


def step_bytes(buffers: Sequence[Lifetime]) -> int:
    """A unit in bytes: the pool of every packed plan is a multiple of it."""
    step = math.gcd(*(life.size_bytes for life in buffers), *(life.offset_bytes or 0 for life in buffers))
    alignments = {life.alignment_bytes for life in buffers}
    while clashes := [a for a in alignments if step % a and a % step]:
        step = math.gcd(step, clashes[0])
    return max(step, 1)


def lower_bound_bytes(buffers: Sequence[Lifetime]) -> int:
    """Lower bound of the bytes of all plans of one memory region.

    Buffers that are live at once lie one above the other. Each but the topmost counts up to where the next
    can begin: the next multiple of the unit that divides all alignments and required offsets. Any plan can be
    packed, and the pool of a packed plan is a multiple of `step_bytes`.
    """
    if not buffers:
        return 0
    unit = math.gcd(
        *(life.alignment_bytes for life in buffers), *(life.offset_bytes or 0 for life in buffers)
    )
    first, last, count = live_sections(buffers)
    change = np.zeros(count + 1, np.int64)
    spare = np.zeros(count, np.int64)
    for life, begin, end in zip(buffers, first, last):
        stacked = -(-life.size_bytes // unit) * unit
        change[begin] += stacked
        change[end] -= stacked
        np.maximum(spare[begin:end], stacked - life.size_bytes, out=spare[begin:end])
    ends = [life.offset_bytes + life.size_bytes for life in buffers if life.offset_bytes is not None]
    bound = max(int((np.cumsum(change[:-1]) - spare).max()), *ends, 0)
    step = step_bytes(buffers)
    return -(-bound // step) * step


def pool_end_bytes(buffers: Sequence[Lifetime], offsets: Sequence[int]) -> int:
    """End of the highest buffer: the bytes of the pool."""
    return max((int(offset) + life.size_bytes for life, offset in zip(buffers, offsets)), default=0)
