"""Which layers to fuse: the paper's greedy, and the best cut of the layers' order into groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pimflow.deep_fusion.accelerator import Accelerator
from pimflow.deep_fusion.candidates import Candidates
from pimflow.deep_fusion.group import REUSES, Group, Placement, place
from pimflow.deep_fusion.layers import Layer, LayerGraph
from pimflow.deep_fusion.segments import Costed, Growing, Objective, best_groups
from pimflow.errors import InfeasibleError, UnknownNameError

SEARCHES = ("greedy", "optimal")
HALOS = ("recompute", "retain")
OBJECTIVES = ("traffic", "time", "energy")


@dataclass(frozen=True, kw_only=True)
class FusionPlan:
    """A network cut into groups.

    Attributes
    ----------
    graph : LayerGraph
    accelerator : Accelerator
    groups : tuple of Group
        In execution order.
    placements : tuple of Placement or None
        Where their tiles lie; None for layers by themselves.
    """

    graph: LayerGraph
    accelerator: Accelerator
    groups: tuple[Group, ...]
    placements: tuple[Placement | None, ...]

    @property
    def dram_bytes(self) -> int:
        return sum(group.traffic_elements for group in self.groups) * self.accelerator.element_bytes

    @property
    def dram_bytes_unfused(self) -> int:
        """Every layer reads its operands and weights once and writes its result."""
        return sum(map(self.graph.moved_elements, self.graph.layers)) * self.accelerator.element_bytes

    @property
    def dram_bytes_ideal(self) -> int:
        """Inputs, weights and outputs alone."""
        return self.graph.ideal_elements * self.accelerator.element_bytes

    @property
    def reduction(self) -> float:
        return 1 - self.dram_bytes / self.dram_bytes_unfused

    @property
    def recomputed_macs(self) -> int:
        """Multiply-accumulates beyond the network's own."""
        return sum(group.macs for group in self.groups) - sum(layer.macs for layer in self.graph.layers)

    def _times_ns(self, group: Group) -> tuple[float, float]:
        moving = self.accelerator.memory_ns(group.traffic_elements * self.accelerator.element_bytes)
        return moving, self.accelerator.compute_ns(group.operations)

    @property
    def time_serial_ns(self) -> float:
        """DRAM and arithmetic one after the other."""
        return sum(sum(self._times_ns(group)) for group in self.groups)

    @property
    def time_overlapped_ns(self) -> float:
        """Each group takes as long as the slower of its DRAM traffic and its arithmetic."""
        return sum(max(self._times_ns(group)) for group in self.groups)

    @property
    def energy_pj(self) -> float:
        """Of DRAM traffic and arithmetic; see `Accelerator.energy_pj`."""
        return sum(
            self.accelerator.energy_pj(
                group.traffic_elements * self.accelerator.element_bytes, group.operations
            )
            for group in self.groups
        )

    @property
    def unfused(self) -> FusionPlan:
        """Every layer by itself."""
        groups = tuple(Group(graph=self.graph, begin=i, end=i + 1) for i in range(len(self.graph.layers)))
        return FusionPlan(
            graph=self.graph,
            accelerator=self.accelerator,
            groups=groups,
            placements=(None,) * len(groups),
        )


