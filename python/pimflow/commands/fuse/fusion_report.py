"""Reports of fused networks, as the tree that ``pimflow fuse --json`` prints.

Times are in ns, energies in pJ, shares in [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pimflow.core.json_form import OMITTED, JsonTree, report_from
from pimflow.core.output_error import OUTPUT_BOUND
from pimflow.decomposition.report import DecompositionReport, decomposition_text
from pimflow.fusion import KINDS, FusionPlan, GroupReport, LayerGraph

if TYPE_CHECKING:
    from pimflow.fusion.kernels.execution import FusedExecution


@dataclass(frozen=True, kw_only=True)
class LayerShare:
    """The share of a kind of layers in arithmetic (`computation`) and in unfused traffic (`memory`)."""

    kind: str
    layers: int
    computation: float
    memory: float


def layer_shares(graph: LayerGraph) -> tuple[LayerShare, ...]:
    """Shares of each kind of layer: Table 1 of the Deep Fusion paper."""
    operations = max(1, sum(layer.operations for layer in graph.layers))
    moved = max(1, sum(map(graph.traffic_elements, graph.layers)))
    by_kind = {kind: [layer for layer in graph.layers if layer.kind == kind] for kind in KINDS}
    return tuple(
        LayerShare(
            kind=kind,
            layers=len(layers),
            computation=sum(layer.operations for layer in layers) / operations,
            memory=sum(map(graph.traffic_elements, layers)) / moved,
        )
        for kind, layers in by_kind.items()
        if layers
    )


@dataclass(frozen=True, kw_only=True)
class ExecutedGroup:
    """Bytes that a group moved while it ran, the search's count (`dram_bytes`), and the largest error."""

    layers: tuple[str, ...]
    loaded_bytes: int
    weight_bytes: int
    stored_bytes: int
    counted_bytes: int
    dram_bytes: int
    error: float


