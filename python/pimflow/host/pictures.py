"""Pictures by Vega-Lite: interactive HTML pages, which need no package; SVG and PNG by vl-convert."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from pimflow.errors import UsageError
from pimflow.host.files import PICTURES, check_file, replace_file
from pimflow.host.pages import THEMES, Chart, chart_page

FORMATS = (".png", ".svg", ".html")
INSTALL = "pip install 'pimflow[plot]'"
_GRAMMAR = "6.4"  # version of Vega-Lite; pages have the same major version


def check_format(path: str | os.PathLike[str], *, force: bool = False) -> str:
    """Suffix of `path`; raises `UsageError` or `OutputError` if no picture can be written there.

    `force` is that of `check_file`.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise UsageError(f"{path}: a plot is written as {', '.join(FORMATS)}")
    check_file(path, PICTURES[suffix], force=force)
    if suffix != ".html" and not can_render_images():
        raise UsageError(f"{path}: pictures as {suffix} need vl-convert-python, as .html nothing; {INSTALL}")
    return suffix


def can_render_images() -> bool:
    """Whether pictures can be written as SVG and PNG."""
    return importlib.util.find_spec("vl_convert") is not None


def save(path: str | os.PathLike[str], chart: Chart, title: str) -> None:
    """Write a chart as .png, .svg or .html by the name of the file; raises `UsageError`, `OutputError`.

    Replaces any existing file: commands check for files of others before the work (`check_format`).
    """
    replace_file(path, render(chart, check_format(path, force=True), title))


def render(chart: Chart, suffix: str, title: str) -> bytes:
    """The bytes of a chart in one of `FORMATS`; the same bytes every time."""
    if suffix == ".html":
        return chart_page(title, chart)
    import vl_convert

    config = {**THEMES["light"], "background": "white"}
    if suffix == ".svg":
        return _renumber_ids(
            str(vl_convert.vegalite_to_svg(chart, vl_version=_GRAMMAR, config=config))
        ).encode()
    return bytes(vl_convert.vegalite_to_png(chart, vl_version=_GRAMMAR, config=config, scale=2))


def _renumber_ids(svg: str) -> str:
    """`svg` with ids numbered from 0; vl-convert continues the numbers of the previous picture."""
    names = list(dict.fromkeys(re.findall(r'id="([A-Za-z_]+\d+)"', svg)))
    if not names:
        return svg
    numbers = {name: f"part{number}" for number, name in enumerate(names)}
    pattern = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    return re.sub(rf'(id="|url\(#)({pattern})(?=["\)])', lambda match: match[1] + numbers[match[2]], svg)
