"""What a search is asked for beside network and system, and what of it would have no effect."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pimflow.commands.shared.options import NetworkOptions
from pimflow.core.goal import GoalOptions
from pimflow.core.options import OptionSet, declarations, option, require_type, split_keywords, type_check
from pimflow.errors import UsageError

if TYPE_CHECKING:
    from pimflow.core.plan import Plan
    from pimflow.hardware import System
    from pimflow.placement import Goal, Profiling
    from pimflow.primitive_selection.options import SelectionOptions

T = TypeVar("T")


def as_system(value: System | str | os.PathLike[str] | None) -> System:
    """A system, also by its name or file, or the default system; raises `UsageError` for another type."""
    from pimflow.hardware import System, system

    if value is None or isinstance(value, str | os.PathLike):
        return system() if value is None else system(os.fspath(value))
    require_type("system", value, (System,), "a System, which pimflow.system(…) makes, a name or a file")
    return value


def _as_plan(name: str, plan: Any) -> Plan | None:
    """The plan of a search result or of a file."""
    from pimflow.core.plan import Plan
    from pimflow.placement import SearchResult

    if isinstance(plan, SearchResult):
        return plan.plan
    if plan is None or isinstance(plan, Plan):
        return plan
    require_type(name, plan, (str, os.PathLike), "a Plan, what search returned or a file")
    return Plan.load(os.fspath(plan))


def _instance(name: str, value: Any, cls: type[T]) -> T:
    """`value`, by default a `cls` of defaults."""
    require_type(name, value, (cls, type(None)), f"a {cls.__name__} or None")
    return cls() if value is None else value


def _as_options(name: str, options: Any) -> NetworkOptions:
    return _instance(name, options, NetworkOptions)


def _as_goal(name: str, goal: Any) -> Goal:
    from pimflow.placement import Goal

    return _instance(name, goal, Goal)


def _as_profiling(name: str, profiling: Any) -> Profiling:
    """Profiling, also from a text such as ``gpu=learned,pim=ramulator:PATH``."""
    from pimflow.placement import Profiling

    if not isinstance(profiling, str):
        return _instance(name, profiling, Profiling)
    from pimflow.commands.shared.profilers import parse_profilers

    gpu, pim = parse_profilers(profiling.split(","))
    return Profiling(gpu=gpu, pim=pim) if gpu else Profiling(pim=pim)


def _as_selection(_: str, select: Any) -> SelectionOptions | None:
    from pimflow.primitive_selection.options import selection_options

    return None if select is None else selection_options(select)


@dataclass(frozen=True, kw_only=True)
class SearchArguments(OptionSet):
    """The arguments of `pimflow.search` beside network and system; None stands for the defaults."""

    target: str = option(
        "llvm+pim",
        "--target TARGET",
        "what to build for: llvm+pim, cuda+pim or c (default: %(default)s)",
        group="system",
        check=type_check("the name of a target, such as 'llvm+pim'", str),
    )
    plan: Plan | None = option(
        None,
        "--plan FILE",
        "apply this plan.json instead of searching; to change a layer and search the rest, use --pin",
        group="search",
        check=_as_plan,
    )
    options: NetworkOptions = option(None, check=_as_options)
    goal: Goal = option(None, check=_as_goal)
    select: SelectionOptions | None = option(None, check=_as_selection)
    profiling: Profiling = option(None, check=_as_profiling)

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> SearchArguments:
        """From keywords, of which some may be fields of options and goal and replace these.

        Raises
        ------
        UnknownNameError
            For a keyword that is none of these.
        UsageError
            For a value of another type or out of its range.
        """
        values, network_values, goal_values = split_keywords(keywords, cls, NetworkOptions, GoalOptions)
        arguments = cls(**values)
        return replace(
            arguments,
            options=replace(arguments.options, **network_values),
            goal=replace(arguments.goal, **goal_values),
        )


# What a function takes that searches: `public` makes its keywords of these.
SEARCH = (SearchArguments, NetworkOptions, GoalOptions)


def plan_modes(goal: Goal, plan: Plan | None) -> Sequence[str]:
    """The modes of regions: those that the goal allows, or those in a plan."""
    return goal.modes if plan is None else tuple({choice.mode for choice in plan.choices})


# Fields of a goal without effect on a given plan. Bounds are none of them: a given plan must meet them.
_PLAN_FIELDS = ("objective", "solver", "search_seconds", "modes", "pins")
_GPU_ONLY_MODES = GoalOptions(modes="gpu").modes


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
    options : NetworkOptions, optional
        Options that fuse layers have no effect with the target ``c``; a bound on the error has none unless
        layers are decomposed.
    """
    options, defaults = options or NetworkOptions(), GoalOptions()
    if goal.max_error is not None and options.decomposition_request is None:
        raise UsageError(
            "--max-error has no effect without --decompose: nothing else changes results; leave it out"
        )
    if goal.pins and (goal.objective == "memory" or goal.max_memory_bytes is not None or pareto is not None):
        raise UsageError(
            "--pin restricts one search, and --pareto, --objective memory and --memory-budget make several; "
            "leave out one of both"
        )
    changed = {
        name: declaration.flag
        for name, declaration in declarations(GoalOptions).items()
        if declaration.flag and getattr(goal, name) != getattr(defaults, name)
    }
    ineffective = ["--pareto"] if pareto is not None else []
    if in_c:
        if goal.modes == _GPU_ONLY_MODES:
            changed.pop("modes", None)
        fuse_flags = {"--fuse": options.fuse, "--fuse-activations": options.fuse_activations}
        ineffective += [flag for flag, is_set in fuse_flags.items() if is_set]
        ineffective += changed.values()
        reason = "--target c: the CPU computes layer by layer, and nothing is placed or fused"
    elif plan is not None:
        ineffective += [flag for name, flag in changed.items() if name in _PLAN_FIELDS]
        reason = "--plan: the plan says what does each layer, and nothing is searched for"
    else:
        return
    if ineffective:
        raise UsageError(f"{ineffective[0]} has no effect with {reason}; leave out one of both")
