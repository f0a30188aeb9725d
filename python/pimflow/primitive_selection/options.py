"""What a selection of primitives is asked for, and what that means where a network is compiled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypedDict

from pimflow.core.keywords import keywords_checked
from pimflow.errors import UnknownNameError, UsageError
from pimflow.placement import Goal
from pimflow.primitive_selection.search import check_names

if TYPE_CHECKING:
    from pimflow.hardware import GpuSpec
    from pimflow.primitive_selection.profile import Profile

CUDA = "cuda"  # of --device
MEASURE = 12  # primitives of a layer that are measured unless more are asked for


@keywords_checked
@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """What a selection is asked for.

    Attributes
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
        Times to go by. ``measured`` on this machine; ``predicted`` (xgboost) from those that the cache holds,
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
        for name, kind, wanted in (
            ("memory_budget_bytes", Real, "a number of bytes or None"),
            ("time_budget_ns", Real, "a number of ns or None"),
            ("pareto", Integral, "a number of points or None"),
            ("device", str, "the name of a device or None"),
            ("measure", Integral, "a number of primitives or None for all"),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise UsageError(f"{name} is {wanted}, not {value!r} ({type(value).__name__})")
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
    given: SelectionOptions | Mapping[str, object], options: SelectionOptions | None = None
) -> SelectionOptions:
    """`given`, or `options`, the defaults if None, with what the keywords `given` say in place of fields.

    Raises
    ------
    UnknownNameError
        For a keyword that is no field of `SelectionOptions`.
    UsageError
        For anything else than options or keywords.
    """
    if isinstance(given, SelectionOptions):
        return given
    if not isinstance(given, Mapping) or not isinstance(options, SelectionOptions | None):
        wrong = options if isinstance(given, Mapping) else given
        raise UsageError(f"a selection is a SelectionOptions or a mapping of its fields, not {wrong!r}")
    known = tuple(each.name for each in fields(SelectionOptions))
    for name in given:
        if name not in known:
            raise UnknownNameError("option of a selection", str(name), known)
    fresh: dict[str, Any] = dict(given)  # whose types `SelectionOptions` checks
    return replace(options or SelectionOptions(), **fresh)


# What a plan says by options of its own: by option of a selection, its name, its default, and what to give.
_OF_THE_PLAN = {
    "minimize": ("--minimize", "time", "a plan is the least of --objective"),
    "time_budget_ns": ("--time-budget", None, "bound the plan by --max-latency"),
    "memory_model": ("--memory-model", "liveness", "a plan counts what is live at once"),
    "profile": ("--select", "measured", "a plan's times are those of --profiler gpu=…"),
    "measure": ("--measure", MEASURE, "a plan's times are those of --profiler gpu=…"),
}


def check_device(options: SelectionOptions | None, target: str) -> None:
    """Raise `UsageError` if `compile` is to go by times of a device for which it makes no code."""
    device = (options.device if options else None) or ""
    if device.startswith("rpc:") and target != "c":
        raise UsageError(f"--device {device}: code is made for this machine's CPU; give --target c too")
    if device == CUDA and target != "cuda+pim":
        raise UsageError("--device cuda: there are no kernels for a GPU; give --target cuda+pim too")


def goal_with_primitives(goal: Goal, options: SelectionOptions | None) -> Goal:
    """`goal`, with the GPU's primitives and their memory budget if `options` are for a GPU.

    Raises
    ------
    UsageError
        For an option that a plan has no use for.
    """
    if options is None or options.device != CUDA:
        return goal
    for key, (name, default, instead) in _OF_THE_PLAN.items():
        given = getattr(options, key)
        if given != default:
            raise UsageError(f"{name} {given}: with --device cuda {instead}; leave it out")
    if options.memory_budget_bytes is None:
        return replace(goal, primitives=True)
    return replace(goal, primitives=True, max_memory_bytes=options.memory_budget_bytes)
