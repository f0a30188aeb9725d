"""Deep Fusion of a whole network: what it moves and how long it takes, fused and not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pimflow import fusion, zoo
from pimflow.core.json_form import json_form
from pimflow.decomposition.report import DecompositionReport, decomposition_text
from pimflow.errors import UnknownNameError, UsageError
from pimflow.fusion import KINDS, Accelerator, FusionPlan, LayerGraph

if TYPE_CHECKING:
    from pimflow.decomposition.network import Decomposing
    from pimflow.frontend import Model

BASELINES = ("unfolded", "folded")


def layer_graph(
    model: Model,
    baseline: str = "unfolded",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
) -> LayerGraph:
    """The layers of a network.

    Parameters
    ----------
    model, shapes, batch
        See `frontend.load`.
    baseline : str
        ``unfolded``: those of an ONNX network, batch norms, scales and activations apart; ``folded``: the
        regions that pimflow compiles.

    Raises
    ------
    UnknownNameError
        For another baseline.
    UsageError
        If what is to stay unfolded is no ONNX network.
    """
    if baseline not in BASELINES:
        raise UnknownNameError("baseline", baseline, BASELINES)
    if baseline == "folded":
        from pimflow import frontend  # TVM: only who wants regions waits for it
        from pimflow.relay_passes.regions.extract_regions import extract_regions

        network = frontend.load(model, shapes, batch)
        return fusion.folded(extract_regions(network.module, network.name))
    if not zoo.is_onnx(model):
        raise UsageError("only ONNX networks have unfolded layers; give --baseline folded for others")
    return fusion.unfolded(zoo.load_model(model, dict(shapes or {}), batch=batch, filled=False))


def fuse(
    model: Model,
    accelerator: Accelerator | None = None,
    *,
    baseline: str = "unfolded",
    reuse: str = "deep",
    search: str = "optimal",
    halo: str = "recompute",
    objective: str = "traffic",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> FusionPlan:
    """Fuse the layers of a network into groups that pass once over on-chip memory.

    Parameters
    ----------
    model, baseline, shapes, batch
        See `layer_graph`.
    accelerator, reuse, search, halo, objective, progress
        See `fusion.fuse_layers`.
    """
    graph = layer_graph(model, baseline, shapes, batch)
    return fusion.fuse_layers(
        graph, accelerator, reuse=reuse, search=search, halo=halo, objective=objective, progress=progress
    )


@dataclass(frozen=True, kw_only=True)
class DecomposedFusion:
    """A decomposed network, fused, beside the network that it was made of.

    Attributes
    ----------
    plan : FusionPlan
        Of the decomposed network's regions.
    decomposition : DecompositionReport
        What became of the layers, and how far outputs are from the original's.
    dram_bytes_original : int
        Of the original network, layer by layer.
    """

    plan: FusionPlan
    decomposition: DecompositionReport
    dram_bytes_original: int

    @property
    def reduction(self) -> float:
        """Of DRAM traffic, by decomposition and fusion together."""
        return 1 - self.plan.dram_bytes / self.dram_bytes_original

    def summary(self) -> dict[str, Any]:
        """What ``pimflow fuse --decompose --json`` prints."""
        more = {"dram_bytes_original": self.dram_bytes_original, "reduction_of_original": self.reduction}
        return summary(self.plan) | more | {"decomposition": json_form(self.decomposition)}

    def text(self) -> str:
        """The summary for people."""
        return (
            f"{text(self.plan)}\n{decomposition_text(self.decomposition)}\n"
            f"DRAM traffic {self.reduction:.2%} below the original network's, layer by layer, "
            f"{self.dram_bytes_original / 2**20:.2f} MiB"
        )


def fuse_decomposed(
    model: Model,
    decompose: Decomposing,
    accelerator: Accelerator | None = None,
    *,
    baseline: str = "unfolded",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    reuse: str = "deep",
    search: str = "optimal",
    halo: str = "recompute",
    objective: str = "traffic",
    note: Callable[[str], None] = lambda _: None,
    progress: Callable[[float], None] | None = None,
) -> DecomposedFusion:
    """Fuse a network whose layers are decomposed before, as pimflow compiles it.

    Both networks are run once, to say how far their outputs are apart.

    Parameters
    ----------
    decompose : Request or str
        As for `search`.
    baseline : str
        Layers of the original network, by which traffic is compared; see `layer_graph`.
    note : callable
        Told what is being done.
    accelerator, reuse, search, halo, objective, progress
        See `fusion.fuse_layers`.

    Raises
    ------
    DecompositionError, UsageError
        See `decomposition.network.decompose`.
    """
    from pimflow import frontend
    from pimflow.decomposition import network as decomposed_network
    from pimflow.relay_passes.regions.extract_regions import extract_regions

    request = decomposed_network.requested(decompose)
    if request is None:
        raise UsageError("nothing says how to decompose: give a request such as 'tucker:0.1'")
    decomposed_network.require_all(request, "an analysis of fused layers")
    original, accelerator = layer_graph(model, baseline, shapes, batch), accelerator or Accelerator()
    change = decomposed_network.decompose(frontend.load(model, shapes, batch), request, note)
    network = change.network
    graph = fusion.folded(extract_regions(network.module, network.name))
    plan = fusion.fuse_layers(
        graph, accelerator, reuse=reuse, search=search, halo=halo, objective=objective, progress=progress
    )
    note("comparing outputs")
    inputs = network.example_inputs()
    return DecomposedFusion(
        plan=plan,
        decomposition=change.summary(inputs, network.reference(inputs)),
        dram_bytes_original=sum(map(original.moved_elements, original.layers)) * accelerator.element_bytes,
    )


def layer_shares(graph: LayerGraph) -> list[dict[str, Any]]:
    """By kind of layer, its share of arithmetic and of unfused traffic: Table 1 of the paper."""
    operations = max(1, sum(layer.operations for layer in graph.layers))
    moved = max(1, sum(map(graph.moved_elements, graph.layers)))
    rows = []
    for kind in KINDS:
        layers = [layer for layer in graph.layers if layer.kind == kind]
        if layers:
            rows.append(
                {
                    "kind": kind,
                    "layers": len(layers),
                    "computation": sum(layer.operations for layer in layers) / operations,
                    "memory": sum(map(graph.moved_elements, layers)) / moved,
                }
            )
    return rows


def summary(plan: FusionPlan) -> dict[str, Any]:
    """What ``pimflow fuse --json`` prints."""
    unfused, element_bytes = plan.unfused, plan.accelerator.element_bytes
    return {
        "network": plan.graph.name,
        "dtype": plan.accelerator.dtype,
        "on_chip_bytes": plan.accelerator.on_chip_bytes,
        "dram_bytes_unfused": plan.dram_bytes_unfused,
        "dram_bytes": plan.dram_bytes,
        "dram_bytes_ideal": plan.dram_bytes_ideal,
        "reduction": plan.reduction,
        "time_serial_ns": plan.time_serial_ns,
        "time_overlapped_ns": plan.time_overlapped_ns,
        "time_serial_unfused_ns": unfused.time_serial_ns,
        "time_overlapped_unfused_ns": unfused.time_overlapped_ns,
        "speedup_serial_baseline": unfused.time_serial_ns / plan.time_overlapped_ns,
        "speedup_roofline": unfused.time_overlapped_ns / plan.time_overlapped_ns,
        "energy_pj": plan.energy_pj,
        "energy_unfused_pj": unfused.energy_pj,
        "energy_sources": plan.accelerator.energy.sources,
        "recomputed_macs": plan.recomputed_macs,
        "groups": [
            {
                "layers": [layer.name for layer in group.layers],
                "tile": {
                    "shape": list(group.tile(group.layers[-1].name)),
                    "tiles": group.tiling.tiles,
                    "retain": group.tiling.retain,
                },
                "by_channel": [
                    [layer.name for layer in group.layers[run.begin : run.end]] for run in group.channel_runs
                ],
                "on_chip_bytes": placed.on_chip_bytes if placed else None,
                "dram_bytes": group.traffic_elements * element_bytes,
            }
            for group, placed in zip(plan.groups, plan.placements)
        ],
        "layers": layer_shares(plan.graph),
    }


def text(plan: FusionPlan) -> str:
    """The summary for people."""
    found = summary(plan)
    rows = [
        ("DRAM traffic, layer by layer", f"{found['dram_bytes_unfused'] / 2**20:.2f} MiB"),
        ("fused", f"{found['dram_bytes'] / 2**20:.2f} MiB, {100 * found['reduction']:.2f} % less"),
        ("inputs, weights and outputs alone", f"{found['dram_bytes_ideal'] / 2**20:.2f} MiB"),
        (
            "time, traffic beside arithmetic",
            f"{found['time_overlapped_ns'] / 1e6:.3f} ms, unfused {found['speedup_roofline']:.2f} x",
        ),
        (
            "unfused, one after the other",
            f"{found['time_serial_unfused_ns'] / 1e6:.3f} ms, {found['speedup_serial_baseline']:.2f} x",
        ),
        (
            "energy of DRAM and arithmetic",
            f"{found['energy_pj'] / 1e9:.3f} mJ, unfused {found['energy_unfused_pj'] / 1e9:.3f} mJ"
            + (" (prices assumed)" if any("assumed" in s for s in found["energy_sources"].values()) else ""),
        ),
        ("multiply-accumulates done again", f"{found['recomputed_macs']:,}"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    fused = [group for group in found["groups"] if group["on_chip_bytes"] is not None]
    lines.append(
        f"{len(plan.graph.layers)} layers in {len(found['groups'])} groups; those of several layers:"
    )
    for group in fused:
        names, tile = group["layers"], group["tile"]
        shape = "x".join(map(str, tile["shape"]))
        kept = ", halo rows retained" if tile["retain"] else ""
        kept += ", channel by channel" if group["by_channel"] else ""
        lines.append(
            f"  {names[0]} .. {names[-1]} ({len(names)}): {tile['tiles']} tiles of {shape}{kept}, "
            f"{group['on_chip_bytes']} B on chip, {group['dram_bytes']} B moved"
        )
    return "\n".join(lines)
