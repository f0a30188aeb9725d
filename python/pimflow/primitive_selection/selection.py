"""Convolution primitives chosen for a network, and what they are compared with."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pimflow.core.candidate import Candidate, Known
from pimflow.core.region import RegionGraph
from pimflow.hardware import GpuSpec
from pimflow.primitive_selection.integer_program import RELATIVE_GAP, Selected
from pimflow.primitive_selection.layers import Layers, apart
from pimflow.primitive_selection.problem import Budgets, SelectionProblem, Sums
from pimflow.primitive_selection.profile import (
    ANALYTIC,
    NetworkTime,
    Profile,
    applicable,
    network_text,
    unmeasured,
)
from pimflow.primitive_selection.search import (
    Point,
    check_names,
    everywhere,
    fastest,
    front,
    greedy,
    minimise,
)
from pimflow.primitive_selection.time_sources import CUDA, MEASURE, Progress, Source
from pimflow.primitives import PRIMITIVES, Primitive

if TYPE_CHECKING:
    from pimflow.host.result_cache import ResultCache

# The paper's baselines (Figure 5): a family, in its layout, everywhere.
EVERYWHERE = {"direct": "direct", "im2row": "windows", "im2col": "windows", "winograd": "winograd"}
LAYOUT_OF = {"im2row": "HWC", "im2col": "CHW"}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What was selected for a network.

    Attributes
    ----------
    problem : SelectionProblem
    objective : str
    budgets : Budgets
    profile : Profile
    selected : Selected
    greedy : Sums or None
        The paper's greedy selection within the budgets. Where time is not minimised, it may take no more
        memory or workspace than `selected`. None if it finds none.
    baselines : dict of str to Sums
        ``pbqp``, the fastest whatever it takes; ``direct``, ``im2row``, ``im2col`` and ``winograd``, that
        family in every layer that it applies to, else direct; on a GPU, else the operator.
    front : tuple of Point
        Empty if none was asked for.
    solve_seconds : float
        Time to solve the integer programs of `selected` alone.
    network : NetworkTime or None
        Times of all kernels that the network is compiled to; None where they were not measured.
    """

    problem: SelectionProblem
    objective: str
    budgets: Budgets
    profile: Profile
    selected: Selected
    greedy: Sums | None
    baselines: dict[str, Sums]
    front: tuple[Point, ...]
    solve_seconds: float
    network: NetworkTime | None = None

    @property
    def choices(self) -> dict[str, Primitive]:
        """By layer, the primitive that computes it."""
        chosen = self.selected.choice
        return {
            step.name: PRIMITIVES[chosen[step.name].rewrite.primitive]
            for step in self.problem.steps
            if step.chosen
        }

    @property
    def layouts(self) -> dict[str, str]:
        """By layer without a primitive, the layout that it works in."""
        others = self.problem.others(self.selected.choice)
        return {name: candidate.input.layout for name, candidate in others.items()}


def with_network(selection: Selection, network: NetworkTime | None) -> Selection:
    """`selection` and its profile with the times of a network's kernels."""
    if network is None:
        return selection
    kernels_ns = {kernel.key: kernel.time_ns for kernel in network.kernels}
    profile = replace(selection.profile, kernels_ns=selection.profile.kernels_ns | kernels_ns)
    return replace(selection, network=network, profile=profile)


