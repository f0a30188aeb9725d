"""Selects convolution primitives for a network, and compares them with baselines."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pimflow.core.candidate import Candidate
from pimflow.core.integer_program import RELATIVE_GAP
from pimflow.core.json_form import report_from
from pimflow.core.region_graph import RegionGraph
from pimflow.primitive_selection.layers import Layers, separate_concats
from pimflow.primitive_selection.options import CUDA, SelectionOptions
from pimflow.primitive_selection.problem import Budgets, SelectionProblem, SelectionResult, Sums, is_guess
from pimflow.primitive_selection.profile import (
    ANALYTIC,
    Device,
    NetworkTime,
    Profile,
    applicable_primitives,
    count_unmeasured,
)
from pimflow.primitive_selection.report import (
    Baseline,
    ChosenPrimitive,
    OtherLayer,
    SelectionFrontPoint,
    SelectionReport,
    TimesReport,
)
from pimflow.primitive_selection.search import Point, fastest, front, greedy, minimise, uniform_selection
from pimflow.primitive_selection.time_sources import Progress, selection_times
from pimflow.primitives import PRIMITIVES, Primitive

if TYPE_CHECKING:
    from pimflow.host.result_cache import ResultCache

# Baselines of the paper (Figure 5): one family, in its layout, for all layers.
UNIFORM_FAMILIES = {"direct": "direct", "im2row": "windows", "im2col": "windows", "winograd": "winograd"}
DIRECT_FAMILIES = ("direct", "depthwise", "loops")  # without a workspace, the best first
LAYOUT_OF = {"im2row": "HWC", "im2col": "CHW"}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The primitives selected for a network, with baselines.

    Attributes
    ----------
    greedy : Sums or None
        The paper's greedy selection within the budgets. If memory or workspace is minimised, those of
        `selected` are its budget. None if it finds no selection.
    baselines : dict of str to Sums
        ``fastest``: without budgets. ``direct``, ``im2row``, ``im2col`` and ``winograd``: that family in
        every layer to which it applies, else direct; on a GPU, else the operator.
    front : tuple of Point
        Empty if no front was requested.
    network : NetworkTime or None
        Times of all kernels of the compiled network; None if they were not measured.
    """

    problem: SelectionProblem
    objective: str
    budgets: Budgets
    profile: Profile
    selected: SelectionResult
    greedy: Sums | None
    baselines: dict[str, Sums]
    front: tuple[Point, ...]
    solve_seconds: float
    network: NetworkTime | None = None

    @property
    def graph(self) -> RegionGraph:
        """The regions of the network."""
        return self.problem.graph

    @property
    def device(self) -> Device:
        """The device that is timed."""
        return self.profile.device

    @property
    def choices(self) -> dict[str, Primitive]:
        """By layer, the primitive that computes it."""
        chosen = self.selected.choice
        return {
            step.name: PRIMITIVES[chosen[step.name].primitive] for step in self.problem.steps if step.chosen
        }

    @property
    def layouts(self) -> dict[str, str]:
        """By layer without a primitive, the layout that it works in."""
        others = self.problem.layout_choices(self.selected.choice)
        return {name: candidate.input.layout.value for name, candidate in others.items()}


def with_network(selection: Selection, network: NetworkTime | None) -> Selection:
    """`selection` with the times of a network's kernels, also in its profile."""
    if network is None:
        return selection
    kernels_ns = {kernel.key: kernel.time_ns for kernel in network.kernels}
    profile = replace(selection.profile, kernels_ns=selection.profile.kernels_ns | kernels_ns)
    return replace(selection, network=network, profile=profile)


