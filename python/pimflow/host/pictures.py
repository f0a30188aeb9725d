"""Pictures, as PNG, SVG or a page of HTML; matplotlib draws them where it is installed."""

from __future__ import annotations

import base64
import html
import importlib.util
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pimflow.errors import UsageError
from pimflow.host.files import check_file, replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FORMATS = (".png", ".svg", ".html")


def check_format(path: str | os.PathLike[str]) -> str:
    """Suffix of `path`; raises `UsageError` or `OutputError` if no picture can be written there."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise UsageError(f"{path}: a plot is written as {', '.join(FORMATS)}")
    if not available():
        raise UsageError("plots need matplotlib; pip install 'pimflow[plot]'")
    check_file(path)
    return suffix


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def save(path: str | os.PathLike[str], picture: Figure, title: str) -> None:
    """Write a matplotlib Figure as .png, .svg or .html by the name of the file; raises `OutputError`."""
    replace_file(path, rendered(picture, check_format(path), title))


def rendered(picture: Figure, suffix: str, title: str) -> bytes:
    """The file of a matplotlib Figure, of one of `FORMATS`; the same bytes every time."""
    import matplotlib

    kind = "png" if suffix == ".png" else "svg"
    data = io.BytesIO()
    # With a random salt, or a date, the same picture would be other bytes every time.
    with matplotlib.rc_context({"svg.hashsalt": "pimflow"}):
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        picture.savefig(data, format=kind, dpi=150, metadata=metadata)
    return _page(title, data.getvalue()) if suffix == ".html" else data.getvalue()


def _page(title: str, svg: bytes) -> bytes:
    source = base64.b64encode(svg).decode()
    escaped = html.escape(title)
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escaped}</title></head>'
    body = f'<body><img alt="{escaped}" src="data:image/svg+xml;base64,{source}"></body>'
    return f"{head}{body}</html>\n".encode()
