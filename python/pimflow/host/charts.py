"""Parts of charts, as Vega-Lite has them."""

from __future__ import annotations

from collections.abc import Sequence

from pimflow.host.pages import Chart

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
# Of the resources of a system, and of the baseline; people who see no red tell them apart.
COLOURS = {
    "gpu": "#4477aa",
    "pim": "#ee7733",
    "crossbar": "#228833",
    "baseline": "#8a939d",
    "host": "#aa3377",
}
# Of things that only have to be told apart; dark enough for white names.
MANY = ("#4477aa", "#a8553a", "#228833", "#8a6d1d", "#227c92", "#aa3377", "#5b6770", "#6a4c93")
INSIDE = "white"  # names inside bars


def chart(**parts: object) -> Chart:
    """A chart of these parts."""
    return {"$schema": SCHEMA, **parts}


def zoomed(*axes: str) -> Chart:
    """The parameter ``zoom``: drag to move, wheel with Ctrl or Shift to zoom, double click for the whole."""
    held = "event.ctrlKey || event.shiftKey || event.metaKey"
    select = {"type": "interval", "encodings": list(axes), "zoom": f"wheel![{held}]"}
    return {"name": "zoom", "select": select, "bind": "scales"}


def fitting_names(name: str, begin: str, end: str, encoding: Chart, more: str = "true") -> Chart:
    """A layer with names inside bars from `begin` to `end` along x, cut to their width, or left out.

    Of a name that is cut, so much is left that it says something.
    """
    width = f"abs(scale('x', datum['{end}']) - scale('x', datum['{begin}']))"
    wide = f"{width} > max(44, min(72, 7 * length(datum['{name}'])))"
    return {
        "mark": {
            "type": "text",
            "color": INSIDE,
            "clip": True,
            "limit": {"expr": f"max(1, {width} - 6)"},
            "dir": "rtl",  # what is cut is the beginning: layers of a network begin alike
            "tooltip": None,
        },
        "encoding": {
            **encoding,
            "text": {"field": name, "type": "nominal"},
            "opacity": {"condition": {"test": f"{wide} && ({more})", "value": 1}, "value": 0},
        },
    }


def tooltip(*fields: tuple[str, str] | tuple[str, str, str]) -> list[Chart]:
    """What is shown of a mark that is pointed at: field, title and, of numbers, the format."""
    shown: list[Chart] = []
    for field, title, *form in fields:
        kind: Chart = {"type": "quantitative", "format": form[0]} if form else {"type": "nominal"}
        shown.append({"field": field, "title": title, **kind})
    return shown


def legend_at_top(columns: int | None = None) -> Chart:
    """A legend above the chart, where it covers nothing."""
    return {"orient": "top", "title": None, "labelLimit": 260, **({"columns": columns} if columns else {})}


def cycled(names: Sequence[str]) -> list[str]:
    """A colour for each name, in turn."""
    return [MANY[index % len(MANY)] for index in range(len(names))]
