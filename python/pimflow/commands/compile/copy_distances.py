"""Choose how far ahead streamed weights are copied: search the plan of a network for several distances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pimflow.commands.shared import prepare
from pimflow.commands.shared.arguments import public
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

DISTANCES = (0, 1, 2, 4, 8, 16)  # kernels


@dataclass(frozen=True, kw_only=True)
class CopyChoice:
    """The system with the best distance of copies, and the figures for each distance."""

    system: System
    distances: tuple[CopyDistance, ...]


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
    systems = [replace(request.system, copy_ahead=distance) for distance in DISTANCES]
    requests = [replace(request, system=candidate).validate() for candidate in systems]
    network = prepare.load(model, request.options)
    rows: list[CopyDistance] = []
    infeasible: InfeasibleError | None = None
    for candidate in requests:
        progress(f"searching with copies {candidate.system.copy_ahead} kernels ahead")
        try:
            rows.append(_distance(candidate, network))
        except InfeasibleError as error:
            infeasible = error
            row = CopyDistance(copy_ahead=candidate.system.copy_ahead, latency_ns=None, pool_bytes=None)
            rows.append(row)
    latencies = [float("inf") if row.latency_ns is None else row.latency_ns for row in rows]
    best = latencies.index(min(latencies))
    if infeasible and rows[best].latency_ns is None:
        raise infeasible
    rows[best] = replace(rows[best], chosen=True)
    return CopyChoice(system=requests[best].system, distances=tuple(rows))


def _distance(request: SearchRequest, network: Network) -> CopyDistance:
    """The latency with copies of the best plan, and its pool as it is built."""
    prepared, search_result = request.find_plan(network)
    target = targets.target_by_name(request.target)
    pools = PlanPools(network=prepared, target=target, system=request.system)
    streaming = StreamingReport.from_search(search_result)
    assert streaming is not None  # the system streams
    return CopyDistance(
        copy_ahead=request.system.copy_ahead,
        latency_ns=streaming.plan.latency_ns,
        pool_bytes=pools.pool_bytes(search_result),
    )
