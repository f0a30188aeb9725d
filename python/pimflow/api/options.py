"""What may be asked for, as types: what a network becomes before it is searched, and the search's goal.

Public functions take `NetworkOptions` and `Goal` as they are, or their fields as keywords. An unknown
keyword, a value of another type and an option that would have no effect are refused before the work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict

from pimflow.core.keywords import keywords_checked
from pimflow.core.plan import Plan
from pimflow.decomposition.request import Request
from pimflow.errors import UnknownNameError, UsageError
from pimflow.hardware import System, system
from pimflow.placement import Goal, Profiling, Searched

if TYPE_CHECKING:
    from pimflow.primitive_selection.options import SelectionKeywords, SelectionOptions

Shapes = Mapping[str, tuple[int, ...]]
States = Mapping[str, str]
AnyPlan = Plan | Searched | str | os.PathLike[str]


@keywords_checked
@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """What is done with a network before it is searched; see `api.prepare.prepare`.

    Attributes
    ----------
    shapes : mapping of str to tuple of int, optional
        Shapes of inputs that the model leaves open.
    batch : int, optional
        Inferences at once; see `frontend.load`.
    context : int, optional
        Of a decoder in ONNX: its caches have a place for so many tokens, and stay where they are from step to
        step; see `frontend.load`.
    states : mapping of str to str, optional
        With a context: inputs that are caches, and the outputs that they become, beside those that names and
        shapes tell.
    decompose : Request, optional
        Layers to decompose, such as ``tucker:0.1``; with ``where=pays`` those that a search for the same goal
        finds cheaper as chains. A text is read by `decomposition.request.Request.parse`.
    optimize_skips : str, optional
        One of `decomposition.skips.CRITERIA`: skip connections of a decomposed network wait in their reduced
        form.
    fuse_activations : bool
        Of a decomposed network: whether what lies between two chains may be one GPU kernel
        (`relay_passes.kernels.fuse_groups.activation_chains`).
    fuse : bool
        Whether neighbouring layers may be one GPU kernel over shared memory (`placement.candidates.tilings`).
    reorder : bool
        Whether layers may run in another order, if it takes less memory (docs/memory.md). A plan, if given,
        says the order.

    Raises
    ------
    UsageError
        For a value of another type or out of its range.
    """

    shapes: Shapes | None = None
    batch: int | None = None
    context: int | None = None
    states: States | None = None
    decompose: Request | str | None = None
    optimize_skips: str | None = None
    fuse_activations: bool = False
    fuse: bool = False
    reorder: bool = False

    def __post_init__(self) -> None:
        _require_shapes(self.shapes)
        require_type("batch", self.batch, (Integral, type(None)), "a number of inferences or None")
        require_type("context", self.context, (Integral, type(None)), "a number of tokens or None")
        _require_states(self.states, self.context)
        require_type(
            "decompose",
            self.decompose,
            (Request, str, type(None)),
            "a Request, its text such as 'tucker:0.1'",
        )
        require_type(
            "optimize_skips", self.optimize_skips, (str, type(None)), "the name of a criterion or None"
        )
        for name in ("fuse_activations", "fuse", "reorder"):
            require_type(name, getattr(self, name), (bool,), "True or False")
        if self.optimize_skips is not None:
            from pimflow.decomposition.skips import check_criterion  # TVM: only who asks for it waits

            check_criterion(self.optimize_skips)
        if isinstance(self.decompose, str):
            object.__setattr__(self, "decompose", Request.parse(self.decompose))

    @property
    def rewrites(self) -> bool:
        """Whether other layers are searched than those of the model, or in another order."""
        return bool(self.decompose or self.optimize_skips or self.fuse_activations or self.reorder)

    @property
    def request(self) -> Request | None:
        """`decompose`, which is no text any more."""
        assert not isinstance(self.decompose, str)
        return self.decompose


class NetworkKeywords(TypedDict, total=False):
    """The fields of `NetworkOptions` as keywords."""

    shapes: Shapes | None
    batch: int | None
    context: int | None
    states: States | None
    decompose: Request | str | None
    optimize_skips: str | None
    fuse_activations: bool
    fuse: bool
    reorder: bool


class GoalKeywords(TypedDict, total=False):
    """The fields of `placement.Goal` as keywords."""

    objective: str
    solver: str
    search_seconds: float
    max_latency_ns: float | None
    max_energy_pj: float | None
    max_memory_bytes: float | None
    max_error: float | None
    modes: Sequence[str]
    primitives: bool


class SearchKeywords(NetworkKeywords, GoalKeywords, total=False):
    """What a search takes as keywords."""


class QuestionKeywords(SearchKeywords, total=False):
    """What a search takes besides a network, a system and a plan."""

    target: str
    options: NetworkOptions | None
    goal: Goal | None
    select: SelectionOptions | SelectionKeywords | None
    profiling: Profiling | None


class PlanKeywords(QuestionKeywords, total=False):
    """What `api.search.search` takes besides a model and a system."""

    plan: AnyPlan | None


def asked(
    keywords: Mapping[str, object], options: NetworkOptions | None = None, goal: Goal | None = None
) -> tuple[NetworkOptions, Goal]:
    """`options` and `goal`, defaults where None, with what `keywords` says in place of single fields.

    Raises
    ------
    UnknownNameError
        For a keyword that is a field of neither.
    UsageError
        For a value of another type or out of its range.
    """
    require_type("options", options, (NetworkOptions, type(None)), "a NetworkOptions or None")
    require_type("goal", goal, (Goal, type(None)), "a Goal or None")
    options, goal = options or NetworkOptions(), goal or Goal()
    of_network, of_goal = names(NetworkOptions), names(Goal)
    require_known(keywords, (*of_network, *of_goal))
    return replace(options, **_only(of_network, keywords)), replace(goal, **_only(of_goal, keywords))


def network_options(keywords: Mapping[str, object], options: NetworkOptions | None = None) -> NetworkOptions:
    """The same for a command that searches nothing; see `asked`."""
    require_type("options", options, (NetworkOptions, type(None)), "a NetworkOptions or None")
    require_known(keywords, names(NetworkOptions))
    return replace(options or NetworkOptions(), **_only(names(NetworkOptions), keywords))


def _only(wanted: Sequence[str], keywords: Mapping[str, object]) -> dict[str, Any]:
    """Of `keywords`, those called `wanted`; the dataclass that gets them checks their types."""
    return {name: value for name, value in keywords.items() if name in wanted}


def names(options: type) -> tuple[str, ...]:
    """The fields of a dataclass."""
    return tuple(each.name for each in fields(options))


def require_known(keywords: Mapping[str, object], known: Sequence[str]) -> None:
    """Raise `UnknownNameError` for a keyword that is none of `known`."""
    for name in keywords:
        if name not in known:
            raise UnknownNameError("keyword", name, known)


def require_type(name: str, value: object, kinds: tuple[type, ...], wanted: str) -> None:
    """Raise `UsageError` unless `value` is of one of `kinds`; a bool is no number."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise UsageError(f"{name} is {wanted}, not {value!r} ({type(value).__name__})")


