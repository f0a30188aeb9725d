"""The exact planner: searches for a plan below a capacity, again and again, until a pool is proved smallest.

The search is ``src/canonical_search.cc``. For a capacity it finds a plan, proves that there is none, or stops
at its limit of nodes. Limits are in nodes, not in seconds, so that the same buffers give the same plan unless
the time runs out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pimflow.core.liveness import Lifetime
from pimflow.host import native
from pimflow.memory.pools import live_sections, lower_bound_bytes, pool_end_bytes, step_bytes

_search = native.get("pimflow.memory.search")
_BUFFER = native.Record("pimflow.memory.buffer")
_FEASIBLE, _INFEASIBLE, _STOPPED = range(3)
_FIRST_NODES = 20_000


@dataclass
class Incumbent:
    """The best plan so far, and a lower bound of all plans.

    Attributes
    ----------
    offsets : list of int
        Of the best plan so far, in bytes.
    pool_bytes, lower_bound_bytes : int
        Equal if the plan is proved to be the best.
    nodes : int
        Nodes searched so far.
    """

    offsets: list[int]
    pool_bytes: int
    lower_bound_bytes: int
    nodes: int = 0

    @property
    def is_optimal(self) -> bool:
        """Whether it is proved that no plan is smaller."""
        return self.pool_bytes <= self.lower_bound_bytes


def solve(
    buffers: Sequence[Lifetime],
    start_offsets: Sequence[int],
    seconds: float,
    capacity_bytes: int | None = None,
) -> Incumbent:
    """Improve the plan `start_offsets` of one memory region.

    Parameters
    ----------
    start_offsets : sequence of int
        Offsets of a plan, in bytes.
    seconds : float
        Time limit.
    capacity_bytes : int, optional
        If given, only decide whether a plan fits: stop at the first plan of at most so many bytes, or at the
        proof that none exists (`lower_bound_bytes` is above the capacity).

    Raises
    ------
    KeyboardInterrupt
        On Ctrl-C.
    """
    step = step_bytes(buffers)
    solution = Incumbent(
        list(start_offsets), pool_end_bytes(buffers, start_offsets), lower_bound_bytes(buffers)
    )
    deadline = time.monotonic() + seconds
    rows, count = _buffer_rows(buffers)

    def is_done() -> bool:
        """Whether the question is answered, or the time is up."""
        is_open = capacity_bytes is None or solution.lower_bound_bytes <= capacity_bytes < solution.pool_bytes
        return not is_open or solution.is_optimal or time.monotonic() >= deadline

    def try_capacity(capacity: int, nodes: int) -> int:
        """Search a plan of at most `capacity` bytes; one that is found becomes the solution."""
        offsets, remaining_seconds = np.zeros(len(buffers), np.int64), max(deadline - time.monotonic(), 0.0)
        answer = _search(rows, offsets, count, capacity, nodes, remaining_seconds)
        outcome: int = answer["outcome"]
        solution.nodes += answer["nodes"]
        if outcome == _FEASIBLE:
            solution.offsets = offsets.tolist()
            solution.pool_bytes = pool_end_bytes(buffers, solution.offsets)
        return outcome

    nodes = _FIRST_NODES
    while not is_done():
        # Below `low` there is no plan, or this round's limit of nodes was too small to find one.
        low = solution.lower_bound_bytes
        # Pools of packed plans are multiples of `step`.
        capacity = low if capacity_bytes is None else capacity_bytes // step * step
        while not is_done() and low < solution.pool_bytes:
            outcome = try_capacity(capacity, nodes)
            if outcome == _INFEASIBLE:
                solution.lower_bound_bytes = max(
                    solution.lower_bound_bytes, min(capacity + step, solution.pool_bytes)
                )
            if capacity_bytes is not None:
                break
            if outcome != _FEASIBLE:
                low = capacity + step
            capacity = low + (solution.pool_bytes - low) // (2 * step) * step
        nodes *= 2
    return solution


def _buffer_rows(buffers: Sequence[Lifetime]) -> tuple[np.ndarray, int]:
    first, last, count = live_sections(buffers)
    rows = [
        (
            *(begin, end, life.end - life.begin, life.size_bytes, life.alignment_bytes),
            -1 if life.offset_bytes is None else life.offset_bytes,
        )
        for life, begin, end in zip(buffers, first, last)
    ]
    return _BUFFER.table(("first", "last", "width", "size", "alignment", "fixed"), rows), count
