"""Choose how many memory channels have PIM: search the best plan of a network for several counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pimflow.commands.shared import prepare
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.channel_report import ChannelCount
from pimflow.commands.shared.search import SearchRequest
from pimflow.commands.shared.search_arguments import SEARCH
from pimflow.errors import InfeasibleError, UsageError
from pimflow.hardware import System

if TYPE_CHECKING:
    from pimflow.frontend import Model

STEPS = 8  # the counts that are searched are multiples of this fraction of all channels


@dataclass(frozen=True, kw_only=True)
class ChannelChoice:
    """The system with the best number of PIM channels, and the figures for each number."""

    system: System
    counts: tuple[ChannelCount, ...]


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
    progress : callable
        Called with the number that is searched.

    Raises
    ------
    InfeasibleError
        If no number has a plan within the bounds.
    UsageError, PimflowError
        See `pimflow.search`.
    """
    base_request = SearchRequest.from_arguments(system, **keywords)
    if base_request.goal.objective == "memory":
        raise UsageError(
            "--pim-channels auto compares times and energies; with --objective memory, give a number"
        )
    pim_channels = counts(base_request.system)
    systems = [replace(base_request.system, pim_channels=count) for count in pim_channels]
    requests = [replace(base_request, system=candidate).validate() for candidate in systems]
    network = prepare.load(model, base_request.options)
    rows: list[ChannelCount] = []
    values: list[float] = []
    infeasible: InfeasibleError | None = None
    for candidate in requests:
        count = candidate.system.pim_channels
        progress(f"searching with {count} PIM channels")
        try:
            _, search_result = candidate.find_plan(network)
        except InfeasibleError as error:
            infeasible = error
            rows.append(ChannelCount(pim_channels=count, latency_ns=None, energy_pj=None, speedup=None))
            values.append(float("inf"))
            continue
        latency_ns = search_result.evaluation.latency_ns
        row = ChannelCount(
            pim_channels=count,
            latency_ns=latency_ns,
            energy_pj=search_result.evaluation.energy_pj,
            speedup=search_result.baseline.latency_ns / latency_ns,
        )
        rows.append(row)
        values.append(candidate.goal.value(search_result.evaluation))
    best = values.index(min(values))
    if infeasible and rows[best].latency_ns is None:
        raise infeasible
    rows[best] = replace(rows[best], chosen=True)
    return ChannelChoice(system=requests[best].system, counts=tuple(rows))