def select_for(
    graph: RegionGraph,
    options: SelectionOptions | None = None,
    *,
    cache: ResultCache | None = None,
    progress: Progress = lambda _: None,
) -> Selection:
    """Select primitives for the regions of a network; see `select`.

    Parameters
    ----------
    options : SelectionOptions, optional
        By default: minimal time, measured on this machine.
    progress : callable
        Called with the share of measurements that are done.

    Raises
    ------
    InfeasibleError
        If no selection is within the budgets.
    ProfileError
        If the profile is of another machine than `options.device`, or has no times of a layer.
    ProfilerError
        If a remote machine is not there, or its connection is lost.
    UsageError
        For a target without a remote machine, or an invalid one.
    """
    options = options or SelectionOptions()
    minimize, pareto = options.minimize, options.pareto
    layers = Layers(separate_concats(graph), "cuda" if options.device == CUDA else "cpu")
    budgets = Budgets(
        time_ns=math.inf if options.time_budget_ns is None else options.time_budget_ns,
        memory_bytes=math.inf if options.memory_budget_bytes is None else options.memory_budget_bytes,
    )
    with selection_times(options, layers, cache, progress) as times:
        while True:
            table = layers.table(times.profile)
            problem = SelectionProblem(graph=layers.graph, table=table, memory_model=options.memory_model)
            begin = time.perf_counter()
            selected = minimise(problem, minimize, budgets)
            solve_seconds = time.perf_counter() - begin
            if not times.refine(selected):
                break
    over = "workspace" if minimize == "workspace" else "memory"
    return Selection(
        problem=problem,
        objective=minimize,
        budgets=budgets,
        profile=times.profile,
        selected=selected,
        greedy=greedy(problem, _tighten_budgets(minimize, selected.sums, budgets)),
        baselines=baselines(problem),
        front=front(problem, pareto, over, budgets) if pareto is not None else (),
        solve_seconds=solve_seconds,
    )


def _tighten_budgets(objective: str, sums: Sums, budgets: Budgets) -> Budgets:
    """`budgets` for a fair baseline: if memory or workspace was minimised, that of `sums`, and any time."""
    if objective == "time":
        return budgets
    smallest = {"memory": sums.memory_bytes, "workspace": sums.workspace_bytes}[objective]
    return replace(budgets, time_ns=math.inf, **{f"{objective}_bytes": smallest})


def baselines(problem: SelectionProblem) -> dict[str, Sums]:
    """The baselines of the paper, by name."""

    def family_filter(family: str, layout: str | None = None) -> Callable[[Candidate], bool]:
        """A predicate: whether a candidate is of the family, and in the layout."""

        def is_match(candidate: Candidate) -> bool:
            """Whether a candidate is of the family, and in the layout."""
            primitive = PRIMITIVES[candidate.primitive] if candidate.primitive else None
            return bool(primitive) and primitive.family == family and layout in (None, primitive.layout)

        return is_match

    by_name = {"fastest": fastest(problem).sums}
    for name, family in UNIFORM_FAMILIES.items():
        direct, operator = [*map(family_filter, DIRECT_FAMILIES)], family_filter("operator")
        if family == "direct":
            by_name[name] = uniform_selection(problem, direct, [operator])
        else:
            kind = family_filter(family, LAYOUT_OF.get(name))
            by_name[name] = uniform_selection(problem, [kind], [*direct, operator])
    return by_name


def summary(selection: Selection) -> SelectionReport:
    """The report that ``pimflow select --json`` prints."""
    problem, sums, choice = selection.problem, selection.selected.sums, selection.selected.choice
    others = problem.layout_choices(choice)
    time_sources = {False: "measured", True: ANALYTIC if selection.device.cpu == ANALYTIC else "predicted"}
    return report_from(
        SelectionReport,
        sums,
        network=problem.graph.name,
        status="optimal" if selection.selected.gap <= 10 * RELATIVE_GAP else "time limit",
        minimize=selection.objective,
        memory_model=problem.memory_model,
        choices=tuple(
            ChosenPrimitive(
                layer=step.name,
                primitive=choice[step.name].primitive,
                input_layout=choice[step.name].input.layout.value,
                output_layout=choice[step.name].output.layout.value,
                time_ns=problem.time_ns(choice[step.name]),
                known=time_sources[is_guess(choice[step.name])],
                workspace_bytes=choice[step.name].footprint.workspace_bytes,
                filter_bytes=choice[step.name].footprint.filter_bytes,
            )
            for step in problem.steps
            if step.chosen
        ),
        others=tuple(
            OtherLayer(layer=name, layout=entry.input.layout.value, time_ns=problem.time_ns(entry))
            for name, entry in others.items()
        ),
        greedy_time_ns=selection.greedy and selection.greedy.time_ns,
        baselines={name: report_from(Baseline, sums) for name, sums in selection.baselines.items()},
        solve_seconds=selection.solve_seconds,
        gap=selection.selected.gap,
        device=selection.device.name,
        measured=_times_report(selection),
        network_time=selection.network.summary() if selection.network else None,
        front=tuple(map(_front_point, selection.front)) or None,
    )


