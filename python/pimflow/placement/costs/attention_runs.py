"""Schedules of attention over a cache in PIM, layouts included, and their costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pimflow.core.attention import Attention
from pimflow.core.program import PimProgram
from pimflow.errors import InfeasibleError, UnsupportedOpError
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs import attention as programs
from pimflow.pim_backend.programs.cache_appends import append_keys, append_values
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout
from pimflow.pim_backend.programs.cache_schedule import ProductSchedule
from pimflow.placement.costs.pim_runs import PimCost, PimRun, PimSide
from pimflow.simulators.profiler import PimProfiler

Layout = KeyLayout | ValueLayout
KEYS, VALUES = KeyLayout.kind, ValueLayout.kind
RANKED_TOKENS = 2048  # schedules are ranked over so many tokens, if there are more
TIMED = 2  # how many of the best ranked schedules are timed over all tokens


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One product of a decode step, with its layout, programs and time.

    Attributes
    ----------
    cycles : int
        Of its programs in sequence.
    comp_cycles : int
        Cycles in which the multipliers of the busiest channel work.
    """

    layout: Layout
    step: programs.Step
    cycles: int
    comp_cycles: int

    @property
    def busy(self) -> float:
        """Share of the time in which the multipliers work."""
        return self.comp_cycles / self.cycles


def fastest(
    product: str, attention: Attention, pim: PimSpec, dtype: str, channels: int, profiler: PimProfiler
) -> Timed:
    """The fastest schedule of a product, `KEYS` or `VALUES`, over a full cache.

    Raises
    ------
    UnsupportedOpError, InfeasibleError
        If no layout is possible; see `CacheLayout.fits`.
    """
    ways = every_schedule(product, attention, pim, dtype, channels)
    found = (timed(layout, way.step(layout, attention.keys), profiler) for way, layout in ways)
    return min(found, key=lambda each: each.cycles)


def timed(layout: Layout, step: programs.Step, profiler: PimProfiler) -> Timed:
    """Time the programs of `step`."""
    found = [profiler.time_program(program, layout.pim) for program in step.programs]
    comps = sum(max(commands["COMP"] for commands in each.channel_commands) for each in found)
    return Timed(
        layout=layout,
        step=step,
        cycles=sum(each.cycles for each in found),
        comp_cycles=comps * layout.pim.timing["nCCDS"],
    )


@dataclass(frozen=True, kw_only=True)
class ProductCost:
    """The cost of one product of a decode step by one schedule, and of the append to its cache.

    Attributes
    ----------
    product : PimCost
        Of its programs in sequence; `rows` are those of the cache.
    append : PimCost
        Of the program that writes a token to the cache.
    sums : int
        Partial sums for each element of the product.
    """

    schedule: ProductSchedule
    product: PimCost
    append: PimCost
    sums: int

    @property
    def rows(self) -> int:
        """Rows of every bank that the cache takes."""
        return self.product.rows

    def further(self, other: ProductCost, steps: float) -> ProductCost:
        """Extrapolate linearly: the cost `steps` times as far from this one as `other`, of one schedule."""
        return replace(
            self,
            product=self.product.further(other.product, steps),
            append=self.append.further(other.append, steps),
            sums=round(self.sums + steps * (other.sums - self.sums)),
        )


