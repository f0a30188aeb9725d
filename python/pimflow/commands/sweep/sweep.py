"""Sweep the design space: a search for each network and each combination of system settings."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from pimflow import placement
from pimflow.commands.profile.profile import search_inputs
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.search_arguments import SEARCH, SearchArguments, as_system, require_effect
from pimflow.commands.sweep.options import MAX_POINTS
from pimflow.commands.sweep.sweep_rows import SweepFigures, SweepRow
from pimflow.core.frames import Rows
from pimflow.core.json_form import Json, fields_form
from pimflow.core.options import require_type
from pimflow.core.region_graph import RegionGraph
from pimflow.core.typed_values import read_fields
from pimflow.errors import InfeasibleError, UsageError
from pimflow.hardware import System
from pimflow.hardware.device_rules import rule_faults
from pimflow.hardware.settings import Setting, Value
from pimflow.host.executors import Executor, Serial
from pimflow.host.result_cache import ResultCache
from pimflow.placement import Costs, Evaluation, Goal, Profiling
from pimflow.simulators.profiler import GpuProfiler, PimProfiler

# The values of settings, and the system that has them.
SystemSettings = tuple[tuple[tuple[str, Value], ...], System]


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """A network on a system of the design space."""

    graph: RegionGraph
    original: RegionGraph | None
    mixture: Evaluation | None
    system: System
    settings: tuple[tuple[str, Value], ...]
    goal: Goal

    def key(self, profilers: str) -> tuple[object, ...]:
        """The cache key: everything that its row depends on."""
        system = self.system.without_sources()
        graph = self.graph.digest, self.graph.fusible, self.graph.runs, self.original and self.original.digest
        return ("sweep row", *graph, system.identity, repr(self.goal), profilers)

    def row(self, costs: Costs, cache: ResultCache | None) -> SweepRow:
        """The row of the table, from `cache` or from a search."""
        key = self.key(costs.profilers)
        stored = cache.get([key], read=_read_row) if cache else {}
        figures, error = stored[key] if key in stored else self._search(costs)
        if cache and key not in stored:
            cache.put({key: [figures, error]})
        return SweepRow(
            model=self.graph.name,
            settings=dict(self.settings),  # a cached row of the same system may have other settings
            figures=SweepFigures(**figures) if figures else None,
            error=error,
        )

    def _search(self, costs: Costs) -> tuple[dict[str, Json] | None, str]:
        try:
            search_result = placement.search(self.graph, self.system, costs, self.goal, self.original)
        except InfeasibleError as error:
            return None, str(error)
        search_result = replace(search_result, mixture=self.mixture or search_result.mixture)
        return fields_form(SweepFigures.from_search(search_result)), ""


def _read_row(stored: Any) -> tuple[dict[str, Json] | None, str]:
    """Parse a cached value of `SweepPoint.row`; raises `TypeError` or `ValueError` if it is none."""
    figures, error = stored
    if not isinstance(error, str) or (figures is None) != bool(error):
        raise TypeError("neither figures nor an error")
    if figures is not None:
        read_fields(SweepFigures, figures)
    return figures, error


@dataclass(frozen=True, kw_only=True)
class SweepGroup:
    """Points that share costs of kernels and layers: their systems differ in launch times only."""

    points: tuple[SweepPoint, ...]
    gpu: GpuProfiler
    pim: PimProfiler | None
    cache: Path | None

    def rows(self, executor: Executor | None = None) -> list[SweepRow]:
        """Search the points; returns a row for each. `executor` times layers."""
        cache = ResultCache(self.cache) if self.cache else None
        profiling = Profiling(gpu=self.gpu, pim=self.pim, cache=cache, executor=executor or Serial())
        costs = Costs(self.points[0].system, profiling)
        rows = [point.row(costs, cache) for point in self.points]
        if cache:
            cache.close()
        return rows


@public(*SEARCH, without=("plan", "target", "select"))
def sweep(
    models: Sequence[str | os.PathLike[str]],
    settings: Sequence[Setting | str],
    system: System | None = None,
    *,
    progress: Callable[[float], None] = lambda _: None,
    points: int = MAX_POINTS,
    **keywords: Any,
) -> Rows[SweepRow]:
    """Search every network on every combination of `settings`; other fields are those of `system`.

    The total number of memory channels does not change, so more PIM channels leave fewer to the GPU, unless
    ``gpu.memory_channels`` is set too. Points that are in `profiling.cache` are not searched again, so that
    an interrupted sweep continues.

    Parameters
    ----------
    models
        Names of the zoo or files.
    settings : sequence of Setting or str
        Such as ``["pim_channels=4,8,16", "global_buffers=1,2"]``.
    system : System, optional
        ``pimflow.system()`` by default.
    profiling : Profiling, optional
        Sources of times, and their cache; by default the built-in models without a cache.
    points : int
        Largest number of searches.
    options, goal, **keywords
        The request of every search; see `pimflow.search`.

    Returns
    -------
    Rows of SweepRow
        A row for each point, networks outermost, the last setting innermost.

    Raises
    ------
    UsageError
        If a combination is no valid system, an option would have no effect, or there are more combinations
        than `points`; then nothing is searched.
    """
    arguments = SearchArguments.from_keywords(keywords)
    require_effect(arguments.goal, options=arguments.options)
    base, profiling = as_system(system), arguments.profiling
    parsed = _settings(settings)
    _check_point_count(models, parsed, points)
    systems = [(values, point_system(base, parsed, values)) for values in _combinations(parsed)]
    for _, system in systems:
        profiling.require(system, arguments.goal.modes)
    searches = [point for model in models for point in _model_points(model, systems, arguments)]
    positions_by_system: dict[str, list[int]] = {}
    for position, point in enumerate(searches):
        shared_costs = point.system.with_launches(gpu_ns=0.0, pim_ns=0.0)
        positions_by_system.setdefault(shared_costs.identity, []).append(position)
    path = profiling.cache.path if profiling.cache else None
    members = list(positions_by_system.values())
    groups = [
        SweepGroup(
            points=tuple(searches[i] for i in positions), gpu=profiling.gpu, pim=profiling.pim, cache=path
        )
        for positions in members
    ]
    rows: dict[int, SweepRow] = {}
    for completed, (position, group_rows) in enumerate(_run(groups, profiling.executor), start=1):
        rows |= zip(members[position], group_rows)
        progress(completed / len(groups))
    return Rows[SweepRow](with_pareto([rows[index] for index in range(len(searches))]))


def _model_points(
    model: str | os.PathLike[str], systems: Sequence[SystemSettings], arguments: SearchArguments
) -> Iterator[SweepPoint]:
    """The points of a network; it is loaded once, unless decomposition or order depend on the system."""
    options, goal, profiling = arguments.options, arguments.goal, arguments.profiling
    inputs_by_key: dict[object, tuple[RegionGraph, RegionGraph | None, Evaluation | None]] = {}
    for values, system in systems:
        key = system.identity if options.rewrites else system.uses_views
        if key not in inputs_by_key:
            inputs_by_key[key] = search_inputs(model, system, options, Costs(system, profiling), goal)
        graph, original, mixture = inputs_by_key[key]
        yield SweepPoint(
            graph=graph, original=original, mixture=mixture, system=system, settings=values, goal=goal
        )


def _settings(settings: object) -> list[Setting]:
    if isinstance(settings, str) or not isinstance(settings, Sequence):
        raise UsageError(f"settings are a list, such as ['pim_channels=4,8,16'], not {settings!r}")
    for setting in settings:
        require_type("a setting", setting, (Setting, str), "a Setting or a text such as 'pim_channels=4,8'")
    return [Setting.parse(setting) if isinstance(setting, str) else setting for setting in settings]


def _check_point_count(models: Sequence[object], settings: Sequence[Setting], points: int) -> None:
    """Raise `UsageError` if a sweep needs more searches than `points`."""
    if points < 1:
        raise UsageError(f"--points {points} is not above zero")
    searches = len(models) * prod(len(setting.values) for setting in settings)
    if searches > points:
        raise UsageError(f"{searches} points, each a search; give fewer values, or --points {searches}")


def _run(groups: Sequence[SweepGroup], executor: Executor) -> Iterator[tuple[int, list[SweepRow]]]:
    if len(groups) == 1:  # then the executor gets the layers of the group
        yield 0, groups[0].rows(executor)
    else:
        yield from executor.map(SweepGroup.rows, groups)


def _combinations(settings: Sequence[Setting]) -> Iterator[tuple[tuple[str, Value], ...]]:
    names = [setting.name for setting in settings]
    if len(set(names)) != len(names):
        raise UsageError(f"--set {max(names, key=names.count)} occurs twice; list all values in one")
    for values in itertools.product(*(setting.values for setting in settings)):
        yield tuple(zip(names, values))


def point_system(base: System, settings: Sequence[Setting], values: tuple[tuple[str, Value], ...]) -> System:
    """The system of a point: `base` with `values`, by name in the order of `settings`.

    Raises
    ------
    UsageError
        If that is no valid system.
    """
    # Devices first: settings of a device's fields apply to the device that is set.
    pairs = sorted(zip(settings, values), key=lambda pair: pair[0].field not in ("gpu", "pim"))
    for setting, (_, value) in pairs:
        base = setting.apply(base, value)
    base.require_network_dtype()
    for fault in itertools.chain(base.pim.faults(), rule_faults(base.pim)):
        settings_text = " ".join(f"--set {name}={value}" for name, value in values)
        raise UsageError(f"{settings_text}: pim '{base.pim.name}': {fault}")
    return base


def with_pareto(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Return `rows` with `pareto` set: whether a row is on the front of its network."""
    return [
        replace(row, pareto=bool(row.figures) and not any(rival.dominates(row) for rival in rows))
        for row in rows
    ]


def text(rows: Sequence[SweepRow]) -> str:
    """The rows as a table of text."""
    heads = ["model", *rows[0].settings, "latency ms", "speed-up", "energy mJ", ""]
    table = [heads]
    for row in rows:
        cells = [row.model, *map(str, row.settings.values())]
        if row_figures := row.figures:
            figures = [
                f"{row_figures.latency_ns / 1e6:.4f}",
                f"{row_figures.speedup:.3f}x",
                f"{row_figures.energy_pj / 1e9:.2f}",
            ]
            table.append([*cells, *figures, "Pareto" * row.pareto])
        else:
            table.append([*cells, "-", "-", "-", row.error])
    widths = [max(len(line[column]) for line in table) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table
    )
