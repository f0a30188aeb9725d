"""Charts of selections of primitives, after Figures 1, 2 and 5 to 10 of Wen et al., *TASO*."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pimflow.core.candidate import Candidate
from pimflow.host import pictures
from pimflow.host.charts import PALETTE, category, chart, layer, legend_at_top, number, tooltip
from pimflow.host.pages import Chart
from pimflow.primitive_selection.problem import SelectionProblem, Sums
from pimflow.primitive_selection.search import Point, fastest
from pimflow.primitive_selection.selection import Selection
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.families import FAMILIES

MIB = 2**20
# of families that have another name in the paper
TITLES = {"windows": "im2row, im2col", "shifted": "kn2row, kn2col"}
WIDE_RANGE = 20  # an axis is logarithmic if the ratio of its largest to its smallest value is above this
SIZE = {"width": 330, "height": 230}  # of a panel


def write(path: str | os.PathLike, selection: Selection) -> None:
    """Draw a selection with a front as .png, .svg or .html, by the name of the file.

    Raises
    ------
    UsageError
        Another kind of file, or what draws it is not installed.
    OutputError
        The file cannot be written.
    """
    pictures.save(path, figure(selection), f"{selection.graph.name}: primitives")


def figure(selection: Selection) -> Chart:
    """The chart of a selection, with six panels.

    They show time and memory if one family is used for all layers (Figures 1, 2 and 5), the front beside that
    of the greedy selection (6 to 9), the speed-up over the greedy selection by budget (10), memory over the
    layers, and choices by family.
    """
    over = "workspace" if selection.objective == "workspace" else "memory"
    kinds = {**selection.baselines, "selected": selection.selected.sums}
    if selection.greedy:
        kinds["greedy"] = selection.greedy
    quick = fastest(selection.problem).choice
    panels = [
        times_view(kinds),
        memory_view(kinds),
        front_view(selection.front, over, selection.baselines),
        speedups_view(selection.front),
        layers_view(selection.problem, {"fastest": quick, "selected": selection.selected.choice}),
        families_view(selection.front, over),
    ]
    return arrange_panels(f"{selection.graph.name}, {selection.device.name}", panels, 3)


def arrange_panels(title: str, panels: Sequence[Chart], columns: int) -> Chart:
    """Arrange views in rows of `columns`, each view with its own scales."""
    rows = [list(panels[begin : begin + columns]) for begin in range(0, len(panels), columns)]
    independent = {"scale": {"color": "independent", "shape": "independent", "xOffset": "independent"}}
    return chart(
        title=title, vconcat=[{"hconcat": row, "resolve": independent} for row in rows], resolve=independent
    )


def _scale(values: Iterable[float]) -> Chart:
    """A logarithmic scale if values have a wide range, with room at both ends; else the default scale."""
    numbers = list(values)
    wide = bool(numbers) and min(numbers) > 0 and max(numbers) > WIDE_RANGE * min(numbers)
    return {"type": "log", "domain": [min(numbers) / 2, max(numbers) * 2], "nice": False} if wide else {}


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _bars(
    rows: Sequence[Mapping[str, object]], title: str, axis: str, group: str = "", label: str = ""
) -> Chart:
    """A bar chart: rows have ``name``, ``value``, the label ``told`` and a `group`, drawn side by side."""
    sizes = [float(str(row["value"])) for row in rows if row["value"]]
    scale = _scale(sizes) or {"domainMax": max(sizes, default=1.0) * 1.1}
    axis_of_names = {"labelAngle": -50, "labelLimit": 110}
    where: Chart = {
        "x": category("name", sort=None, title=label or None, axis=axis_of_names),
        "y": number("value", title=axis, scale=scale),
    }
    colour: Chart = {"value": PALETTE[0]}
    if group:
        names = list(dict.fromkeys(str(row[group]) for row in rows))
        where["xOffset"] = category(group, sort=names)
        colours = {"domain": names, "range": list(PALETTE[: len(names)])}
        colour = category(group, scale=colours, legend=legend_at_top())
    low = {"y2": {"datum": scale["domain"][0]}} if "domain" in scale else {}
    hover_text = tooltip(("name", "of"), ("told", axis))
    bars = layer({"type": "bar"}, **where, **low, color=colour, tooltip=hover_text)
    labels = layer({"type": "text", "dy": -6, "fontSize": 9}, **where, text=category("told"))
    return {**SIZE, "title": title, "data": {"values": list(rows)}, "layer": [bars, labels]}


def times_view(kinds: Mapping[str, Sums], name: str = "") -> Chart:
    """Figures 1 and 5a: the time of each selection in `kinds`."""
    rows = [
        {"name": label, "value": sums.time_ns / 1e6, "told": _short(sums.time_ns / 1e6)}
        for label, sums in kinds.items()
    ]
    return _bars(rows, name or "time of one primitive everywhere", "time (ms)")


def memory_view(kinds: Mapping[str, Sums], name: str = "") -> Chart:
    """Figures 1, 2 and 5b: memory, and the largest footprint of a layer, of each selection in `kinds`."""
    rows = []
    for quantity, field in (("memory", "memory_bytes"), ("largest layer", "workspace_bytes")):
        for label, sums in kinds.items():
            size = getattr(sums, field) / MIB
            rows.append({"name": label, "what": quantity, "value": size, "told": _short(size)})
    return _bars(rows, name or "memory, and the largest layer's footprint", "MiB", "what")


# Marks of points in charts of Vega-Lite.
_SHAPES = (
    *("circle", "cross", "square", "diamond"),
    *("triangle-up", "triangle-down", "triangle-left", "stroke"),
)


def front_view(points: Sequence[Point], over: str, kinds: Mapping[str, Sums], name: str = "") -> Chart:
    """Figures 6 to 9: time over memory or workspace, of the front, the greedy selection, and `kinds`."""

    def row(quantity: str, sums: Sums) -> dict[str, object]:
        """A point of the chart."""
        size_mib = (sums.memory_bytes if over == "memory" else sums.workspace_bytes) / MIB
        return {"what": quantity, "taken": size_mib, "ms": sums.time_ns / 1e6}

    selected = [row("integer program", point.selected.sums) for point in points]
    greedily = [row("greedy", point.greedy) for point in points if point.greedy]
    others = [row(label, sums) for label, sums in kinds.items()]
    rows = [*selected, *greedily, *others]
    names = list(dict.fromkeys(str(entry["what"]) for entry in rows))
    quantity = "memory" if over == "memory" else "footprint of the largest layer"
    time_scale = _scale(float(str(entry["ms"])) for entry in rows) or {"zero": False}
    x = number("taken", title=f"{quantity} (MiB)", scale={"zero": False})
    y = number("ms", title="time (ms)", scale=time_scale)
    highlights = ["#4477aa", "#cc3311"] if "greedy" in names else ["#4477aa"]
    colours = [*highlights, *["#59636e"] * len(names)][: len(names)]
    series = category("what", sort=names, legend=legend_at_top(3))
    shapes = [_SHAPES[i % len(_SHAPES)] for i in range(len(names))]
    line = layer({"type": "line", "interpolate": "step-after", "color": "#4477aa"}, x=x, y=y)
    markers = layer(
        {"type": "point", "size": 50},
        x=x,
        y=y,
        color={**series, "scale": {"domain": names, "range": colours}},
        shape={**series, "scale": {"domain": names, "range": shapes}},
        tooltip=tooltip(("what", "by"), ("taken", "MiB", ".2f"), ("ms", "ms", ".3f")),
    )
    layers = [{"transform": [{"filter": "datum.what == 'integer program'"}], **line}, markers]
    return {**SIZE, "title": name or "front", "data": {"values": rows}, "layer": layers}


def speedups_view(points: Sequence[Point]) -> Chart:
    """Figure 10: time of the greedy selection over ours; budgets fall from left to right."""
    rows = []
    for point in reversed(points):
        ratio = point.greedy.time_ns / point.time_ns if point.greedy else 0.0
        told = _short(ratio) if point.greedy else "none"
        rows.append({"name": _budget(point), "value": ratio, "told": told})
    return _bars(rows, "speed-up over greedy", "greedy's time / ours", label="budget (MiB)")


def _budget(point: Point) -> str:
    return f"{point.budget_bytes / MIB:.1f}"


def layers_view(problem: SelectionProblem, choices: Mapping[str, Mapping[str, Candidate]]) -> Chart:
    """Memory over the layers: live bytes, or in the memory model ``sum`` the footprint of each layer."""
    rows = []
    for label, choice in choices.items():
        if problem.memory_model == "sum":
            sizes = [problem.footprint_bytes(s, choice[s.name]) for s in problem.steps if s.chosen]
        else:
            live, _ = problem.liveness(choice)
            sizes = [live.live_bytes(step) for step in range(live.steps)]
        rows += [
            {"choice": label, "at": step / len(sizes), "mib": size / MIB} for step, size in enumerate(sizes)
        ]
    quantity = "footprint" if problem.memory_model == "sum" else "live, without filters"
    names = list(choices)
    colours = {"domain": names, "range": list(PALETTE[: len(names)])}
    lines = layer(
        {"type": "line", "interpolate": "step-after"},
        x=number("at", title="share of the layers"),
        y=number("mib", title=f"{quantity} (MiB)"),
        color=category("choice", scale=colours, legend=legend_at_top()),
    )
    return {**SIZE, "title": "memory over the layers", "data": {"values": rows}, **lines}


def families(choice: Mapping[str, Candidate]) -> Counter[str]:
    """How many layers each family computes."""
    named = (candidate.primitive for candidate in choice.values())
    return Counter(PRIMITIVES[name].family for name in named if name)


def families_view(points: Sequence[Point], over: str) -> Chart:
    """How many layers each family computes at every point of a front."""
    rows = []
    for point in points:
        count = families(point.selected.choice)
        rows += [
            {"budget": _budget(point), "family": TITLES.get(family, family), "layers": count[family]}
            for family in FAMILIES
            if count[family]
        ]
    names = [TITLES.get(family, family) for family in FAMILIES]
    used = [name for name in names if any(row["family"] == name for row in rows)]
    colours = {"domain": used, "range": [PALETTE[names.index(name) % len(PALETTE)] for name in used]}
    bars = layer(
        "bar",
        x={
            "field": "budget",
            "type": "ordinal",
            "sort": None,
            "title": f"{over} budget (MiB)",
            "axis": {"labelAngle": -60},
        },
        y=number("layers", stack=True, title="layers"),
        color=category("family", scale=colours, legend=legend_at_top(4)),
        tooltip=tooltip(("family", "family"), ("layers", "layers", "d"), ("budget", "budget, MiB")),
    )
    return {**SIZE, "title": "choices by family", "data": {"values": rows}, **bars}