def select_for(
    graph: RegionGraph,
    *,
    minimize: str = "time",
    memory_budget_bytes: int | None = None,
    time_budget_ns: float | None = None,
    memory_model: str = "liveness",
    pareto: int | None = None,
    profile: Profile | str | os.PathLike = "measured",
    device: str | None = None,
    target: str = "",
    gpu: str | os.PathLike | GpuSpec | None = None,
    measure: int | None = MEASURE,
    cache: ResultCache | None = None,
    progress: Progress = lambda _: None,
) -> Selection:
    """`select` for the regions of a network.

    Parameters
    ----------
    minimize : str
        ``time``, ``memory`` or ``workspace``: the largest footprint of a layer.
    memory_budget_bytes, time_budget_ns : optional
        Budgets to keep to.
    memory_model : str
        ``liveness``, or ``sum`` for the paper's.
    pareto : int, optional
        Points of a front besides: of time and memory, or workspace if that is minimised.
    profile : Profile, str or path
        Times to go by. ``measured`` on this machine; ``predicted`` (xgboost) from those that `cache` holds,
        of transforms measured; ``mixed``: some measured, others predicted, and what is selected by a
        predicted time measured too, until all of it is. Or given, or a file.
    device : str, optional
        The machine that a given profile is for, where it is not this one. One at
        ``rpc:HOST:PORT/KEY`` is asked by TVM's RPC, and measured where this one would be.
    target : str
        What a remote machine's code is made for (`pim_backend.runtime.targets.cpu_target`); what it says of
        itself if empty. Or ``c``: times of primitives as C, by this machine's compiler.
    gpu : str, path or GpuSpec, optional
        With `device` ``cuda``: primitives for GPUs, by the analytic model of this one, in fp32.
    measure : int, optional
        How many primitives of each layer to measure at most, the promising ones first; all if None.
    cache : ResultCache, optional
        Where measured times are kept.
    progress : callable
        Told which share of the measuring is done.

    Raises
    ------
    InfeasibleError
        If nothing keeps to the budgets.
    ProfileError
        If the profile is of another machine than `device`, or has no times of a layer.
    ProfilerError
        If a remote machine is not there, or goes away.
    UnknownNameError
        For another objective or memory model.
    UsageError
        For a `target` without a remote machine, or one that is none.
    """
    check_names(minimize, memory_model)
    layers = Layers(apart(graph), "cuda" if device == CUDA else "cpu")
    budgets = Budgets(
        time_ns=math.inf if time_budget_ns is None else time_budget_ns,
        memory_bytes=math.inf if memory_budget_bytes is None else memory_budget_bytes,
    )
    source = Source(profile=profile, device=device, target=target, measure=measure, cache=cache, gpu=gpu)
    with source.times(layers, progress) as times:
        while True:
            problem = SelectionProblem(
                graph=layers.graph, table=layers.table(times.profile), memory_model=memory_model
            )
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
        greedy=greedy(problem, _no_larger(minimize, selected.sums, budgets)),
        baselines=baselines(problem),
        front=front(problem, pareto, over, budgets) if pareto is not None else (),
        solve_seconds=solve_seconds,
    )


def for_compilation(graph: RegionGraph, options: Mapping[str, Any], *, in_c: bool = False) -> Selection:
    """`select_for`, for the code of a CPU: by times of C if the network is to be C."""
    return select_for(graph, **({"target": "c"} if in_c else {}) | dict(options))


def _no_larger(objective: str, sums: Sums, budgets: Budgets) -> Budgets:
    """`budgets`, and no more of what was minimised than `sums` has; of time, no more than the budget."""
    if objective == "time":
        return budgets
    least = {"memory": sums.memory_bytes, "workspace": sums.workspace_bytes}[objective]
    return replace(budgets, time_ns=math.inf, **{f"{objective}_bytes": least})


def baselines(problem: SelectionProblem) -> dict[str, Sums]:
    """By name, the selections that the paper compares with."""

    def of(family: str, layout: str | None = None) -> Callable[[Candidate], bool]:
        def wanted(candidate: Candidate) -> bool:
            primitive = PRIMITIVES[candidate.rewrite.primitive] if candidate.rewrite.primitive else None
            return bool(primitive) and primitive.family == family and layout in (None, primitive.layout)

        return wanted

    by_name = {"pbqp": fastest(problem).sums}
    for name, family in EVERYWHERE.items():
        kinds = [of(family, LAYOUT_OF.get(name)), *map(of, ("direct", "depthwise", "loops", "operator"))]
        by_name[name] = everywhere(problem, kinds)
    return by_name


