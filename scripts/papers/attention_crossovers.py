"""Where attention over a cache is faster in PIM than on the GPU: by context, requests, and group of heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from tvm import relax

from pimflow.core.attention import Attention
from pimflow.core.candidate import Cost
from pimflow.core.region_graph import RegionGraph
from pimflow.errors import InfeasibleError
from pimflow.hardware import System
from pimflow.host.charts import chart, cycle_colours
from pimflow.host.pages import Chart
from pimflow.pim_backend.programs.cache_layout import KeyLayout
from pimflow.pim_backend.programs.cache_schedule import (
    KEYS,
    VALUES,
    ProductLayout,
    ProductSchedule,
    all_schedules,
)
from pimflow.placement import CandidateGenerator, Costs
from pimflow.placement.candidates import pim_attention
from pimflow.placement.costs.attention_runs import CacheWork, ProductCost
from pimflow.placement.costs.pim_runs import PimCost
from pimflow.relay_passes.attention import NAME, attention_function
from pimflow.relay_passes.caches import append_in_place
from pimflow.relay_passes.regions.extract_regions import extract_regions

MIN_TIMED_TOKENS = 1024  # smallest cache that is timed, and twice that; longer ones are extrapolated linearly


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Times of one decode step of attention in one layer, appends to the cache included.

    Attributes
    ----------
    gpu_ns : float
        On the GPU with all memory channels.
    beside_ns : float
        On the GPU with the channels that serve it while PIM works.
    pim_ns : float or None
        With both products in PIM; None if the cache does not fit its channels.
    """

    context: int
    batch: int
    group: int
    gpu_ns: float
    beside_ns: float
    pim_ns: float | None

    @property
    def speedup(self) -> float | None:
        """Of PIM over the GPU with all memory channels."""
        return None if self.pim_ns is None else self.gpu_ns / self.pim_ns


def crossing(attention: Attention, system: System, costs: Costs) -> Crossing:
    """Time one attention; PIM times of long caches and many requests are extrapolated (`LengthCosts`)."""
    graph = attention_regions(attention)
    generator = CandidateGenerator(graph, system, LengthCosts(costs))
    run = pim_attention.find_run(generator, graph.regions[-1])
    assert run is not None
    all_channels_ns, gpu_channels_ns = (
        sum(
            Cost.from_candidate(generator.gpu_candidates(region, channels)[0]).latency_ns
            for region in graph.regions
        )
        for channels in (system.gpu.memory_channels, system.gpu_channels)
    )
    try:
        pim_ns: float | None = Cost.from_candidate(pim_attention.run_candidates(generator, run)[0]).latency_ns
    except InfeasibleError:
        pim_ns = None
    return Crossing(
        context=attention.keys,
        batch=attention.batch,
        group=attention.group,
        gpu_ns=all_channels_ns,
        beside_ns=gpu_channels_ns,
        pim_ns=pim_ns,
    )


