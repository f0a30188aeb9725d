"""A plan over time, both devices and the crossbar: for Perfetto, as a picture, and in figures."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pimflow.api.arguments import public
from pimflow.api.options import PlanKeywords
from pimflow.api.report import BASELINE, MIXTURE
from pimflow.compiler.artifact import INTERFACE, TIMELINE, Interface
from pimflow.core.candidate import RESOURCES
from pimflow.core.frames import frame
from pimflow.core.json_form import Json, fields_form
from pimflow.hardware import System
from pimflow.host import pictures
from pimflow.host.files import replace_file
from pimflow.placement import Searched

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from typing_extensions import Unpack

    from pimflow.frontend import Model

NAMES = {"gpu": "GPU stream", "pim": "PIM stream", "crossbar": "crossbar"}
LABELLED_SHARE = 0.02  # of the latency: names of shorter tasks do not fit


@dataclass(frozen=True, kw_only=True)
class TracedTask:
    """What runs on a resource from when on, and for how long.

    Attributes
    ----------
    regions : tuple of str
        That it is part of.
    launched : int
        Kernels or PIM programs that it launches.
    also : tuple of str
        Other resources that it holds behind its launch (`core.candidate.Task`).
    """

    name: str
    resource: str
    start_us: float
    duration_us: float
    regions: tuple[str, ...]
    launched: int
    also: tuple[str, ...] = ()

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True, kw_only=True)
class PlanTrace:
    """A plan over time: what runs when, on both devices and the crossbar.

    Attributes
    ----------
    latency_gpu_only_ns, latency_mixture_gpu_only_ns : float or None
        Of the network as it was given, and of the best that it may become, on the GPU with all memory
        channels; None where a directory does not say, and where there are no other layers.
    """

    model: str
    system: str
    latency_ns: float
    latency_gpu_only_ns: float | None = None
    latency_mixture_gpu_only_ns: float | None = None
    tasks: tuple[TracedTask, ...]

    def __repr__(self) -> str:
        latency = f"{self.latency_ns / 1e6:.4f} ms"
        return f"PlanTrace({self.model} on {self.system}: {latency}, {len(self.tasks)} tasks)"

    @classmethod
    def of(cls, searched: Searched) -> PlanTrace:
        tasks = tuple(
            TracedTask(
                name=event.label,
                resource=event.resource,
                start_us=event.start_ps / 1e6,
                duration_us=(event.end_ps - event.start_ps) / 1e6,
                regions=tuple(event.regions),
                launched=event.launched,
                also=event.also,
            )
            for event in searched.evaluation.timeline.events
        )
        latency_ns = searched.evaluation.latency_ns
        return cls(
            model=searched.graph.name,
            system=searched.system.name,
            latency_ns=latency_ns,
            latency_gpu_only_ns=searched.baseline.latency_ns,
            latency_mixture_gpu_only_ns=searched.mixture.latency_ns if searched.mixture else None,
            tasks=tasks,
        )

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> PlanTrace:
        """That of a compiled directory; raises `ArtifactError` if it is none, or was changed."""
        path = Path(directory)
        Interface.load(path).check(path, TIMELINE)
        stored = json.loads((path / TIMELINE).read_text(encoding="utf-8"))
        tasks = tuple(
            TracedTask(
                name=event["name"],
                resource=RESOURCES[event["tid"]],
                start_us=event["ts"],
                duration_us=event["dur"],
                regions=tuple(event["args"]["regions"]),
                launched=event["args"]["launched"],
                also=tuple(event["args"].get("also", ())),
            )
            for event in stored["traceEvents"]
            if event["ph"] == "X"
        )
        return cls(**stored["otherData"], tasks=tasks)

    def to_perfetto(self) -> str:
        """As a file in the trace event format of Perfetto: a row a resource, an event a line, times in us."""
        about = {name: value for name, value in vars(self).items() if name != "tasks" and value is not None}
        events: list[dict[str, Json]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": NAMES[resource]}}
            for row, resource in enumerate(RESOURCES)
        ]
        for task in self.tasks:
            place = {"pid": 0, "tid": RESOURCES.index(task.resource)}
            times = {"ts": task.start_us, "dur": task.duration_us}
            args: dict[str, Json] = {"regions": list(task.regions), "launched": task.launched}
            args |= {"also": list(task.also)} if task.also else {}
            events.append({"ph": "X", "name": task.name, **place, **times, "args": args})
        head = json.dumps({"displayTimeUnit": "ns", "otherData": about})
        rows = ",\n".join(map(json.dumps, events))
        return f'{head[:-1]}, "traceEvents": [\n{rows}\n]}}\n'

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file for Perfetto; raises `OutputError` if that is not possible."""
        replace_file(path, self.to_perfetto().encode())

    def on(self, resource: str) -> list[TracedTask]:
        """What runs on `resource`."""
        return [task for task in self.tasks if task.resource == resource]

    def to_json(self) -> dict[str, Json]:
        """All of it, task by task."""
        return fields_form(self)

    def to_pandas(self) -> DataFrame:
        """A row a task; raises `UsageError` where pandas is not installed."""
        return frame(self.tasks)

    def report(self) -> TimelineReport:
        """Its figures."""
        gpu, pim = self.on("gpu"), self.on("pim")
        both_us = sum(
            max(0.0, min(a.end_us, b.end_us) - max(a.start_us, b.start_us)) for a in gpu for b in pim
        )
        return TimelineReport(
            model=self.model,
            system=self.system,
            latency_ns=self.latency_ns,
            latency_gpu_only_ns=self.latency_gpu_only_ns,
            latency_mixture_gpu_only_ns=self.latency_mixture_gpu_only_ns,
            tasks={resource: len(self.on(resource)) for resource in RESOURCES},
            busy_ns={r: sum(task.duration_us for task in self.on(r)) * 1e3 for r in RESOURCES},
            both_devices_ns=both_us * 1e3,
        )


