"""Charts of plans, in Vega-Lite."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from pimflow.core.rewrite import Mode
from pimflow.host.charts import (
    COLOURS,
    PALETTE,
    chart,
    legend_at_top,
    tooltip,
)
from pimflow.host.pages import Chart

WIDTH = 900  # of picture files; on a page, charts are as wide as the page
ROWS = {"gpu": "GPU", "pim": "PIM", "crossbar": "crossbar"}  # of the timeline, by resource
GPU_ONLY = "GPU alone"  # the baseline of a plan


def waterfall(terms: Sequence[tuple[str, float]], baseline_ns: float) -> Chart:
    """Chart of the steps between accountings; `terms` are names, and latencies (ns) with that charge."""
    colours = {"domain": ["latency", "more", "less"], "range": ["#4477aa", "#cc3311", "#228833"]}
    x: Chart = {"field": "term", "type": "nominal", "sort": None, "title": None}
    x["axis"] = {"labelAngle": -25, "labelLimit": 180}
    return chart(
        width=WIDTH,
        height=280,
        data={"values": _waterfall_steps(terms, baseline_ns)},
        layer=[
            {
                "mark": {"type": "bar", "width": {"band": 0.72}},
                "encoding": {
                    "x": x,
                    "y": {"field": "begin", "type": "quantitative", "title": "latency, us"},
                    "y2": {"field": "end"},
                    "color": {"field": "kind", "type": "nominal", "scale": colours, "legend": None},
                    "tooltip": tooltip(
                        ("term", "charged too"),
                        ("end", "latency, us", ".2f"),
                        ("speedup", "speed-up", ".3f"),
                    ),
                },
            },
            {
                "mark": {"type": "text", "dy": -7, "fontSize": {"expr": "width < 400 ? 8 : 11"}},
                "encoding": {
                    "x": x,
                    "y": {"field": "top", "type": "quantitative"},
                    "text": {"field": "label", "type": "nominal"},
                },
            },
            {
                "data": {"values": [{"alone": baseline_ns / 1e3, "what": "GPU alone"}]},
                "mark": {"type": "rule", "strokeDash": [5, 4]},
                "encoding": {
                    "y": {"field": "alone", "type": "quantitative"},
                    "tooltip": tooltip(("what", "latency of"), ("alone", "us", ".2f")),
                },
            },
        ],
    )


def _waterfall_steps(terms: Sequence[tuple[str, float]], baseline_ns: float) -> list[Chart]:
    """The bars of a waterfall: a term each, and the plan at the end."""
    values: list[Chart] = []
    before = 0.0
    for position, (name, latency_ns) in enumerate(terms):
        is_total = position in (0, len(terms) - 1) and not name.startswith("searched")
        kind = "latency" if is_total else ("more" if latency_ns >= before else "less")
        begin = 0.0 if is_total else before
        change = latency_ns - begin
        values.append(
            {
                "term": name,
                "begin": begin / 1e3,
                "end": latency_ns / 1e3,
                "top": max(begin, latency_ns) / 1e3,
                "kind": kind,
                "label": f"{change / 1e3:+.1f}" if not is_total else f"{change / 1e3:.1f}",
                "speedup": baseline_ns / latency_ns,
            }
        )
        before = latency_ns
    if terms:
        last = terms[-1][1]
        values.append(
            {
                "term": "plan",
                "begin": 0.0,
                "end": last / 1e3,
                "top": last / 1e3,
                "kind": "latency",
                "label": f"{last / 1e3:.1f}",
                "speedup": baseline_ns / last,
            }
        )
    return values


def energy(by_plan: Mapping[str, Mapping[str, float]]) -> Chart:
    """Chart of energy (pJ) by consumer, with a bar for each plan."""
    parts = {
        name: max(energies.get(name, 0.0) for energies in by_plan.values())
        for energies in by_plan.values()
        for name in energies
    }
    order = sorted((name for name, max_pj in parts.items() if max_pj), key=lambda name: -parts[name])
    values = [
        {"part": name.replace("_", " "), "plan": plan, "mj": energies.get(name, 0.0) / 1e9}
        for name in order
        for plan, energies in by_plan.items()
    ]
    return bar_groups(values, "part", "plan", "mj", "energy, mJ")


def bar_groups(
    values: Sequence[Mapping[str, object]],
    group: str,
    series: str,
    value: str,
    title: str,
    form: str = ".4~g",
) -> Chart:
    """Chart of horizontal bars, one for each series in each group, with its figure at the end.

    Parameters
    ----------
    values : sequence of mapping of str to object
        The bars, in the order of groups and series.
    group, series, value : str
        Fields of `values`.
    """
    groups, names = (list(dict.fromkeys(row[field] for row in values)) for field in (group, series))
    y: Chart = {"field": group, "type": "nominal", "sort": groups, "title": None}
    y["axis"] = {"labelLimit": 190, "ticks": False}
    offset: Chart = {"field": series, "type": "nominal", "sort": names}
    colours = ["#8a939d", "#ee7733", "#4477aa", "#228833", "#aa3377", "#227c92", "#8a6d1d", "#6a4c93"]
    x: Chart = {"field": value, "type": "quantitative", "title": title}
    x["axis"] = {"tickCount": 8, "labelSeparation": 6}
    x["scale"] = {"domainMin": 0, "domainMax": _axis_end([float(str(row[value])) for row in values])}
    return chart(
        width=WIDTH,
        height={"step": 15},
        data={"values": list(values)},
        layer=[
            {
                "mark": {"type": "bar"},
                "encoding": {
                    "y": y,
                    "yOffset": offset,
                    "x": x,
                    "color": {
                        "field": series,
                        "type": "nominal",
                        "sort": names,
                        "scale": {"domain": names, "range": colours[: len(names)]},
                        "legend": legend_at_top(3),
                    },
                    "tooltip": tooltip((group, "of"), (series, "in"), (value, title, form)),
                },
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 10},
                "encoding": {
                    "y": y,
                    "yOffset": offset,
                    "x": {"field": value, "type": "quantitative"},
                    "text": {"field": value, "type": "quantitative", "format": form},
                    "opacity": {"condition": {"test": f"datum['{value}'] == 0", "value": 0}, "value": 1},
                },
            },
        ],
    )


def roofline(points: Sequence[Mapping[str, object]], rooflines: Mapping[str, Mapping[str, float]]) -> Chart:
    """Chart of rates over intensities: a dot for each layer, and a line for what each device can do.

    Parameters
    ----------
    points : sequence of mapping
        With ``layer``, ``mode``, ``macs_per_byte`` and ``macs_per_ns``.
    rooflines : mapping of str to mapping
        By device, its ``macs_per_ns`` and ``bytes_per_ns``; a device without multipliers has no line.
    """
    intensities = [float(str(point["macs_per_byte"])) for point in points]
    ridges = [
        roof["macs_per_ns"] / roof["bytes_per_ns"] for roof in rooflines.values() if roof["macs_per_ns"]
    ]
    low, high = min(intensities + ridges) / 2, max(intensities + ridges) * 2
    lines = [
        {
            "device": ROWS[device],
            "macs_per_byte": at,
            "macs_per_ns": min(roof["macs_per_ns"], at * roof["bytes_per_ns"]),
        }
        for device, roof in rooflines.items()
        if roof["macs_per_ns"]
        for at in sorted({low, roof["macs_per_ns"] / roof["bytes_per_ns"], high})
    ]
    scale = {"type": "log", "nice": False}
    x: Chart = {"field": "macs_per_byte", "type": "quantitative", "scale": scale}
    x["title"] = "MACs per byte of operands"
    y: Chart = {
        "field": "macs_per_ns",
        "type": "quantitative",
        "scale": {"type": "log"},
        "title": "MACs per ns",
    }
    modes = list(dict.fromkeys(str(point["mode"]) for point in points))
    colours = {Mode.GPU.value: COLOURS["gpu"], Mode.PIM.value: COLOURS["pim"]}
    palette = itertools.cycle((COLOURS["crossbar"], COLOURS["host"], *PALETTE))
    ranges = [colours.get(mode) or next(palette) for mode in modes]
    devices = list(dict.fromkeys(str(line["device"]) for line in lines))
    return chart(
        width=WIDTH,
        height=320,
        layer=[
            {
                "data": {"values": lines},
                "mark": {"type": "line", "strokeWidth": 1.5},
                "encoding": {
                    "x": x,
                    "y": y,
                    "strokeDash": {
                        "field": "device",
                        "type": "nominal",
                        "sort": devices,
                        "legend": {**legend_at_top(), "symbolStrokeColor": "gray"},
                    },
                    "color": {"value": COLOURS["baseline"]},
                    "tooltip": tooltip(("device", "device"), ("macs_per_ns", "at most, MACs per ns", ".4~g")),
                },
            },
            {
                "data": {"values": list(points)},
                "mark": {"type": "circle", "size": 70, "opacity": 0.85},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": {
                        "field": "mode",
                        "type": "nominal",
                        "scale": {"domain": modes, "range": ranges},
                        "legend": legend_at_top(),
                    },
                    "tooltip": tooltip(
                        ("layer", "layer"),
                        ("mode", "mode"),
                        ("macs_per_byte", "MACs per byte", ".4~g"),
                        ("macs_per_ns", "MACs per ns", ".4~g"),
                    ),
                },
            },
        ],
    )


def over_time(steps: Sequence[Mapping[str, object]]) -> Chart:
    """Chart of energy (mJ) that has been taken by a time (us), a line for each plan."""
    plans = list(dict.fromkeys(str(step["plan"]) for step in steps))
    x: Chart = {"field": "time", "type": "quantitative", "title": "time, us"}
    y: Chart = {"field": "mj", "type": "quantitative", "title": "energy, mJ"}
    scale = {"domain": plans, "range": [COLOURS["baseline"], COLOURS["pim"]]}
    colour: Chart = {"field": "plan", "type": "nominal", "scale": scale, "legend": legend_at_top()}
    return chart(
        width=WIDTH,
        height=240,
        data={"values": list(steps)},
        mark={"type": "line", "strokeWidth": 2},
        encoding={"x": x, "y": y, "color": colour},
    )


def front(points: Sequence[Mapping[str, object]]) -> Chart:
    """Chart of plans by ``latency`` (ms) and ``energy`` (mJ); larger dots take a larger ``pool`` (MB)."""
    scale = {"zero": False, "padding": 22, "nice": True}
    fields = tooltip(
        ("plan", "plan"),
        ("latency", "latency, ms", ".4f"),
        ("energy", "energy, mJ", ".3f"),
        ("pool", "pool, MB", ".3f"),
    )
    return chart(
        width=WIDTH,
        height=260,
        data={"values": list(points)},
        mark={"type": "circle", "color": COLOURS["gpu"], "opacity": 0.8},
        encoding={
            "x": {"field": "latency", "type": "quantitative", "title": "latency, ms", "scale": scale},
            "y": {"field": "energy", "type": "quantitative", "title": "energy, mJ", "scale": scale},
            "size": {"field": "pool", "type": "quantitative", "scale": {"range": [120, 900]}, "legend": None},
            "tooltip": fields,
        },
    )


def _axis_end(values: Sequence[float]) -> float:
    """The end of an axis, with room for the figure at the end of the longest bar."""
    return max(values, default=1.0) * 1.3


def shares_chart(
    values: Sequence[Mapping[str, object]], columns: Sequence[str], rows: Sequence[str], title: str
) -> Chart:
    """Chart of shares (``share``, in [0, 1]) by ``row`` and ``column``: squares with figures or a legend."""
    has_few_columns = len(columns) < 8
    legend: Chart = {"orient": "bottom", "title": None, "gradientLength": 120}
    legend |= {"format": ".0%", "values": [0, 0.5, 1]}
    x: Chart = {"field": "column", "type": "nominal", "sort": list(columns), "title": None}
    x["axis"] = {
        "orient": "top",
        "labelAngle": -90,  # on a narrow screen no other heading fits above its column
        "labelOverlap": "parity",
        "ticks": False,
        "domain": False,
    }
    y: Chart = {"field": "row", "type": "nominal", "sort": list(rows), "title": None}
    y["axis"] = {"labelLimit": 200, "ticks": False, "domain": False}
    layers: list[Chart] = [
        {
            "mark": {"type": "rect", "stroke": "white", "strokeWidth": 0.5},
            "encoding": {
                "x": x,
                "y": y,
                "color": {
                    "field": "share",
                    "type": "quantitative",
                    "scale": {"domain": [0, 1], "scheme": "blues"},
                    "legend": None if has_few_columns else legend,
                },
                "tooltip": tooltip(
                    ("row", "program"), ("column", title), ("share", "share", ".1%"), ("more", "more")
                ),
            },
        }
    ]
    if has_few_columns:
        dark = {"condition": {"test": "datum.share > 0.65", "value": "white"}, "value": "#1b1f24"}
        text: Chart = {"field": "share", "type": "quantitative", "format": ".0%"}
        layers.append({"mark": {"type": "text"}, "encoding": {"x": x, "y": y, "text": text, "color": dark}})
    return chart(width=WIDTH, height={"step": 20}, data={"values": list(values)}, layer=layers)