def attention_regions(attention: Attention) -> RegionGraph:
    """The regions of a network that appends a token to keys and values and attends to them."""

    def param(name: str, dims: tuple[int, ...]) -> relax.Var:
        return relax.Var(name, relax.TensorType(dims, "float32"))

    q, k, v = (
        param(name, dims)
        for name, dims in (
            ("q", attention.query_shape),
            ("k", attention.key_shape),
            ("v", attention.value_shape),
        )
    )
    new = [
        param(f"new_{cache_var.name}", (*dims[:2], 1, dims[3]))
        for cache_var, dims in _shapes(attention, k, v)
    ]
    position = relax.Var("position", relax.TensorType((attention.batch,), "int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [q, k, v, *new, position]):
        with builder.dataflow():
            caches = [
                builder.emit(append_in_place(builder, cache, token, position), name_hint=f"{cache.name}_all")
                for cache, token in zip((k, v), new, strict=True)
            ]
            callee = builder.add_func(attention_function(attention), NAME)
            result = builder.emit(relax.Call(callee, [q, *caches, position]), name_hint="mixed")
            output = builder.emit_output(relax.Tuple([result, *caches]))
        builder.emit_func_output(output)
    return extract_regions(builder.get(), "attention")


def _shapes(
    attention: Attention, k: relax.Var, v: relax.Var
) -> tuple[tuple[relax.Var, tuple[int, ...]], ...]:
    return (k, attention.key_shape), (v, attention.value_shape)


class LengthCosts(Costs):
    """Costs of attention over long caches of many requests, extrapolated from shorter and fewer ones.

    Timed are programs of up to twice as many requests as give each channel a head, over the tokens of a whole
    number of rows, and over twice as many tokens. With more, each channel repeats the same work, so that
    costs are linear in requests and tokens.
    """

    def __init__(self, costs: Costs):
        self.__dict__ = costs.__dict__

    def attention_costs(self, attention: Attention, tokens: int = 0) -> dict[str, tuple[ProductCost, ...]]:
        """As `Costs.attention_costs`, for full caches only."""
        assert not tokens
        return {product: self._product_costs(product, attention) for product in (KEYS, VALUES)}

    def _product_costs(self, product: str, attention: Attention) -> tuple[ProductCost, ...]:
        """Costs of a product by schedule, the fastest first.

        Schedules are those whose rows need the fewest tokens, and those that use all channels.
        """
        pim_target = self.pim_target
        schedules = all_schedules(product, attention, pim_target.pim, pim_target.dtype, pim_target.channels)
        row_tokens = max(MIN_TIMED_TOKENS, min(_row_tokens(layout) for _, layout in schedules))
        # With fewer matrices than channels, several channels share a matrix, so that none is idle.
        sharing = pim_target.channels // (attention.batch * attention.kv_heads)
        costs = [
            self._extrapolate_requests(
                CacheWork.from_attention(pim_target, attention, product), schedule, _row_tokens(layout)
            )
            for schedule, layout in schedules
            if _row_tokens(layout) <= row_tokens or layout.spread == sharing
        ]
        return tuple(sorted(costs, key=attrgetter("total_ns")))

    def _extrapolate_requests(self, work: CacheWork, schedule: ProductSchedule, tokens: int) -> ProductCost:
        batch = work.attention.batch
        base = -(-self.pim_target.channels // work.attention.kv_heads)
        if batch <= 2 * base:
            return self._extrapolate_tokens(work, schedule, tokens)
        near, far = (
            self._extrapolate_tokens(
                replace(work, attention=replace(work.attention, batch=requests)), schedule, tokens
            )
            for requests in (base, 2 * base)
        )
        return extrapolate(near, far, (batch - base) / base)

    def _extrapolate_tokens(self, work: CacheWork, schedule: ProductSchedule, row_tokens: int) -> ProductCost:
        """The cost of `work`, extrapolated if its cache is long; `row_tokens` fill a row."""
        near = -(-MIN_TIMED_TOKENS // row_tokens) * row_tokens
        if work.tokens <= 2 * near:
            return self._full_cache_cost(work, schedule)
        first, second = (
            self._full_cache_cost(replace(work, tokens=cache_tokens), schedule)
            for cache_tokens in (near, 2 * near)
        )
        return extrapolate(first, second, (work.tokens - near) / near)

    def _full_cache_cost(self, work: CacheWork, schedule: ProductSchedule) -> ProductCost:
        """The cost in a cache with no free places, if its layout is that of the longer cache.

        The rows are those of the longer cache.
        """
        layout = work.layout(schedule)
        full = replace(work, attention=replace(work.attention, keys=work.tokens))
        if _row_tokens(full.layout(schedule)) == _row_tokens(layout):
            work = full
        key = (*work.key, schedule)
        if key not in self._caches:
            self._caches[key] = (work.cost(schedule),)
        cost = self._caches[key][0]
        return replace(cost, product=replace(cost.product, rows=layout.rows))


def extrapolate(cost: ProductCost, reference: ProductCost, steps: float) -> ProductCost:
    """Extrapolate linearly: the cost `steps` times as far from `cost` as `reference`, of one schedule."""

    def figure(first: float, second: float) -> float:
        return first + steps * (second - first)

    def pim_cost(first: PimCost, second: PimCost) -> PimCost:
        return replace(
            first,
            rows=math.ceil(figure(first.rows, second.rows)),
            results=round(figure(first.results, second.results)),
            time_ns=figure(first.time_ns, second.time_ns),
            commands={name: round(figure(n, second.commands[name])) for name, n in first.commands.items()},
            gwrite_bursts=round(figure(first.gwrite_bursts, second.gwrite_bursts)),
            write_bursts=round(figure(first.write_bursts, second.write_bursts)),
            ahead_ns=figure(first.ahead_ns, second.ahead_ns),
        )

    return replace(
        cost,
        product=pim_cost(cost.product, reference.product),
        append=pim_cost(cost.append, reference.append),
        sums=round(figure(cost.sums, reference.sums)),
    )


def _row_tokens(layout: ProductLayout) -> int:
    """Tokens of one matrix that fill a row in each channel that shares it."""
    if isinstance(layout, KeyLayout):
        return layout.banks * layout.spread * layout.parts * layout.places_per_row
    return layout.elements * layout.width * layout.spread


def speedup_chart(crossings_by_system: dict[str, Sequence[Crossing]]) -> Chart:
    """Chart of PIM's speed-up by context: a row a system, a column a group, a line a batch."""
    values = [
        {
            "system": name,
            "context": point.context,
            "batch": str(point.batch),
            "group": f"query heads a KV head: {point.group}",
            "speedup": point.speedup,
        }
        for name, system_crossings in crossings_by_system.items()
        for point in system_crossings
        if point.speedup is not None
    ]
    return speedup_lines(
        values, along=("context", "tokens attended to"), lines=("batch", "requests"), column="group"
    )


def speedup_lines(
    values: Sequence[Mapping[str, Any]],
    *,
    along: tuple[str, str],
    lines: tuple[str, str],
    column: str,
    width: int = 210,
) -> Chart:
    """Chart of the field ``speedup``, both axes logarithmic, with a row for each value of ``system``.

    `along` and `lines` are a field and its title: of the horizontal axis, and of the lines. Each value of the
    field `column` has a column of `width` pixels.
    """
    field, axis_title = along
    line, line_title = lines
    names, columns, systems = (
        list(dict.fromkeys(str(row[name]) for row in values)) for name in (line, column, "system")
    )
    scale = {"type": "log", "base": 2}
    ticks = {"values": sorted({row[field] for row in values}), "format": "d", "labelOverlap": "greedy"}
    x = {"field": field, "type": "quantitative", "title": axis_title, "scale": scale, "axis": ticks}
    y = {"field": "speedup", "type": "quantitative", "title": "speed-up over the GPU alone", "scale": scale}
    colour = {
        "field": line,
        "type": "nominal",
        "title": line_title,
        "sort": names,
        "scale": {"domain": names, "range": cycle_colours(names)},
    }
    parity_line = {"data": {"values": [{"one": 1}]}, "mark": {"type": "rule", "strokeDash": [5, 4]}}
    return chart(
        data={"values": values},
        facet={
            "row": {"field": "system", "type": "nominal", "title": None, "sort": systems},
            "column": {"field": column, "type": "nominal", "title": None, "sort": columns},
        },
        spec={
            "width": width,
            "height": 170,
            "layer": [
                {
                    "mark": {"type": "line", "point": True},
                    "encoding": {"x": x, "y": y, "color": colour},
                },
                {**parity_line, "encoding": {"y": {"field": "one", "type": "quantitative"}}},
            ],
        },
    )
