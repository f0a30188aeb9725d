"""Recompute the tables and figures of Deep Fusion, and write them into docs/results_deep_fusion.md."""

from __future__ import annotations

import statistics
from pathlib import Path

from configurations import fill
from papers.deep_fusion_remainder import remainder_rows
from papers.deep_fusion_terms import term_rows
from papers.deep_reuse import overlap

from pimflow.commands.fuse import fuse
from pimflow.commands.fuse.fusion_report import FusionReport, layer_shares
from pimflow.core.ranges import RangeMap
from pimflow.fusion import KINDS, OBJECTIVES, Accelerator, FusionPlan, FusionRules, LayerGraph, fuse_layers

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results_deep_fusion.md"
NETWORKS = ("vgg-19", "googlenet", "inception-v3", "resnet-18", "resnet-50")
MOBILE_NETWORKS = ("mobilenet-v2", "efficientnet-b0")  # of small layers, which the paper has not
# The paper's own figures: Table 1 in percent, and the abstract's and section 4.2's reductions and speed-ups.
TABLE_1 = {
    "convolution": (99.55, 45.59), "batch_norm": (0.15, 15.27), "scale": (0.15, 15.24), "relu": (0.06, 13.10),
    "pooling": (0.05, 2.92), "eltwise": (0.02, 6.41), "inner_product": (0.03, 1.46),
}  # fmt: skip
ON_CHIP_KIB = (128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384)
# Figure 8's and 9's bars, and three steps beyond the paper.
BEST = "over branches, halos retained"
STEPS = {
    "fusion": dict(reuse="none", search="greedy"),
    "fusion, reuse": dict(reuse="deep", search="greedy"),
    "best cut of the order": dict(reuse="deep", search="runs"),
    "over branches": dict(reuse="deep", search="optimal"),
    BEST: dict(reuse="deep", search="optimal", halo="retain"),
}
TUCKER = "tucker:0.1"


def table_1(graph: LayerGraph) -> list[str]:
    """Share of computation and of memory traffic by kind of layer, beside the paper's Table 1."""
    rows = ["| layers | computation | paper | memory | paper |", "|---|---|---|---|---|"]
    for row in layer_shares(graph):
        computation, memory = TABLE_1[row.kind]
        rows.append(
            f"| {row.kind} | {row.computation:.2%} | {computation} % | {row.memory:.2%} | {memory} % |"
        )
    return rows


def figure_1(graph: LayerGraph) -> list[str]:
    """Arithmetic intensity by kind of layer: minimum, median, maximum, in operations a byte."""
    rows = ["| layers | operations a byte, fp32: least | median | most |", "|---|---|---|---|"]
    for kind in KINDS:
        ratios = [
            layer.operations / (4 * graph.traffic_elements(layer))
            for layer in graph.layers
            if layer.kind == kind and layer.operations
        ]
        if ratios:
            rows.append(
                f"| {kind} | {min(ratios):.3g} | {statistics.median(ratios):.3g} | {max(ratios):.3g} |"
            )
    return rows


def figure_5() -> list[str]:
    """Where operand and result overlap in one array, by both rules of `overlap`."""
    rows = ["| rule | operand, bytes | result, bytes | saved |", "|---|---|---|---|"]
    axes = [RangeMap(extent=extent, window=4, stride=2) for extent in (8, 64)]
    for strict in (False, True):
        layout = overlap(*axes, 3, 16, strict=strict)
        rule = "as published" if not strict else "strict: channels are written one by one"
        begin, end = 4 * layout.lead, 4 * (layout.lead + layout.operand)
        rows.append(f"| {rule} | {begin}..{end} | 0..{4 * layout.result} | {layout.saving:.2%} |")
    return rows


def neurons(graph: LayerGraph) -> list[str]:
    """The claim that fusing all of ResNet-18 removes more than 99.6 % of the transfers (section 2.2)."""
    weights = sum(layer.weight_elements for layer in graph.layers)
    moved, ideal = sum(map(graph.traffic_elements, graph.layers)), graph.ideal_elements
    return [
        f"Fusing all of ResNet-18 removes {1 - (ideal - weights) / (moved - weights):.2%} of the transfers "
        f"of neurons, {1 - ideal / moved:.2%} of all. The paper says more than 99.6 %."
    ]