def summary(selection: Selection) -> dict[str, Any]:
    """What ``pimflow select --json`` prints."""
    problem, sums, choice = selection.problem, selection.selected.sums, selection.selected.choice
    device = selection.profile.device
    layers = set(Layers(problem.graph, device.target).chosen.values())
    missing = unmeasured(selection.profile, layers)
    possible = sum(len(applicable(layer, device.target)) for layer in layers)
    others = problem.others(choice)
    every = Layers(problem.graph, device.target).layouts
    known = {False: "measured", True: ANALYTIC if device.cpu == ANALYTIC else "predicted"}
    row = {
        "network": problem.graph.name,
        "status": "optimal" if selection.selected.gap <= 10 * RELATIVE_GAP else "time limit",
        "minimize": selection.objective,
        "memory_model": problem.memory_model,
        "time_ns": sums.time_ns,
        "memory_bytes": sums.memory_bytes,
        "workspace_bytes": sums.workspace_bytes,
        "choices": [
            {
                "layer": step.name,
                "primitive": choice[step.name].rewrite.primitive,
                "input_layout": choice[step.name].input.layout,
                "output_layout": choice[step.name].output.layout,
                "time_ns": problem.time_ns(choice[step.name]),
                "known": known[is_guess(choice[step.name])],
                "workspace_bytes": choice[step.name].workspace_bytes,
                "filter_bytes": choice[step.name].filter_bytes,
            }
            for step in problem.steps
            if step.chosen
        ],
        "others": [
            {"layer": name, "layout": each.input.layout, "time_ns": problem.time_ns(each)}
            for name, each in others.items()
        ],
        "transforms": [dict(vars(transform)) for transform in sums.transforms],
        "greedy_time_ns": selection.greedy and selection.greedy.time_ns,
        "baselines": {name: _brief(each) for name, each in selection.baselines.items()},
        "solve_seconds": selection.solve_seconds,
        "gap": selection.selected.gap,
        "device": device.name,
        "measured": {
            "primitives": possible - missing,
            "of": possible,
            "predicted": len(selection.profile.predicted_ns),
            "failed": len(selection.profile.failed),
            "layouts_untimed": sum(len(every[name]) - len(problem.layouts(name)) for name in others),
        },
    }
    if selection.network:
        row["network_time"] = selection.network.plain()
    if selection.front:
        row["front"] = [
            {**_brief(point.selected.sums), "greedy_time_ns": point.greedy and point.greedy.time_ns}
            for point in selection.front
        ]
    return row


def is_guess(candidate: Candidate) -> bool:
    """Whether its time is predicted."""
    return any(task.known is not Known.MEASURED for task in candidate.tasks)


def _brief(sums: Sums) -> dict[str, Any]:
    return {
        "time_ns": sums.time_ns,
        "memory_bytes": sums.memory_bytes,
        "workspace_bytes": sums.workspace_bytes,
    }


def text(selection: Selection) -> str:
    """The summary for people."""
    row = summary(selection)
    width = max(len(each["layer"]) for each in row["choices"])
    wide = max(len(each["primitive"]) for each in row["choices"])
    lines = [f"{'layer':<{width}}  {'primitive':<{wide}}  layout  {'us':>9}  workspace KiB"]
    lines += [
        f"{each['layer']:<{width}}  {each['primitive']:<{wide}}  {each['input_layout']:<6}  "
        f"{each['time_ns'] / 1e3:>9.1f}  {each['workspace_bytes'] / 1024:>13.1f}"
        for each in row["choices"]
    ]
    spent_ns = sum(each["time_ns"] for each in row["transforms"])
    measured, used = row["measured"], Counter(each["layout"] for each in row["others"])
    left = measured["layouts_untimed"]
    untimed = f"; {left} more layouts have no times" if left else ""
    lines += [
        f"least {row['minimize']}: {_figures(row)}, {row['status']}, {row['solve_seconds']:.2f} s",
        f"{len(row['transforms'])} layout transforms, {spent_ns / 1e6:.3f} ms of that; memory is "
        + ("the most that is live" if row["memory_model"] == "liveness" else "the sum over layers"),
        "other layers: " + (", ".join(f"{n} in {layout}" for layout, n in used.items()) or "none") + untimed,
        *([network_text(row["network_time"])] if selection.network else []),
        f"greedy: {_ms(row['greedy_time_ns'])}",
        *(f"{name}: {_figures(each)}" for name, each in row["baselines"].items()),
        f"{measured['primitives']} times of the model (analytic), fp32, for {row['device']}"
        if selection.profile.device.cpu == ANALYTIC
        else f"measured {measured['primitives']} of {measured['of']} times of primitives that apply, "
        f"{measured['predicted']} predicted, on {row['device']}",
    ]
    if "front" in row:
        lines.append("front:")
        lines += [f"  {_figures(each)}; greedy {_ms(each['greedy_time_ns'])}" for each in row["front"]]
    return "\n".join(lines)


def _figures(row: Mapping[str, Any]) -> str:
    mib = 2**20
    return (
        f"{row['time_ns'] / 1e6:.3f} ms, memory {row['memory_bytes'] / mib:.2f} MiB, "
        f"workspace {row['workspace_bytes'] / mib:.2f} MiB"
    )


def _ms(ns: float | None) -> str:
    return "none" if ns is None else f"{ns / 1e6:.3f} ms"
