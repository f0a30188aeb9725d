"""Memory over time: every buffer a rectangle, its lifetime wide and its bytes high."""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pimflow.core.liveness import Lifetime
from pimflow.errors import UsageError
from pimflow.memory.csv_form import replace_file
from pimflow.memory.pools import MemoryPlan, Pool

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".html")
LABELLED = 40  # more names than these cannot be read


def check_format(path: str | os.PathLike) -> str:
    """Suffix of `path`, or UsageError if no picture can be written there."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise UsageError(f"{path}: a plot is written as {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("plots need matplotlib; pip install 'pimflow[plot]'") from error
    return suffix


def write(
    path: str | os.PathLike, lifetimes: Sequence[Lifetime], plan: MemoryPlan, title: str = "memory"
) -> None:
    """Draw a plan, a panel a memory region, as .png, .svg or .html by the name of the file.

    Raises
    ------
    UsageError
        Another kind of file, or matplotlib is not installed.
    LifetimeError
        The file cannot be written.
    """
    suffix = check_format(path)
    replace_file(path, rendered(figure(lifetimes, plan, title), suffix, title))


def rendered(picture: Figure, suffix: str, title: str) -> bytes:
    """The file of a matplotlib Figure, of one of `FORMATS`; the same bytes every time."""
    import matplotlib

    kind = "png" if suffix == ".png" else "svg"
    data = io.BytesIO()
    # Without a salt of its own and with a date, the same plan would give other bytes every time.
    with matplotlib.rc_context({"svg.hashsalt": "pimflow"}):
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        picture.savefig(data, format=kind, dpi=150, metadata=metadata)
    return _page(title, data.getvalue()) if suffix == ".html" else data.getvalue()


def _page(title: str, svg: bytes) -> bytes:
    source = base64.b64encode(svg).decode()
    text = html.escape(title)
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text}</title></head>'
    body = f'<body><img alt="{text}" src="data:image/svg+xml;base64,{source}"></body>'
    return f"{head}{body}</html>\n".encode()


def figure(lifetimes: Sequence[Lifetime], plan: MemoryPlan, title: str):
    """The picture, as a matplotlib Figure with one Axes a memory region."""
    from matplotlib.figure import Figure

    whole = Figure(figsize=(10, 5 * max(len(plan.pools), 1)), layout="constrained")
    whole.suptitle(title)
    for index, pool in enumerate(plan.pools):
        axes = whole.add_subplot(len(plan.pools), 1, index + 1)
        _draw(axes, [life for life in lifetimes if life.memory == pool.memory], plan, pool)
    return whole


def _draw(axes, lifetimes: Sequence[Lifetime], plan: MemoryPlan, pool: Pool) -> None:
    from matplotlib import colormaps
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    boxes = []
    for life in lifetimes:
        low = plan.offsets_bytes[life.name]
        boxes.append(Rectangle((life.begin, low), life.end - life.begin, life.size_bytes))
        if len(lifetimes) <= LABELLED and life.size_bytes:
            middle = ((life.begin + life.end) / 2, low + life.size_bytes / 2)
            axes.annotate(life.name, middle, ha="center", va="center", fontsize=7, zorder=3)
    colours = colormaps["tab20"].colors
    faces = [colours[index % len(colours)] for index in range(len(boxes))]
    axes.add_collection(PatchCollection(boxes, facecolors=faces, edgecolors="black", linewidths=0.3))
    axes.axhline(pool.pool_bytes, color="black", linewidth=1, label=f"pool {pool.pool_bytes} B")
    axes.axhline(
        pool.lower_bound_bytes,
        color="tab:red",
        linestyle="--",
        linewidth=1,
        label=f"lower bound {pool.lower_bound_bytes} B",
    )
    axes.set_xlim(min(life.begin for life in lifetimes), max(life.end for life in lifetimes))
    axes.set_ylim(0, max(pool.pool_bytes, 1) * 1.02)
    axes.set_xlabel("step")
    axes.set_ylabel("offset (B)")
    axes.set_title(f"{pool.memory}: {pool.policy}")
    axes.legend(loc="upper right", bbox_to_anchor=(1, -0.08), ncols=2, frameon=False)
