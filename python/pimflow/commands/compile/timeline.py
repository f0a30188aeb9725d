"""The timeline of a plan, on both devices and the crossbar: for Perfetto, as a chart, and in figures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.plan_report import BASELINE, MIXTURE
from pimflow.commands.shared.search_arguments import SEARCH
from pimflow.compiler.artifact import TIMELINE
from pimflow.compiler.interface import INTERFACE, Interface, convert_read_errors
from pimflow.core.candidate import RESOURCES, Resource
from pimflow.core.frames import Tabular
from pimflow.core.json_form import Json, JsonTree, report_from
from pimflow.core.table_files import read_json
from pimflow.core.typed_values import has_type
from pimflow.errors import ArtifactError
from pimflow.hardware import System
from pimflow.host import pictures
from pimflow.host.files import replace_file
from pimflow.placement import Evaluation, SearchResult
from pimflow.report_page.timeline_chart import Bar, TracedTask, sort_bars, timeline

if TYPE_CHECKING:
    from pimflow.frontend import Model

NAMES = {"gpu": "GPU stream", "pim": "PIM stream", "crossbar": "crossbar"}
PROCESSES = ("plan", "GPU alone")  # indices are process numbers in the file


@dataclass(frozen=True, kw_only=True)
class PlanTrace(JsonTree, Tabular, rows="tasks"):
    """The timeline of a plan, on both devices and the crossbar.

    Attributes
    ----------
    latency_gpu_only_ns, latency_mixture_gpu_only_ns : float or None
        Of the original network, and of the best choice of original and decomposed layers, on the GPU with all
        memory channels; None if a directory does not have it, or if no layer may be decomposed.
    tasks, baseline : tuple of TracedTask
        Of the plan, and of the original network on the GPU with all memory channels.
    """

    model: str
    system: str
    latency_ns: float
    latency_gpu_only_ns: float | None = None
    latency_mixture_gpu_only_ns: float | None = None
    tasks: tuple[TracedTask, ...]
    baseline: tuple[TracedTask, ...] = ()

    def __repr__(self) -> str:
        latency = f"{self.latency_ns / 1e6:.4f} ms"
        return f"PlanTrace({self.model} on {self.system}: {latency}, {len(self.tasks)} tasks)"

    @classmethod
    def from_search(cls, search_result: SearchResult) -> PlanTrace:
        """From a search result."""
        latency_ns = search_result.evaluation.latency_ns
        return cls(
            model=search_result.graph.name,
            system=search_result.system.name,
            latency_ns=latency_ns,
            latency_gpu_only_ns=search_result.baseline.latency_ns,
            latency_mixture_gpu_only_ns=search_result.mixture.latency_ns if search_result.mixture else None,
            tasks=_trace_tasks(search_result.evaluation),
            baseline=_trace_tasks(search_result.baseline),
        )

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> PlanTrace:
        """Read the timeline of a compiled directory; raises `ArtifactError` if it is none, or was changed."""
        path = Path(directory)
        Interface.load(path).check(path, TIMELINE)
        with convert_read_errors(path, TIMELINE):
            trace = cls._from_perfetto(read_json(path / TIMELINE, ArtifactError))
            if not has_type(trace, cls):
                raise TypeError("not of the types of a timeline")
            return trace

    @classmethod
    def _from_perfetto(cls, stored: Mapping[str, Any]) -> PlanTrace:
        tasks, baseline = (
            tuple(
                TracedTask.from_event(event)
                for event in stored["traceEvents"]
                if event["ph"] == "X" and event["pid"] == process
            )
            for process in range(len(PROCESSES))
        )
        return cls(**stored["otherData"], tasks=tasks, baseline=baseline)

    def to_perfetto(self) -> str:
        """The trace event format of Perfetto: a row for each resource, a line for each event, times in us."""
        task_lists = (self.tasks, self.baseline)
        metadata = {
            name: value
            for name, value in vars(self).items()
            if name not in ("tasks", "baseline") and value is not None
        }
        events: list[dict[str, Json]] = []
        for process, (title, tasks) in enumerate(zip(PROCESSES, task_lists, strict=True)):
            used = {task.resource for task in tasks} if process else set(RESOURCES)
            if used:
                events.append(_name_event("process_name", title, pid=process, tid=0))
            for row, resource in enumerate(RESOURCES):
                if resource in used:
                    events.append(_name_event("thread_name", NAMES[resource], pid=process, tid=row))
            for task in tasks:
                place = {"pid": process, "tid": RESOURCES.index(task.resource)}
                times = {"ts": task.start_us, "dur": task.duration_us}
                args: dict[str, Json] = {"regions": list(task.regions), "launched": task.launched}
                args |= {"also": list(task.also)} if task.also else {}
                events.append({"ph": "X", "name": task.name, **place, **times, "args": args})
        head = json.dumps({"displayTimeUnit": "ns", "otherData": metadata})
        lines = ",\n".join(map(json.dumps, events))
        return f'{head[:-1]}, "traceEvents": [\n{lines}\n]}}\n'

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file for Perfetto; raises `OutputError` if that is not possible."""
        replace_file(path, self.to_perfetto().encode())

    def tasks_on(self, resource: Resource) -> list[TracedTask]:
        """The plan's tasks on `resource`."""
        return [task for task in self.tasks if task.resource == resource]

    def report(self) -> TimelineReport:
        """The figures of the timeline."""
        gpu, pim = self.tasks_on("gpu"), self.tasks_on("pim")
        overlap_us = sum(
            max(0.0, min(a.end_us, b.end_us) - max(a.start_us, b.start_us)) for a in gpu for b in pim
        )
        return report_from(
            TimelineReport,
            self,
            tasks={resource: len(self.tasks_on(resource)) for resource in RESOURCES},
            busy_ns={r: sum(task.duration_us for task in self.tasks_on(r)) * 1e3 for r in RESOURCES},
            both_devices_ns=overlap_us * 1e3,
        )


