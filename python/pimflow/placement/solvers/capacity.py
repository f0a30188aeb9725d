"""Rows of PIM's banks that a plan takes: for weights, caches, and tensors in plain memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pimflow.core.candidate import Candidate
from pimflow.core.rewrite import AttentionRewrite
from pimflow.hardware import System


def row_bytes(system: System) -> int:
    """Bytes of one row across the banks of all PIM channels."""
    pim = system.pim
    return pim.banks * pim.columns_per_row * pim.column_bytes * system.pim_channels


def channel_bytes(system: System) -> int:
    """Bytes of all rows of the PIM channels."""
    return system.pim.usable_rows * row_bytes(system)


def weight_row_bytes(system: System, candidates: Sequence[Candidate]) -> int:
    """Bytes of the rows of a plan's weights and caches over all PIM channels."""
    return sum(c.footprint.bank_rows for c in candidates) * row_bytes(system)


def loaded_weight_bytes(system: System, candidates: Sequence[Candidate]) -> int:
    """Bytes of weights that are written to the PIM channels before the first inference; caches are not."""
    layers = [c for c in candidates if not isinstance(c.rewrite, AttentionRewrite)]
    return weight_row_bytes(system, layers)


def uses_plain_memory(candidate: Candidate) -> bool:
    """Whether a kernel of `candidate` uses the channels that have PIM, so that its tensors may lie there."""
    return any("pim" in task.also for task in candidate.tasks)


def bank_rows(system: System, candidates: Sequence[Candidate], pool_bytes: float) -> int:
    """Rows of each PIM bank that a plan takes; its pool counts if tensors may lie beside the weights."""
    rows = sum(c.footprint.bank_rows for c in candidates)
    if any(map(uses_plain_memory, candidates)):
        plain_bytes = pool_bytes + sum(c.footprint.filter_bytes for c in candidates)
        rows += math.ceil(plain_bytes / row_bytes(system))
    return rows
