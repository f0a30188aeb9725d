"""Choose the system that is best for a network: its number of PIM channels, or its distance of copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pimflow.commands.shared import prepare
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.channel_report import ChannelCount
from pimflow.commands.shared.search import SearchRequest
from pimflow.commands.shared.search_arguments import SEARCH
from pimflow.commands.shared.streaming_report import CopyDistance, StreamingReport
from pimflow.compiler.plan_pools import PlanPools
from pimflow.errors import InfeasibleError, UsageError
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.pim_backend.runtime import targets

if TYPE_CHECKING:
    from pimflow.frontend import Model

STEPS = 8  # the counts that are searched are multiples of this fraction of all channels
DISTANCES = (0, 1, 2, 4, 8, 16)  # kernels

Row = TypeVar("Row", ChannelCount, CopyDistance)


@dataclass(frozen=True, kw_only=True)
class ChannelChoice:
    """The system with the best number of PIM channels, and the figures for each number."""

    system: System
    counts: tuple[ChannelCount, ...]


@dataclass(frozen=True, kw_only=True)
class CopyChoice:
    """The system with the best distance of copies, and the figures for each distance."""

    system: System
    distances: tuple[CopyDistance, ...]


def counts(system: System) -> list[int]:
    """Numbers of PIM channels to search: multiples of an eighth; all channels only if time-shared."""
    channels = system.gpu.memory_channels
    candidates = sorted({max(channels * part // STEPS, 1) for part in range(1, STEPS + 1)})
    return [count for count in candidates if count < channels or system.is_time_shared]


@public(*SEARCH, without=("plan",))
def choose_channels(
    model: Model,
    system: System | None = None,
    *,
    progress: Callable[[str], None] = lambda _: None,
    **keywords: Any,
) -> ChannelChoice:
    """Search a network for each number of `counts`, and return the best number of PIM channels.

    Of equally good numbers, it is the smallest.

    Parameters
    ----------
    model, system, **keywords
        As for `pimflow.search`, without a plan; the objective is not ``memory``.

    Raises
    ------
    InfeasibleError
        If no number has a plan within the bounds.
    UsageError, PimflowError
        See `pimflow.search`.
    """
    request = SearchRequest.from_arguments(system, **keywords)
    if request.goal.objective == "memory":
        raise UsageError(
            "--pim-channels auto compares times and energies; with --objective memory, give a number"
        )

    def figures(request: SearchRequest, network: Network) -> tuple[ChannelCount, float]:
        """The row of a number, and what the goal compares."""
        progress(f"searching with {request.system.pim_channels} PIM channels")
        _, search_result = request.find_plan(network)
        latency_ns = search_result.evaluation.latency_ns
        row = ChannelCount(
            pim_channels=request.system.pim_channels,
            latency_ns=latency_ns,
            energy_pj=search_result.evaluation.energy_pj,
            speedup=search_result.baseline.latency_ns / latency_ns,
        )
        return row, request.goal.value(search_result.evaluation)

    systems = [replace(request.system, pim_channels=count) for count in counts(request.system)]
    rows_without_plan = [ChannelCount(pim_channels=candidate.pim_channels) for candidate in systems]
    best, rows = _best_system(_requests(request, systems), model, figures, rows_without_plan)
    return ChannelChoice(system=best, counts=rows)


@public(*SEARCH, without=("plan",))
def choose_copy_ahead(
    model: Model,
    system: System | None = None,
    *,
    progress: Callable[[str], None] = lambda _: None,
    **keywords: Any,
) -> CopyChoice:
    """Search a network for each of `DISTANCES`; return the one of the least latency with copies.

    A bound on memory applies to the pool that is built, which has the weights while they are needed. Of
    equally good distances, it is the smallest.

    Parameters
    ----------
    model, system, **keywords
        As for `pimflow.search`, without a plan; the system streams weights, the objective is ``latency``.
    progress : callable
        Called with the distance that is searched.

    Raises
    ------
    InfeasibleError
        If no distance has a plan within the bounds.
    UsageError, PimflowError
        If weights are resident, or for another objective; see `pimflow.search`.
    """
    request = SearchRequest.from_arguments(system, **keywords)
    if not request.system.streams_weights:
        raise UsageError("--copy-ahead auto is for streamed weights: give --weights streamed")
    if request.goal.objective != "latency":
        raise UsageError(
            f"--copy-ahead auto compares latencies; with --objective {request.goal.objective}, give a number"
        )

    def figures(request: SearchRequest, network: Network) -> tuple[CopyDistance, float]:
        """The row of a distance, whose pool is as it is built, and the latency with copies."""
        progress(f"searching with copies {request.system.copy_ahead} kernels ahead")
        prepared, search_result = request.find_plan(network)
        target = targets.target_by_name(request.target)
        pools = PlanPools(network=prepared, target=target, system=request.system)
        streaming = StreamingReport.from_search(search_result)
        assert streaming is not None  # the system streams
        row = CopyDistance(
            copy_ahead=request.system.copy_ahead,
            latency_ns=streaming.plan.latency_ns,
            pool_bytes=pools.pool_bytes(search_result),
        )
        return row, streaming.plan.latency_ns

    systems = [replace(request.system, copy_ahead=distance) for distance in DISTANCES]
    rows_without_plan = [CopyDistance(copy_ahead=distance) for distance in DISTANCES]
    best, rows = _best_system(_requests(request, systems), model, figures, rows_without_plan)
    return CopyChoice(system=best, distances=rows)


def _requests(request: SearchRequest, systems: Sequence[System]) -> list[SearchRequest]:
    """The same request for each of `systems`; raises before any work."""
    return [replace(request, system=system).validate() for system in systems]


def _best_system(
    requests: Sequence[SearchRequest],
    model: Model,
    figures: Callable[[SearchRequest, Network], tuple[Row, float]],
    rows_without_plan: Sequence[Row],
) -> tuple[System, tuple[Row, ...]]:
    """The system of the request with the smallest value, the first of equals; and the rows of all.

    `figures` gives the row and the value of a request. Where no plan is within the bounds, the row is that of
    `rows_without_plan`; if that is so for all requests, the last `InfeasibleError` is raised.
    """
    network = prepare.load(model, requests[0].options)
    rows: list[Row] = []
    values: list[float] = []
    infeasible: InfeasibleError | None = None
    for request, row_without_plan in zip(requests, rows_without_plan, strict=True):
        try:
            row, value = figures(request, network)
        except InfeasibleError as error:
            infeasible, row, value = error, row_without_plan, math.inf
        rows.append(row)
        values.append(value)
    best = values.index(min(values))
    if infeasible and math.isinf(values[best]):
        raise infeasible
    rows[best] = replace(rows[best], chosen=True)
    return requests[best].system, tuple(rows)
