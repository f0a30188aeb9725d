"""A Pareto front of plans: latency, energy and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pimflow.core.plan import Plan
from pimflow.host import pictures
from pimflow.host.charts import BAR_TEXT_COLOUR, COLOURS, category, chart, layer, number, tooltip
from pimflow.host.pages import Chart

if TYPE_CHECKING:
    import os

FOLDER = "front"  # of a compiled directory, for the plans


@dataclass(frozen=True, kw_only=True)
class ParetoPoint:
    """A plan of a front, with its figures.

    Attributes
    ----------
    memory_bytes : int
        Size of the pool that is built for the target.
    weight_bytes : int
        Size of the weights, which are not in the pool: those that the GPU reads and those in PIM channels.
    plan : Plan or str
        The plan, or the file that it was written to.
    """

    latency_ns: float
    energy_pj: float
    memory_bytes: int
    weight_bytes: int
    plan: Plan | str

    @property
    def figures(self) -> tuple[float, float, int]:
        """The criteria of the front; less is better."""
        return self.latency_ns, self.energy_pj, self.memory_bytes

    def dominates(self, rival: ParetoPoint) -> bool:
        """Whether this point dominates another one."""
        return self.figures != rival.figures and all(a <= b for a, b in zip(self.figures, rival.figures))


def pareto_front(points: Sequence[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """The points that no other point dominates, without duplicates, the fastest first."""
    by_figures = {point.figures: point for point in reversed(points)}
    front = [p for p in by_figures.values() if not any(rival.dominates(p) for rival in by_figures.values())]
    return tuple(sorted(front, key=lambda point: point.figures))


def files(directory: str | os.PathLike[str], points: int) -> list[str]:
    """The names of the plan files of a front in a compiled directory."""
    return [str(Path(directory) / FOLDER / f"plan-{number}.json") for number in range(1, points + 1)]


def text(points: Sequence[ParetoPoint]) -> list[str]:
    """The lines of a front's table."""
    heads = ("latency", "energy", "pool", "weights")
    lines = [f"front     {len(points)} plans, none as good as another in latency, energy and memory"]
    lines.append("          " + "  ".join(f"{head:>11}" for head in heads))
    for point in points:
        figures = (
            f"{point.latency_ns / 1e6:.4f} ms",
            f"{point.energy_pj / 1e9:.2f} mJ",
            f"{point.memory_bytes / 1e6:.3f} MB",
            f"{point.weight_bytes / 1e6:.3f} MB",
        )
        file = point.plan if isinstance(point.plan, str) else ""
        lines.append(("          " + "  ".join(f"{figure:>11}" for figure in figures) + f"  {file}").rstrip())
    return lines


def draw(path: str | os.PathLike[str], points: Sequence[ParetoPoint], title: str) -> None:
    """Draw a front as .png, .svg or .html, by the name of the file.

    Raises
    ------
    UsageError
        For another kind of file, or if the drawing package is not installed.
    OutputError
        If the file cannot be written.
    """
    pictures.save(path, _figure(points, title), title)


def _figure(points: Sequence[ParetoPoint], title: str) -> Chart:
    """Energy and memory over latency; the size of a dot is the third criterion."""
    rows = [
        {
            "plan": str(number),
            "latency": point.latency_ns / 1e6,
            "energy": point.energy_pj / 1e9,
            "pool": point.memory_bytes / 1e6,
            "weights": point.weight_bytes / 1e6,
        }
        for number, point in enumerate(points, start=1)
    ]
    fields = tooltip(
        ("plan", "plan"),
        ("latency", "latency, ms", ".4f"),
        ("energy", "energy, mJ", ".3f"),
        ("pool", "pool, MB", ".3f"),
        ("weights", "weights, MB", ".3f"),
    )
    panels = [_panel("energy", "energy, mJ", "pool", fields), _panel("pool", "pool, MB", "energy", fields)]
    return chart(
        title=title, data={"values": rows}, hconcat=panels, resolve={"scale": {"size": "independent"}}
    )


def _panel(vertical: str, title: str, size: str, fields: list[Chart]) -> Chart:
    scale = {"zero": False, "padding": 22, "nice": True}
    x, y = number("latency", title="latency, ms", scale=scale), number(vertical, title=title, scale=scale)
    line = layer(
        {"type": "line", "color": COLOURS["baseline"], "strokeDash": [3, 3], "opacity": 0.6},
        x=x,
        y=y,
        order=number("latency"),
    )
    points = layer(
        {"type": "circle", "opacity": 0.75, "color": COLOURS["gpu"], "stroke": BAR_TEXT_COLOUR},
        x=x,
        y=y,
        size=number(size, scale={"range": [120, 900]}, legend=None),
        tooltip=fields,
    )
    numbers = layer({"type": "text", "dx": 14, "dy": -12, "align": "left"}, x=x, y=y, text=category("plan"))
    heading = {"text": f"larger dots take more {size}", "fontSize": 11, "fontWeight": "normal"}
    return {"width": 440, "height": 340, "title": heading, "layer": [line, points, numbers]}
