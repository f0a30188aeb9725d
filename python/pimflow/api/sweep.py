"""The design space: one search for every network and every combination of settings of the system."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pimflow import placement
from pimflow.api.profile import region_graph
from pimflow.core.region import RegionGraph
from pimflow.errors import ArtifactError, InfeasibleError, UsageError
from pimflow.hardware import System
from pimflow.hardware.settings import Setting, Value
from pimflow.host import pictures
from pimflow.host.executors import Executor, Serial
from pimflow.host.files import probe_directory, replace_file
from pimflow.host.result_cache import ResultCache
from pimflow.placement import Costs, Goal, Profiling
from pimflow.simulators.profiler import GpuProfiler, PimProfiler


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """A network on a system of the design space."""

    graph: RegionGraph
    system: System
    settings: tuple[tuple[str, Value], ...]
    goal: Goal

    def key(self, profilers: str) -> tuple[object, ...]:
        """All that its row depends on."""
        system = replace(
            self.system,
            sources={},
            gpu=replace(self.system.gpu, sources={}),
            pim=replace(self.system.pim, sources={}),
        )
        graph = self.graph.digest, self.graph.fusible
        return ("design point", *graph, repr(system), repr(self.goal), profilers)

    def row(self, costs: Costs) -> dict[str, Any]:
        """What a search finds."""
        row = {"model": self.graph.name, **dict(self.settings)}
        try:
            searched = placement.search(self.graph, self.system, costs, self.goal)
        except InfeasibleError as error:
            return row | {"error": str(error)}
        plan, gpu_only = searched.evaluation, searched.gpu_only
        modes = [choice.mode for choice in searched.plan.choices]
        return row | {
            "latency_gpu_only_ns": gpu_only.latency_ns,
            "latency_ns": plan.latency_ns,
            "speedup": gpu_only.latency_ns / plan.latency_ns,
            "energy_gpu_only_pj": gpu_only.energy_pj,
            "energy_pj": plan.energy_pj,
            "regions": len(modes),
            "regions_with_pim": sum(mode != "GPU" for mode in modes),
            "pim_busy_ns": plan.timeline.busy_ps("pim") / 1000,
            "error": "",
        }


@dataclass(frozen=True, kw_only=True)
class SweepGroup:
    """Points that share what kernels and layers cost: systems that differ in launch times alone."""

    points: tuple[SweepPoint, ...]
    gpu: GpuProfiler
    pim: PimProfiler | None
    cache: Path | None

    def rows(self, executor: Executor | None = None) -> list[dict[str, Any]]:
        """A row for each point; `executor` times its layers."""
        cache = ResultCache(self.cache) if self.cache else None
        profiling = Profiling(gpu=self.gpu, pim=self.pim, cache=cache, executor=executor or Serial())
        costs = Costs(self.points[0].system, profiling)
        rows = []
        for point in self.points:
            key = point.key(costs.profilers)
            kept = cache.get([key]) if cache else {}
            found = kept[key] if key in kept else point.row(costs)
            if cache and key not in kept:
                cache.put({key: found})
            # The same system may have been reached by other settings.
            rows.append({"model": point.graph.name, **dict(point.settings)} | _results(found))
        if cache:
            cache.close()
        return rows


RESULTS = (
    "latency_gpu_only_ns",
    "latency_ns",
    "speedup",
    "energy_gpu_only_pj",
    "energy_pj",
    "regions",
    "regions_with_pim",
    "pim_busy_ns",
    "error",
)


def _results(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row.get(name, "") for name in RESULTS}


def sweep(
    models: Sequence[str | os.PathLike[str]],
    base: System,
    settings: Sequence[Setting],
    profiling: Profiling,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    progress: Callable[[float], None] = lambda _: None,
    goal: Goal | None = None,
    *,
    fuse: bool = False,
) -> list[dict[str, Any]]:
    """Search every network on every combination of `settings`; the rest of the system is `base`.

    The GPU keeps its memory channels: more of them for PIM are fewer for the GPU, unless
    ``gpu.memory_channels`` is set too. Points whose results `profiling.cache` holds are not searched again,
    so that a sweep that was stopped goes on where it was.

    Parameters
    ----------
    goal : Goal, optional
        What every search is asked for; see `placement.search`.
    fuse : bool
        Whether neighbouring layers may be one GPU kernel over shared memory, where that is faster.

    Returns
    -------
    list of dict
        A row a point, networks outermost, the last setting innermost: ``model``, the settings by name,
        those of `RESULTS`, and ``pareto``: no other point of the network is better in latency or energy and
        as good in the other.

    Raises
    ------
    UsageError
        If a combination makes no system; nothing is searched then.
    """
    goal = goal or Goal()
    systems = [(values, _system(base, settings, values)) for values in _combinations(settings)]
    for _, system in systems:
        profiling.require(system, goal.modes)
    points = []
    for model in models:
        graphs = {
            views: region_graph(model, shapes or {}, profiling.cache, views=views, batch=batch, fuse=fuse)
            for views in sorted({system.views for _, system in systems})
        }
        points += [
            SweepPoint(graph=graphs[system.views], system=system, settings=values, goal=goal)
            for values, system in systems
        ]
    grouped: dict[str, list[int]] = {}
    for position, point in enumerate(points):
        grouped.setdefault(repr(point.system.with_launches(gpu_ns=0.0, pim_ns=0.0)), []).append(position)
    path = profiling.cache.path if profiling.cache else None
    groups = [
        SweepGroup(points=tuple(points[i] for i in members), gpu=profiling.gpu, pim=profiling.pim, cache=path)
        for members in grouped.values()
    ]
    rows: list[dict[str, Any]] = [{}] * len(points)
    members = list(grouped.values())
    for done, (position, found) in enumerate(_run(groups, profiling.executor), start=1):
        for index, row in zip(members[position], found):
            rows[index] = row
        progress(done / len(groups))
    return _with_pareto(rows)


def _run(groups: Sequence[SweepGroup], executor: Executor) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    if len(groups) == 1:  # its layers are what can be shared out
        yield 0, groups[0].rows(executor)
    else:
        yield from executor.map(SweepGroup.rows, groups)


def _combinations(settings: Sequence[Setting]) -> Iterator[tuple[tuple[str, Value], ...]]:
    names = [setting.name for setting in settings]
    if len(set(names)) != len(names):
        raise UsageError(f"--set {max(names, key=names.count)} is there twice; list all values in one")
    for values in itertools.product(*(setting.values for setting in settings)):
        yield tuple(zip(names, values))


def _system(base: System, settings: Sequence[Setting], values: tuple[tuple[str, Value], ...]) -> System:
    # Devices first: what is set of them is set of the ones that are taken.
    pairs = sorted(zip(settings, values), key=lambda pair: pair[0].field not in ("gpu", "pim"))
    for setting, (_, value) in pairs:
        base = setting.apply(base, value)
    base.require_network_dtype()
    for fault in base.pim.faults():
        set_so = " ".join(f"--set {name}={value}" for name, value in values)
        raise UsageError(f"{set_so}: pim '{base.pim.name}': {fault}")
    return base


def _with_pareto(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def beats(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
        pair = [(a[name], b[name]) for name in ("latency_ns", "energy_pj")]
        return all(x <= y for x, y in pair) and any(x < y for x, y in pair)

    found = []
    for row in rows:
        rivals = [other for other in rows if other["model"] == row["model"] and not other["error"]]
        found.append(row | {"pareto": not row["error"] and not any(beats(other, row) for other in rivals)})
    return found


def check_output(directory: str | os.PathLike[str]) -> None:
    """Raise `ArtifactError` if `write` could make nothing there, before a sweep that takes hours."""
    place = Path(os.path.realpath(directory))
    try:
        if place.exists() and not place.is_dir():
            raise ArtifactError(f"{directory} is a file; name a directory")
        probe_directory(place / "sweep.csv")
    except OSError as error:
        raise ArtifactError(f"{directory}: cannot be made: {error.strerror or error}") from error


def write(
    directory: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], settings: Sequence[Setting]
) -> None:
    """Write ``sweep.csv``, ``sweep.json`` and, where matplotlib is installed, ``sweep.png``."""
    folder = Path(directory)
    check_output(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"{folder}: cannot be made: {error.strerror}") from error
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    replace_file(folder / "sweep.csv", table.getvalue().encode())
    replace_file(folder / "sweep.json", (json.dumps(rows, indent=1) + "\n").encode())
    if pictures.available():
        pictures.save(folder / "sweep.png", figure(rows, settings), "design space")


def figure(rows: Sequence[Mapping[str, Any]], settings: Sequence[Setting]) -> Any:
    """Latency against energy with the Pareto fronts, and the speed-up over the first setting of numbers.

    Both are fractions of the network's best point on the GPU alone: networks of all sizes share a plane.
    """
    from matplotlib.figure import Figure

    whole = Figure(figsize=(11, 4.5), layout="constrained")
    plane, lines = whole.subplots(1, 2)
    numbers = next((s for s in settings if all(isinstance(v, int | float) for v in s.values)), None)
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model and not row["error"]]
        if not own:
            continue
        alone_ns = min(row["latency_gpu_only_ns"] for row in own)
        alone_pj = min(row["energy_gpu_only_pj"] for row in own)
        places = [(row["latency_ns"] / alone_ns, row["energy_pj"] / alone_pj) for row in own]
        front = sorted(place for place, row in zip(places, own) if row["pareto"])
        (line,) = plane.plot(*zip(*front), label=model, marker="o")
        plane.scatter(*zip(*places), s=12, color=line.get_color())
        if numbers:
            best: dict[Value, float] = {}
            for row in own:
                value = row[numbers.name]
                best[value] = max(row["speedup"], best.get(value, 0.0))
            lines.plot(list(best), list(best.values()), label=model, marker="o")
            lines.set(xlabel=numbers.name, ylabel="best speed-up over the GPU alone")
    plane.set(
        xlabel="latency, GPU alone = 1", ylabel="energy, GPU alone = 1", title="points and Pareto fronts"
    )
    plane.legend(fontsize="small")
    return whole


def text(rows: Sequence[Mapping[str, Any]], settings: Sequence[Setting]) -> str:
    """`rows` for people."""
    names = [setting.name for setting in settings]
    heads = ["model", *names, "latency ms", "speed-up", "energy mJ", ""]
    table = [heads]
    for row in rows:
        cells = [row["model"], *(str(row[name]) for name in names)]
        if row["error"]:
            table.append([*cells, "-", "-", "-", row["error"]])
        else:
            figures = [
                f"{row['latency_ns'] / 1e6:.4f}",
                f"{row['speedup']:.3f}x",
                f"{row['energy_pj'] / 1e9:.2f}",
            ]
            table.append([*cells, *figures, "Pareto" * row["pareto"]])
    widths = [max(len(line[column]) for line in table) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table
    )
