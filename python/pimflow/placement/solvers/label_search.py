"""The label-setting search in C++ (``placement/src/label_search.h``): queries of a problem, and plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pimflow.core.candidate import Candidate
from pimflow.host import native
from pimflow.placement.solvers.problem import PlacementProblem
from pimflow.placement.solvers.solution import Criterion

_search = native.get("pimflow.placement.search")

INFINITE = 1e300  # in C++
MAX_LABELS = 1_000_000  # at a position: some hundreds of MB
COMPARED_LABELS = 10_000
SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class SearchQuery:
    """A query of a problem.

    Attributes
    ----------
    criteria : sequence of Criterion
        The first is minimised, unless memory is; all are bounded.
    counts_memory : bool
        Whether the peaks of the pools count, one pool for each set of channels.
    minimises_memory : bool
        Whether the sum of the pools is minimised.
    only_gpu : bool
        Whether plans have no PIM, and a single pool.
    front : bool
        Whether all Pareto-optimal plans in the criteria are required.
    max_memory_bytes, capacity_bytes : float
        Bounds of the pools, and of the contents of PIM's channels. With the latter, the last criterion counts
        rows and filters.
    max_labels : int
        Limit of the labels at a position.
    compared_labels : int
        Limit of the labels at a position while the peaks of pools that share a budget are compared; beyond
        it, branch and bound on the pools takes over.
    seconds : float
        Time after which labels are dropped; a plan and a bound are found even so.
    """

    criteria: Sequence[Criterion]
    counts_memory: bool = False
    minimises_memory: bool = False
    only_gpu: bool = False
    front: bool = False
    max_memory_bytes: float = math.inf
    capacity_bytes: float = math.inf
    max_labels: int = MAX_LABELS
    compared_labels: int = COMPARED_LABELS
    seconds: float = SECONDS


@dataclass(frozen=True, kw_only=True)
class Label:
    """A plan with the figures of the search: latency, bytes of its pools, values of the criteria.

    The latency is NaN if no criterion counts times or energies.
    """

    candidates: tuple[Candidate, ...]
    latency_ns: float
    pool_bytes: float
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The plans that answer a query, the best first.

    `bound` is a lower bound of the value of all plans; `dropped_bound` of those that were dropped, `INFINITE`
    if the search ended in time.
    """

    plans: tuple[Label, ...]
    bound: float
    dropped_bound: float
    labels: int = field(repr=False)
    max_labels: int = field(repr=False)


def _row(criterion: Criterion) -> list[float]:
    """The fields of `Criterion` in C++, in their order."""
    weights = [criterion.per_ns, criterion.per_pj, criterion.per_error]
    bytes_weights = [criterion.per_row_byte, criterion.per_filter_byte]
    return [*weights, *bytes_weights, min(criterion.upper_bound, INFINITE), criterion.tolerance]


def search(problem: PlacementProblem, query: SearchQuery) -> Labels:
    """Answer `query`; without plans if none is within the bounds."""
    import tvm_ffi

    rows = np.array([_row(criterion) for criterion in query.criteria], np.float64).reshape(-1, 7)
    limits = (
        *(query.max_memory_bytes, query.capacity_bytes),
        *(query.max_labels, query.compared_labels, query.seconds),
    )
    numbers = [min(float(limit), INFINITE) for limit in limits]
    flags = [query.counts_memory, query.minimises_memory, query.only_gpu, query.front]
    plans, bound, dropped_bound, labels, max_labels = _search(
        problem.native, tvm_ffi.from_dlpack(rows), numbers, flags
    )
    return Labels(
        plans=tuple(
            Label(
                candidates=tuple(problem.candidates[int(number)] for number in candidates),
                latency_ns=latency_ns,
                pool_bytes=pool_bytes,
                values=tuple(values),
            )
            for latency_ns, pool_bytes, values, candidates in plans
        ),
        bound=bound,
        dropped_bound=dropped_bound,
        labels=labels,
        max_labels=max_labels,
    )