@dataclass(frozen=True, kw_only=True)
class CacheWork:
    """One product of attention over a cache, to be timed by all schedules.

    Attributes
    ----------
    side : PimSide
    attention : Attention
        Normalised by `like`: attention with the same programs is equal.
    product : str
        `KEYS` or `VALUES`.
    tokens : int
        Tokens in the cache, this step's included.
    """

    side: PimSide
    attention: Attention
    product: str
    tokens: int

    @classmethod
    def like(cls, side: PimSide, attention: Attention, product: str, tokens: int = 0) -> CacheWork:
        """The work for `attention` over `tokens` tokens, by default all; equal if the programs are equal."""
        same = Attention(
            batch=attention.batch,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_size=attention.head_size,
            value_size=attention.value_size,
            queries=1,
            keys=attention.keys,
            scale=1.0,
            positioned=True,
        )
        return cls(side=side, attention=same, product=product, tokens=tokens or attention.keys)

    @property
    def key(self) -> tuple:
        """The cache key of its costs."""
        return ("cache", self.side.identity, self.attention, self.product, self.tokens)

    def costs(self) -> tuple[ProductCost, ...]:
        """Costs of the schedules that are candidates, the fastest first.

        If there are many tokens, schedules are ranked over fewer, as their times grow in proportion; only the
        best are timed over all.

        Raises
        ------
        UnsupportedOpError, InfeasibleError
            If no layout is possible; see `CacheLayout.fits`.
        """
        schedules = self.schedules()
        if len(schedules) > TIMED and self.tokens > RANKED_TOKENS:
            fewer = replace(self, tokens=RANKED_TOKENS)
            ranked = sorted(map(fewer.cost, schedules), key=total_ns)
            schedules = [each.schedule for each in (*ranked[:TIMED], min(ranked, key=_rows))]
        found = map(self.cost, dict.fromkeys(schedules))
        return tuple(sorted(found, key=total_ns))

    def schedules(self) -> list[ProductSchedule]:
        """All schedules of the product; raises as `costs`."""
        side = self.side
        ways = every_schedule(self.product, self.attention, side.pim, side.dtype, side.channels)
        return [schedule for schedule, _ in ways]

    def layout(self, schedule: ProductSchedule) -> Layout:
        """The layout of its cache by a schedule."""
        side = self.side
        return _layout(self.product, schedule, self.attention, side.pim, side.dtype, side.channels)

    def cost(self, schedule: ProductSchedule) -> ProductCost:
        """The cost by one schedule; raises as `costs`."""
        a, layout = self.attention, self.layout(schedule)
        layout.fits()
        step, new = schedule.step(layout, self.tokens), self.tokens - 1
        append = append_values if isinstance(layout, ValueLayout) else append_keys
        product = PimCost.joined([self._timed(program) for program in step.programs])
        elements = a.batch * a.heads * (self.tokens if self.product == KEYS else a.value_size)
        # More scores are read back than there are tokens, but scores are never added up.
        partial = 1 if self.product == KEYS else product.results // elements
        return ProductCost(
            schedule=schedule,
            product=product,
            append=self._timed(append(layout, new)),
            sums=partial * product.result_lanes,
        )

    def _timed(self, program: PimProgram) -> PimCost:
        timing = self.side.profiler.time_program(program, self.side.pim)
        return PimCost.of(PimRun(program=program, timing=timing), self.side.pim)


def total_ns(cost: ProductCost) -> float:
    """Time of the product and of the append."""
    return sum(each.time_ns + each.ahead_ns for each in (cost.product, cost.append))


def _rows(cost: ProductCost) -> int:
    return cost.rows


def every_schedule(
    product: str, attention: Attention, pim: PimSpec, dtype: str, channels: int
) -> list[tuple[ProductSchedule, Layout]]:
    """All schedules of a product of `attention`, each with the layout of its cache.

    Raises
    ------
    UnsupportedOpError, InfeasibleError
        If no layout is possible; see `CacheLayout.fits`.
    """
    found, refused = [], []
    for spread in _divisors(channels):
        for lanes in _lanes(pim, dtype):
            plain = ProductSchedule(order=programs.ORDERS[0], spread=spread, lanes=lanes)
            layout = _layout(product, plain, attention, pim, dtype, channels)
            try:
                layout.fits()
            except (UnsupportedOpError, InfeasibleError):
                refused.append(layout)
                continue
            found += [(each, layout) for each in _orders(plain, layout)]
    if not found:
        refused[0].fits()  # raises the reason
    return found


def _layout(
    product: str, schedule: ProductSchedule, attention: Attention, pim: PimSpec, dtype: str, channels: int
) -> Layout:
    kind = KeyLayout if product == KEYS else ValueLayout
    return schedule.layout(kind, attention, pim, dtype, channels)


def _orders(plain: ProductSchedule, layout: Layout) -> Iterator[ProductSchedule]:
    """The orders that differ: with one vector for each matrix, all orders are the same."""
    shared = layout.attention.group > 1
    yield from (replace(plain, order=order) for order in (programs.ORDERS if shared else programs.ORDERS[:1]))
    if isinstance(layout, ValueLayout) and programs.may_accumulate(layout):
        yield replace(plain, accumulate=True)


def _lanes(pim: PimSpec, dtype: str) -> Sequence[int]:
    return [1] + [pim.elements_per_column(dtype)] * (pim.lane_elements > 0)


def _divisors(channels: int) -> list[int]:
    """Divisors of `channels`, the largest first: with all channels on each matrix, any layout is possible."""
    return [spread for spread in range(channels, 0, -1) if channels % spread == 0]
