"""Schedules of attention over a cache in PIM, layouts included, and their costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

from pimflow.core.attention import Attention
from pimflow.core.program import PimProgram
from pimflow.pim_backend.programs.cache_appends import append_keys, append_values
from pimflow.pim_backend.programs.cache_layout import ValueLayout
from pimflow.pim_backend.programs.cache_schedule import (
    KEYS,
    ProductLayout,
    ProductSchedule,
    all_schedules,
    cache_device,
    product_layout,
)
from pimflow.placement.costs.pim_runs import PimCost, PimRun, PimTarget

RANKED_TOKENS = 2048  # schedules are ranked over so many tokens, if there are more
TIMED_SCHEDULES = 2  # how many of the best ranked schedules are timed over all tokens


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

    @property
    def total_ns(self) -> float:
        """Time of the product and of the append."""
        return sum(part.time_ns + part.ahead_ns for part in (self.product, self.append))


@dataclass(frozen=True, kw_only=True)
class CacheWork:
    """One product of attention over a cache, to be timed by all schedules.

    Attributes
    ----------
    attention : Attention
        Normalised by `from_attention`: attention with the same programs is equal.
    product : str
        `KEYS` or `VALUES`.
    tokens : int
        Tokens in the cache, this step's included.
    """

    pim_target: PimTarget
    attention: Attention
    product: str
    tokens: int

    @classmethod
    def from_attention(
        cls, pim_target: PimTarget, attention: Attention, product: str, tokens: int = 0
    ) -> CacheWork:
        """The work for `attention` over `tokens` tokens, by default all; equal if the programs are equal."""
        device = cache_device(pim_target.pim, attention, pim_target.dtype)
        # A cache that the device widens has the programs of a wide one.
        is_widened = device is pim_target.pim
        normal_attention = Attention(
            batch=attention.batch,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_size=attention.head_size,
            value_size=attention.value_size,
            queries=1,
            keys=attention.keys,
            scale=1.0,
            positioned=True,
            cache_type=None if is_widened else attention.cache_type,
        )
        return cls(
            pim_target=pim_target,
            attention=normal_attention,
            product=product,
            tokens=tokens or attention.keys,
        )

    @property
    def key(self) -> tuple[object, ...]:
        """The cache key of its costs."""
        return ("cache", self.pim_target.identity, self.attention, self.product, self.tokens)

    def costs(self) -> tuple[ProductCost, ...]:
        """Costs of the schedules that are candidates, the fastest first.

        If there are many tokens, schedules are ranked over fewer, as their times grow in proportion; only the
        best are timed over all.

        Raises
        ------
        UnsupportedOpError, InfeasibleError
            If no layout is possible; see `CacheLayout.check_fit`.
        """
        schedules = self.schedules()
        if len(schedules) > TIMED_SCHEDULES and self.tokens > RANKED_TOKENS:
            fewer = replace(self, tokens=RANKED_TOKENS)
            ranked = sorted(map(fewer.cost, schedules), key=attrgetter("total_ns"))
            schedules = [
                cost.schedule for cost in (*ranked[:TIMED_SCHEDULES], min(ranked, key=attrgetter("rows")))
            ]
        product_costs = map(self.cost, dict.fromkeys(schedules))
        return tuple(sorted(product_costs, key=attrgetter("total_ns")))

    def schedules(self) -> list[ProductSchedule]:
        """All schedules of the product; raises as `costs`."""
        target = self.pim_target
        alternatives = all_schedules(self.product, self.attention, target.pim, target.dtype, target.channels)
        return [schedule for schedule, _ in alternatives]

    def layout(self, schedule: ProductSchedule) -> ProductLayout:
        """The layout of its cache by a schedule."""
        target = self.pim_target
        return product_layout(
            self.product, schedule, self.attention, target.pim, target.dtype, target.channels
        )

    def cost(self, schedule: ProductSchedule) -> ProductCost:
        """The cost by one schedule; raises as `costs`."""
        attention, layout = self.attention, self.layout(schedule)
        layout.check_fit()
        step, new = schedule.attention_product(layout, self.tokens), self.tokens - 1
        append = append_values(layout, new) if isinstance(layout, ValueLayout) else append_keys(layout, new)
        product = PimCost.from_sequence([self._program_cost(program) for program in step.programs])
        elements = attention.batch * attention.heads * attention.value_size
        # More scores are read back than there are tokens, but scores are never added up.
        partial_sums = 1 if self.product == KEYS else product.results // elements
        return ProductCost(
            schedule=schedule,
            product=product,
            append=self._program_cost(append),
            sums=partial_sums * product.result_lanes,
        )

    def _program_cost(self, program: PimProgram) -> PimCost:
        timing = self.pim_target.profiler.time_program(program, self.pim_target.pim)
        return PimCost.from_run(PimRun(program=program, timing=timing), self.pim_target.pim)
