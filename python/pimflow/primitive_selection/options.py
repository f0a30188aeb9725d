"""Options of a selection of primitives, and what they mean when a network is compiled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pimflow.core.keywords import check_keywords
from pimflow.core.options import OptionSet, declarations, field_names, option
from pimflow.core.quantities import parse_bytes, parse_latency
from pimflow.errors import UnknownNameError, UsageError
from pimflow.primitive_selection.search import check_names

if TYPE_CHECKING:
    from pimflow.hardware import GpuSpec
    from pimflow.placement import Goal
    from pimflow.primitive_selection.profile import Profile

CUDA = "cuda"  # a value of --device
MEASURE = 12  # primitives of a layer that are measured by default


def _parse_measure(text: str, flag: str) -> int | None:
    """Read a number of primitives; None stands for all."""
    if text == "all":
        return None
    if not (text.isdecimal() and int(text) > 0):
        raise UsageError(f"{flag} {text}: give a number of primitives from 1 on, or 'all'")
    return int(text)


@check_keywords
@dataclass(frozen=True, kw_only=True)
class SelectionOptions(OptionSet, group="primitives"):
    """Options of a selection.

    Attributes
    ----------
    measure : int, optional
        Maximum number of primitives to measure for each layer, the most promising first; None for all.

    Raises
    ------
    UnknownNameError
        For another objective or memory model.
    UsageError
        For a value of another type.
    """

    minimize: str = option(
        "time", "--minimize WHAT", "time, memory, or workspace of a layer (default: %(default)s)"
    )
    memory_budget_bytes: float | None = option(
        None, "--memory-budget BYTES", "most memory, such as 50MiB", parse=parse_bytes
    )
    time_budget_ns: float | None = option(
        None, "--time-budget X[ns|us|ms|s]", "most time, such as 12ms", parse=parse_latency
    )
    memory_model: str = option(
        "liveness",
        "--memory-model MODEL",
        "what counts as memory: liveness (what is live at once) or sum (of all layers, as in the paper; "
        "default: %(default)s)",
    )
    pareto: int | None = option(None, "--pareto N", "find a front of time and memory with N budgets")
    profile: Profile | str | os.PathLike[str] = option(
        "measured",
        "--profile SOURCE|FILE",
        "where times come from: measured (on this machine or --device), predicted (from those that the "
        "cache holds), mixed (predicted, but measured where the choice relies on them), or FILE, a profile "
        "that -o wrote (default: %(default)s)",
    )
    device: str | None = option(
        None,
        "--device cuda|rpc:…|NAME",
        "cuda: a GPU; rpc:HOST:PORT[/KEY]: another machine, measured by TVM's RPC: a server, or what a "
        "tracker calls KEY; NAME: the machine of a profile's FILE (default: this machine's CPU)",
    )
    target: str = option(
        "",
        "--target c|LLVM",
        "c: primitives as C, here or on the remote machine; LLVM: what code for the remote machine is "
        "made for, such as 'llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72', or the same with c for llvm "
        "(default: what the machine says of itself)",
        group="system",
    )
    gpu: str | os.PathLike[str] | GpuSpec | None = option(
        None,
        "--gpu NAME|FILE",
        "GPU that is modelled, with --device cuda (default: the system's)",
        group="system",
    )
    measure: int | None = option(
        MEASURE,
        "--measure N|all",
        "most primitives of each layer to measure, the promising ones first (default: %(default)s)",
        parse=_parse_measure,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self.minimize, self.memory_model)


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
    for name in selection:
        if name not in field_names(SelectionOptions):
            raise UnknownNameError("option of a selection", str(name), field_names(SelectionOptions))
    new_values: dict[str, Any] = dict(selection)  # whose types `SelectionOptions` checks
    return replace(options or SelectionOptions(), **new_values)


# Options of a selection that a plan has options of its own for, with advice.
_PLAN_OPTIONS = {
    "minimize": "a plan is the least of --objective",
    "time_budget_ns": "bound the plan by --max-latency",
    "memory_model": "a plan counts what is live at once",
    "profile": "a plan's times are those of --profiler gpu=…",
    "measure": "a plan's times are those of --profiler gpu=…",
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
    for name, advice in _PLAN_OPTIONS.items():
        value = getattr(options, name)
        if value != getattr(SelectionOptions, name):
            flag = "--select" if name == "profile" else declarations(SelectionOptions)[name].flag
            raise UsageError(f"{flag} {value}: with --device cuda {advice}; leave it out")
    if options.memory_budget_bytes is None:
        return replace(goal, primitives=True)
    return replace(goal, primitives=True, max_memory_bytes=options.memory_budget_bytes)
