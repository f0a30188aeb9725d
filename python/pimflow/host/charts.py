"""Parts of Vega-Lite charts."""

from __future__ import annotations

from collections.abc import Sequence

from pimflow.host.pages import Chart

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
# Colours of resources and of the baseline; safe for colour-blind readers.
COLOURS = {
    "gpu": "#4477aa",
    "pim": "#ee7733",
    "crossbar": "#228833",
    "baseline": "#8a939d",
    "host": "#aa3377",
}
# Colours for categories without a meaning of their own; dark enough for white text.
PALETTE = ("#4477aa", "#a8553a", "#228833", "#8a6d1d", "#227c92", "#aa3377", "#5b6770", "#6a4c93")
BAR_TEXT_COLOUR = "white"  # names inside bars


def chart(**parts: object) -> Chart:
    """A Vega-Lite chart with these top-level properties."""
    return {"$schema": SCHEMA, **parts}


def number(field: str, **options: object) -> Chart:
    """How a mark encodes a field of numbers, with options of Vega-Lite such as ``title``."""
    return {"field": field, "type": "quantitative", **options}


def category(field: str, **options: object) -> Chart:
    """How a mark encodes a field of categories, with options of Vega-Lite such as ``sort``."""
    return {"field": field, "type": "nominal", **options}


def layer(mark: object, **encoding: object) -> Chart:
    """Marks, with what each of their channels encodes."""
    return {"mark": mark, "encoding": encoding}


def zoom_parameter(*axes: str) -> Chart:
    """The parameter ``zoom``: drag to pan, wheel with Ctrl, Shift or Meta to zoom, double click to reset."""
    modifier_keys = "event.ctrlKey || event.shiftKey || event.metaKey"
    select = {"type": "interval", "encodings": list(axes), "zoom": f"wheel![{modifier_keys}]"}
    return {"name": "zoom", "select": select, "bind": "scales"}


def bar_names(name: str, begin: str, end: str, encoding: Chart, condition: str = "true") -> Chart:
    """A layer with names inside bars from `begin` to `end` along x, cut to the width of the bar.

    Names whose rest would be too short to read are omitted, and so are those that fail the test `condition`.
    """
    width = f"abs(scale('x', datum['{end}']) - scale('x', datum['{begin}']))"
    is_wide = f"{width} > max(44, min(72, 7 * length(datum['{name}'])))"
    return {
        "mark": {
            "type": "text",
            "color": BAR_TEXT_COLOUR,
            "clip": True,
            "limit": {"expr": f"max(1, {width} - 6)"},
            "dir": "rtl",  # cuts the beginning, which is the same for many layers
            "tooltip": None,
        },
        "encoding": {
            **encoding,
            "text": category(name),
            "opacity": {"condition": {"test": f"{is_wide} && ({condition})", "value": 1}, "value": 0},
        },
    }


def tooltip(*fields: tuple[str, str] | tuple[str, str, str]) -> list[Chart]:
    """The tooltip of a mark: field, title and, for numbers, the format."""
    shown: list[Chart] = []
    for field, title, *form in fields:
        kind: Chart = {"type": "quantitative", "format": form[0]} if form else {"type": "nominal"}
        shown.append({"field": field, "title": title, **kind})
    return shown


def legend_at_top(columns: int | None = None) -> Chart:
    """A legend above the chart."""
    return {"orient": "top", "title": None, "labelLimit": 260, **({"columns": columns} if columns else {})}


def cycle_colours(names: Sequence[str]) -> list[str]:
    """A colour for each name; colours repeat."""
    return [PALETTE[index % len(PALETTE)] for index in range(len(names))]
