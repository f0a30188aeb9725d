"""Types of options: rewrites of a network before its search, and the goal of the search.

Public functions take `NetworkOptions` and `Goal`, or their fields as keywords. An unknown keyword, a value of
another type and an option without effect raise an error before any work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict

from pimflow.core.keywords import check_keywords
from pimflow.core.plan import Plan
from pimflow.decomposition.request import DecompositionRequest
from pimflow.errors import UnknownNameError, UsageError
from pimflow.hardware import System, system
from pimflow.placement import Goal, Profiling, SearchResult

if TYPE_CHECKING:
    from pimflow.primitive_selection.options import SelectionKeywords, SelectionOptions

Shapes = Mapping[str, tuple[int, ...]]
States = Mapping[str, str]
AnyPlan = Plan | SearchResult | str | os.PathLike[str]


@check_keywords
@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """How a network is loaded and rewritten before its search; see `commands.shared.prepare.prepare`.

    Attributes
    ----------
    shapes : mapping of str to tuple of int, optional
        Shapes of inputs that the model leaves open.
    batch : int, optional
        Number of inferences in a batch; see `frontend.load`.
    context : int, optional
        For a decoder in ONNX: places of its caches, which are resident from step to step; see
        `frontend.load`.
    states : mapping of str to str, optional
        With a context: inputs that are caches, and the outputs that are their next content, where names and
        shapes do not tell.
    decompose : Request, optional
        Layers to decompose, such as ``tucker:0.1``; with ``where=pays`` only those that a search for the same
        goal finds cheaper as chains. A text is parsed by `decomposition.request.Request.parse`.
    optimize_skips : str, optional
        One of `decomposition.skips.CRITERIA`: store skip connections of a decomposed network in their reduced
        form.
    fuse_activations : bool
        Whether the operators between two chains of a decomposed network may be one GPU kernel
        (`relay_passes.kernels.fuse_groups.activation_chains`).
    fuse : bool
        Whether neighbouring layers may be one GPU kernel over shared memory (`placement.candidates.tilings`).
    reorder : bool
        Whether layers may run in another order that takes less memory (docs/memory.md). A plan, if there is
        one, determines the order.

    Raises
    ------
    UsageError
        For a value of another type or out of its range.
    """

    shapes: Shapes | None = None
    batch: int | None = None
    context: int | None = None
    states: States | None = None
    decompose: DecompositionRequest | str | None = None
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
            (DecompositionRequest, str, type(None)),
            "a Request, its text such as 'tucker:0.1'",
        )
        require_type(
            "optimize_skips", self.optimize_skips, (str, type(None)), "the name of a criterion or None"
        )
        for name in ("fuse_activations", "fuse", "reorder"):
            require_type(name, getattr(self, name), (bool,), "True or False")
        if self.optimize_skips is not None:
            from pimflow.decomposition.skips import check_criterion  # loads TVM, so only if it is needed

            check_criterion(self.optimize_skips)
        if isinstance(self.decompose, str):
            object.__setattr__(self, "decompose", DecompositionRequest.parse(self.decompose))

    @property
    def rewrites(self) -> bool:
        """Whether the search gets other layers than those of the model, or another order."""
        return bool(self.decompose or self.optimize_skips or self.fuse_activations or self.reorder)

    @property
    def decomposition_request(self) -> DecompositionRequest | None:
        """`decompose` as a parsed request."""
        assert not isinstance(self.decompose, str)
        return self.decompose


class NetworkKeywords(TypedDict, total=False):
    """The fields of `NetworkOptions` as keywords."""

    shapes: Shapes | None
    batch: int | None
    context: int | None
    states: States | None
    decompose: DecompositionRequest | str | None
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
    """The fields of `NetworkOptions` and `placement.Goal` as keywords."""


class RequestKeywords(SearchKeywords, total=False):
    """Keywords of a search beside network, system and plan."""

    target: str
    options: NetworkOptions | None
    goal: Goal | None
    select: SelectionOptions | SelectionKeywords | None
    profiling: Profiling | None


class PlanKeywords(RequestKeywords, total=False):
    """Keywords of `pimflow.search` beside model and system."""

    plan: AnyPlan | None


def merge_keywords(
    keywords: Mapping[str, object], options: NetworkOptions | None = None, goal: Goal | None = None
) -> tuple[NetworkOptions, Goal]:
    """Return `options` and `goal`, or their defaults, with fields replaced by `keywords`.

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
    network_names, goal_names = field_names(NetworkOptions), field_names(Goal)
    require_known(keywords, (*network_names, *goal_names))
    return replace(options, **_select_keys(network_names, keywords)), replace(
        goal, **_select_keys(goal_names, keywords)
    )


def network_options(keywords: Mapping[str, object], options: NetworkOptions | None = None) -> NetworkOptions:
    """Return `options`, or the defaults, with fields replaced by `keywords`; see `merge_keywords`."""
    require_type("options", options, (NetworkOptions, type(None)), "a NetworkOptions or None")
    require_known(keywords, field_names(NetworkOptions))
    return replace(options or NetworkOptions(), **_select_keys(field_names(NetworkOptions), keywords))


def _select_keys(names: Sequence[str], keywords: Mapping[str, object]) -> dict[str, Any]:
    """The items of `keywords` whose names are in `names`; their dataclass checks the types."""
    return {name: value for name, value in keywords.items() if name in names}


