"""Pictures of plans: every buffer is a rectangle, as wide as its lifetime and as high as its bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pimflow.core.liveness import Lifetime
from pimflow.host.charts import PALETTE, bar_names, category, chart, layer, number, tooltip, zoom_parameter
from pimflow.host.pages import Chart
from pimflow.host.pictures import save
from pimflow.memory.pools import MemoryPlan

MB = 1e6


def write(
    path: str | os.PathLike[str], lifetimes: Sequence[Lifetime], plan: MemoryPlan, title: str = "memory"
) -> None:
    """Draw a plan, a panel a memory region, as .png, .svg or .html by the name of the file.

    Raises
    ------
    UsageError
        Another kind of file, or what draws it is not installed.
    OutputError
        The file cannot be written.
    """
    save(path, figure(lifetimes, plan, title), title)


def figure(lifetimes: Sequence[Lifetime], plan: MemoryPlan, title: str) -> Chart:
    """The chart of a plan, with a view for each memory region."""
    views = []
    for pool in plan.pools:
        pool_lifetimes = [life for life in lifetimes if life.memory == pool.memory]
        rectangles = [
            (life.name, life.begin, life.end, plan.offsets_bytes[life.name], life.size_bytes)
            for life in pool_lifetimes
        ]
        heading = {"text": f"{title}: {pool.memory}, {pool.policy}" if len(plan.pools) > 1 else title}
        views.append(pool_view(rectangles, pool.pool_bytes, pool.lower_bound_bytes) | {"title": heading})
    if len(views) == 1:
        return chart(width=900, height=420, **views[0])
    return chart(vconcat=[{**view, "width": 900, "height": 320} for view in views])


def pool_view(
    rectangles: Sequence[tuple[str, int, int, int, int]], pool_bytes: int, lower_bound_bytes: int
) -> Chart:
    """One pool over the steps of a network.

    Parameters
    ----------
    rectangles
        Name, begin, end (exclusive), offset and size in bytes of each buffer. A buffer that is part of
        another is drawn as an outline only.
    """
    rows = _rectangle_rows(rectangles)
    bound_rows = [
        {"bytes": pool_bytes / MB, "what": f"pool: {pool_bytes / MB:.3f} MB"},
        {"bytes": lower_bound_bytes / MB, "what": f"lower bound: {lower_bound_bytes / MB:.3f} MB"},
    ]
    has_room = "abs(scale('y', datum.high) - scale('y', datum.low)) > 13"  # for a line of text
    label_position: Chart = {"x": number("middle"), "y": number("centre")}
    bounds = layer(
        {"type": "rule", "strokeWidth": 1.5, "clip": True},
        y=number("bytes"),
        strokeDash=category(
            "what",
            scale={"domain": [row["what"] for row in bound_rows], "range": [[1, 0], [6, 4]]},
            legend={"orient": "top", "title": None, "symbolType": "stroke", "labelLimit": 400},
        ),
    )
    boxes = _boxes(max((end for _, _, end, _, _ in rectangles), default=1))
    labels = bar_names("label", "begin", "end", label_position, has_room)
    return {"data": {"values": rows}, "layer": [boxes, labels, {"data": {"values": bound_rows}, **bounds}]}


def _rectangle_rows(rectangles: Sequence[tuple[str, int, int, int, int]]) -> list[dict[str, object]]:
    """The rows of the chart's data, those of parts after their wholes."""
    outermost = _outermost(rectangles)
    rows: list[dict[str, object]] = [
        {
            "name": name,
            "label": name.partition(":")[2] or name if name in outermost else "",
            "opacity": 1.0 if name in outermost else 0.0,
            "outline": 1.0 if name in outermost else 0.35,  # faint, since it may cross a name
            "begin": begin,
            "end": end,
            "low": offset / MB,
            "high": (offset + size) / MB,
            "middle": (begin + end) / 2,
            "centre": (offset + size / 2) / MB,
            "size": size / MB,
            "colour": PALETTE[index % len(PALETTE)],
        }
        for index, (name, begin, end, offset, size) in enumerate(rectangles)
        if size
    ]
    rows.sort(key=lambda row: row["name"] not in outermost)
    return rows


def _boxes(last_step: int) -> Chart:
    """The layer of rectangles, over steps up to `last_step`."""
    x = number(
        "begin",
        title="step: a kernel or a PIM program",
        axis={"format": "d", "tickMinStep": 1},
        scale={"domain": [0, last_step], "nice": False},
    )
    boxes = layer(
        {"type": "rect", "stroke": "white", "strokeWidth": 0.7, "clip": True},
        x=x,
        x2={"field": "end"},
        y=number("low", title="offset in the pool, MB"),
        y2={"field": "high"},
        color=category("colour", scale=None),
        fillOpacity=number("opacity", scale=None),
        strokeOpacity=number("outline", scale=None),
        tooltip=tooltip(
            ("name", "tensor of"),
            ("begin", "from step", "d"),
            ("end", "to before step", "d"),
            ("low", "offset, MB", ".6f"),
            ("size", "size, MB", ".6f"),
        ),
    )
    return {"params": [zoom_parameter("x", "y")], **boxes}


def _outermost(rectangles: Sequence[tuple[str, int, int, int, int]]) -> set[str]:
    """Names of the buffers that do not lie inside another while that is live."""
    outermost: list[tuple[str, int, int, int, int]] = []
    by_area = sorted(
        rectangles, key=lambda rectangle: (-(rectangle[2] - rectangle[1]) * rectangle[4], rectangle[0])
    )
    for rectangle in by_area:
        _, begin, end, offset, size = rectangle
        is_inside = any(
            b <= begin and end <= e and low <= offset and offset + size <= low + height
            for _, b, e, low, height in outermost
        )
        if not is_inside:
            outermost.append(rectangle)
    return {name for name, *_ in outermost}
