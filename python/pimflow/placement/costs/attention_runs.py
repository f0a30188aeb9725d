"""The fastest layouts and orders of attention over a cache in PIM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pimflow.core.attention import Attention
from pimflow.errors import InfeasibleError, UnsupportedOpError
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs import attention as programs
from pimflow.pim_backend.programs.cache_layout import CacheLayout, KeyLayout, ValueLayout
from pimflow.simulators.profiler import PimProfiler

Layout = TypeVar("Layout", bound=CacheLayout)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One product of a decode step as it is computed.

    Attributes
    ----------
    cycles : int
        Of its programs, one after the other.
    comp_cycles : int
        Cycles in which multipliers work, of the channel that has most to do.
    """

    layout: CacheLayout
    step: programs.Step
    cycles: int
    comp_cycles: int

    @property
    def busy(self) -> float:
        """Share of the time in which multipliers work."""
        return self.comp_cycles / self.cycles


def fastest_scores(
    attention: Attention, pim: PimSpec, dtype: str, channels: int, profiler: PimProfiler, tokens: int = 0
) -> Timed:
    """The fastest way to ``Q K^T`` over `tokens` tokens, all by default, of a cache of ``attention.keys``.

    Raises
    ------
    UnsupportedOpError, InfeasibleError
        Where no layout is possible; see `CacheLayout.fits`.
    """

    layouts = [
        KeyLayout(attention=attention, pim=pim, dtype=dtype, channels=channels, spread=spread, lanes=lanes)
        for spread in _divisors(channels)
        for lanes in _lanes(pim, dtype)
    ]
    length = tokens or attention.keys

    def steps(layout: KeyLayout) -> Iterator[programs.Step]:
        for order in _orders(attention):
            yield programs.scores(layout, length, order)

    return _fastest(layouts, steps, profiler)


def fastest_mix(
    attention: Attention, pim: PimSpec, dtype: str, channels: int, profiler: PimProfiler, tokens: int = 0
) -> Timed:
    """The fastest way to ``S V``; as `fastest_scores`."""

    layouts = [
        ValueLayout(attention=attention, pim=pim, dtype=dtype, channels=channels, spread=spread, lanes=lanes)
        for spread in _divisors(channels)
        for lanes in _lanes(pim, dtype)
    ]
    length = tokens or attention.keys

    def steps(layout: ValueLayout) -> Iterator[programs.Step]:
        for order in _orders(attention):
            yield programs.mix(layout, length, order)
        if programs.may_accumulate(layout):
            yield programs.mix(layout, length, accumulate=True)

    return _fastest(layouts, steps, profiler)


def timed(layout: CacheLayout, step: programs.Step, profiler: PimProfiler) -> Timed:
    """What the programs of `step` take."""
    found = [profiler.time_program(program, layout.pim) for program in step.programs]
    comps = sum(max(commands["COMP"] for commands in each.channel_commands) for each in found)
    return Timed(
        layout=layout,
        step=step,
        cycles=sum(each.cycles for each in found),
        comp_cycles=comps * layout.pim.timing["nCCDS"],
    )


def _fastest(
    layouts: Sequence[Layout], steps: Callable[[Layout], Iterable[programs.Step]], profiler: PimProfiler
) -> Timed:
    found: list[Timed] = []
    for layout in layouts:
        try:
            layout.fits()
        except (UnsupportedOpError, InfeasibleError):
            continue
        found += (timed(layout, step, profiler) for step in steps(layout))
    if not found:
        layouts[0].fits()  # says why
    return min(found, key=lambda each: each.cycles)


def _lanes(pim: PimSpec, dtype: str) -> list[int]:
    return [1] + [pim.elements_per_column(dtype)] * (pim.lane_elements > 0)


def _orders(attention: Attention) -> tuple[str, ...]:
    """Orders that differ: of one vector a matrix, each product opens its row."""
    return programs.ORDERS if attention.group > 1 else programs.ORDERS[:1]


def _divisors(channels: int) -> list[int]:
    """The largest first: of channels that all share each matrix, every layout is possible."""
    return [spread for spread in range(channels, 0, -1) if channels % spread == 0]
