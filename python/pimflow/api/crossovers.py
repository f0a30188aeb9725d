"""Where attention over a cache is faster in PIM than on the GPU: by context, requests, and group of heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax

from pimflow.core.attention import Attention
from pimflow.core.candidate import Cost
from pimflow.core.region import RegionGraph
from pimflow.errors import InfeasibleError
from pimflow.hardware import System
from pimflow.host.charts import chart, cycled
from pimflow.host.pages import Chart
from pimflow.pim_backend.programs.cache_layout import KeyLayout
from pimflow.pim_backend.programs.cache_schedule import ProductSchedule
from pimflow.placement import Candidates, Costs
from pimflow.placement.candidates import cached
from pimflow.placement.costs.attention_runs import (
    KEYS,
    VALUES,
    CacheWork,
    Layout,
    ProductCost,
    every_schedule,
    total_ns,
)
from pimflow.placement.costs.costs import CacheCosts
from pimflow.relay_passes.attention import NAME, attention_function
from pimflow.relay_passes.caches import append_in_place
from pimflow.relay_passes.regions.extract_regions import extract_regions

TIMED_TOKENS = 1024  # smallest cache that is timed, and twice that; longer ones are extrapolated linearly


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


def crossings(
    system: System,
    costs: Costs,
    *,
    heads: int,
    head_size: int,
    contexts: Iterable[int],
    batches: Sequence[int],
    groups: Sequence[int],
) -> Iterator[Crossing]:
    """Time every combination of group, batch and context, the context innermost."""
    for group in groups:
        for batch in batches:
            for context in contexts:
                attention = Attention(
                    batch=batch,
                    heads=heads,
                    kv_heads=heads // group,
                    head_size=head_size,
                    value_size=head_size,
                    queries=1,
                    keys=context,
                    scale=head_size**-0.5,
                    causal=True,
                    positioned=True,
                )
                yield crossing(attention, system, costs)


def crossing(attention: Attention, system: System, costs: Costs) -> Crossing:
    """Time one attention; PIM times of long caches and many requests are extrapolated (`LengthCosts`)."""
    graph = regions_of(attention)
    maker = Candidates(graph, system, LengthCosts(costs))
    run = cached.run_of(maker, graph.regions[-1])
    assert run is not None
    everywhere, beside = (
        sum(Cost.of(maker.on_gpu(region, channels)[0]).latency_ns for region in graph.regions)
        for channels in (system.gpu.memory_channels, system.gpu_channels)
    )
    try:
        pim_ns: float | None = Cost.of(cached.of_run(maker, run)[0]).latency_ns
    except InfeasibleError:
        pim_ns = None
    return Crossing(
        context=attention.keys,
        batch=attention.batch,
        group=attention.group,
        gpu_ns=everywhere,
        beside_ns=beside,
        pim_ns=pim_ns,
    )


def regions_of(attention: Attention) -> RegionGraph:
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
    new = [param(f"new_{each.name}", (*dims[:2], 1, dims[3])) for each, dims in _shapes(attention, k, v)]
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

    def caches(self, wanted: Sequence[tuple[Attention, int]]) -> list[CacheCosts]:
        """As `Costs.caches`, for full caches only."""
        assert not any(tokens for _, tokens in wanted)
        return [
            CacheCosts(keys=self._of(KEYS, attention), values=self._of(VALUES, attention))
            for attention, _ in wanted
        ]

    def _of(self, product: str, attention: Attention) -> tuple[ProductCost, ...]:
        """Costs of a product by schedule, the fastest first.

        Schedules are those whose rows need the fewest tokens, and those that use all channels.
        """
        side = self.side
        ways = every_schedule(product, attention, side.pim, side.dtype, side.channels)
        fewest = max(TIMED_TOKENS, min(_tokens_of_row(layout) for _, layout in ways))
        # With fewer matrices than channels, several channels share a matrix, so that none is idle.
        sharing = side.channels // (attention.batch * attention.kv_heads)
        found = [
            self._over_requests(CacheWork.like(side, attention, product), schedule, _tokens_of_row(layout))
            for schedule, layout in ways
            if _tokens_of_row(layout) <= fewest or layout.spread == sharing
        ]
        return tuple(sorted(found, key=total_ns))

    def _over_requests(self, work: CacheWork, schedule: ProductSchedule, tokens: int) -> ProductCost:
        batch = work.attention.batch
        base = -(-self.side.channels // work.attention.kv_heads)
        if batch <= 2 * base:
            return self._over_tokens(work, schedule, tokens)
        near, far = (
            self._over_tokens(replace(work, attention=replace(work.attention, batch=each)), schedule, tokens)
            for each in (base, 2 * base)
        )
        return near.further(far, (batch - base) / base)

    def _over_tokens(self, work: CacheWork, schedule: ProductSchedule, tokens: int) -> ProductCost:
        """The cost of `work`, extrapolated if its cache is long; `tokens` fill a row."""
        near = -(-TIMED_TOKENS // tokens) * tokens
        if work.tokens <= 2 * near:
            return self._timed(work, schedule)
        first, second = (self._timed(replace(work, tokens=each), schedule) for each in (near, 2 * near))
        return first.further(second, (work.tokens - near) / near)

    def _timed(self, work: CacheWork, schedule: ProductSchedule) -> ProductCost:
        """The cost in a cache with no free places, if its layout is that of the longer cache.

        The rows are those of the longer cache.
        """
        whole = work.layout(schedule)
        full = replace(work, attention=replace(work.attention, keys=work.tokens))
        if _tokens_of_row(full.layout(schedule)) == _tokens_of_row(whole):
            work = full
        key = (*work.key, schedule)
        if key not in self._caches:
            self._caches[key] = (work.cost(schedule),)
        cost = self._caches[key][0]
        return replace(cost, product=replace(cost.product, rows=whole.rows))


def _tokens_of_row(layout: Layout) -> int:
    """Tokens of one matrix that fill a row in each channel that shares it."""
    if isinstance(layout, KeyLayout):
        return layout.banks * layout.spread * layout.parts * layout.places_per_row
    return layout.elements * layout.width * layout.spread


def speedup_chart(found: dict[str, Sequence[Crossing]]) -> Chart:
    """Chart of PIM's speed-up by context: a row a system, a column a group, a line a batch."""
    values = [
        {
            "system": name,
            "context": each.context,
            "batch": str(each.batch),
            "group": f"query heads a KV head: {each.group}",
            "speedup": each.speedup,
        }
        for name, crossings_of in found.items()
        for each in crossings_of
        if each.speedup is not None
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
    field, titled = along
    line, line_title = lines
    names, columns, systems = (
        list(dict.fromkeys(str(each[name]) for each in values)) for name in (line, column, "system")
    )
    scale = {"type": "log", "base": 2}
    ticks = {"values": sorted({each[field] for each in values}), "format": "d", "labelOverlap": "greedy"}
    x = {"field": field, "type": "quantitative", "title": titled, "scale": scale, "axis": ticks}
    y = {"field": "speedup", "type": "quantitative", "title": "speed-up over the GPU alone", "scale": scale}
    colour = {
        "field": line,
        "type": "nominal",
        "title": line_title,
        "sort": names,
        "scale": {"domain": names, "range": cycled(names)},
    }
    one = {"data": {"values": [{"one": 1}]}, "mark": {"type": "rule", "strokeDash": [5, 4]}}
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
                {**one, "encoding": {"y": {"field": "one", "type": "quantitative"}}},
            ],
        },
    )