def field_names(options: type) -> tuple[str, ...]:
    """The names of a dataclass's fields."""
    return tuple(field.name for field in fields(options))


def require_known(keywords: Mapping[str, object], allowed: Sequence[str]) -> None:
    """Raise `UnknownNameError` for a keyword that is none of `allowed`."""
    for name in keywords:
        if name not in allowed:
            raise UnknownNameError("keyword", name, allowed)


def require_type(name: str, value: object, kinds: tuple[type, ...], expected: str) -> None:
    """Raise `UsageError` unless `value` is of one of `kinds`; a bool does not count as a number."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise UsageError(f"{name} is {expected}, not {value!r} ({type(value).__name__})")


def _require_shapes(shapes: Shapes | None) -> None:
    expected = "a mapping of input names to tuples of sizes, such as {'input': (1, 3, 224, 224)}"
    require_type("shapes", shapes, (Mapping, type(None)), expected)
    for name, shape in (shapes or {}).items():
        require_type("shapes", name, (str,), expected)
        require_type(f"the shape of '{name}'", shape, (tuple, list), "a tuple of sizes")
        for size in shape:
            require_type(f"a size of '{name}'", size, (Integral,), "a whole number")


def _require_states(states: States | None, context: int | None) -> None:
    expected = "a mapping of inputs that are caches to the outputs that they become"
    require_type("states", states, (Mapping, type(None)), expected)
    for pair in (states or {}).items():
        for name in pair:
            require_type("states", name, (str,), expected)
    if states and context is None:
        raise UsageError("states need a context: how many tokens their caches hold")


def as_system(target_system: System | None) -> System:
    """Return `target_system`, or the default system; raises `UsageError` for another type."""
    if target_system is None:
        return system()
    require_type("target_system", target_system, (System,), "a System, which pimflow.system(…) makes")
    return target_system


def as_profiling(profiling: Profiling | None) -> Profiling:
    """Return `profiling`, or analytic models without a cache; raises `UsageError` for another type."""
    if profiling is None:
        return Profiling()
    require_type("profiling", profiling, (Profiling,), "a Profiling")
    return profiling


def as_plan(plan: AnyPlan | None) -> Plan | None:
    """Return the plan of a search result or of a file; raises `UsageError` for another type."""
    if isinstance(plan, SearchResult):
        return plan.plan
    if plan is None or isinstance(plan, Plan):
        return plan
    require_type("plan", plan, (str, os.PathLike), "a Plan, what search returned or a file")
    return Plan.load(os.fspath(plan))


def plan_modes(goal: Goal, plan: Plan | None) -> Sequence[str]:
    """The modes of regions: those that the goal allows, or those in a plan."""
    return goal.modes if plan is None else tuple({choice.mode for choice in plan.choices})


# By field of a goal, its command-line option.
_GOAL_OPTIONS = {
    "objective": "--objective",
    "solver": "--solver",
    "search_seconds": "--search-seconds",
    "modes": "--modes",
    "max_latency_ns": "--max-latency",
    "max_energy_pj": "--max-energy",
    "max_memory_bytes": "--memory-budget",
    "max_error": "--max-error",
}
# Fields of a goal without effect on a given plan. Bounds are none of them: a given plan must meet them.
_PLAN_FIELDS = ("objective", "solver", "search_seconds", "modes")
_GPU_ONLY_MODES = Goal(modes="gpu").modes


def require_effect(
    goal: Goal,
    *,
    plan: Plan | None = None,
    in_c: bool = False,
    options: NetworkOptions | None = None,
    pareto: int | None = None,
) -> None:
    """Raise `UsageError` for an option that would have no effect.

    Parameters
    ----------
    plan : Plan, optional
        A plan to apply in place of a search.
    in_c : bool
        Whether the target is ``c``.
    options : NetworkOptions, optional
        Options that fuse layers have no effect with the target ``c``; a bound on the error has none unless
        layers are decomposed.
    pareto : int, optional
        Number of points of a front to search.
    """
    options, defaults = options or NetworkOptions(), Goal()
    front = ["--pareto"] if pareto is not None else []
    if goal.max_error is not None and options.decomposition_request is None:
        raise UsageError(
            "--max-error has no effect without --decompose: nothing else changes results; leave it out"
        )
    changed_fields = [name for name in _GOAL_OPTIONS if getattr(goal, name) != getattr(defaults, name)]
    if in_c:
        fuse_options = {"--fuse": options.fuse, "--fuse-activations": options.fuse_activations}
        ineffective = front + [option for option, is_set in fuse_options.items() if is_set]
        ineffective += [
            _GOAL_OPTIONS[name] for name in changed_fields if name != "modes" or goal.modes != _GPU_ONLY_MODES
        ]
        reason = "--target c: the CPU computes layer by layer, and nothing is placed or fused"
    else:
        ineffective = (
            []
            if plan is None
            else front + [_GOAL_OPTIONS[name] for name in changed_fields if name in _PLAN_FIELDS]
        )
        reason = "--plan: the plan says what does each layer, and nothing is searched for"
    if ineffective:
        raise UsageError(f"{ineffective[0]} has no effect with {reason}; leave out one of both")
