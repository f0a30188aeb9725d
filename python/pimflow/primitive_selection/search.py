"""Selections of minimal time, memory or workspace, fronts of them, and the baselines of the paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pimflow.core.candidate import Candidate
from pimflow.errors import InfeasibleError, UnknownNameError, UsageError
from pimflow.primitive_selection.problem import (
    MEMORY_MODELS,
    OBJECTIVES,
    Budgets,
    SelectionProblem,
    SelectionResult,
    Sums,
)
from pimflow.primitive_selection.program import solve

NO_BUDGETS = Budgets()
Progress = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of a front of selections.

    Attributes
    ----------
    greedy : Sums or None
        The paper's greedy selection within that budget; None if it finds none.
    """

    selected: SelectionResult
    budget_bytes: int
    greedy: Sums | None

    @property
    def time_ns(self) -> float:
        """Time of the selection."""
        return self.selected.sums.time_ns


def check_names(objective: str, memory_model: str) -> None:
    """Raise `UnknownNameError` for an unknown objective or memory model."""
    if objective not in OBJECTIVES:
        raise UnknownNameError("objective", objective, OBJECTIVES)
    if memory_model not in MEMORY_MODELS:
        raise UnknownNameError("memory model", memory_model, MEMORY_MODELS)


def minimise(
    problem: SelectionProblem, objective: str = "time", budgets: Budgets = NO_BUDGETS
) -> SelectionResult:
    """The selection of minimal `objective` within `budgets`; of equal ones the fastest.

    ``time`` is equation 13 of the paper, ``memory`` 14, ``workspace`` 15.

    Raises
    ------
    InfeasibleError
        If no selection is within the budgets. The error has the smallest possible budget, and its layer.
    UsageError
        If no layer has a choice of primitives.
    """
    if not any(step.chosen for step in problem.steps):
        raise UsageError(f"'{problem.graph.name}' has no convolution to choose a primitive for")
    if objective == "workspace":
        return _min_workspace(problem, budgets)
    selected = solve(problem, objective, budgets)
    if selected is None:
        raise _infeasible_error(problem, budgets)
    if objective == "time":
        return selected
    tighter = replace(budgets, memory_bytes=min(budgets.memory_bytes, selected.sums.memory_bytes))
    return replace(solve(problem, "time", tighter) or selected, gap=selected.gap)


def fastest(problem: SelectionProblem, budgets: Budgets = NO_BUDGETS) -> SelectionResult:
    """The selection of minimal time; without budgets, the optimum of PBQP (Anderson and Gregg 2018)."""
    selected = solve(problem, "time", budgets)
    if selected is None:
        raise _infeasible_error(problem, budgets)
    return selected


def _min_workspace(problem: SelectionProblem, budgets: Budgets) -> SelectionResult:
    """Equation 15: the smallest footprint for which equation 13 has a solution.

    The workspace of the fastest selection is an upper bound. A bisection over the footprints of all
    candidates finds the smallest; each trial has only the candidates whose footprint is within it.
    """
    best = fastest(problem, budgets)
    footprints = {problem.footprint_bytes(s, c) for s in problem.steps for c in s.candidates if s.chosen}
    sizes = sorted(size for size in footprints if size < best.sums.workspace_bytes)
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        selected = solve(problem, "time", replace(budgets, workspace_bytes=sizes[middle]))
        if selected is None:
            low = middle + 1
        else:
            best, high = selected, middle
    return best


def _infeasible_error(problem: SelectionProblem, budgets: Budgets) -> InfeasibleError:
    """The error if no selection is within `budgets`.

    It names the first budget that cannot be met together with those before it.
    """
    name = problem.graph.name
    met_budgets = NO_BUDGETS
    if budgets.memory_bytes < math.inf:
        smallest_memory = solve(problem, "memory", met_budgets).sums
        if smallest_memory.memory_bytes > budgets.memory_bytes:
            subject = (
                f"memory of '{name}' ({problem.memory_model}), at its peak in layer "
                f"'{smallest_memory.memory_layer}'"
            )
            levers = [f"--memory-budget {smallest_memory.memory_bytes}B or more"]
            return InfeasibleError(
                subject, smallest_memory.memory_bytes, int(budgets.memory_bytes), "B", levers
            )
        met_budgets = replace(met_budgets, memory_bytes=budgets.memory_bytes)
    if budgets.workspace_bytes < math.inf:
        smallest_workspace = _min_workspace(problem, met_budgets).sums
        if smallest_workspace.workspace_bytes > budgets.workspace_bytes:
            subject = f"workspace of '{name}', largest in layer '{smallest_workspace.workspace_layer}'"
            levers = [f"a budget of {smallest_workspace.workspace_bytes} B or more"]
            return InfeasibleError(
                subject, smallest_workspace.workspace_bytes, int(budgets.workspace_bytes), "B", levers
            )
        met_budgets = replace(met_budgets, workspace_bytes=budgets.workspace_bytes)
    quickest = solve(problem, "time", met_budgets).sums
    condition = " within the other budgets" if met_budgets != NO_BUDGETS else ""
    subject = f"time of '{name}'{condition}, most of it in layer '{quickest.time_layer}'"
    min_ns = math.ceil(quickest.time_ns)
    return InfeasibleError(subject, min_ns, budgets.time_ns, "ns", [f"--time-budget {min_ns}ns or more"])