def figures_8_and_9(plans: dict[str, dict[str, FusionPlan]]) -> list[str]:
    """DRAM traffic, speed-ups and recomputed work of every plan."""
    rows = [
        "| network | step | DRAM traffic | reduction | of the ideal | roofline | serial | MACs again |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, steps in plans.items():
        for step, plan in steps.items():
            report = FusionReport.from_plan(plan)
            possible = report.dram_bytes_unfused - report.dram_bytes_ideal
            share = (report.dram_bytes_unfused - report.dram_bytes) / possible
            recomputed_share = plan.recomputed_macs / sum(layer.macs for layer in plan.graph.layers)
            rows.append(
                f"| {name} | {step} | {report.dram_bytes / 2**20:.1f} MiB "
                f"| {report.reduction:.1%} | {share:.1%} | {report.speedup_roofline:.2f} x "
                f"| {report.speedup_serial_baseline:.2f} x | {recomputed_share:.1%} |"
            )
    return rows


def target_rows(
    unfolded: dict[str, FusionPlan], folded: dict[str, FusionPlan], tucker: fuse.DecomposedFusion
) -> list[str]:
    """Figures that have a target, beside the target and the paper's figure."""
    shares_of_1 = layer_shares(unfolded["resnet-18"].graph)
    max_distance = max(
        abs(100 * getattr(row, column_name) - TABLE_1[row.kind][column])
        for row in shares_of_1
        for column, column_name in enumerate(("computation", "memory"))
    )
    reductions = {name: plan.reduction for name, plan in unfolded.items()}
    roofline = statistics.geometric_mean(
        FusionReport.from_plan(p).speedup_roofline for p in unfolded.values()
    )
    serial = statistics.geometric_mean(
        FusionReport.from_plan(p).speedup_serial_baseline for p in unfolded.values()
    )
    shares = [
        (p.dram_bytes_unfused - p.dram_bytes) / (p.dram_bytes_unfused - p.dram_bytes_ideal)
        for p in folded.values()
    ]
    mean, share = statistics.mean(reductions.values()), statistics.mean(shares)
    figures = [
        ("Table 1, largest distance, points", f"{max_distance:.2f}", "1", "", max_distance <= 1),
        ("mean reduction, unfolded", f"{mean:.1%}", "50 %", "32 %", mean >= 0.5),
        ("ResNet-50", f"{reductions['resnet-50']:.1%}", "60 %", "56 %", reductions["resnet-50"] >= 0.6),
        ("VGG-19", f"{reductions['vgg-19']:.1%}", "18 %", "15 %", reductions["vgg-19"] >= 0.18),
        ("speed-up, roofline, geometric mean", f"{roofline:.2f} x", "1.9 x", "", roofline >= 1.9),
        ("speed-up over serial, geometric mean", f"{serial:.2f} x", "2.2 x", "1.6 x", serial >= 2.2),
        ("share of the ideal reduction, folded, mean", f"{share:.1%}", "75 %", "", share >= 0.75),
        (
            f"ResNet-18 with {TUCKER}, of the original unfused", f"{tucker.reduction:.1%}", "90 %", "",
            tucker.reduction >= 0.9,
        ),
    ]  # fmt: skip
    rows = ["| | found | wanted | paper | |", "|---|---|---|---|---|"]
    for column_name, value, target, paper, is_met in figures:
        rows.append(f"| {column_name} | {value} | {target} | {paper} | {'met' if is_met else 'not met'} |")
    return rows


def objective_rows(graph: LayerGraph) -> list[str]:
    """Traffic, time and energy of the plan that each objective of the search gives."""
    rows = ["| least | DRAM traffic | time | energy | MACs again |", "|---|---|---|---|---|"]
    for objective in OBJECTIVES:
        plan = fuse_layers(graph, rules=FusionRules(halo="retain", objective=objective))
        recomputed_share = plan.recomputed_macs / sum(layer.macs for layer in plan.graph.layers)
        rows.append(
            f"| {objective} | {plan.dram_bytes / 2**20:.1f} MiB | {plan.time_overlapped_ns / 1e6:.2f} ms "
            f"| {plan.energy_pj / 1e9:.2f} mJ | {recomputed_share:.1%} |"
        )
    unfused = plan.layer_by_layer
    rows.append(
        f"| unfused | {unfused.dram_bytes / 2**20:.1f} MiB | {unfused.time_overlapped_ns / 1e6:.2f} ms "
        f"| {unfused.energy_pj / 1e9:.2f} mJ | |"
    )
    return rows


def tucker_rows(fusion: fuse.DecomposedFusion, folded_bytes: int) -> list[str]:
    """DRAM traffic of ResNet-18 decomposed and fused, and how far its outputs then differ."""
    part = fusion.decomposition
    rows = ["| ResNet-18 | DRAM traffic |", "|---|---|"]
    sizes = {
        "original, unfolded, layer by layer": fusion.dram_bytes_original,
        "original, folded, layer by layer": folded_bytes,
        f"{TUCKER}, folded, layer by layer": fusion.plan.dram_bytes_unfused,
        f"{TUCKER}, fused": fusion.plan.dram_bytes,
        f"{TUCKER}, inputs, weights and outputs alone": fusion.plan.dram_bytes_ideal,
    }
    rows += [f"| {label} | {size / 2**20:.1f} MiB |" for label, size in sizes.items()]
    return [
        *rows,
        "",
        f"The decomposed network's outputs differ from the original's by up to "
        f"{part.max_relative_difference:.0%} of the largest; reconstruction errors of its filters are "
        f"up to {max(layer.reconstruction_error for layer in part.layers):.2f} of their norms.",
    ]


def capacity_rows(graph: LayerGraph) -> list[str]:
    """DRAM traffic of one network by size of the on-chip memory."""
    rows = ["| on chip | DRAM traffic | reduction | roofline |", "|---|---|---|---|"]
    for size in ON_CHIP_KIB:
        plan = fuse_layers(graph, Accelerator(on_chip_bytes=size * 2**10), FusionRules(halo="retain"))
        report = FusionReport.from_plan(plan)
        rows.append(
            f"| {size} KiB | {plan.dram_bytes / 2**20:.1f} MiB | {plan.reduction:.1%} "
            f"| {report.speedup_roofline:.2f} x |"
        )
    return rows


def main() -> None:
    """Compute every table, print it, and write it into the page."""
    graphs = {name: fuse.layer_graph(name) for name in NETWORKS}
    resnet18 = graphs["resnet-18"]
    plans = {
        name: {step: fuse_layers(graph, rules=FusionRules(**options)) for step, options in STEPS.items()}
        for name, graph in graphs.items()
    }
    folded = {name: fuse.fuse(name, baseline="folded", halo="retain") for name in NETWORKS}
    best = {name: steps[BEST] for name, steps in plans.items()}
    tucker = fuse.fuse_decomposed("resnet-18", TUCKER, halo="retain")
    terms, traffic = term_rows(NETWORKS, MOBILE_NETWORKS)
    text = PAGE.read_text(encoding="utf-8")
    for name, rows in {
        "table 1": table_1(resnet18),
        "figure 1": figure_1(resnet18),
        "figure 5": figure_5(),
        "99.6": neurons(resnet18),
        "figures 8 and 9": figures_8_and_9(plans),
        "folded": figures_8_and_9({name: {BEST: plan} for name, plan in folded.items()}),
        "remainder": remainder_rows(folded),
        "must reach": target_rows(best, folded, tucker),
        "objectives": objective_rows(graphs["googlenet"]),
        "tucker": tucker_rows(tucker, folded["resnet-18"].dram_bytes_unfused),
        "on chip": capacity_rows(resnet18),
        "terms": terms,
        "group traffic": traffic,
    }.items():
        text = fill(text, f"deep fusion {name}", "\n".join(rows))
        print(f"{name}\n" + "\n".join(rows))
    partial = PAGE.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(PAGE)


if __name__ == "__main__":
    main()
