"""Lines of a compilation's table about convolution primitives and C."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pimflow.core.candidate import Cost
from pimflow.placement import Searched
from pimflow.primitive_selection.profile import network_text
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.launches import usable


def plan_part(searched: Searched, operators: Searched) -> dict[str, Any]:
    """What a report says of the GPU's primitives in a plan; times in ns.

    Parameters
    ----------
    operators : Searched
        The same without primitives.
    """
    costs, graph, choices = searched.maker.costs, searched.graph, []
    for name, primitive in searched.primitives().items():
        candidate, region = searched.doing[name], graph.region(name)
        own = Cost.of(candidate)
        operator = searched.maker.make(region, "GPU", gpu_channels=searched.plan.gpu_channels)
        choices.append(
            {
                "layer": name,
                "primitive": primitive.name,
                "launches": len(candidate.tasks),
                "time_ns": own.latency_ns,
                "operator_ns": Cost.of(operator).latency_ns,
                "known": own.known["gpu"].value,
                "workspace_bytes": candidate.workspace_bytes,
                "filter_bytes": candidate.filter_bytes,
            }
        )
    return {
        "device": f"{searched.system.gpu.name}, {costs.profiling.gpu.name}",
        "layers": sum(bool(usable(region)) for region in graph.regions),
        "choices": choices,
        "latency_operators_ns": operators.evaluation.latency_ns,
        "saved_ns": operators.evaluation.latency_ns - searched.evaluation.latency_ns,
        "latency_gpu_only_operators_ns": operators.baseline.latency_ns,
        "saved_gpu_only_ns": operators.baseline.latency_ns - searched.baseline.latency_ns,
        "workspace_bytes": max((each["workspace_bytes"] for each in choices), default=0),
        "filter_bytes": sum(each["filter_bytes"] for each in choices),
    }


def primitives_text(chosen: Mapping[str, Any]) -> list[str]:
    """Of what `primitive_selection.selection.summary` or `plan_part` says."""
    if "saved_ns" in chosen:
        return [_plan_text(chosen)]
    line = (
        f"primitives of {len(chosen['choices'])} layers for {chosen['device']}: "
        f"{chosen['time_ns'] / 1e6:.3f} ms by themselves, {chosen['status']}"
    )
    whole = chosen.get("network_time")
    return [line, network_text(whole)] if whole else [line]


def _plan_text(part: Mapping[str, Any]) -> str:
    families = Counter(PRIMITIVES[each["primitive"]].family for each in part["choices"])
    which = ", ".join(f"{family} {count}" for family, count in sorted(families.items()))
    return (
        f"primitives of {len(part['choices'])} of {part['layers']} layers{which and f' ({which})'}: "
        f"{part['saved_ns'] / 1e3:.2f} us saved against operators alone, "
        f"{part['saved_gpu_only_ns'] / 1e3:.2f} us of the GPU alone; workspaces up to "
        f"{part['workspace_bytes'] / 2**20:.2f} MiB, filters {part['filter_bytes'] / 2**20:.2f} MiB"
    )


def c_text(part: Mapping[str, Any]) -> str:
    """Of what `CNetwork.summary` says."""
    sizes = f"pool {part['pool_bytes']} B, weights {part['weight_bytes']} B"
    if part["flaw"]:
        return f"C         not built: {part['flaw']}; {sizes}"
    parallel = f", {part['parallel_ns'] / 1e6:.3f} ms on {part['threads']}" if part["parallel_ns"] else ""
    return (
        f"C         {part['measured_ns'] / 1e6:.3f} ms on one core{parallel} by {part['compiler']}, outputs "
        f"match (max rel {part['max_relative_error']:.1e}); {sizes}"
    )
