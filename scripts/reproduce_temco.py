"""TeMCO's equations and Figures 4, 10 and 11 on our networks and kernels: ``reproduce_temco.py [MODEL…]``.

Paper: Song et al., "TeMCO: Tensor Memory Compiler Optimization across Tensor Decompositions in Deep Learning
Inference", sections 2.2 and 4. ``--parts`` says which tables: memory, equations, over-time, times; see
docs/results_temco.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import geometric_mean

from papers.temco_variants import (
    VARIANTS,
    DecompositionVariants,
    MemoryOverTime,
    decomposition_variants,
    memory_over_time,
    two_layers,
)

from pimflow import hardware
from pimflow.core.output_error import OUTPUT_BOUND
from pimflow.errors import PimflowError
from pimflow.host import pictures
from pimflow.host.charts import PALETTE, chart, legend_at_top

# Section 4.2: reduction of internal tensors by family, percent. The paper names none of its ten networks, so
# which network stands for which figure is assumed.
PAPER = {
    "alexnet": 49.4,
    **dict.fromkeys(("vgg-11", "vgg-13", "vgg-16", "vgg-19"), 90.7),
    **dict.fromkeys(("resnet-18", "resnet-34"), 30.7),
    **dict.fromkeys(("densenet-121", "densenet-169"), 54.0),
    "unet": 79.3,
}
PAPER_MEAN, PAPER_SKIP_SHARE, PAPER_TIMES = 75.7, 76.2, {4: 1.08, 32: 1.70}
TARGETS = {"vgg-16": 90.6, "alexnet": 49.4, "unet": 79.3, "densenet-121": 54.0, "resnet-18": 58.0}  # batch 4
LAYERS = {  # pairs of convolutions with nothing but an activation between them
    "vgg-16": (("features.5", "features.7"), ("features.12", "features.14"), ("features.19", "features.21")),
    "alexnet": (("conv3", "conv4"), ("conv4", "conv5")),
}
OVER_TIME = ("unet", "vgg-16")  # Figure 4
TIMED_NETWORKS = {4: tuple(PAPER), 32: ("vgg-16", "resnet-18", "unet")}  # by batch; others as 32
BASELINES = ("original", "original, coalesced", "decomposed", "decomposed, coalesced")
PARTS = ("memory", "equations", "over-time", "times")
MIB = 2**20

Progress = Callable[[str], None]


def pools(models: list[str], batches: list[int], decompose: str, progress: Progress) -> list[dict]:
    """Bytes of the pools of every variant, by network and batch."""
    rows = []
    for name in models:
        for batch in batches:
            progress(f"{name}, batch {batch}")
            pool_bytes = variants(name, batch, decompose, progress).pools(hardware.system())
            rows.append({"network": name, "batch": batch, "pool_bytes": pool_bytes})
    return rows


def variants(name: str, batch: int, decompose: str, progress: Progress) -> DecompositionVariants:
    """A network decomposed, and its variants with skip connections reduced or activations fused."""
    return decomposition_variants(
        name, hardware.system(), decompose_as=decompose, batch=batch, progress=progress
    )


def reduction(row: dict) -> float:
    """By how many percent the pool with both passes is smaller than the original network's."""
    return 100 * (1 - row["pool_bytes"]["skip-opt+fusion"] / row["pool_bytes"]["original"])


def pools_table(rows: list[dict]) -> str:
    """Section 4.2: sizes of pools, the reduction, and whether it reaches the target."""
    names = [*BASELINES, *VARIANTS]
    body = []
    for row in rows:
        name, target = row["network"], TARGETS.get(row["network"]) if row["batch"] == 4 else None
        cells = [f"{row['pool_bytes'][variant] / MIB:.2f}" for variant in names]
        verdict = f"{target}: {'met' if reduction(row) >= target else 'not met'}" if target else ""
        cells += [f"{reduction(row):.1f}", PAPER.get(name, ""), verdict]
        body.append([name, row["batch"], *cells])
    text = table(["network", "batch", *names, "less (%)", "paper", "wanted"], body)
    for batch in dict.fromkeys(row["batch"] for row in rows):
        batch_rows = [row for row in rows if row["batch"] == batch]
        mean = 100 * (1 - geometric_mean(1 - reduction(row) / 100 for row in batch_rows))
        text += f"\n\nBatch {batch}, {len(batch_rows)} networks, 1 - geometric mean: {mean:.1f} % (paper: "
        text += f"{PAPER_MEAN} %)"
    return text


