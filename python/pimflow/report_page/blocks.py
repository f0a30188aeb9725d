"""The parts of a page: sections with text, charts and tables."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pimflow.host import pages
from pimflow.host.pages import Chart

Row = Mapping[str, Any]
_THEME = '<button id="theme" type="button">light or dark</button>'


def column(title: str, name: str, **options: object) -> dict[str, object]:
    """A column of a table.

    Its options are `digits` for numbers, `filter` (``text`` or ``list``), the `least` width in pixels, and
    `link` for paths to pages.
    """
    return {"title": title, "field": name, **options}


def escape(text: object) -> str:
    """Escape text for HTML."""
    return html.escape(str(text))


def items(rows: Sequence[str]) -> str:
    """An HTML list of lines of plain text."""
    return "<ul>" + "".join(f"<li>{escape(row)}</li>" for row in rows) + "</ul>"


@dataclass
class Page:
    """A page that is being built: its sections in order, and the charts and tables in them."""

    title: str
    sections: list[tuple[str, str, str]] = field(default_factory=list)
    charts: dict[str, Chart] = field(default_factory=dict)
    tables: dict[str, dict[str, object]] = field(default_factory=dict)
    graph: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, title: str, *parts: str) -> None:
        """Add a section with parts in HTML."""
        self.sections.append((name, title, "".join(parts)))

    def chart(self, name: str, chart: Chart) -> str:
        """Add a chart; returns the HTML element in which a script draws it."""
        self.charts[name] = pages.with_page_width(chart)
        return f'<figure id="{name}" class="chart"></figure>'

    def table(self, name: str, columns: Sequence[object], rows: Sequence[Row], **options: object) -> str:
        """Add a table; returns its HTML element.

        With `details`, a click on a row shows its field of that name.
        """
        self.tables[name] = {"columns": list(columns), "rows": list(rows), **options}
        button = f'<button type="button" class="copy" data-table="{name}">copy as CSV</button>'
        return f'<div class="controls">{button}</div><div id="{name}" class="table"></div>'

    def render(self, head: str) -> bytes:
        """Write the page as HTML, with `head` above its sections."""
        links = "".join(f'<a href="#{name}-section">{escape(t)}</a>' for name, t, _ in self.sections)
        body = "".join(
            f'<section id="{name}-section"><h2>{escape(title)}</h2>{content}</section>\n'
            for name, title, content in self.sections
        )
        footer = f"Written by pimflow {escape(version('pimflow'))}, with Vega-Lite and Tabulator."
        return pages.page(
            self.title,
            f"<header>{head}<nav>{links}{_THEME}</nav></header>\n"
            f"<main>{body}</main>\n<footer>{footer}</footer>",
            scripts=(pages.charts_script(), _read_asset("report.js")),
            style=pages.library("tabulator.min.css") + _read_asset("report.css"),
            data={"themes": pages.THEMES, "charts": self.charts, "tables": self.tables, "graph": self.graph},
            libraries=(*pages.VEGA, *pages.TABULATOR),
        )


def _read_asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
