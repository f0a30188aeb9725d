"""Selections of primitives as pictures, after Figures 1, 2 and 5 to 10 of Wen et al., *TASO*."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pimflow.core.candidate import Candidate
from pimflow.host import pictures
from pimflow.primitive_selection.problem import SelectionProblem, Sums
from pimflow.primitive_selection.search import Point, fastest
from pimflow.primitive_selection.selection import Selection
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.families import FAMILIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20
MARKERS = "sDv^PX*<>"
TITLES = {
    "windows": "im2row, im2col",
    "shifted": "kn2row, kn2col",
}  # of families that the paper calls otherwise
WIDE_RANGE = 20  # largest over least from which an axis is logarithmic


def write(path: str | os.PathLike, selection: Selection) -> None:
    """Draw a selection with a front as .png, .svg or .html, by the name of the file.

    Raises
    ------
    UsageError
        Another kind of file, or matplotlib is not installed.
    LifetimeError
        The file cannot be written.
    """
    pictures.check_format(path)
    pictures.save(path, figure(selection), f"{selection.problem.graph.name}: primitives")


def figure(selection: Selection) -> Figure:
    """A figure of six panels.

    Time and memory of one primitive everywhere (Figures 1, 2 and 5), the front with the greedy's (6 to 9),
    the speed-up over the greedy by budget (10), memory over the layers, and choices by family.
    """
    from matplotlib.figure import Figure

    over = "workspace" if selection.objective == "workspace" else "memory"
    whole = Figure(figsize=(15, 8), layout="constrained")
    whole.suptitle(f"{selection.problem.graph.name}, {selection.profile.device.name}")
    panels = whole.subplots(2, 3).flat
    kinds = {**selection.baselines, "selected": selection.selected.sums}
    if selection.greedy:
        kinds["greedy"] = selection.greedy
    draw_times(next(panels), kinds)
    draw_memory(next(panels), kinds)
    draw_front(next(panels), selection.front, over, selection.baselines)
    draw_speedups(next(panels), selection.front)
    quick = fastest(selection.problem).choice
    draw_layers(next(panels), selection.problem, {"fastest": quick, "selected": selection.selected.choice})
    draw_families(next(panels), selection.front, over)
    return whole


def _scaled(axes: Axes, which: str, values: Sequence[float]) -> None:
    if values and min(values) > 0 and max(values) > WIDE_RANGE * min(values):
        axes.set(**{f"{which}scale": "log"})


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def draw_times(axes: Axes, kinds: Mapping[str, Sums], name: str = "") -> None:
    """Figures 1 and 5a: the time of each of `kinds`."""
    times_ms = [sums.time_ns / 1e6 for sums in kinds.values()]
    bars = axes.bar(list(kinds), times_ms)
    axes.bar_label(bars, [_short(value) for value in times_ms], fontsize=7)
    axes.set(ylabel="time (ms)", title=name or "time of one primitive everywhere")
    axes.tick_params(axis="x", labelrotation=30)
    _scaled(axes, "y", times_ms)


def draw_memory(axes: Axes, kinds: Mapping[str, Sums], name: str = "") -> None:
    """Figures 1, 2 and 5b: memory, and the footprint of the largest layer, of each of `kinds`."""
    width = 0.4
    for number, (label, what) in enumerate(
        (("memory", "memory_bytes"), ("largest layer", "workspace_bytes"))
    ):
        places = [index + (number - 0.5) * width for index in range(len(kinds))]
        sizes = [getattr(sums, what) / MIB for sums in kinds.values()]
        bars = axes.bar(places, sizes, width, label=label)
        axes.bar_label(bars, [_short(size) for size in sizes], fontsize=7)
    axes.set_xticks(range(len(kinds)), list(kinds))
    axes.tick_params(axis="x", labelrotation=30)
    axes.set(ylabel="MiB", title=name or "memory, and the largest layer's footprint")
    axes.margins(y=0.3)  # above the bars, for the legend
    axes.legend(fontsize="small", loc="upper left", ncols=2)


def draw_front(
    axes: Axes, points: Sequence[Point], over: str, kinds: Mapping[str, Sums], name: str = ""
) -> None:
    """Figures 6 to 9: time over memory, or over the workspace; beside the front the greedy's, and `kinds`.

    One of several has a `name`, and no legend of its own.
    """

    def taken(sums: Sums) -> float:
        return (sums.memory_bytes if over == "memory" else sums.workspace_bytes) / MIB

    selected = [(taken(p.selected.sums), p.selected.sums.time_ns / 1e6) for p in points]
    greedily = [(taken(p.greedy), p.greedy.time_ns / 1e6) for p in points if p.greedy]
    others = [(taken(sums), sums.time_ns / 1e6) for sums in kinds.values()]
    axes.step(*zip(*selected), where="post", marker="o", markersize=4, label="integer program")
    if greedily:
        axes.plot(*zip(*greedily), "x", color="tab:red", label="greedy")
    for number, (label, place) in enumerate(zip(kinds, others)):
        axes.plot(*place, MARKERS[number % len(MARKERS)], color="0.4", markersize=5, label=label)
    _scaled(axes, "y", [ms for _, ms in (*selected, *greedily, *others)])
    what = "memory" if over == "memory" else "footprint of the largest layer"
    axes.set(xlabel=f"{what} (MiB)", ylabel="time (ms)", title=name or "front")
    if not name:
        axes.legend(fontsize="x-small")


def draw_speedups(axes: Axes, points: Sequence[Point], name: str = "") -> None:
    """Figure 10: the greedy's time over ours, budgets falling from left to right."""
    falling = list(reversed(points))
    ratios = [p.greedy.time_ns / p.selected.sums.time_ns if p.greedy else math.nan for p in falling]
    places = range(len(falling))
    bars = axes.bar(places, [0.0 if math.isnan(ratio) else ratio for ratio in ratios])
    axes.bar_label(bars, ["none" if math.isnan(r) else _short(r) for r in ratios], fontsize=6)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(places, [f"{p.budget_bytes / MIB:.1f}" for p in falling], rotation=60, fontsize=8)
    axes.set(xlabel="budget (MiB)", ylabel="greedy's time / ours", title=name or "speed-up over greedy")