def check_equations(models: list[str], batches: list[int], decompose: str, progress: Progress) -> list[dict]:
    """Equations 1 to 4 of the pairs in `LAYERS`, beside what is planned."""
    rows = []
    for name in (layer_network for layer_network in LAYERS if layer_network in models):
        progress(name)
        network_variants = variants(name, batches[0], decompose, progress)
        rows += [
            {"network": name, "batch": batches[0], **vars(two_layers(network_variants, *pair))}
            for pair in LAYERS[name]
        ]
    return rows


def equations_table(rows: list[dict]) -> str:
    """Equations 1 to 4: the paper's formula, and what is planned where it differs."""
    head = ["network", "batch", "layers", *(f"({n}), planned (B)" for n in (1, 2, 3, 4))]
    body = []
    for row in rows:
        cells = []
        for number, expected in row["equations"].items():
            planned = row["planned"][number]
            cells.append(f"{expected}, {'the same' if planned == expected else planned}")
        body.append([row["network"], row["batch"], f"{row['first']}, {row['second']}", *cells])
    return table(head, body)


def collect_over_time(
    models: list[str], batches: list[int], decompose: str, progress: Progress
) -> list[dict]:
    """Live bytes during each layer of the networks in `OVER_TIME`, original and decomposed."""
    rows = []
    for name in (plotted for plotted in OVER_TIME if plotted in models):
        progress(name)
        networks = variants(name, batches[0], decompose, progress).networks
        rows += [
            {"network": name, "batch": batches[0], "form": form, **vars(memory_over_time(networks[form]))}
            for form in ("original", "decomposed")
        ]
    return rows


def memory_over_time_table(rows: list[dict]) -> str:
    """Figure 4 in figures: the peak, and the share of skip connections in it."""
    head = ["network", "batch", "form", "peak (MiB)", "skip connections at the peak"]
    head += ["at the layer with most of them", "their most, over the peak"]
    body = []
    for row in rows:
        memory = MemoryOverTime(live_bytes=row["live_bytes"], skip_bytes=row["skip_bytes"])
        shares = (memory.share_at_peak, memory.largest_share, memory.skips_to_peak)
        has_skips = row["form"] == "decomposed"  # what is restored by an lconv is a skip connection
        cells = [f"{max(memory.live_bytes) / MIB:.2f}", *(f"{s:.1%}" if has_skips else "-" for s in shares)]
        body.append([row["network"], row["batch"], row["form"], *cells])
    return table(head, body) + f"\n\nThe paper: {PAPER_SKIP_SHARE} % of the peak of its decomposed U-Net."


def measure_times(
    models: list[str], batches: list[int], decompose: str, progress: Progress, runs: int = 3
) -> list[dict]:
    """Latency, allocations and errors of the variants, run in turns."""
    rows = []
    for batch in batches:
        for name in (name for name in TIMED_NETWORKS.get(batch, TIMED_NETWORKS[32]) if name in models):
            network_variants = variants(name, batch, decompose, progress)
            progress(f"{name}, batch {batch}, {runs} runs")
            forms = network_variants.run(VARIANTS, hardware.system(), runs=runs)
            original_bytes = network_variants.pools(hardware.system())["original"]
            rows.append({"network": name, "batch": batch, "original_bytes": original_bytes, "forms": forms})
    return rows


