"""What the options of a selection mean where a network is compiled: for the CPU's code, or for the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pimflow.errors import UsageError
from pimflow.primitive_selection.search import check_names
from pimflow.primitive_selection.time_sources import CUDA, MEASURE

# What a plan says by options of its own: by option of a selection, its name, its default, and what to give.
_OF_THE_PLAN = {
    "minimize": ("--minimize", "time", "a plan is the least of --objective"),
    "time_budget_ns": ("--time-budget", None, "bound the plan by --max-latency"),
    "memory_model": ("--memory-model", "liveness", "a plan counts what is live at once"),
    "profile": ("--select", "measured", "a plan's times are those of --profiler gpu=…"),
    "measure": ("--measure", MEASURE, "a plan's times are those of --profiler gpu=…"),
}


def check_device(options: Mapping[str, Any] | None, target: str) -> None:
    """Raise `UsageError` if `compile` is to go by times of a device for which it makes no code."""
    device = (options or {}).get("device") or ""
    if device.startswith("rpc:") and target != "c":
        raise UsageError(f"--device {device}: code is made for this machine's CPU; give --target c too")
    if device == CUDA and target != "cuda+pim":
        raise UsageError("--device cuda: there are no kernels for a GPU; give --target cuda+pim too")


def for_plan(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a search is asked for by `options` of a selection that are for a GPU; nothing by others.

    Raises
    ------
    UnknownNameError
        For another objective or memory model.
    UsageError
        For an option that a plan has no use for.
    """
    options = options or {}
    if options.get("device") != CUDA:
        return {}
    check_names(options.get("minimize", "time"), options.get("memory_model", "liveness"))
    for key, (name, default, instead) in _OF_THE_PLAN.items():
        given = options.get(key, default)
        if given != default:
            raise UsageError(f"{name} {given}: with --device cuda {instead}; leave it out")
    search_options: dict[str, Any] = {"primitives": True}
    if options.get("memory_budget_bytes") is not None:
        search_options["max_memory_bytes"] = options["memory_budget_bytes"]
    return search_options