@dataclass(frozen=True, kw_only=True)
class TimelineReport(JsonTree):
    """Figures of a timeline: tasks and busy time by resource, and the time in which GPU and PIM overlap."""

    model: str
    system: str
    latency_ns: float
    latency_gpu_only_ns: float | None
    latency_mixture_gpu_only_ns: float | None
    tasks: dict[str, int]
    busy_ns: dict[str, float]
    both_devices_ns: float

    def text(self) -> str:
        """The figures as text."""
        latency_ns, overlap_ns = self.latency_ns, self.both_devices_ns
        lines = [f"{self.model} on {self.system}: {latency_ns / 1e6:.4f} ms"]
        baselines_ns = (self.latency_gpu_only_ns, self.latency_mixture_gpu_only_ns)
        for label, gpu_only_ns in zip((BASELINE, MIXTURE), baselines_ns):
            if gpu_only_ns is not None:
                lines.append(f"  {label}: {gpu_only_ns / 1e6:.4f} ms ({gpu_only_ns / latency_ns:.3f}x)")
        lines += [
            f"{NAMES[resource]:<10}  busy {busy_ns / 1e3:>10.2f} us ({100 * busy_ns / latency_ns:5.1f} %), "
            f"{self.tasks[resource]} tasks"
            for resource, busy_ns in self.busy_ns.items()
        ]
        lines.append(
            f"both at once     {overlap_ns / 1e3:>10.2f} us ({100 * overlap_ns / latency_ns:5.1f} %)"
        )
        return "\n".join(lines)


def _name_event(kind: str, name: str, **place: int) -> dict[str, Json]:
    """The event that names a process or row in Perfetto."""
    return {"ph": "M", "name": kind, **place, "args": {"name": name}}


def _trace_tasks(evaluation: Evaluation) -> tuple[TracedTask, ...]:
    return tuple(
        TracedTask(
            name=event.label,
            resource=event.resource,
            start_us=event.start_ps / 1e6,
            duration_us=(event.end_ps - event.start_ps) / 1e6,
            regions=tuple(event.regions),
            launched=int(event.launched),
            also=event.also,
        )
        for event in evaluation.timeline.events
    )


@public(*SEARCH)
def trace_plan(source: Model, system: System | None = None, **options: Any) -> PlanTrace:
    """The timeline of a compiled directory, or of the plan that a search finds.

    Parameters
    ----------
    source
        A compiled directory, or a network as `pimflow.search` takes it, with its `options`.
    """
    if isinstance(source, str | os.PathLike) and (Path(source) / INTERFACE).exists():
        return PlanTrace.load(source)
    from pimflow.commands.shared.search import search  # loads TVM, so only for a network

    return PlanTrace.from_search(search(source, system, **options))


def draw(path: str | os.PathLike[str], trace: PlanTrace) -> None:
    """Draw a timeline as .png, .svg or .html, by the file's name: a row for each resource, and the baseline.

    Raises
    ------
    UsageError
        For another kind of file, or if the drawing package is not installed.
    OutputError
        If the file cannot be written.
    """
    title = f"{trace.model} on {trace.system}"
    pictures.save(path, timeline(bars(trace), trace.latency_ns / 1e3, title), title)


def bars(trace: PlanTrace) -> list[Bar]:
    """The bars of a timeline's chart."""
    bars = [bar for task in trace.tasks for bar in task.bars()]
    bars += [bar for task in trace.baseline for bar in task.bars(is_baseline=True)]
    return sort_bars(bars)
