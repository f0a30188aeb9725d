"""Charts of plans, in Vega-Lite."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from pimflow.core.rewrite import Mode
from pimflow.host.charts import COLOURS, PALETTE, category, chart, layer, legend_at_top, number, tooltip
from pimflow.host.pages import Chart

WIDTH = 900  # of picture files; on a page, charts are as wide as the page
ROWS = {"gpu": "GPU", "pim": "PIM", "crossbar": "crossbar"}  # of the timeline, by resource
GPU_ONLY = "GPU alone"  # the baseline of a plan


def waterfall(terms: Sequence[tuple[str, float]], baseline_ns: float) -> Chart:
    """Chart of the steps between accountings; `terms` are names, and latencies (ns) with that charge."""
    colours = {"domain": ["latency", "more", "less"], "range": ["#4477aa", "#cc3311", "#228833"]}
    x = category("term", sort=None, title=None, axis={"labelAngle": -25, "labelLimit": 180})
    bars = layer(
        {"type": "bar", "width": {"band": 0.72}},
        x=x,
        y=number("begin", title="latency, us"),
        y2={"field": "end"},
        color=category("kind", scale=colours, legend=None),
        tooltip=tooltip(
            ("term", "charged too"), ("end", "latency, us", ".2f"), ("speedup", "speed-up", ".3f")
        ),
    )
    label_mark = {"type": "text", "dy": -7, "fontSize": {"expr": "width < 400 ? 8 : 11"}}
    labels = layer(label_mark, x=x, y=number("top"), text=category("label"))
    baseline = layer(
        {"type": "rule", "strokeDash": [5, 4]},
        y=number("alone"),
        tooltip=tooltip(("what", "latency of"), ("alone", "us", ".2f")),
    )
    baseline_values = [{"alone": baseline_ns / 1e3, "what": GPU_ONLY}]
    return chart(
        width=WIDTH,
        height=280,
        data={"values": _waterfall_steps(terms, baseline_ns)},
        layer=[bars, labels, {"data": {"values": baseline_values}, **baseline}],
    )


def _waterfall_steps(terms: Sequence[tuple[str, float]], baseline_ns: float) -> list[Chart]:
    """The bars of a waterfall: a term each, and the plan at the end."""
    values: list[Chart] = []
    before = 0.0
    plan = [("plan", terms[-1][1])] if terms else []
    for position, (name, latency_ns) in enumerate([*terms, *plan]):
        is_end = position == 0 or position >= len(terms) - 1
        is_total = is_end and not name.startswith("searched")
        begin = 0.0 if is_total else before
        change_us = (latency_ns - begin) / 1e3
        values.append(
            {
                "term": name,
                "begin": begin / 1e3,
                "end": latency_ns / 1e3,
                "top": max(begin, latency_ns) / 1e3,
                "kind": "latency" if is_total else ("more" if latency_ns >= before else "less"),
                "label": f"{change_us:.1f}" if is_total else f"{change_us:+.1f}",
                "speedup": baseline_ns / latency_ns,
            }
        )
        before = latency_ns
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
    """Chart of horizontal bars, one for each series in each group, with its figure at the end."""
    groups, names = (list(dict.fromkeys(row[field] for row in values)) for field in (group, series))
    y = category(group, sort=groups, title=None, axis={"labelLimit": 190, "ticks": False})
    offset = category(series, sort=names)
    colours = ["#8a939d", "#ee7733", "#4477aa", "#228833", "#aa3377", "#227c92", "#8a6d1d", "#6a4c93"]
    colour_scale = {"domain": names, "range": colours[: len(names)]}
    longest = max((float(str(row[value])) for row in values), default=1.0)
    scale = {"domainMin": 0, "domainMax": longest * 1.3}  # with room for the figure at the end of the bar
    bars = layer(
        {"type": "bar"},
        y=y,
        yOffset=offset,
        x=number(value, title=title, axis={"tickCount": 8, "labelSeparation": 6}, scale=scale),
        color=category(series, sort=names, scale=colour_scale, legend=legend_at_top(3)),
        tooltip=tooltip((group, "of"), (series, "in"), (value, title, form)),
    )
    figures = layer(
        {"type": "text", "align": "left", "dx": 4, "fontSize": 10},
        y=y,
        yOffset=offset,
        x=number(value),
        text=number(value, format=form),
        opacity={"condition": {"test": f"datum['{value}'] == 0", "value": 0}, "value": 1},
    )
    return chart(width=WIDTH, height={"step": 15}, data={"values": list(values)}, layer=[bars, figures])


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
    x = number("macs_per_byte", scale={"type": "log", "nice": False}, title="MACs per byte of operands")
    y = number("macs_per_ns", scale={"type": "log"}, title="MACs per ns")
    modes = list(dict.fromkeys(str(point["mode"]) for point in points))
    colours = {Mode.GPU.value: COLOURS["gpu"], Mode.PIM.value: COLOURS["pim"]}
    palette = itertools.cycle((COLOURS["crossbar"], COLOURS["host"], *PALETTE))
    ranges = [colours.get(mode) or next(palette) for mode in modes]
    devices = list(dict.fromkeys(str(line["device"]) for line in lines))
    limits = layer(
        {"type": "line", "strokeWidth": 1.5},
        x=x,
        y=y,
        strokeDash=category("device", sort=devices, legend={**legend_at_top(), "symbolStrokeColor": "gray"}),
        color={"value": COLOURS["baseline"]},
        tooltip=tooltip(("device", "device"), ("macs_per_ns", "at most, MACs per ns", ".4~g")),
    )
    dots = layer(
        {"type": "circle", "size": 70, "opacity": 0.85},
        x=x,
        y=y,
        color=category("mode", scale={"domain": modes, "range": ranges}, legend=legend_at_top()),
        tooltip=tooltip(
            ("layer", "layer"),
            ("mode", "mode"),
            ("macs_per_byte", "MACs per byte", ".4~g"),
            ("macs_per_ns", "MACs per ns", ".4~g"),
        ),
    )
    layers = [{"data": {"values": lines}, **limits}, {"data": {"values": list(points)}, **dots}]
    return chart(width=WIDTH, height=320, layer=layers)


def over_time(steps: Sequence[Mapping[str, object]]) -> Chart:
    """Chart of energy (mJ) that has been taken by a time (us), a line for each plan."""
    plans = list(dict.fromkeys(str(step["plan"]) for step in steps))
    scale = {"domain": plans, "range": [COLOURS["baseline"], COLOURS["pim"]]}
    lines = layer(
        {"type": "line", "strokeWidth": 2},
        x=number("time", title="time, us"),
        y=number("mj", title="energy, mJ"),
        color=category("plan", scale=scale, legend=legend_at_top()),
    )
    return chart(width=WIDTH, height=240, data={"values": list(steps)}, **lines)


def front(points: Sequence[Mapping[str, object]]) -> Chart:
    """Chart of plans by ``latency`` (ms) and ``energy`` (mJ); larger dots take a larger ``pool`` (MB)."""
    scale = {"zero": False, "padding": 22, "nice": True}
    dots = layer(
        {"type": "circle", "color": COLOURS["gpu"], "opacity": 0.8},
        x=number("latency", title="latency, ms", scale=scale),
        y=number("energy", title="energy, mJ", scale=scale),
        size=number("pool", scale={"range": [120, 900]}, legend=None),
        tooltip=tooltip(
            ("plan", "plan"),
            ("latency", "latency, ms", ".4f"),
            ("energy", "energy, mJ", ".3f"),
            ("pool", "pool, MB", ".3f"),
        ),
    )
    return chart(width=WIDTH, height=260, data={"values": list(points)}, **dots)


def shares_chart(
    values: Sequence[Mapping[str, object]], columns: Sequence[str], rows: Sequence[str], title: str
) -> Chart:
    """Chart of shares (``share``, in [0, 1]) by ``row`` and ``column``: squares with figures or a legend."""
    has_few_columns = len(columns) < 8
    legend: Chart = {"orient": "bottom", "title": None, "gradientLength": 120}
    legend |= {"format": ".0%", "values": [0, 0.5, 1]}
    # A label is upright: on a narrow screen no other heading fits above its column.
    axis = {"orient": "top", "labelAngle": -90, "labelOverlap": "parity", "ticks": False, "domain": False}
    x = category("column", sort=list(columns), title=None, axis=axis)
    y_axis = {"labelLimit": 200, "ticks": False, "domain": False}
    y = category("row", sort=list(rows), title=None, axis=y_axis)
    squares = layer(
        {"type": "rect", "stroke": "white", "strokeWidth": 0.5},
        x=x,
        y=y,
        color=number(
            "share", scale={"domain": [0, 1], "scheme": "blues"}, legend=None if has_few_columns else legend
        ),
        tooltip=tooltip(("row", "program"), ("column", title), ("share", "share", ".1%"), ("more", "more")),
    )
    layers = [squares]
    if has_few_columns:
        dark = {"condition": {"test": "datum.share > 0.65", "value": "white"}, "value": "#1b1f24"}
        layers.append(layer({"type": "text"}, x=x, y=y, text=number("share", format=".0%"), color=dark))
    return chart(width=WIDTH, height={"step": 20}, data={"values": list(values)}, layer=layers)