def front(
    problem: SelectionProblem,
    points: int,
    over: str = "memory",
    budgets: Budgets = NO_BUDGETS,
    progress: Progress = lambda _: None,
) -> tuple[Point, ...]:
    """The fastest selections for `points` budgets, evenly spaced from the minimum to that of the fastest.

    Parameters
    ----------
    points : int
        At least 2; points that are equal to an earlier one are left out.
    over : str
        ``memory`` or ``workspace``.

    Returns
    -------
    tuple of Point
        From the smallest to the fastest: each is larger and faster than the one before.

    Raises
    ------
    UsageError
        For fewer than two points.
    InfeasibleError
        See `minimise`.
    """
    if points < 2:
        raise UsageError(f"a front has at least 2 points, not {points}")
    smallest, quickest = minimise(problem, over, budgets), minimise(problem, "time", budgets)
    low, high = _used_bytes(smallest.sums, over), _used_bytes(quickest.sums, over)
    all_points: list[Point] = []
    for number in range(points):
        budget_bytes = low + (high - low) * number // (points - 1)
        ends = {0: smallest, points - 1: quickest}
        selected = ends.get(number) or fastest(problem, _with_budget(budgets, over, budget_bytes))
        greedy_sums = greedy(problem, _with_budget(NO_BUDGETS, over, budget_bytes))
        all_points.append(Point(selected=selected, budget_bytes=budget_bytes, greedy=greedy_sums))
        progress((number + 1) / points)
    return tuple(
        point
        for number_before, point in enumerate(all_points)
        if not any(_is_as_fast(o, point) for o in all_points[:number_before])
    )


def _is_as_fast(smaller: Point, larger: Point) -> bool:
    """Whether the selection of a smaller budget is as fast as that of a larger one, up to rounding."""
    return smaller.time_ns <= larger.time_ns * (1 + 1e-9)


def _used_bytes(sums: Sums, over: str) -> int:
    return sums.memory_bytes if over == "memory" else sums.workspace_bytes


def _with_budget(budgets: Budgets, over: str, budget_bytes: int) -> Budgets:
    return replace(budgets, **{f"{over}_bytes": budget_bytes})


def greedy(problem: SelectionProblem, budgets: Budgets) -> Sums | None:
    """The paper's greedy selection (5.3.2) over the same candidates; None if it ends outside the budgets.

    It begins with the fastest selection. Until the budgets are met, the layer with the largest footprint
    takes the fastest of its candidates that have a smaller one; if it has none, the next layer that has. At
    the end, layers without primitives take the cheapest layouts.
    """
    choice = dict(fastest(problem).choice)
    layers = [step for step in problem.steps if step.chosen]
    sums = problem.evaluate(choice)
    space = replace(budgets, time_ns=math.inf)
    while not sums.is_within(space):
        footprints = {step.name: problem.footprint_bytes(step, choice[step.name]) for step in layers}
        for step in sorted(layers, key=lambda step: -footprints[step.name]):
            smaller = [c for c in step.candidates if problem.footprint_bytes(step, c) < footprints[step.name]]
            if smaller:
                choice[step.name] = min(smaller, key=problem.time_ns)
                break
        else:
            return None
        sums = problem.evaluate(choice)
    names = {step.name for step in layers}
    relaxed = problem.restrict(lambda name, c: name not in names or c is choice[name])
    selected = solve(relaxed, "time", space)
    sums = selected.sums if selected else sums
    return sums if sums.is_within(budgets) else None


def uniform_selection(
    problem: SelectionProblem,
    kinds: Sequence[Callable[[Candidate], bool]],
    substitutes: Sequence[Callable[[Candidate], bool]],
) -> Sums:
    """One kind of primitive in every layer: the first of `kinds` that a layer has, else of `substitutes`.

    Of several candidates of the kind, the fastest is taken; of a layer that has neither, the fastest of all.
    `Sums.substituted` has the layers that have none of `kinds`.
    """
    kind_by_step, substituted = {}, []
    for step in problem.steps:
        possible = [kind for kind in (*kinds, *substitutes) if any(map(kind, step.candidates))]
        kind_by_step[step.name] = possible[0] if step.chosen and possible else lambda _: True
        if step.chosen and not (possible and possible[0] in kinds):
            substituted.append(step.name)
    sums = fastest(problem.restrict(lambda name, c: kind_by_step[name](c))).sums
    return replace(sums, substituted=tuple(substituted))
