"""Charts of a design space: latency against energy by convention, and the speed-up of every design."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pimflow.commands.sweep.sweep_rows import SweepRow
from pimflow.host.charts import PALETTE, category, chart, cycle_colours, layer, number, tooltip
from pimflow.host.pages import Chart

MAX_DESIGNS = 40  # with a line each; of more designs, only those on a front have one


def design_space(rows: Sequence[SweepRow]) -> Chart:
    """The charts of `rows`; each convention has its own panel, since conventions are not designs."""
    values = [_value(row) for row in rows if row.figures]
    designs = list(dict.fromkeys(str(value["design"]) for value in values))
    for value in values:
        number = designs.index(str(value["design"])) + 1
        value |= {"label": str(number), "line": f"{number}: {value['design']}"}
    best = {str(value["design"]) for value in values if value["front"]}
    title = "speed-up of every design"
    if len(designs) > MAX_DESIGNS:
        designs = [design for design in designs if design in best]
        title = "speed-up of the designs on a front"
    return chart(
        vconcat=[_planes(values), _speedups([v for v in values if v["design"] in designs], title)],
        spacing=40,
        resolve={"scale": {"color": "independent"}, "legend": {"color": "independent"}},
        **({} if values else {"title": "no point has a plan"}),
    )


def _value(row: SweepRow) -> dict[str, object]:
    assert row.figures is not None
    design = {name: value for name, value in row.settings.items() if name not in row.convention}
    return {
        "model": row.model,
        "convention": _text(row.convention) or "one convention",
        "design": _text(design) or "as it is",
        "line": "",
        "latency": row.figures.latency_ns / 1e6,
        "energy": row.figures.energy_pj / 1e9,
        "speedup": row.figures.speedup,
        "front": row.pareto,
        "label": "",
        **{name: str(value) for name, value in row.settings.items()},
    }


def _text(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in settings.items())


_TOOLTIP_FIELDS = (
    ("model", "network"),
    ("convention", "convention"),
    ("design", "design"),
    ("latency", "latency, ms", ".4f"),
    ("energy", "energy, mJ", ".3f"),
    ("speedup", "speed-up", ".3f"),
)


def _planes(values: Sequence[dict[str, object]]) -> Chart:
    """Latency against energy: a column for each convention, a row for each network, with fronts."""
    scale = {"zero": False, "padding": 20}
    x, y = (
        number("latency", title="latency, ms", scale=scale),
        number("energy", title="energy, mJ", scale=scale),
    )
    fill = {"condition": {"test": "datum.front", "value": PALETTE[0]}, "value": "transparent"}
    line = layer({"type": "line", "color": PALETTE[0], "opacity": 0.5}, x=x, y=y, order=number("latency"))
    dots = layer(
        {"type": "point", "size": 50, "stroke": PALETTE[0], "strokeWidth": 1.2},
        x=x,
        y=y,
        fill=fill,
        tooltip=tooltip(*_TOOLTIP_FIELDS),
    )
    label_mark = {"type": "text", "dx": 5, "dy": -6, "align": "left", "fontSize": 10}
    labels = layer(label_mark, x=x, y=y, text=category("label"))
    layers = [{"transform": [{"filter": "datum.front"}], **line}, dots, labels]
    return {
        "title": "latency and energy; numbers are those of the designs below, filled points are on a front",
        "data": {"values": list(values)},
        "facet": {
            "column": category("convention", title=None, sort=None),
            "row": category("model", title=None, sort=None),
        },
        "spec": {"width": 400, "height": 280, "layer": layers},
        "resolve": {"scale": {"x": "independent", "y": "independent"}},
    }


def _speedups(values: Sequence[dict[str, object]], title: str) -> Chart:
    """Speed-ups: a line for each design, a colour for each convention, a column for each network."""
    names = list(dict.fromkeys(str(value["convention"]) for value in values))
    dots = layer(
        {"type": "point", "filled": True, "size": 70},
        y=category("line", sort=None, title=None, axis={"labelLimit": 340, "grid": True, "ticks": False}),
        x=number("speedup", title="speed-up over the GPU alone", scale={"zero": False, "padding": 20}),
        color=category(
            "convention",
            sort=names,
            scale={"domain": names, "range": cycle_colours(names)},
            legend={"orient": "top", "title": None, "labelLimit": 400} if len(names) > 1 else None,
        ),
        tooltip=tooltip(*_TOOLTIP_FIELDS),
    )
    rule = layer({"type": "rule", "strokeDash": [5, 4]}, x=number("one"))
    layers = [dots, {"data": {"values": [{"one": 1.0}]}, **rule}]
    return {
        "title": title,
        "data": {"values": list(values)},
        "facet": {"column": category("model", title=None, sort=None)},
        "resolve": {"scale": {"x": "independent"}},
        "spec": {"width": 400, "height": {"step": 18}, "layer": layers},
    }
