"""A front: plans of which none is at least as good as another in latency, energy and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pimflow.core.plan import Plan
from pimflow.host import pictures

if TYPE_CHECKING:
    import os

    from matplotlib.figure import Figure

FOLDER = "front"  # of a compiled directory, for the plans


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """A plan of a front, and what it takes.

    Attributes
    ----------
    memory_bytes : int
        Of the pool that is built for the target.
    weight_bytes : int
        Of the weights, beside the pool: those that the GPU reads and those in the PIM channels.
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
        """What a front is about; less is better."""
        return self.latency_ns, self.energy_pj, self.memory_bytes

    def beats(self, other: FrontPoint) -> bool:
        """Whether it makes another needless."""
        return self.figures != other.figures and all(a <= b for a, b in zip(self.figures, other.figures))


def undominated(points: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Those that no other beats, each once, from the fastest on."""
    by_figures = {point.figures: point for point in reversed(points)}
    kept = [p for p in by_figures.values() if not any(other.beats(p) for other in by_figures.values())]
    return tuple(sorted(kept, key=lambda point: point.figures))


def files(directory: str | os.PathLike[str], points: int) -> list[str]:
    """The files that so many plans have in a compiled directory."""
    return [str(Path(directory) / FOLDER / f"plan-{number}.json") for number in range(1, points + 1)]


def text(points: Sequence[FrontPoint]) -> list[str]:
    """A front as lines for people."""
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


def draw(path: str | os.PathLike[str], points: Sequence[FrontPoint], title: str) -> None:
    """Draw a front as .png, .svg or .html, by the name of the file.

    Raises
    ------
    UsageError
        Another kind of file, or matplotlib is not installed.
    OutputError
        The file cannot be written.
    """
    pictures.save(path, _figure(points, title), title)


def _figure(points: Sequence[FrontPoint], title: str) -> Figure:
    """Energy and memory over latency; in each, the size of a dot is the third figure."""
    from matplotlib.figure import Figure

    whole = Figure(figsize=(12, 5), layout="constrained")
    whole.suptitle(title)
    latencies = [point.latency_ns / 1e6 for point in points]
    energies, pools = (
        [point.energy_pj / 1e9 for point in points],
        [point.memory_bytes / 1e6 for point in points],
    )
    panels = zip(whole.subplots(1, 2), ((energies, pools), (pools, energies)), ("energy, mJ", "pool, MB"))
    for axes, (shown, other), label in panels:
        axes.scatter(latencies, shown, s=[20 + 180 * each / max(other) for each in other], alpha=0.6)
        for number, place in enumerate(zip(latencies, shown), start=1):
            axes.annotate(str(number), place, ha="center", va="center", fontsize=7)
        axes.set(xlabel="latency, ms", ylabel=label)
    return whole