def draw_layers(
    axes: Axes, problem: SelectionProblem, choices: Mapping[str, Mapping[str, Candidate]]
) -> None:
    """Memory over the layers: what is live, or in the paper's sum each layer's footprint."""
    for label, choice in choices.items():
        if problem.memory_model == "sum":
            sizes = [problem.footprint_bytes(s, choice[s.name]) for s in problem.steps if s.chosen]
        else:
            live, _ = problem.liveness(choice)
            sizes = [live.live_bytes(step) for step in range(live.steps)]
        at = [step / len(sizes) for step in range(len(sizes))]
        axes.step(at, [size / MIB for size in sizes], where="post", label=label)
    what = "footprint" if problem.memory_model == "sum" else "live, without filters"
    axes.set(xlabel="share of the layers", ylabel=f"{what} (MiB)", title="memory over the layers")
    axes.legend(fontsize="small")


def families(choice: Mapping[str, Candidate]) -> Counter[str]:
    """How many layers each family computes."""
    named = (candidate.rewrite.primitive for candidate in choice.values())
    return Counter(PRIMITIVES[name].family for name in named if name)


def draw_families(axes: Axes, points: Sequence[Point], over: str, name: str = "") -> None:
    """How many layers each family computes at every point of a front."""
    counts = [families(point.selected.choice) for point in points]
    below = [0] * len(points)
    for number, family in enumerate(FAMILIES):
        heights: list[Any] = [count[family] for count in counts]
        if any(heights):
            axes.bar(
                range(len(points)),
                heights,
                bottom=below,
                color=f"C{number}",
                label=TITLES.get(family, family),
            )
            below = [low + height for low, height in zip(below, heights)]
    labels = [f"{p.budget_bytes / MIB:.1f}" for p in points]
    axes.set_xticks(range(len(points)), labels, rotation=60, fontsize=8)
    axes.set(xlabel=f"{over} budget (MiB)", ylabel="layers", title=name or "choices by family")
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
