"""The search for groups: the paper's greedy one, the best cut of the layer order, the best over branches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from pimflow.core.options import OptionSet, option
from pimflow.errors import InfeasibleError, UnsupportedOpError
from pimflow.fusion.accelerator import Accelerator
from pimflow.fusion.convex import ConvexCover
from pimflow.fusion.group import REUSES, Placement, Reuse, place
from pimflow.fusion.layers import Layer, LayerGraph
from pimflow.fusion.plan import FusionPlan
from pimflow.fusion.run_costs import CostedGroup, Objective, RunCosts
from pimflow.fusion.tiling_candidates import HALOS, Halo

SEARCHES = ("greedy", "runs", "optimal")
OBJECTIVES = ("traffic", "time", "energy")


@dataclass(frozen=True, kw_only=True)
class FusionRules(OptionSet, group="search"):
    """How layers are grouped; raises `UnknownNameError` for an unknown name.

    Attributes
    ----------
    search : str
        ``greedy``: grow a group by the next layer while it fits with some tiling and moves less (Figure 6);
        ``runs``: the best cut of the layer order; ``optimal``: the best cover of the layers by the groups of
        `ConvexCover`, which may skip layers of other branches.
    halo : Halo
        ``recompute``: elements that tiles share are loaded or computed for each tile; ``retain``: rows may
        stay on chip.
    objective : str
        ``traffic``, ``time`` or ``energy``. No group is slower than its single layers.
    """

    objective: str = option(
        "traffic",
        "--objective WHAT",
        "what is minimised: {choices} (default: %(default)s)",
        choices=OBJECTIVES,
    )
    search: str = option(
        "optimal", "--search HOW", "how groups are found: {choices} (default: %(default)s)", choices=SEARCHES
    )
    halo: Halo = option(
        "recompute",
        "--halo HOW",
        "what is done with rows that tiles share: {choices} (default: %(default)s)",
        choices=HALOS,
    )
    reuse: Reuse = option(
        "deep",
        "--reuse HOW",
        "reuse of on-chip memory inside a group: {choices} (default: %(default)s)",
        group="memory",
        choices=REUSES,
    )


def fuse_layers(
    graph: LayerGraph,
    accelerator: Accelerator | None = None,
    rules: FusionRules | None = None,
    progress: Callable[[float], None] | None = None,
) -> FusionPlan:
    """Cut `graph` into groups of layers and place their tiles on chip.

    Parameters
    ----------
    accelerator : Accelerator, optional
        The accelerator of the paper by default.
    progress : callable, optional
        Called with the share that is done.

    Raises
    ------
    InfeasibleError
        If the smallest tile of a layer does not fit on chip.
    UnsupportedOpError
        If there are no layers.
    """
    accelerator, rules = accelerator or Accelerator(), rules or FusionRules()
    if not graph.layers:
        raise UnsupportedOpError(f"'{graph.name}' only looks at its inputs: it has no layers to fuse")
    _check_smallest_tiles(graph, accelerator)
    costs = RunCosts(
        graph,
        Objective(accelerator, rules.objective),
        rules.reuse,
        rules.halo,
        progress or (lambda share: None),
    )
    groups, placements = _placeable_groups(_greedy if rules.search == "greedy" else _best_runs, costs)
    if rules.search == "optimal" and (cover := ConvexCover(costs)).has_non_runs:
        groups, placements = min(
            (groups, placements),
            _placeable_groups(cover.best, costs),
            key=lambda cut: sum(group.objective for group in cut[0]),
        )
    ordered = graph.with_order([position for group in groups for position in group.positions])
    begins = itertools.accumulate((len(group.positions) for group in groups), initial=0)
    return FusionPlan(
        graph=ordered,
        accelerator=accelerator,
        groups=tuple(group.group(ordered, rules.reuse, begin) for group, begin in zip(groups, begins)),
        placements=placements,
    )


Cut = tuple[list[CostedGroup], tuple[Placement | None, ...]]


def _placeable_groups(choose: Callable[[RunCosts], list[CostedGroup]], costs: RunCosts) -> Cut:
    """Repeat `choose` without groups whose tiles cannot be placed, until all groups can be placed."""
    placements: dict[CostedGroup, Placement | None] = {}
    while True:
        groups = choose(costs)
        failed = [group for group in groups if not _try_place(group, costs, placements)]
        if not failed:
            return groups, tuple(placements[group] for group in groups)
        costs.exclude(failed)


def _try_place(
    group_cost: CostedGroup, costs: RunCosts, placements: dict[CostedGroup, Placement | None]
) -> bool:
    """Place a group and add it to `placements`; False if its tiles do not fit."""
    if group_cost in placements:
        return True
    accelerator, graph, begin = costs.objective.accelerator, costs.graph, group_cost.positions[0]
    if group_cost.positions[-1] - begin >= len(group_cost.positions):
        ancestors = graph.ancestors(group_cost.positions)
        later_layers = set(range(len(costs))) - ancestors - set(group_cost.positions)
        graph = graph.with_order([*sorted(ancestors), *group_cost.positions, *sorted(later_layers)])
        begin = len(ancestors)
    group = group_cost.group(graph, costs.reuse, begin)
    try:
        placements[group_cost] = (
            None if group.is_single else place(group, accelerator.element_bytes, accelerator.on_chip_bytes)
        )
    except InfeasibleError:
        return False
    return True


def smallest_tile_elements(layer: Layer) -> int:
    """Elements on chip to compute one result: the elements that it reads at once, their weights, the result.

    Sums over channels can wait on chip for further operands; operators that are not known in detail cannot.
    """
    if layer.kind in ("other", "softmax"):
        reads = sum(math.prod(m.window for m in maps) for maps in layer.maps)
    else:
        reads = sum(maps[1].window * maps[2].window for maps in layer.maps)
    return reads + (reads if layer.macs else min(1, layer.weight_elements)) + 1


def _check_smallest_tiles(graph: LayerGraph, accelerator: Accelerator) -> None:
    layer = max(graph.layers, key=smallest_tile_elements)
    needed = smallest_tile_elements(layer) * accelerator.element_bytes
    if needed > accelerator.on_chip_bytes:
        raise InfeasibleError(
            f"smallest tile of layer '{layer.name}'", needed, accelerator.on_chip_bytes, "bytes",
            ["more on-chip memory (--on-chip)", "a smaller storage type (--dtype)"],
        )  # fmt: skip


def _greedy(costs: RunCosts) -> list[CostedGroup]:
    groups, begin = [], 0
    while begin < len(costs):
        best, end = costs.single_layers[begin], begin + 1
        while end < len(costs):
            longer = costs.run(begin, end + 1)
            if longer is None or longer.objective > best.objective + costs.single_layers[end].objective:
                break
            best, end = longer, end + 1
        groups.append(best)
        begin = end
    return groups


def _best_runs(costs: RunCosts) -> list[CostedGroup]:
    """The best cut: a shortest path over positions between layers; of equal ones, that with fewer groups."""
    best: list[tuple[float, int]] = [(0.0, 0)]
    last: list[CostedGroup] = []
    for end in range(1, len(costs) + 1):
        options = [
            (best[run.positions[0]][0] + run.objective, best[run.positions[0]][1] + 1, run)
            for run in costs.runs_ending_at(end)
            if run is not None
        ]
        value, count, run = min(options, key=lambda option: option[:2])
        best.append((value, count))
        last.append(run)
    groups, end = [], len(costs)
    while end:
        groups.append(last[end - 1])
        end = groups[-1].positions[0]
    return groups[::-1]