def times_table(rows: list[dict]) -> str:
    """Figure 11: latency of every variant over that of the decomposed network."""
    head = ["network", "batch", "form", "pool (B)", "peak in the VM, over it (B)", "time (ms)"]
    head += ["over decomposed", "error"]
    body = []
    for row in rows:
        decomposed_ns = row["forms"]["decomposed"]["latency_ns"]
        for form, run in row["forms"].items():
            peak = "-" if run["peak_bytes"] is None else run["peak_bytes"] - run["allocated_bytes"]
            cells = [f"{run['latency_ns'] / 1e6:.1f}", f"{run['latency_ns'] / decomposed_ns:.3f}"]
            cells.append(f"{run['error']:.1e}")
            body.append([row["network"], row["batch"], form, run["allocated_bytes"], peak, *cells])
    text = table(head, body)
    for batch in dict.fromkeys(row["batch"] for row in rows):
        batch_rows = [row for row in rows if row["batch"] == batch]
        both = [(row["forms"]["skip-opt+fusion"], row) for row in batch_rows]
        ratio = geometric_mean(
            run["latency_ns"] / row["forms"]["decomposed"]["latency_ns"] for run, row in both
        )
        memory = geometric_mean(
            (run["peak_bytes"] or run["allocated_bytes"]) / row["original_bytes"] for run, row in both
        )
        paper = f" (paper, on a GPU: {PAPER_TIMES[batch]})" if batch in PAPER_TIMES else ""
        text += (
            f"\n\nBatch {batch}, {len(both)} networks, geometric means of skip-opt+fusion: time over "
            f"decomposed {ratio:.3f}{paper}; memory as run {100 * (1 - memory):.1f} % less than planned for "
            "the original"
        )
    error = max(run["error"] for row in rows for run in row["forms"].values())
    verdict = "within" if error <= OUTPUT_BOUND["fp32"] else "NOT within"
    return f"{text}\n\nErrors of all, in fp32: {verdict} the bound of {OUTPUT_BOUND['fp32']:.0e}"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def draw(rows: list[dict], path: Path) -> None:
    """Draw Figure 4: live bytes during each layer, and those of skip connections."""
    values = []
    for row in rows:
        total, has_skips = len(row["live_bytes"]), row["form"] == "decomposed" and any(row["skip_bytes"])
        facet = {"network": f"{row['network']}, batch {row['batch']}"}
        parts = {row["form"]: row["live_bytes"]}
        parts |= {"decomposed, skip connections": row["skip_bytes"]} if has_skips else {}
        values += [
            {**facet, "what": label, "at": step / total, "mib": size / MIB}
            for label, sizes in parts.items()
            for step, size in enumerate(sizes)
        ]
    names = list(dict.fromkeys(value["what"] for value in values))
    colours = {"domain": names, "range": list(PALETTE[: len(names)])}
    encoding = {
        "x": {"field": "at", "type": "quantitative", "title": "share of the layers"},
        "y": {"field": "mib", "type": "quantitative", "title": "live (MiB)"},
        "color": {"field": "what", "type": "nominal", "scale": colours, "legend": legend_at_top()},
    }
    picture = chart(
        data={"values": values},
        facet={"column": {"field": "network", "type": "nominal", "sort": None, "title": None}},
        spec={
            "width": 400,
            "height": 240,
            "mark": {"type": "line", "interpolate": "step-after"},
            "encoding": encoding,
        },
        resolve={"scale": {"y": "independent"}},
    )
    pictures.save(path, picture, "memory while each layer runs")


COLLECT = {
    "memory": pools,
    "equations": check_equations,
    "over-time": collect_over_time,
    "times": measure_times,
}
TABLES = {
    "memory": pools_table,
    "equations": equations_table,
    "over-time": memory_over_time_table,
    "times": times_table,
}


def slice_rows(files: Iterable[Path], parts: Iterable[str]) -> dict[str, list[dict]]:
    """Rows of `parts` from files that ``--json`` wrote: by batch, and then in the order of the files."""
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    rows_by_part = {part: [row for file in stored for row in file.get(part, ())] for part in parts}
    return {part: sorted(rows, key=lambda row: row["batch"]) for part, rows in rows_by_part.items()}


def main() -> None:
    """Parse the command line; print tables or JSON, and draw Figure 4."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(PAPER), help="of the zoo, or ONNX files")
    parser.add_argument("--parts", default=",".join(PARTS), help="which tables (default: %(default)s)")
    parser.add_argument("--batches", default="4,32", help="of pools and times; others take the first")
    parser.add_argument("--decompose", default="tucker:0.1", help="see docs/decomposition.md")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where the picture over time is written")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--rows", type=Path, nargs="+", metavar="FILE", help="compute nothing: tables of what --json printed"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if not all(batch.isdigit() and int(batch) for batch in args.batches.split(",")):
        parser.error(f"--batches: '{args.batches}' is no list of numbers")
    batches = [int(batch) for batch in args.batches.split(",")]

    def progress(text: str) -> None:
        if not args.quiet:
            print(f"{text} …", file=sys.stderr)

    try:
        if args.rows:
            rows_by_part = slice_rows(args.rows, parts)
        else:
            rows_by_part = {
                part: COLLECT[part](args.models, batches, args.decompose, progress) for part in parts
            }
    except PimflowError as error:
        sys.exit(str(error))
    if args.plot and rows_by_part.get("over-time"):
        draw(rows_by_part["over-time"], args.plot)
    if args.json:
        print(json.dumps(rows_by_part, indent=1))
    else:
        print(
            "\n\n".join(f"### {part}\n\n{TABLES[part](rows)}" for part, rows in rows_by_part.items() if rows)
        )


if __name__ == "__main__":
    main()
