"""What a fused network still moves beyond its inputs, weights and outputs, by reason."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping

from pimflow.fusion import FusionPlan, Group

REASONS = {
    "large maps": "maps larger than on-chip memory",
    "small maps": "maps that would fit by themselves",
    "halos": "halos that tiles load again",
    "weights": "weights that tiles load again",
}


def remaining_bytes(plan: FusionPlan) -> dict[str, int]:
    """By reason, the bytes that a plan moves beyond `FusionPlan.dram_bytes_ideal`, which are their sum."""
    graph, accelerator = plan.graph, plan.accelerator
    moved, remaining = Counter[str](), Counter[str]()
    for group in plan.groups:
        for name, count in _loaded_elements(group).items():
            whole = min(count, graph.elements(name))
            moved[name] += whole
            remaining["halos"] += count - whole
        for name in group.output_names:
            moved[name] += 0 if group.is_single and group.layers[0].is_view else graph.elements(name)
        for layer in group.layers:
            times = 1 if group.is_single or layer.name in group.resident else group.tiling.tiles
            remaining["weights"] += layer.weight_elements * (times - 1)
    for name in (*graph.inputs, *dict.fromkeys(graph.outputs)):
        moved[name] -= graph.elements(name)
    for name, count in moved.items():
        is_large = graph.elements(name) * accelerator.element_bytes > accelerator.on_chip_bytes
        remaining["large maps" if is_large else "small maps"] += count
    return {reason: remaining[reason] * accelerator.element_bytes for reason in REASONS}


def _loaded_elements(group: Group) -> dict[str, int]:
    """By tensor that a group loads, the elements over all tiles."""
    if not group.is_single:
        return {name: group.elements_over_tiles(name) for name in group.input_names}
    (layer,) = group.layers
    return {} if layer.is_view else {name: group.graph.elements(name) for name in dict.fromkeys(layer.inputs)}


def remainder_rows(plans: Mapping[str, FusionPlan]) -> list[str]:
    """The table of `remaining_bytes`, with the share of the ideal reduction that each reason takes."""
    rows = [f"| network | reached | {' | '.join(REASONS.values())} |", "|---" * (len(REASONS) + 2) + "|"]
    shares: list[list[float]] = []
    for name, plan in plans.items():
        possible = plan.dram_bytes_unfused - plan.dram_bytes_ideal
        reached = (plan.dram_bytes_unfused - plan.dram_bytes) / possible
        remaining = remaining_bytes(plan).values()
        parts = (f"{size / 2**20:.1f} MiB, {size / possible:.1%}" for size in remaining)
        rows.append(f"| {name} | {reached:.1%} | {' | '.join(parts)} |")
        shares.append([reached, *(size / possible for size in remaining)])
    means = (f"{statistics.mean(column):.1%}" for column in zip(*shares))
    rows.append(f"| mean | {' | '.join(means)} |")
    return rows
