"""Validator of memory plans: compares all pairs of buffers, and shares no code with the planners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pimflow.core.liveness import Lifetime
from pimflow.errors import VerificationError


def check(
    lifetimes: Sequence[Lifetime],
    offsets_bytes: Mapping[str, int],
    pools_bytes: Mapping[str, int],
    capacities_bytes: Mapping[str, int] | None = None,
) -> None:
    """Certify a plan.

    Parameters
    ----------
    pools_bytes : mapping
        Size of the pool of every memory region.
    capacities_bytes : mapping, optional
        Largest pool of the regions that have a limit.

    Raises
    ------
    VerificationError
        If a buffer has no offset, or is outside of its pool, not aligned, or not at its required offset; if
        two buffers overlap in time and in bytes, or two of an alias class do not share their bytes; or if a
        pool is above its capacity. The message names the first such buffers or pool.
    """
    for life in lifetimes:
        _check_lifetime(life, offsets_bytes.get(life.name), pools_bytes.get(life.memory))
    unknown = sorted(set(offsets_bytes) - {life.name for life in lifetimes})
    if unknown:
        raise VerificationError(f"the plan has an offset for '{unknown[0]}', which is no buffer")
    for memory, capacity in (capacities_bytes or {}).items():
        if pools_bytes.get(memory, 0) > capacity:
            raise VerificationError(
                f"the pool of memory '{memory}' takes {pools_bytes[memory]} B, its capacity is {capacity} B"
            )
    _check_aliases(lifetimes, offsets_bytes)
    _check_pairs(lifetimes, offsets_bytes)


def check_ranges(
    lifetimes: Sequence[Lifetime],
    offsets_bytes: Mapping[str, int],
    ranges_bytes: Mapping[str, tuple[int, int]],
    pool_bytes: int,
) -> None:
    """Certify a plan whose memory regions are ranges of one pool.

    Parameters
    ----------
    offsets_bytes : mapping
        Offset of every buffer in the pool by its name.
    ranges_bytes : mapping
        Begin and end of every memory region in the pool.

    Raises
    ------
    VerificationError
        If a region is outside of the pool, or two regions overlap; if a buffer is outside of its region or
        not aligned; or if two buffers overlap in time and in bytes, or two of an alias class do not share
        their bytes. The message names the first such regions or buffers.
    """
    for memory, (begin, end) in ranges_bytes.items():
        if not 0 <= begin <= end <= pool_bytes:
            raise VerificationError(
                f"memory '{memory}' takes bytes {begin} to {end}, outside of the pool of {pool_bytes} B"
            )
        for other_memory, (low, high) in ranges_bytes.items():
            if other_memory != memory and begin < high and low < end:
                shared = max(begin, low)
                raise VerificationError(f"memory '{memory}' and memory '{other_memory}' share byte {shared}")
    for life in lifetimes:
        if life.name not in offsets_bytes:
            raise VerificationError(f"buffer '{life.name}' has no offset")
        if life.memory not in ranges_bytes:
            where = f"memory '{life.memory}', which has no range"
            raise VerificationError(f"buffer '{life.name}' lies in {where}")
        (begin, end), offset = ranges_bytes[life.memory], offsets_bytes[life.name]
        if life.size_bytes and not begin <= offset <= offset + life.size_bytes <= end:
            raise VerificationError(
                f"buffer '{life.name}' takes bytes {offset} to {offset + life.size_bytes}, outside of memory "
                f"'{life.memory}' (bytes {begin} to {end})"
            )
        if offset % life.alignment_bytes:
            raise VerificationError(
                f"buffer '{life.name}' lies at {offset} B, no multiple of {life.alignment_bytes} B"
            )
    _check_aliases(lifetimes, offsets_bytes)
    _check_pairs(lifetimes, offsets_bytes)


def _check_lifetime(life: Lifetime, offset: int | None, pool: int | None) -> None:
    where = f"buffer '{life.name}'"
    if offset is None:
        raise VerificationError(f"{where} has no offset")
    if pool is None:
        raise VerificationError(f"{where} lies in memory '{life.memory}', which has no pool")
    if offset < 0 or (life.size_bytes and offset + life.size_bytes > pool):
        raise VerificationError(
            f"{where} takes bytes {offset} to {offset + life.size_bytes}, outside of its pool of {pool} B"
        )
    if offset % life.alignment_bytes:
        raise VerificationError(f"{where} lies at {offset} B, no multiple of {life.alignment_bytes} B")
    if life.offset_bytes is not None and offset != life.offset_bytes:
        raise VerificationError(f"{where} lies at {offset} B and has to lie at {life.offset_bytes} B")


def _check_aliases(lifetimes: Sequence[Lifetime], offsets_bytes: Mapping[str, int]) -> None:
    first_members: dict[tuple[str, str], Lifetime] = {}
    for life in lifetimes:
        if not life.alias:
            continue
        first_member = first_members.setdefault((life.memory, life.alias), life)
        distance = offsets_bytes[life.name] - offsets_bytes[first_member.name]
        if distance != life.within_bytes - first_member.within_bytes:
            raise VerificationError(
                f"buffers '{first_member.name}' and '{life.name}' share their bytes and lie at "
                f"{offsets_bytes[first_member.name]} and {offsets_bytes[life.name]} B, {distance} and not "
                f"{life.within_bytes - first_member.within_bytes} B apart"
            )


def _check_pairs(lifetimes: Sequence[Lifetime], offsets_bytes: Mapping[str, int]) -> None:
    def column(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    begin = column([life.begin for life in lifetimes])
    end = column([life.end for life in lifetimes])
    low = column([offsets_bytes[life.name] for life in lifetimes])
    size = column([life.size_bytes for life in lifetimes])
    regions = {name: number for number, name in enumerate(sorted({life.memory for life in lifetimes}))}
    region = column([regions[life.memory] for life in lifetimes])
    groups: dict[tuple[str, str], int] = {}
    group = column([groups.setdefault((life.memory, life.alias), len(groups)) for life in lifetimes])
    for index, life in enumerate(lifetimes):
        later = slice(index + 1, None)
        clash = (begin[later] < life.end) & (end[later] > life.begin)
        clash &= (low[later] < low[index] + size[index]) & (low[later] + size[later] > low[index])
        clash &= (size[later] > 0) & (life.size_bytes > 0) & (region[later] == region[index])
        if life.alias:
            clash &= group[later] != group[index]
        if clash.any():
            clashing = lifetimes[index + 1 + int(np.argmax(clash))]
            raise VerificationError(
                f"buffers '{life.name}' and '{clashing.name}' are both live in step "
                f"{max(life.begin, clashing.begin)} and share byte "
                f"{max(offsets_bytes[life.name], offsets_bytes[clashing.name])} of memory '{life.memory}'"
            )
