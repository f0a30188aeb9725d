"""Occamy's four placement policies (Lee et al., section III-C)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pimflow.core.liveness import Lifetime

Hole = tuple[int, int | None]  # begin and end in bytes; the topmost has no end


def place_in_order(buffers: Sequence[Lifetime], order: Sequence[int], best_hole: bool) -> list[int]:
    """Place buffers one after another in `order`, each in the lowest hole that is big enough.

    Parameters
    ----------
    order : sequence of int
        Indices of `buffers`. Buffers with a required offset are placed before all others.
    best_hole : bool
        Take the smallest hole that is big enough instead of the lowest.

    Returns
    -------
    list of int
        Offset of each buffer, in bytes.
    """
    begin = np.array([life.begin for life in buffers])
    end = np.array([life.end for life in buffers])
    size = np.array([life.size_bytes for life in buffers])
    offset = np.zeros(len(buffers), np.int64)
    is_placed = np.zeros(len(buffers), bool)
    for index, life in enumerate(buffers):
        if life.offset_bytes is not None:
            offset[index] = life.offset_bytes
            is_placed[index] = True
    for index in order:
        if is_placed[index]:
            continue
        life = buffers[index]
        neighbours = np.flatnonzero(is_placed & (begin < life.end) & (end > life.begin))
        neighbours = neighbours[np.argsort(offset[neighbours], kind="stable")]
        holes = _holes(offset[neighbours], offset[neighbours] + size[neighbours], life)
        offset[index] = min(holes, key=_slack)[0] if best_hole else next(holes)[0]
        is_placed[index] = True
    return [int(x) for x in offset]


def _holes(low: np.ndarray, high: np.ndarray, life: Lifetime) -> Iterator[Hole]:
    """Holes that have room for `life` between occupied ranges, which are sorted by `low`; lowest first."""
    covered = np.maximum.accumulate(np.concatenate(([0], high)))
    starts = -(-covered // life.alignment_bytes) * life.alignment_bytes
    for index in np.flatnonzero(low - starts[:-1] >= life.size_bytes):
        yield int(starts[index]), int(low[index])
    yield int(starts[-1]), None


def _slack(hole: Hole) -> tuple[bool, int]:
    return (hole[1] is None, 0 if hole[1] is None else hole[1] - hole[0])


# Order, and whether the smallest hole is taken. The paper does not say in which order the first two go: here
# it is the order in which the program defines the buffers. It also breaks every tie.
_POLICIES: dict[str, tuple[Callable[[Lifetime], int | tuple[int, int]], bool]] = {
    "first-fit": (lambda life: life.begin, False),
    "best-fit": (lambda life: life.begin, True),
    "longer-first": (lambda life: (life.begin - life.end, life.begin), False),
    "bigger-first": (lambda life: (-life.size_bytes, life.begin), False),
}
POLICIES = tuple(_POLICIES)


def place(buffers: Sequence[Lifetime], policy: str) -> list[int]:
    """Offsets of the buffers of one memory region under one of `POLICIES`, in bytes."""
    key, best_hole = _POLICIES[policy]
    order = sorted(range(len(buffers)), key=lambda index: key(buffers[index]))
    return place_in_order(buffers, order, best_hole)
