"""Choose how many memory channels have PIM: search the best plan of a network for several counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pimflow.api import prepare
from pimflow.api.arguments import public
from pimflow.api.channel_report import ChannelCount
from pimflow.api.options import QuestionKeywords
from pimflow.api.search import Question
from pimflow.errors import InfeasibleError, UsageError
from pimflow.hardware import System

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pimflow.frontend import Model

STEPS = 8  # the counts that are searched are multiples of this fraction of all channels


@dataclass(frozen=True, kw_only=True)
class ChannelChoice:
    """The system with the best number of PIM channels, and the figures for each number."""

    system: System
    counts: tuple[ChannelCount, ...]


def counts(system: System) -> list[int]:
    """Numbers of PIM channels to search: multiples of an eighth; all channels only if time-shared."""
    every = system.gpu.memory_channels
    tried = sorted({max(every * part // STEPS, 1) for part in range(1, STEPS + 1)})
    return [count for count in tried if count < every or system.time_shared]


@public(QuestionKeywords)
def choose_channels(
    model: Model,
    target_system: System | None = None,
    *,
    progress: Callable[[str], None] = lambda _: None,
    **question: Unpack[QuestionKeywords],
) -> ChannelChoice:
    """Search a network for each number of `counts`, and return the best number of PIM channels.

    Of equally good numbers, it is the smallest.

    Parameters
    ----------
    model, target_system, **question
        As for `api.search.search`, without a plan; the objective is not ``memory``.
    progress : callable
        Called with the number that is searched.

    Raises
    ------
    InfeasibleError
        If no number has a plan within the bounds.
    UsageError, PimflowError
        See `api.search.search`.
    """
    asked_for = Question.of(target_system, **question)
    if asked_for.goal.objective == "memory":
        raise UsageError(
            "--pim-channels auto compares times and energies; with --objective memory, give a number"
        )
    tried = counts(asked_for.system)
    systems = [replace(asked_for.system, pim_channels=count) for count in tried]
    questions = [replace(asked_for, system=each).checked() for each in systems]
    network = prepare.load(model, asked_for.options)
    rows: list[ChannelCount] = []
    values: list[float] = []
    failed: InfeasibleError | None = None
    for each in questions:
        count = each.system.pim_channels
        progress(f"searching with {count} PIM channels")
        try:
            _, found = each.answered(network)
        except InfeasibleError as error:
            failed = error
            rows.append(ChannelCount(pim_channels=count, latency_ns=None, energy_pj=None, speedup=None))
            values.append(float("inf"))
            continue
        latency_ns = found.evaluation.latency_ns
        row = ChannelCount(
            pim_channels=count,
            latency_ns=latency_ns,
            energy_pj=found.evaluation.energy_pj,
            speedup=found.baseline.latency_ns / latency_ns,
        )
        rows.append(row)
        values.append(each.goal.value(found.evaluation))
    best = values.index(min(values))
    if failed and rows[best].latency_ns is None:
        raise failed
    rows[best] = replace(rows[best], chosen=True)
    return ChannelChoice(system=questions[best].system, counts=tuple(rows))
