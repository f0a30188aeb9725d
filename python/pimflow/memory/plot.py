"""Pictures of plans: every buffer is a rectangle, as wide as its lifetime and as high as its bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pimflow.core.liveness import Lifetime
from pimflow.host.pictures import check_format, save
from pimflow.memory.pools import MemoryPlan, Pool

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELLED = 40  # more names than these cannot be read


def write(
    path: str | os.PathLike[str], lifetimes: Sequence[Lifetime], plan: MemoryPlan, title: str = "memory"
) -> None:
    """Draw a plan, a panel a memory region, as .png, .svg or .html by the name of the file.

    Raises
    ------
    UsageError
        Another kind of file, or matplotlib is not installed.
    OutputError
        The file cannot be written.
    """
    check_format(path)
    save(path, figure(lifetimes, plan, title), title)


def figure(lifetimes: Sequence[Lifetime], plan: MemoryPlan, title: str) -> Figure:
    """The picture, as a matplotlib Figure with one Axes a memory region."""
    from matplotlib.figure import Figure

    whole = Figure(figsize=(10, 5 * max(len(plan.pools), 1)), layout="constrained")
    whole.suptitle(title)
    for index, pool in enumerate(plan.pools):
        axes = whole.add_subplot(len(plan.pools), 1, index + 1)
        _draw(axes, [life for life in lifetimes if life.memory == pool.memory], plan, pool)
    return whole


def _draw(axes: Axes, lifetimes: Sequence[Lifetime], plan: MemoryPlan, pool: Pool) -> None:
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
    colours = colormaps["tab20"]
    faces = [colours(index % colours.N) for index in range(len(boxes))]
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