@dataclass(frozen=True, kw_only=True)
class TimelineReport:
    """A plan over time in figures: by resource, its tasks and how long it is busy; GPU and PIM at once."""

    model: str
    system: str
    latency_ns: float
    latency_gpu_only_ns: float | None
    latency_mixture_gpu_only_ns: float | None
    tasks: dict[str, int]
    busy_ns: dict[str, float]
    both_devices_ns: float

    def to_json(self) -> dict[str, Json]:
        """What ``pimflow timeline --json`` prints."""
        return fields_form(self)

    def text(self) -> str:
        """The same for people."""
        latency_ns, both_ns = self.latency_ns, self.both_devices_ns
        lines = [f"{self.model} on {self.system}: {latency_ns / 1e6:.4f} ms"]
        others_ns = (self.latency_gpu_only_ns, self.latency_mixture_gpu_only_ns)
        for told, alone_ns in zip((BASELINE, MIXTURE), others_ns):
            if alone_ns is not None:
                lines.append(f"  {told}: {alone_ns / 1e6:.4f} ms ({alone_ns / latency_ns:.3f}x)")
        lines += [
            f"{NAMES[resource]:<10}  busy {busy_ns / 1e3:>10.2f} us ({100 * busy_ns / latency_ns:5.1f} %), "
            f"{self.tasks[resource]} tasks"
            for resource, busy_ns in self.busy_ns.items()
        ]
        lines.append(f"both at once     {both_ns / 1e3:>10.2f} us ({100 * both_ns / latency_ns:5.1f} %)")
        return "\n".join(lines)


@public(PlanKeywords)
def trace_plan(
    source: Model, target_system: System | None = None, **options: Unpack[PlanKeywords]
) -> PlanTrace:
    """When everything runs: of a compiled directory, or of the plan that a search finds.

    Parameters
    ----------
    source
        A compiled directory, or a network as `api.search.search` takes it, with its `options`.
    """
    if isinstance(source, str | os.PathLike) and (Path(source) / INTERFACE).exists():
        return PlanTrace.load(source)
    from pimflow.api.search import search  # TVM: only who gives a network waits for it

    return PlanTrace.of(search(source, target_system, **options))


def draw(path: str | os.PathLike[str], found: PlanTrace) -> None:
    """Draw a trace, a row a resource, as .png, .svg or .html by the name of the file.

    Raises
    ------
    UsageError
        Another kind of file, or matplotlib is not installed.
    OutputError
        The file cannot be written.
    """
    suffix = pictures.check_format(path)
    title = f"{found.model} on {found.system}"
    replace_file(path, pictures.rendered(_figure(found, title), suffix, title))


def _figure(found: PlanTrace, title: str) -> Figure:
    from matplotlib.figure import Figure

    whole = Figure(figsize=(14, 3), layout="constrained")
    axes = whole.add_subplot()
    latency_us = found.latency_ns / 1e3
    colours = ("tab:blue", "tab:orange", "tab:green")
    for row, resource in enumerate(RESOURCES):
        shown = found.on(resource)
        spans = [(task.start_us, task.duration_us) for task in shown]
        height = len(RESOURCES) - 1 - row
        axes.broken_barh(
            spans, (height - 0.4, 0.8), facecolors=colours[row], edgecolor="white", linewidth=0.3
        )
        for task in shown:
            if task.duration_us > LABELLED_SHARE * latency_us:
                middle = (task.start_us + task.duration_us / 2, height)
                axes.annotate(task.name, middle, ha="center", va="center", fontsize=6, rotation=90)
    axes.set_yticks(range(len(RESOURCES)), [NAMES[r] for r in reversed(RESOURCES)])
    axes.set_xlim(0, latency_us)
    axes.set_xlabel("time (us)")
    axes.set_title(title)
    return whole
