"""A network cut into groups, with its DRAM traffic, time and energy."""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.core.frames import Tabular
from pimflow.core.json_form import Json, json_form
from pimflow.fusion.accelerator import Accelerator
from pimflow.fusion.group import Group, Placement
from pimflow.fusion.layers import LayerGraph


@dataclass(frozen=True, kw_only=True)
class TileReport:
    """The tiles of a group's last layer; with `retain`, rows that two tiles share stay on chip."""

    shape: tuple[int, ...]
    tiles: int
    retain: bool


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """A group of layers in one pass over on-chip memory, or a single layer.

    Attributes
    ----------
    by_channel : tuple of tuple of str
        Runs of layers that go channel by channel.
    on_chip_bytes : int or None
        None for a layer that is not fused.
    """

    layers: tuple[str, ...]
    tile: TileReport
    by_channel: tuple[tuple[str, ...], ...]
    on_chip_bytes: int | None
    dram_bytes: int

    @classmethod
    def from_group(cls, group: Group, placement: Placement | None, element_bytes: int) -> GroupReport:
        """Report a group; `placement` is None for a layer that is not fused."""
        names = tuple(layer.name for layer in group.layers)
        tiling = group.tiling
        return cls(
            layers=names,
            tile=TileReport(shape=tuple(group.tile(names[-1])), tiles=tiling.tiles, retain=tiling.retain),
            by_channel=tuple(names[run.begin : run.end] for run in group.channel_runs),
            on_chip_bytes=placement.on_chip_bytes if placement else None,
            dram_bytes=group.traffic_elements * element_bytes,
        )

    def text(self) -> str:
        """The report as a line of text."""
        shape = "x".join(map(str, self.tile.shape))
        notes = ", halo rows retained" * self.tile.retain + ", channel by channel" * bool(self.by_channel)
        return (
            f"  {self.layers[0]} .. {self.layers[-1]} ({len(self.layers)}): {self.tile.tiles} tiles of "
            f"{shape}{notes}, {self.on_chip_bytes} B on chip, {self.dram_bytes} B moved"
        )


@dataclass(frozen=True, kw_only=True)
class FusionPlan(Tabular, rows="group_reports"):
    """A network cut into groups.

    Attributes
    ----------
    graph : LayerGraph
        The layers in the order in which the groups run.
    groups : tuple of Group
        In execution order.
    placements : tuple of Placement or None
        Offsets of the groups' tiles; None for single layers.
    """

    graph: LayerGraph
    accelerator: Accelerator
    groups: tuple[Group, ...]
    placements: tuple[Placement | None, ...]

    def __repr__(self) -> str:
        """A summary in one line, since networks are long."""
        moved = f"{self.dram_bytes} of {self.dram_bytes_unfused} bytes of DRAM traffic"
        return f"FusionPlan({self.graph.name}: {len(self.groups)} groups, {moved})"

    def to_json(self) -> dict[str, Json]:
        """Figures and groups, with the keys of ``pimflow fuse --json``."""
        figures = (
            *("dram_bytes_unfused", "dram_bytes", "dram_bytes_ideal", "reduction"),
            *("time_serial_ns", "time_overlapped_ns", "energy_pj", "recomputed_macs"),
        )
        return {
            "network": self.graph.name,
            "dtype": self.accelerator.dtype,
            **{name: json_form(getattr(self, name)) for name in figures},
            "groups": json_form(self.group_reports),
        }

    @property
    def group_reports(self) -> tuple[GroupReport, ...]:
        """The report of each group."""
        element_bytes = self.accelerator.element_bytes
        pairs = zip(self.groups, self.placements)
        return tuple(GroupReport.from_group(group, placement, element_bytes) for group, placement in pairs)

    @property
    def dram_bytes(self) -> int:
        """DRAM traffic of all groups."""
        return sum(group.traffic_elements for group in self.groups) * self.accelerator.element_bytes

    @property
    def dram_bytes_unfused(self) -> int:
        """DRAM traffic if every layer reads its operands and weights once and writes its result."""
        return sum(map(self.graph.traffic_elements, self.graph.layers)) * self.accelerator.element_bytes

    @property
    def dram_bytes_ideal(self) -> int:
        """DRAM traffic of inputs, weights and outputs only."""
        return self.graph.ideal_elements * self.accelerator.element_bytes

    @property
    def reduction(self) -> float:
        """Saved share of the DRAM traffic of unfused layers."""
        return 1 - self.dram_bytes / self.dram_bytes_unfused

    @property
    def recomputed_macs(self) -> int:
        """Multiply-accumulates that are done more than once."""
        return sum(group.macs for group in self.groups) - sum(layer.macs for layer in self.graph.layers)

    def _times_ns(self, group: Group) -> tuple[float, float]:
        moving = self.accelerator.memory_ns(group.traffic_elements * self.accelerator.element_bytes)
        return moving, self.accelerator.compute_ns(group.operations)

    @property
    def time_serial_ns(self) -> float:
        """Time with DRAM traffic and arithmetic one after the other."""
        return sum(sum(self._times_ns(group)) for group in self.groups)

    @property
    def time_overlapped_ns(self) -> float:
        """Time with DRAM traffic and arithmetic of each group overlapped: the longer of both counts."""
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
    def layer_by_layer(self) -> FusionPlan:
        """The plan with every layer as a group."""
        groups = tuple(Group(graph=self.graph, begin=i, end=i + 1) for i in range(len(self.graph.layers)))
        return FusionPlan(
            graph=self.graph, accelerator=self.accelerator, groups=groups, placements=(None,) * len(groups)
        )