def _require_shapes(shapes: Shapes | None) -> None:
    wanted = "a mapping of input names to tuples of sizes, such as {'input': (1, 3, 224, 224)}"
    require_type("shapes", shapes, (Mapping, type(None)), wanted)
    for name, shape in (shapes or {}).items():
        require_type("shapes", name, (str,), wanted)
        require_type(f"the shape of '{name}'", shape, (tuple, list), "a tuple of sizes")
        for size in shape:
            require_type(f"a size of '{name}'", size, (Integral,), "a whole number")


def _require_states(states: States | None, context: int | None) -> None:
    wanted = "a mapping of inputs that are caches to the outputs that they become"
    require_type("states", states, (Mapping, type(None)), wanted)
    for pair in (states or {}).items():
        for name in pair:
            require_type("states", name, (str,), wanted)
    if states and context is None:
        raise UsageError("states need a context: how many tokens their caches hold")


def as_system(given: System | None) -> System:
    """`given`, or the default system; raises `UsageError` for what is no system."""
    if given is None:
        return system()
    require_type("target_system", given, (System,), "a System, which pimflow.system(…) makes")
    return given


def as_profiling(given: Profiling | None) -> Profiling:
    """`given`, or the analytic models with nothing kept; raises `UsageError` for what is no `Profiling`."""
    if given is None:
        return Profiling()
    require_type("profiling", given, (Profiling,), "a Profiling")
    return given


def as_plan(plan: AnyPlan | None) -> Plan | None:
    """A plan from what a search returned, or from its file; raises `UsageError` for anything else."""
    if isinstance(plan, Searched):
        return plan.plan
    if plan is None or isinstance(plan, Plan):
        return plan
    require_type("plan", plan, (str, os.PathLike), "a Plan, what search returned or a file")
    return Plan.load(os.fspath(plan))


def planned_modes(goal: Goal, plan: Plan | None) -> Sequence[str]:
    """What regions may be done by: what the goal allows, or what a plan says."""
    return goal.modes if plan is None else tuple({choice.mode for choice in plan.choices})


# By field of a goal, the option that gives it.
_OF_A_GOAL = {
    "objective": "--objective",
    "solver": "--solver",
    "search_seconds": "--search-seconds",
    "modes": "--modes",
    "max_latency_ns": "--max-latency",
    "max_energy_pj": "--max-energy",
    "max_memory_bytes": "--memory-budget",
    "max_error": "--max-error",
}
# What a plan has decided, decomposed layers too. Bounds are not in it: the plan has to keep to them.
_DECIDED = ("objective", "solver", "search_seconds", "modes")
_GPU_ALONE = Goal(modes="gpu").modes


def require_effect(
    goal: Goal,
    *,
    plan: Plan | None = None,
    in_c: bool = False,
    options: NetworkOptions | None = None,
    pareto: int | None = None,
) -> None:
    """Raise `UsageError` for an option that nothing would heed.

    Parameters
    ----------
    plan : Plan, optional
        Applied instead of searching.
    in_c : bool
        Whether the target is ``c``.
    options : NetworkOptions, optional
        What fuses layers has no effect with the target ``c``; a bound on the error has none unless layers
        are decomposed.
    pareto : int, optional
        Points of a front that is searched.
    """
    options, plain = options or NetworkOptions(), Goal()
    front = ["--pareto"] if pareto is not None else []
    if goal.max_error is not None and options.request is None:
        raise UsageError(
            "--max-error has no effect without --decompose: nothing else changes results; leave it out"
        )
    given = [name for name in _OF_A_GOAL if getattr(goal, name) != getattr(plain, name)]
    if in_c:
        fused = {"--fuse": options.fuse, "--fuse-activations": options.fuse_activations}
        idle = front + [option for option, is_given in fused.items() if is_given]
        idle += [_OF_A_GOAL[name] for name in given if name != "modes" or goal.modes != _GPU_ALONE]
        why = "--target c: the CPU computes layer by layer, and nothing is placed or fused"
    else:
        idle = [] if plan is None else front + [_OF_A_GOAL[name] for name in given if name in _DECIDED]
        why = "--plan: the plan says what does each layer, and nothing is searched for"
    if idle:
        raise UsageError(f"{idle[0]} has no effect with {why}; leave out one of both")