def _times_report(selection: Selection) -> TimesReport:
    """How many times are known of the candidates of `selection`."""
    problem, target = selection.problem, selection.device.target
    layers = set(Layers(problem.graph, target).primitive_layers.values())
    missing = count_unmeasured(selection.profile, layers)
    possible = sum(len(applicable_primitives(layer, target)) for layer in layers)
    others = problem.layout_choices(selection.selected.choice)
    all_layouts = Layers(problem.graph, target).layouts
    return TimesReport(
        primitives=possible - missing,
        applicable=possible,
        predicted=len(selection.profile.predicted_ns),
        failed=len(selection.profile.failed),
        layouts_untimed=sum(len(all_layouts[name]) - len(problem.placements(name)) for name in others),
    )


def _front_point(point: Point) -> SelectionFrontPoint:
    greedy_ns = point.greedy and point.greedy.time_ns
    return report_from(SelectionFrontPoint, point.selected.sums, greedy_time_ns=greedy_ns)


def text(selection: Selection) -> str:
    """The summary as text, as ``pimflow select`` prints it."""
    row = summary(selection)
    width = max(len(entry.layer) for entry in row.choices)
    primitive_width = max(len(entry.primitive) for entry in row.choices)
    lines = [f"{'layer':<{width}}  {'primitive':<{primitive_width}}  layout  {'us':>9}  workspace KiB"]
    lines += [
        f"{entry.layer:<{width}}  {entry.primitive:<{primitive_width}}  {entry.input_layout:<6}  "
        f"{entry.time_ns / 1e3:>9.1f}  {entry.workspace_bytes / 1024:>13.1f}"
        for entry in row.choices
    ]
    spent_ns = sum(entry.time_ns for entry in row.transforms)
    measured, used = row.measured, Counter(entry.layout for entry in row.others)
    untimed_layouts = measured.layouts_untimed
    untimed = f"; {untimed_layouts} more layouts have no times" if untimed_layouts else ""
    lines += [
        f"least {row.minimize}: {row.figures.text()}, {row.status}, {row.solve_seconds:.2f} s",
        f"{len(row.transforms)} layout transforms, {spent_ns / 1e6:.3f} ms of that; memory is "
        + ("the most that is live" if row.memory_model == "liveness" else "the sum over layers"),
        "other layers: " + (", ".join(f"{n} in {layout}" for layout, n in used.items()) or "none") + untimed,
        *([row.network_time.text()] if row.network_time else []),
        f"greedy: {_ms(row.greedy_time_ns)}",
        *(f"{name}: {entry.text()}" for name, entry in row.baselines.items()),
        f"{measured.primitives} times of the model (analytic), fp32, for {row.device}"
        if selection.device.cpu == ANALYTIC
        else f"measured {measured.primitives} of {measured.applicable} times of primitives that apply, "
        f"{measured.predicted} predicted, on {row.device}",
    ]
    if row.front:
        lines.append("front:")
        lines += [f"  {entry.text()}; greedy {_ms(entry.greedy_time_ns)}" for entry in row.front]
    return "\n".join(lines)


def _ms(ns: float | None) -> str:
    return "none" if ns is None else f"{ns / 1e6:.3f} ms"
