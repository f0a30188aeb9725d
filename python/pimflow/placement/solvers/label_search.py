"""The label-setting search in C++ (``placement/src/label_search.h``): queries of a problem, and plans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pimflow.core.candidate import Candidate
from pimflow.host import native
from pimflow.placement.solvers.problem import PlacementProblem

_search = native.get("pimflow.placement.search")
_OPTIONS = native.Record("pimflow.placement.query_options")
_LIMITS = native.Record("pimflow.placement.query_limits")
_CRITERION = native.Record("pimflow.placement.criterion")

INFINITE = 1e300  # in C++
MAX_LABELS = 1_000_000  # at a position: some hundreds of MB
COMPARED_LABELS = 10_000
SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A weighted sum over a plan that is minimised, or bounded by `upper_bound`.

    Attributes
    ----------
    per_ns, per_pj, per_error, per_row_byte, per_filter_byte : float
        Weights of the latency, the energy of the tasks, the error, the bytes of PIM's rows and of filters.
    tolerance : float
        In a front, how much worse a dominating label may be at each position.
    """

    per_ns: float = 0.0
    per_pj: float = 0.0
    per_error: float = 0.0
    per_row_byte: float = 0.0
    per_filter_byte: float = 0.0
    upper_bound: float = math.inf
    tolerance: float = 0.0

    def value(self, latency_ns: float, energy_pj: float, candidates: Iterable[Candidate]) -> float:
        """The value for a plan, from its latency, the energy of its tasks and its errors."""
        error = sum(candidate.alternative.error for candidate in candidates)
        return self.per_ns * latency_ns + self.per_pj * energy_pj + self.per_error * error


LATENCY = Criterion(per_ns=1.0)
ERROR = Criterion(per_error=1.0)


@dataclass(frozen=True, kw_only=True)
class SearchQuery:
    """A query of a problem.

    Attributes
    ----------
    criteria : tuple of Criterion
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

    criteria: tuple[Criterion, ...]
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


def _table(record: native.Record, sources: Sequence[object]) -> np.ndarray:
    """A record of each source, of its attributes; infinite ones are `INFINITE`."""
    rows = [[min(getattr(source, name), INFINITE) for name in record.fields] for source in sources]
    return record.table(record.fields, rows)


def search(problem: PlacementProblem, query: SearchQuery) -> Labels:
    """Answer `query`; without plans if none is within the bounds."""
    import tvm_ffi

    tables = (_table(_OPTIONS, [query]), _table(_LIMITS, [query]), _table(_CRITERION, query.criteria))
    answer = _search(problem.native, *map(tvm_ffi.from_dlpack, tables))
    return Labels(
        plans=tuple(
            Label(
                candidates=problem.plan(plan["candidates"]),
                latency_ns=plan["latency_ns"],
                pool_bytes=plan["pool_bytes"],
                values=tuple(plan["values"]),
            )
            for plan in answer["plans"]
        ),
        **{name: answer[name] for name in ("bound", "dropped_bound", "labels", "max_labels")},
    )
