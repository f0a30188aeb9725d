"""A plan over time, both devices and the crossbar: for Perfetto, as a picture, and in figures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pimflow.compiler.artifact import INTERFACE, TIMELINE, Interface
from pimflow.core.candidate import RESOURCES
from pimflow.hardware import System
from pimflow.host import pictures
from pimflow.host.files import replace_file
from pimflow.placement import Searched

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from typing_extensions import Unpack

    from pimflow.api.options import PlanKeywords
    from pimflow.frontend import Model

NAMES = {"gpu": "GPU stream", "pim": "PIM stream", "crossbar": "crossbar"}
LABELLED_SHARE = 0.02  # of the latency: names of shorter tasks do not fit


def trace_plan(
    source: Model, target_system: System | None = None, **options: Unpack[PlanKeywords]
) -> dict[str, Any]:
    """When everything runs, for Perfetto: of a compiled directory, or of the plan that a search finds.

    Parameters
    ----------
    source
        A compiled directory, or a network as `api.search.search` takes it, with its `options`.
    """
    if isinstance(source, str | os.PathLike) and (Path(source) / INTERFACE).exists():
        return load(source)
    from pimflow.api.search import search  # TVM: only who gives a network waits for it

    return trace(search(source, target_system, **options))


def trace(searched: Searched) -> dict[str, Any]:
    """The timeline of a plan in the trace event format of Perfetto: a row a resource, times in us."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": NAMES[resource]}}
        for row, resource in enumerate(RESOURCES)
    ]
    for event in searched.evaluation.timeline.events:
        events.append(
            {
                "ph": "X",
                "name": event.label,
                "pid": 0,
                "tid": RESOURCES.index(event.resource),
                "ts": event.start_ps / 1e6,
                "dur": (event.end_ps - event.start_ps) / 1e6,
                "args": {"regions": list(event.regions), "launched": event.launched},
            }
        )
    about = {
        "model": searched.graph.name,
        "system": searched.system.name,
        "latency_ns": searched.evaluation.latency_ns,
    }
    return {"displayTimeUnit": "ns", "otherData": about, "traceEvents": events}


def to_json(found: Mapping[str, Any]) -> str:
    """A trace as a file, an event a line."""
    head = {name: value for name, value in found.items() if name != "traceEvents"}
    rows = ",\n".join(json.dumps(event) for event in found["traceEvents"])
    return f'{json.dumps(head)[:-1]}, "traceEvents": [\n{rows}\n]}}\n'


def load(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The trace of a compiled directory; raises `ArtifactError` if it is none, or was changed."""
    path = Path(directory)
    Interface.load(path).check(path, TIMELINE)
    stored: dict[str, Any] = json.loads((path / TIMELINE).read_text(encoding="utf-8"))
    return stored


def write(path: str | os.PathLike[str], found: Mapping[str, Any]) -> None:
    """Write a trace for Perfetto; raises `ArtifactError` if that is not possible."""
    replace_file(path, to_json(found).encode())


def tasks(found: Mapping[str, Any], resource: str) -> list[dict[str, Any]]:
    """Of a trace, what runs on `resource`."""
    row = RESOURCES.index(resource)
    return [event for event in found["traceEvents"] if event["ph"] == "X" and event["tid"] == row]


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """A trace in figures, times in ns: how long each resource is busy, and GPU and PIM at once."""
    busy_ns = {r: sum(event["dur"] for event in tasks(found, r)) * 1e3 for r in RESOURCES}
    gpu, pim = tasks(found, "gpu"), tasks(found, "pim")
    both_us = sum(
        max(0.0, min(a["ts"] + a["dur"], b["ts"] + b["dur"]) - max(a["ts"], b["ts"]))
        for a in gpu
        for b in pim
    )
    counts = {r: len(tasks(found, r)) for r in RESOURCES}
    return {**found["otherData"], "tasks": counts, "busy_ns": busy_ns, "both_devices_ns": both_us * 1e3}


def text(row: Mapping[str, Any]) -> str:
    """`summary` for people."""
    latency_ns = row["latency_ns"]
    lines = [f"{row['model']} on {row['system']}: {latency_ns / 1e6:.4f} ms"]
    for resource, busy_ns in row["busy_ns"].items():
        share = 100 * busy_ns / latency_ns
        tasks_of = row["tasks"][resource]
        lines.append(
            f"{NAMES[resource]:<10}  busy {busy_ns / 1e3:>10.2f} us ({share:5.1f} %), {tasks_of} tasks"
        )
    both_ns = row["both_devices_ns"]
    lines.append(f"both at once     {both_ns / 1e3:>10.2f} us ({100 * both_ns / latency_ns:5.1f} %)")
    return "\n".join(lines)


def draw(path: str | os.PathLike[str], found: Mapping[str, Any]) -> None:
    """Draw a trace, a row a resource, as .png, .svg or .html by the name of the file.

    Raises
    ------
    UsageError
        Another kind of file, or matplotlib is not installed.
    OutputError
        The file cannot be written.
    """
    suffix = pictures.check_format(path)
    title = f"{found['otherData']['model']} on {found['otherData']['system']}"
    replace_file(path, pictures.rendered(_figure(found, title), suffix, title))


def _figure(found: Mapping[str, Any], title: str) -> Figure:
    from matplotlib.figure import Figure

    whole = Figure(figsize=(14, 3), layout="constrained")
    axes = whole.add_subplot()
    latency_us = found["otherData"]["latency_ns"] / 1e3
    colours = ("tab:blue", "tab:orange", "tab:green")
    for row, resource in enumerate(RESOURCES):
        shown = tasks(found, resource)
        spans = [(event["ts"], event["dur"]) for event in shown]
        height = len(RESOURCES) - 1 - row
        axes.broken_barh(
            spans, (height - 0.4, 0.8), facecolors=colours[row], edgecolor="white", linewidth=0.3
        )
        for event in shown:
            if event["dur"] > LABELLED_SHARE * latency_us:
                middle = (event["ts"] + event["dur"] / 2, height)
                axes.annotate(event["name"], middle, ha="center", va="center", fontsize=6, rotation=90)
    axes.set_yticks(range(len(RESOURCES)), [NAMES[r] for r in reversed(RESOURCES)])
    axes.set_xlim(0, latency_us)
    axes.set_xlabel("time (us)")
    axes.set_title(title)
    return whole
