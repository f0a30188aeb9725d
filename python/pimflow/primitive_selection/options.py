"""Options of a selection of primitives, and what they mean when a network is compiled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypedDict

from pimflow.core.keywords import check_keywords
from pimflow.errors import UnknownNameError, UsageError
from pimflow.placement import Goal
from pimflow.primitive_selection.search import check_names

if TYPE_CHECKING:
    from pimflow.hardware import GpuSpec
    from pimflow.primitive_selection.profile import Profile

CUDA = "cuda"  # a value of --device
MEASURE = 12  # primitives of a layer that are measured by default


@check_keywords
@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """Options of a selection.

    Attributes
    ----------
    minimize : str
        ``time``, ``memory`` or ``workspace``: the largest footprint of a layer.
    memory_budget_bytes, time_budget_ns : optional
        Upper bounds.
    memory_model : str
        ``liveness``, or ``sum`` for the paper's.
    pareto : int, optional
        Number of points of a front, computed in addition: time over memory, or over workspace if that is
        minimised.
    profile : Profile, str or path
        Source of times. ``measured``: on this machine. ``predicted``: by xgboost, from times in the cache;
        transforms are measured. ``mixed``: some primitives are measured, others predicted; what is selected
        by a predicted time is measured, until every selected time is measured. Or a profile, or its file.
    device : str, optional
        The device of a given profile, if it is not this machine. With ``rpc:HOST:PORT/KEY``, times are
        measured on that machine, by TVM's RPC. ``cuda``: the GPU of this machine.
    target : str
        Target of a remote machine's code (`pim_backend.runtime.targets.cpu_target`); if empty, the machine's
        own description of itself. Or ``c``: primitives are built as C, by this machine's compiler.
    gpu : str, path or GpuSpec, optional
        With `device` ``cuda``: the GPU whose analytic model gives the times, in fp32.
    measure : int, optional
        Maximum number of primitives to measure for each layer, the most promising first; None for all.

    Raises
    ------
    UnknownNameError
        For another objective or memory model.
    UsageError
        For a value of another type.
    """

    minimize: str = "time"
    memory_budget_bytes: float | None = None
    time_budget_ns: float | None = None
    memory_model: str = "liveness"
    pareto: int | None = None
    profile: Profile | str | os.PathLike[str] = "measured"
    device: str | None = None
    target: str = ""
    gpu: str | os.PathLike[str] | GpuSpec | None = None
    measure: int | None = MEASURE

    def __post_init__(self) -> None:
        for name, kind, expected in (
            ("memory_budget_bytes", Real, "a number of bytes or None"),
            ("time_budget_ns", Real, "a number of ns or None"),
            ("pareto", Integral, "a number of points or None"),
            ("device", str, "the name of a device or None"),
            ("measure", Integral, "a number of primitives or None for all"),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise UsageError(f"{name} is {expected}, not {value!r} ({type(value).__name__})")
        for name in ("minimize", "memory_model", "target"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise UsageError(f"{name} is a text, not {value!r} ({type(value).__name__})")
        check_names(self.minimize, self.memory_model)


class SelectionKeywords(TypedDict, total=False):
    """The fields of `SelectionOptions` as keywords."""

    minimize: str
    memory_budget_bytes: float | None
    time_budget_ns: float | None
    memory_model: str
    pareto: int | None
    profile: Profile | str | os.PathLike[str]
    device: str | None
    target: str
    gpu: str | os.PathLike[str] | GpuSpec | None
    measure: int | None


def selection_options(
    selection: SelectionOptions | Mapping[str, object], options: SelectionOptions | None = None
) -> SelectionOptions:
    """`selection` if it is options; else `options`, by default the defaults, with the fields that
    `selection` has.

    Raises
    ------
    UnknownNameError
        For a keyword that is no field of `SelectionOptions`.
    UsageError
        For anything else than options or keywords.
    """
    if isinstance(selection, SelectionOptions):
        return selection
    if not isinstance(selection, Mapping) or not isinstance(options, SelectionOptions | None):
        wrong = options if isinstance(selection, Mapping) else selection
        raise UsageError(f"a selection is a SelectionOptions or a mapping of its fields, not {wrong!r}")
    field_names = tuple(option_field.name for option_field in fields(SelectionOptions))
    for name in selection:
        if name not in field_names:
            raise UnknownNameError("option of a selection", str(name), field_names)
    new_values: dict[str, Any] = dict(selection)  # whose types `SelectionOptions` checks
    return replace(options or SelectionOptions(), **new_values)


# Options of a selection that a plan has options of its own for: name on the command line, default, advice.
_PLAN_OPTIONS = {
    "minimize": ("--minimize", "time", "a plan is the least of --objective"),
    "time_budget_ns": ("--time-budget", None, "bound the plan by --max-latency"),
    "memory_model": ("--memory-model", "liveness", "a plan counts what is live at once"),
    "profile": ("--select", "measured", "a plan's times are those of --profiler gpu=…"),
    "measure": ("--measure", MEASURE, "a plan's times are those of --profiler gpu=…"),
}


def check_device(options: SelectionOptions | None, target: str) -> None:
    """Raise `UsageError` if the times are of a device for which `compile` makes no code with `target`."""
    device = (options.device if options else None) or ""
    if device.startswith("rpc:") and target != "c":
        raise UsageError(f"--device {device}: code is made for this machine's CPU; give --target c too")
    if device == CUDA and target != "cuda+pim":
        raise UsageError("--device cuda: there are no kernels for a GPU; give --target cuda+pim too")


def goal_with_primitives(goal: Goal, options: SelectionOptions | None) -> Goal:
    """`goal`, with primitives and a memory budget if `options` are for a GPU.

    Raises
    ------
    UsageError
        For an option that has no effect on a plan.
    """
    if options is None or options.device != CUDA:
        return goal
    for key, (name, default, instead) in _PLAN_OPTIONS.items():
        value = getattr(options, key)
        if value != default:
            raise UsageError(f"{name} {value}: with --device cuda {instead}; leave it out")
    if options.memory_budget_bytes is None:
        return replace(goal, primitives=True)
    return replace(goal, primitives=True, max_memory_bytes=options.memory_budget_bytes)
