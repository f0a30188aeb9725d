"""A network cut into groups, with its DRAM traffic, time and energy."""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.fusion.accelerator import Accelerator
from pimflow.fusion.group import Group, Placement
from pimflow.fusion.layers import LayerGraph


@dataclass(frozen=True, kw_only=True)
class FusionPlan:
    """A network cut into groups.

    Attributes
    ----------
    graph : LayerGraph
        Its layers in the order in which the groups run.
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

    def __repr__(self) -> str:
        """In a line: networks are long."""
        moved = f"{self.dram_bytes} of {self.dram_bytes_unfused} bytes of DRAM traffic"
        return f"FusionPlan({self.graph.name}: {len(self.groups)} groups, {moved})"

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
        """Energy of DRAM traffic and arithmetic; see `Accelerator.energy_pj`."""
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
