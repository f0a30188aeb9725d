"""Rows of PIM's banks that a plan takes: weights, caches, and what channels hold as plain memory beside."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pimflow.core.candidate import Candidate
from pimflow.hardware import System
from pimflow.placement.solvers.plan_memory import PlanMemory


def row_bytes(system: System) -> int:
    """Bytes of one row across the banks of a PIM channel."""
    pim = system.pim
    return pim.banks * pim.columns_per_row * pim.column_bytes


def channel_bytes(system: System) -> int:
    """Bytes of all rows of the PIM channels."""
    return system.pim.rows_to_use * row_bytes(system) * system.pim_channels


def held_bytes(system: System, candidates: Sequence[Candidate]) -> int:
    """Bytes of the rows that weights and caches of a plan take over all PIM channels."""
    return sum(c.placed_rows for c in candidates) * row_bytes(system) * system.pim_channels


def uses_plain_memory(candidate: Candidate) -> bool:
    """Whether a kernel of `candidate` uses the channels that have PIM: all that it touches may lie there."""
    return any("pim" in task.also for task in candidate.tasks)


def plain_rows(system: System, held_bytes: float) -> int:
    """Rows of each bank of PIM that so many bytes take over all its channels."""
    return math.ceil(held_bytes / (row_bytes(system) * system.pim_channels))


def rows_taken(system: System, memory: PlanMemory, candidates: Sequence[Candidate]) -> int:
    """Rows of each bank of PIM that a plan takes."""
    rows = sum(c.placed_rows for c in candidates)
    if any(map(uses_plain_memory, candidates)):
        rows += plain_rows(system, memory.of(candidates) + sum(c.filter_bytes for c in candidates))
    return rows
