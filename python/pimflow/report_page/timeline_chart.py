"""The chart of a timeline, in Vega-Lite: bars of tasks, in a row for each resource."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pimflow.core.candidate import RESOURCES, Resource
from pimflow.host.charts import (
    BAR_TEXT_COLOUR,
    COLOURS,
    bar_names,
    category,
    chart,
    layer,
    legend_at_top,
    number,
    tooltip,
    zoom_parameter,
)
from pimflow.host.pages import Chart
from pimflow.report_page.charts import GPU_ONLY, ROWS, WIDTH

PS_DIGITS = 6  # digits of times in us: whole picoseconds


_ROW = 46  # height of a row of the timeline


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar in a row of the timeline.

    Attributes
    ----------
    kind : str
        One of `host.charts.COLOURS`.
    """

    row: str
    kind: str
    name: str
    layers: str
    begin_us: float
    end_us: float
    layer_names: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class TracedTask:
    """A task on the timeline.

    Attributes
    ----------
    also : tuple of Resource
        Other resources that it occupies after its launch (`core.candidate.Task`).
    """

    name: str
    resource: Resource
    start_us: float
    duration_us: float
    regions: tuple[str, ...]
    launched: int
    also: tuple[Resource, ...] = ()

    @property
    def end_us(self) -> float:
        """The time at which it ends."""
        return self.start_us + self.duration_us

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> TracedTask:
        """From an event of ``timeline.json``; raises as a dictionary for one of another form."""
        return cls(
            name=event["name"],
            resource=RESOURCES[event["tid"]],
            start_us=event["ts"],
            duration_us=event["dur"],
            regions=tuple(event["args"]["regions"]),
            launched=int(event["args"]["launched"]),
            also=tuple(event["args"].get("also", ())),
        )

    def bars(self, *, is_baseline: bool = False) -> list[Bar]:
        """The bars of the task: in the rows of its resources, or in that of the baseline."""
        rows = [GPU_ONLY] if is_baseline else [ROWS[resource] for resource in (self.resource, *self.also)]
        return [
            Bar(
                row=row,
                kind="baseline" if is_baseline else self.resource,
                name=self.name,
                layers=", ".join(self.regions),
                layer_names=self.regions,
                begin_us=self.start_us,
                end_us=self.end_us,
            )
            for row in rows
        ]


def sort_bars(bars: Sequence[Bar]) -> list[Bar]:
    """Sort bars by rows, the GPU's first, and by time."""
    order = [*ROWS.values(), GPU_ONLY]
    return sorted(bars, key=lambda bar: (order.index(bar.row), bar.begin_us))


def timeline(
    bars: Sequence[Bar], latency_us: float, title: str = "", *, is_searchable: bool = False
) -> Chart:
    """Chart of tasks over time, with a row for each resource, in the order of `bars`.

    Parameters
    ----------
    is_searchable : bool
        Whether the page has a search field that fades the other tasks.
    """
    rows = list(dict.fromkeys(bar.row for bar in bars))
    values = [
        {
            "row": bar.row,
            "kind": bar.kind,
            "name": bar.name,
            "layers": bar.layers,
            **({"layer": bar.layer_names[0]} if is_searchable and bar.layer_names else {}),
            "begin": round(bar.begin_us, PS_DIGITS),
            "end": round(bar.end_us, PS_DIGITS),
            "middle": round((bar.begin_us + bar.end_us) / 2, PS_DIGITS),
            "length": round(bar.end_us - bar.begin_us, PS_DIGITS),
        }
        for bar in bars
    ]
    axis = {"ticks": False, "domain": False, "labelLimit": 140, "labelPadding": 6}
    y = category("row", sort=rows, title=None, axis=axis)
    tasks = _task_layer(y, max([latency_us, *(bar.end_us for bar in bars)]))
    match = "search == '' || indexof(lower(datum.name + ' ' + datum.layers), lower(search)) >= 0"
    if is_searchable:
        kinds = [kind for kind in COLOURS if any(bar.kind == kind for bar in bars)]
        tasks["encoding"]["color"]["legend"] = {**legend_at_top(), "values": kinds}
        tasks["encoding"]["opacity"] = {"condition": {"test": match, "value": 1}, "value": 0.12}
    where: Chart = {"x": number("middle"), "y": y}
    names = bar_names("name", "begin", "end", where, match if is_searchable else "true")
    parts: Chart = {"data": {"values": values}, "layer": [tasks, names]}
    heading: Chart = {"title": title} if title else {}
    if is_searchable:
        heading["params"] = [{"name": "search", "value": ""}]
    return chart(width=WIDTH, height=_ROW * len(rows), **heading, **parts)


def _task_layer(y: Chart, end_us: float) -> Chart:
    """The bars of the timeline, from 0 to `end_us`, in the rows of `y`."""
    colour_scale = {"domain": list(COLOURS), "range": list(COLOURS.values())}
    bars = layer(
        {
            "type": "bar",
            "stroke": BAR_TEXT_COLOUR,
            "strokeWidth": 0.4,
            "clip": True,
            "height": {"band": 0.86},
        },
        x=number("begin", title="time, us", scale={"domain": [0, end_us], "nice": False}),
        x2={"field": "end"},
        y=y,
        color=category("kind", scale=colour_scale, legend=None),
        tooltip=tooltip(
            ("name", "task"),
            ("layers", "layers"),
            ("begin", "from, us", ".3f"),
            ("end", "to, us", ".3f"),
            ("length", "takes, us", ".3f"),
        ),
    )
    return {"params": [zoom_parameter("x")], **bars}
