"""What is said of the network that a plan is compared with."""

from __future__ import annotations

from typing import Any

from pimflow.placement import Searched

BASELINE = "the network as it was given, on the GPU with all memory channels"


def baseline_part(searched: Searched) -> dict[str, Any]:
    """What the plan is compared with, and what a network that was changed takes on the GPU alone."""
    changed = None if searched.given is None else searched.gpu_only
    return {
        "baseline": BASELINE,
        "changed_gpu_only": changed and {"latency_ns": changed.latency_ns, "energy_pj": changed.energy_pj},
    }


def by_region_ns(searched: Searched, decomposition: dict[str, Any] | None) -> dict[str, float]:
    """By region, what the baseline takes for it; for a chain, what the layer took stands at its first."""
    given_ns = dict(searched.baseline.region_ns)
    found = {region.name: given_ns.pop(region.name, 0.0) for region in searched.graph.regions}
    for layer in decomposition["layers"] if decomposition else ():
        first = next((name for name in layer["chain"] if name in found), None)
        if first is not None:
            found[first] += given_ns.pop(layer["name"], 0.0)
    return found


def baseline_lines(report: dict[str, Any]) -> list[str]:
    """What the first figures are of, where that is another network than the plan's."""
    changed = report["changed_gpu_only"]
    if changed is None:
        return []
    taken = f"{changed['latency_ns'] / 1e6:.4f} ms and {changed['energy_pj'] / 1e9:.2f} mJ"
    return [f"baseline  {report['baseline']}; the changed network takes {taken} there"]