@dataclass(frozen=True, kw_only=True)
class ExecutionReport:
    """Bytes that all groups moved while they ran, and the largest error."""

    counted_bytes: int
    error: float
    groups: tuple[ExecutedGroup, ...]

    @classmethod
    def from_execution(cls, plan: FusionPlan, execution: FusedExecution) -> ExecutionReport:
        """From a plan and its execution."""
        groups = tuple(
            report_from(
                ExecutedGroup,
                group_run,
                layers=tuple(layer.name for layer in group.layers),
                dram_bytes=group_run.analytic_bytes,
            )
            for group, group_run in zip(plan.groups, execution.groups)
        )
        return cls(counted_bytes=execution.counted_bytes, error=execution.error, groups=groups)

    def text(self, dram_bytes: int, dtype: str) -> str:
        """The report as text; `dram_bytes` is the search's count for the network, `dtype` its type."""
        lines = [
            f"executed: {self.counted_bytes} B counted while it ran, {dram_bytes} B by the search; "
            f"largest error {self.error:.2g} (bound of outputs {OUTPUT_BOUND[dtype]:g})"
        ]
        lines += [
            f"  {group.layers[0]} .. {group.layers[-1]}: {group.loaded_bytes} B loaded, "
            f"{group.weight_bytes} B of weights, {group.stored_bytes} B stored, error {group.error:.2g}"
            for group in self.groups
            if len(group.layers) > 1
        ]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class FusionReport(JsonTree):
    """A fused network, compared with the same network layer by layer.

    Attributes
    ----------
    dram_bytes_unfused, dram_bytes, dram_bytes_ideal : int
        DRAM traffic layer by layer, fused, and of inputs, weights and outputs alone.
    reduction : float
        Share of `dram_bytes_unfused` that fusion saves.
    speedup_serial_baseline : float
        Over layers whose traffic and arithmetic do not overlap.
    speedup_roofline : float
        Over layers whose traffic and arithmetic overlap.
    recomputed_macs : int
        Multiply-accumulates of halo rows that are recomputed.
    dram_bytes_original, reduction_of_original, decomposition
        Of a decomposed network: traffic of the original layer by layer, the share of it that is saved, and
        the decomposed layers.
    executed : ExecutionReport, optional
        If the groups were run.
    """

    network: str
    dtype: str
    on_chip_bytes: int
    dram_bytes_unfused: int
    dram_bytes: int
    dram_bytes_ideal: int
    reduction: float
    time_serial_ns: float
    time_overlapped_ns: float
    time_serial_unfused_ns: float
    time_overlapped_unfused_ns: float
    speedup_serial_baseline: float
    speedup_roofline: float
    energy_pj: float
    energy_unfused_pj: float
    energy_sources: dict[str, str]
    recomputed_macs: int
    groups: tuple[GroupReport, ...]
    layers: tuple[LayerShare, ...]
    dram_bytes_original: int | None = field(default=None, metadata=OMITTED)
    reduction_of_original: float | None = field(default=None, metadata=OMITTED)
    decomposition: DecompositionReport | None = field(default=None, metadata=OMITTED)
    executed: ExecutionReport | None = field(default=None, metadata=OMITTED)

    @classmethod
    def from_plan(cls, plan: FusionPlan) -> FusionReport:
        """From a fusion plan."""
        unfused, accelerator = plan.layer_by_layer, plan.accelerator
        return report_from(
            cls,
            plan,
            network=plan.graph.name,
            dtype=accelerator.dtype,
            on_chip_bytes=accelerator.on_chip_bytes,
            time_serial_unfused_ns=unfused.time_serial_ns,
            time_overlapped_unfused_ns=unfused.time_overlapped_ns,
            speedup_serial_baseline=unfused.time_serial_ns / plan.time_overlapped_ns,
            speedup_roofline=unfused.time_overlapped_ns / plan.time_overlapped_ns,
            energy_unfused_pj=unfused.energy_pj,
            energy_sources=dict(accelerator.energy.sources),
            groups=plan.group_reports,
            layers=layer_shares(plan.graph),
            **dict.fromkeys(("dram_bytes_original", "reduction_of_original", "decomposition", "executed")),
        )

    def text(self) -> str:
        """The report as text."""
        width = max(len(name) for name, _ in self._figures())
        lines = [f"{name:<{width}}  {value}" for name, value in self._figures()]
        count = sum(len(group.layers) for group in self.groups)
        lines.append(f"{count} layers in {len(self.groups)} groups; those of several layers:")
        lines += [group.text() for group in self.groups if group.on_chip_bytes is not None]
        if self.decomposition and self.dram_bytes_original:
            lines += [
                decomposition_text(self.decomposition),
                f"DRAM traffic {self.reduction_of_original:.2%} below the original network's, layer by "
                f"layer, {self.dram_bytes_original / 2**20:.2f} MiB",
            ]
        if self.executed:
            lines.append(self.executed.text(self.dram_bytes, self.dtype))
        return "\n".join(lines)

    def _figures(self) -> list[tuple[str, str]]:
        assumed = any("assumed" in source for source in self.energy_sources.values())
        return [
            ("DRAM traffic, layer by layer", f"{self.dram_bytes_unfused / 2**20:.2f} MiB"),
            ("fused", f"{self.dram_bytes / 2**20:.2f} MiB, {100 * self.reduction:.2f} % less"),
            ("inputs, weights and outputs alone", f"{self.dram_bytes_ideal / 2**20:.2f} MiB"),
            (
                "time, traffic beside arithmetic",
                f"{self.time_overlapped_ns / 1e6:.3f} ms, unfused {self.speedup_roofline:.2f} x",
            ),
            (
                "unfused, one after the other",
                f"{self.time_serial_unfused_ns / 1e6:.3f} ms, {self.speedup_serial_baseline:.2f} x",
            ),
            (
                "energy of DRAM and arithmetic",
                f"{self.energy_pj / 1e9:.3f} mJ, unfused {self.energy_unfused_pj / 1e9:.3f} mJ"
                + " (prices assumed)" * assumed,
            ),
            ("multiply-accumulates done again", f"{self.recomputed_macs:,}"),
        ]
