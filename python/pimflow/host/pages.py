"""HTML pages that work offline: they contain the libraries that draw charts."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIBRARIES = Path(__file__).with_name("libraries")
VEGA = ("vega.min.js", "vega-lite.min.js", "vega-embed.min.js")
TABULATOR = ("tabulator.min.js",)

Chart = dict[str, Any]  # a specification of Vega-Lite

_FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"


def _theme(ink: str, faint: str, grid: str) -> Chart:
    text: Chart = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12}
    return {
        "background": "transparent",
        "font": _FONT,
        "title": {"color": ink, "subtitleColor": faint, "fontSize": 14, "anchor": "start"},
        "axis": {
            **text,
            "titleFontWeight": "normal",
            "gridColor": grid,
            "domainColor": faint,
            "tickColor": faint,
        },
        "legend": {**text, "titleFontWeight": "normal"},
        "header": {**text, "titleFontWeight": "normal"},
        "view": {"stroke": grid},
        "text": {"color": ink, "fontSize": 11},
        "rule": {"color": ink},
    }


THEMES: dict[str, Chart] = {
    "light": _theme("#1b1f24", "#59636e", "#e3e6ea"),
    "dark": _theme("#e6edf3", "#9aa4af", "#30363d"),
}


_STYLE = f"""body {{ font-family: {_FONT}; margin: 1rem; background: Canvas; color: CanvasText; }}
figure {{ margin: 0; width: 100%; overflow-x: auto; }}"""


@functools.cache
def library(name: str) -> str:
    """The text of a file of `LIBRARIES`, without the link to a source map, which is not there."""
    text = (LIBRARIES / name).read_text(encoding="utf-8").rstrip()
    body, _, last = text.rpartition("\n")
    return body if last.startswith(("//# sourceMappingURL=", "/*# sourceMappingURL=")) else text


def script_data(name: str, value: object) -> str:
    """A script element with `value` as JSON, escaped so that no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def charts_script() -> str:
    """The script that draws each chart of the data ``charts`` in the element with its name."""
    return Path(__file__).with_name("charts.js").read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """The Content-Security-Policy of a page: only these scripts run, and nothing is fetched.

    Even if a name were inserted as HTML, its handlers and links would do nothing. Inline styles are allowed
    because the libraries write them.
    """
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def chart_page(title: str, chart: Chart) -> bytes:
    """A page with one chart."""
    body = '<main><figure id="chart" class="chart"></figure></main>'
    data = {"themes": THEMES, "charts": {"chart": with_page_width(chart)}}
    return page(title, body, scripts=(charts_script(),), style=_STYLE, data=data)


def with_page_width(chart: Chart) -> Chart:
    """`chart` with the width of its element, if it has no width of its own."""
    if "width" not in chart:
        return chart
    return {**chart, "width": "container"}


def page(
    title: str,
    body: str,
    *,
    scripts: Sequence[str],
    style: str = "",
    data: Mapping[str, object] | None = None,
    libraries: Sequence[str] = VEGA,
) -> bytes:
    """A page of HTML.

    Parameters
    ----------
    title : str
        Plain text.
    body : str
        HTML.
    scripts : sequence of str
        Run after the libraries, once the body is there.
    data : mapping of str to JSON, optional
        By the id of the element that holds it.
    libraries : sequence of str
        Files of `LIBRARIES`.
    """
    code = [*map(library, libraries), *(f"\n{script}\n" for script in scripts)]
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(code)}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n',
        f"<title>{html.escape(title)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n{body}\n",
        *(script_data(name, value) for name, value in (data or {}).items()),
        *(f"<script>{script}</script>\n" for script in code),
        f"<!--\n{library('licences.txt').replace('--', '- -')}-->\n</body>\n</html>\n",
    ]
    return "".join(parts).encode()