def fuse_layers(
    graph: LayerGraph,
    accelerator: Accelerator | None = None,
    *,
    reuse: str = "deep",
    search: str = "optimal",
    halo: str = "recompute",
    objective: str = "traffic",
    progress: Callable[[float], None] | None = None,
) -> FusionPlan:
    """Cut `graph` into groups of consecutive layers and place their tiles on chip.

    Parameters
    ----------
    accelerator : Accelerator, optional
        The paper's by default.
    reuse : str
        One of `REUSES`; see `Group`.
    search : str
        ``greedy``: grow a group by the next layer while it fits with some tiling and moves less (Figure 6);
        ``optimal``: no other cut of this order of the layers does better.
    halo : str
        ``recompute``: what tiles share is loaded or computed for each; ``retain``: rows may stay on chip.
    objective : str
        ``traffic``, ``time`` or ``energy``. No group is slower than its layers by themselves.
    progress : callable, optional
        Told the share that is done.

    Raises
    ------
    InfeasibleError
        If the smallest tile of a layer does not fit on chip.
    UnknownNameError
        For other names.
    """
    for kind, name, known in (
        ("reuse", reuse, REUSES),
        ("search", search, SEARCHES),
        ("halo", halo, HALOS),
        ("objective", objective, OBJECTIVES),
    ):
        if name not in known:
            raise UnknownNameError(kind, name, known)
    accelerator = accelerator or Accelerator()
    _check_smallest_tiles(graph, accelerator)
    table = _Table(graph, Objective(accelerator, objective), reuse, halo, progress or (lambda share: None))
    cut = _greedy if search == "greedy" else _optimal
    placed: dict[tuple[int, int], Placement | None] = {}
    while True:
        groups = cut(table)
        failed = [group for group in groups if not _placed(group, accelerator, placed)]
        if not failed:
            break
        table.refuse(failed)
    placements = tuple(placed[group.begin, group.end] for group in groups)
    return FusionPlan(graph=graph, accelerator=accelerator, groups=tuple(groups), placements=placements)


def smallest_tile_elements(layer: Layer) -> int:
    """What has to be on chip to compute one element: what it reads at once, as many weights, itself.

    Sums over channels can wait on chip for their next operands; what is not known in detail cannot.
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


def _placed(group: Group, accelerator: Accelerator, placed: dict) -> bool:
    key = (group.begin, group.end)
    if key not in placed:
        try:
            placed[key] = (
                None if group.single else place(group, accelerator.element_bytes, accelerator.on_chip_bytes)
            )
        except InfeasibleError:
            return False
    return True


class _Table:
    """Best group of every run of layers, by its last layer; made when first asked for."""

    def __init__(
        self,
        graph: LayerGraph,
        objective: Objective,
        reuse: str,
        halo: str,
        progress: Callable[[float], None],
    ) -> None:
        self.graph, self.objective, self.reuse, self.progress = graph, objective, reuse, progress
        self.candidates = Candidates.of(graph, halo)
        self.refused: dict[tuple[int, int], int] = {}
        self._columns: dict[int, list[Costed | None]] = {}

    def __len__(self) -> int:
        return len(self.graph.layers)

    def ending(self, end: int) -> list[Costed | None]:
        """Groups that end before layer `end`, shortest first; None for runs that do not pay."""
        if end not in self._columns:
            growing = Growing(self.graph, end, self.candidates, self.reuse)
            self._columns[end] = list(best_groups(growing, self.objective, self.refused))
            self.progress(len(self._columns) / len(self))
        return self._columns[end]

    def group(self, begin: int, end: int) -> Costed | None:
        column = self.ending(end)
        return column[end - begin - 1] if end - begin <= len(column) else None

    def refuse(self, groups: list[Group]) -> None:
        """Give other tilings of these runs from now on: some that take less."""
        for group in groups:
            bound = self.group(group.begin, group.end).bound_elements
            self.refused[group.begin, group.end] = bound
        for end in {group.end for group in groups}:
            del self._columns[end]


def _greedy(table: _Table) -> list[Group]:
    groups, begin = [], 0
    while begin < len(table):
        best, end = table.group(begin, begin + 1), begin + 1
        while end < len(table):
            longer = table.group(begin, end + 1)
            if longer is None or longer.objective > best.objective + table.group(end, end + 1).objective:
                break
            best, end = longer, end + 1
        groups.append(best.group)
        begin = end
    return groups


def _optimal(table: _Table) -> list[Group]:
    """Shortest path over the positions between layers; of equals, the one with fewer groups."""
    best: list[tuple[float, int]] = [(0.0, 0)]
    last: list[Group] = []
    for end in range(1, len(table) + 1):
        options = [
            (best[costed.group.begin][0] + costed.objective, best[costed.group.begin][1] + 1, costed.group)
            for costed in table.ending(end)
            if costed is not None
        ]
        value, count, group = min(options, key=lambda option: option[:2])
        best.append((value, count))
        last.append(group)
    groups, end = [], len(table)
    while end:
        groups.append(last[end - 1])
        end = groups[-1].begin
    return groups[::-1]
