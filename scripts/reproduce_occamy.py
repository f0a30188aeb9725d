"""Occamy's tables and figures on our networks and kernels: ``reproduce_occamy.py [MODEL…] [--json]``.

Paper: Lee et al., "Occamy: Memory-efficient GPU Compiler for DNN Inference", Table I, sections II and IV,
Figures 1, 2, 4, 5. ``--parts`` says which tables: counts, memory, ahead, chosen, times, sweep. See
docs/results_occamy.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from statistics import geometric_mean

from papers import occamy_operators

import pimflow
from pimflow import frontend
from pimflow.commands.shared.streaming_report import StreamingReport
from pimflow.compiler.smaller_pool import PoolPlanning
from pimflow.errors import PimflowError
from pimflow.hardware import System, system
from pimflow.pim_backend.runtime.targets import target_by_name

# Table I: operators, variables, allocation groups when lazy.
PAPER = {
    "resnet-50": (176, 284, 123),
    "mobilenet-v1": (85, 142, 58),
    "ssd-resnet50": (208, 351, 144),
    "bert-base": (747, 1120, 648),
    "yolov1": (83, 134, 58),
    "srgan": (117, 216, 81),
}
# Section IV-A: pool to lazy memory, to PyTorch's on two GPUs, and speed-up of the pool over eager allocation.
PAPER_POOL_TO_LAZY, PAPER_POOL_TO_TORCH, PAPER_SPEEDUP = 1.073, 0.654, 1.59
BATCHES = (1, 16)
SWEEP_NETWORKS, SWEEP_BATCHES = ("resnet-50", "yolov1"), (1, 4, 16, 32)  # Figure 5
AHEAD = (0, 1, 4, 16)  # kernels
BUDGETS = (1.2, 2.0)  # of the pool that is built, times the least
PARTS = ("counts", "memory", "ahead", "chosen", "times", "sweep")
MB = 1e6
Row = dict[str, object]


def streaming(ahead: int = 0) -> System:
    """The default system, with weights in the host's memory as the paper has them."""
    return system(weights="streamed", copy_ahead=ahead)


def measure_pool(name: str, batch: int, runs: int) -> dict:
    """Run a network with one pool; peak of what the C library handed out, inputs included, and latency."""
    measured = pimflow.measure_allocations(name, streaming(), batch=batch, runs=runs, allocations=("pool",))
    run = measured["pool"]
    return {
        "allocated_bytes": run.allocated_bytes + run.input_bytes,
        "peak_bytes": None if run.peak_bytes is None else run.peak_bytes + run.input_bytes,
        "latency_ns": run.latency_ns,
    }


def measure_memory(name: str, batch: int, runs: int, torch: bool) -> Row:
    """Memory of a network as built and run, and planned otherwise; and of PyTorch if `torch`."""
    print(f"{name}, batch {batch} …", file=sys.stderr)
    streamed = pimflow.plan_memory(name, streaming(), batch=batch)
    internal = streamed.internal  # what the network computes has a pool of its own where weights are resident
    return {
        "network": name,
        "batch": batch,
        "kernels": streamed.kernels,
        "variables": streamed.eager_allocations + streamed.inputs,
        "lazy_groups": streamed.lazy_groups,
        "planned_bytes": streamed.plan.pool_bytes + streamed.input_bytes,
        "optimal": streamed.plan.optimal,
        "lazy_peak_bytes": streamed.lazy_peak_bytes + streamed.input_bytes,
        "eager_bytes": streamed.eager_bytes + streamed.input_bytes,
        "resident_bytes": internal.internal_peak_bytes + internal.weight_bytes + streamed.input_bytes,
        "pool": measure_pool(name, batch, runs),
        "torch_peak_bytes": occamy_operators.torch_peak_bytes(name, batch=batch) if torch else None,
    }


def count_variables(name: str) -> Row:
    """Operators, variables and allocation groups of a network, beside the paper's."""
    operators = occamy_operators.count_operators(name)
    kernels = pimflow.plan_memory(name, streaming())
    fields = ("operators", "variables", "lazy_groups", "in_place_groups", "idle_share")
    return {
        "network": name,
        "paper": dict(zip(("operators", "variables", "lazy_groups"), PAPER.get(name, ()), strict=False)),
        "operators": {field: getattr(operators, field) for field in fields}
        | {"pool_to_lazy": operators.plan.pool_bytes / operators.lazy_peak_bytes},
        "kernels": {
            "kernels": kernels.kernels,
            "variables": kernels.eager_allocations + kernels.inputs,
            "lazy_groups": kernels.lazy_groups,
        },
    }


def compare_ahead(name: str) -> list[Row]:
    """Planned memory and modelled time by how far ahead weights are copied; first with them resident."""
    print(f"{name}, copies ahead …", file=sys.stderr)
    network, target = frontend.load(name), target_by_name("llvm+pim")
    result = pimflow.search(name, streaming(), modes="gpu")
    rows: list[Row] = []
    for planned_system in (system(), *map(streaming, AHEAD)):
        pool_bytes = PoolPlanning().pool_bytes(network.module, target, planned_system)
        row: Row = {"network": name, "ahead": None, "pool_bytes": pool_bytes}
        row["latency_ns"] = result.baseline.latency_ns
        report = StreamingReport.from_search(result, planned_system)
        if report is not None:
            row |= {"ahead": planned_system.copy_ahead, "copied_bytes": report.gpu_only.copied_bytes}
            row |= {"copying_ns": report.gpu_only.copying_ns, "latency_ns": report.gpu_only.latency_ns}
        rows.append(row)
    return rows


def choose_ahead(name: str) -> list[Row]:
    """What ``--copy-ahead auto`` chooses on the GPU alone, without a budget of memory and within some."""
    print(f"{name}, copies ahead within budgets …", file=sys.stderr)
    free = pimflow.choose_copy_ahead(name, streaming(), modes="gpu").distances
    least_bytes = min(row.pool_bytes for row in free if row.pool_bytes is not None)
    budgets = [int(share * least_bytes) for share in BUDGETS]
    within = {
        budget: pimflow.choose_copy_ahead(name, streaming(), modes="gpu", max_memory_bytes=budget).distances
        for budget in budgets
    }
    return [
        {"network": name, "budget_bytes": budget, **vars(next(row for row in distances if row.chosen))}
        for budget, distances in {**within, None: free}.items()
    ]


def time_allocations(name: str, runs: int) -> Row:
    """Latencies and allocations of a network by how memory is allocated: pool, eager, lazy."""
    print(f"{name}, {runs} runs …", file=sys.stderr)
    runs_by_allocation = pimflow.measure_allocations(name, runs=runs)
    return {
        "network": name,
        **{allocation: vars(allocation_run) for allocation, allocation_run in runs_by_allocation.items()},
    }


def time_batch(name: str, batch: int, runs: int, torch: bool) -> Row:
    """Latency of a network with streamed weights, and of PyTorch if `torch`, at a batch."""
    print(f"{name}, batch {batch}, {runs} runs …", file=sys.stderr)
    return {
        "network": name,
        "batch": batch,
        "latency_ns": measure_pool(name, batch, runs)["latency_ns"],
        "torch_ns": occamy_operators.torch_ns(name, batch=batch, runs=runs) if torch else None,
    }


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def counts_table(rows: Sequence[dict]) -> str:
    """Table I: operators, variables and lazy allocation groups (MMG)."""
    head = ["network", "paper: #Op / #Var / lazy MMG", "our ONNX operators", "MMG, batch norms in place"]
    head += ["our kernels", "idle if eager"]
    body = []
    for row in rows:
        operators = row["operators"]
        cells = [" / ".join(map(str, row["paper"].values())) or "-"]
        cells.append(" / ".join(str(operators[k]) for k in ("operators", "variables", "lazy_groups")))
        cells.append(operators["in_place_groups"])
        cells.append(" / ".join(str(row["kernels"][k]) for k in ("kernels", "variables", "lazy_groups")))
        body.append([row["network"], *cells, f"{operators['idle_share']:.1%}"])
    return table(head, body)


def memory_table(rows: Sequence[dict]) -> str:
    """Memory of the pool, planned and as run, of lazy and eager allocation, and of PyTorch."""
    head = ["network", "batch", "weights resident (MB)", "streamed: planned (MB)", "as run (MB)"]
    head += ["lazy (MB)", "eager (MB)", "PyTorch, CPU (MB)"]
    head += ["planned / lazy", "resident / PyTorch", "as run / PyTorch"]
    body = []
    for row in rows:
        run, torch = row["pool"]["peak_bytes"], row["torch_peak_bytes"]
        sizes = [
            row["resident_bytes"],
            row["planned_bytes"],
            run,
            row["lazy_peak_bytes"],
            row["eager_bytes"],
            torch,
        ]
        cells = [f"{size / MB:.3f}" if size else "-" for size in sizes]
        ratios = [
            (row["planned_bytes"], row["lazy_peak_bytes"]),
            (row["resident_bytes"], torch),
            (run, torch),
        ]
        cells += [f"{a / b:.3f}" if a and b else "-" for a, b in ratios]
        body.append([row["network"], row["batch"], *cells])
    return table(head, body)


def headline_means(rows: Sequence[dict]) -> str:
    """Geometric means by batch, beside those that the paper states."""
    lines = []
    for batch in sorted({row["batch"] for row in rows}):
        batch_rows = [row for row in rows if row["batch"] == batch]
        ratios = {"planned to lazy": [(row["planned_bytes"], row["lazy_peak_bytes"]) for row in batch_rows]}
        torch = [row["torch_peak_bytes"] for row in batch_rows]
        if all(torch):
            ratios["resident to PyTorch"] = list(zip([row["resident_bytes"] for row in batch_rows], torch))
        if all(torch) and all(row["pool"]["peak_bytes"] for row in batch_rows):
            ratios["as run to PyTorch"] = list(zip([row["pool"]["peak_bytes"] for row in batch_rows], torch))
        means = [f"{what} {geometric_mean(a / b for a, b in pairs):.3f}" for what, pairs in ratios.items()]
        networks = f"{len(batch_rows)} networks"
        lines.append(f"Geometric means, batch {batch}, {networks}: {', '.join(means)}")
    difference = max(
        ((row["pool"]["peak_bytes"] or 0) - row["pool"]["allocated_bytes"] for row in rows), default=0
    )
    exact = all(row["pool"]["allocated_bytes"] == row["planned_bytes"] for row in rows)
    lines.append(
        f"Allocated as planned, to the byte: {'all' if exact else 'NOT all'}; the C library handed out at "
        f"most {difference} B more"
    )
    lines.append(f"The paper: pool to lazy {PAPER_POOL_TO_LAZY}, pool to PyTorch {PAPER_POOL_TO_TORCH}")
    return "\n\n".join(lines)


def ahead_table(rows: Sequence[dict]) -> str:
    """Memory and modelled time by how far ahead weights are copied."""
    head = ["network", "kernels ahead", "pool, planned (MB)", "copied, fp16 (MB)", "link busy (ms)"]
    head.append("GPU, modelled (ms)")
    body = []
    for row in rows:
        cells = ["resident" if row["ahead"] is None else row["ahead"], f"{row['pool_bytes'] / MB:.3f}"]
        copied = (row.get("copied_bytes"), row.get("copying_ns"))
        cells += ["-" if figure is None else f"{figure / 1e6:.3f}" for figure in copied]  # MB, ms
        body.append([row["network"], *cells, f"{row['latency_ns'] / 1e6:.3f}"])
    return table(head, body)


def copy_ahead_table(rows: Sequence[dict]) -> str:
    """The distances that are chosen within budgets of memory."""
    body = []
    for row in rows:
        budget = "none" if row["budget_bytes"] is None else f"{row['budget_bytes'] / MB:.3f}"
        cells = [budget, row["copy_ahead"], f"{row['pool_bytes'] / MB:.3f}", f"{row['latency_ns'] / 1e6:.3f}"]
        body.append([row["network"], *cells])
    return table(["network", "budget (MB)", "kernels ahead", "pool (MB)", "GPU, modelled (ms)"], body)


def times_table(rows: Sequence[dict]) -> str:
    """Latency by allocation, its share spent on allocating, and the peak against the plan."""
    head = ["network", "pool (ms)", "eager / pool", "lazy / pool", "allocating, eager", "lazy", "pool"]
    head += ["allocations: pool, eager, lazy", "groups", "peak over the plan, pool (B)"]
    body = []
    for row in rows:
        allocations = [row[allocation] for allocation in ("pool", "eager", "lazy")]
        pool, eager, lazy = allocations
        cells = [f"{pool['latency_ns'] / 1e6:.2f}"]
        cells += [f"{allocation['latency_ns'] / pool['latency_ns']:.3f}" for allocation in (eager, lazy)]
        cells += [
            f"{allocation['allocating_ns'] / allocation['latency_ns']:.4%}"
            for allocation in (eager, lazy, pool)
        ]
        cells += [
            ", ".join(str(allocation[key]) for allocation in allocations) for key in ("allocations", "groups")
        ]
        peak = pool["peak_bytes"]
        cells.append("-" if peak is None else str(peak - pool["allocated_bytes"]))
        body.append([row["network"], *cells])
    ratio = geometric_mean(row["eager"]["latency_ns"] / row["pool"]["latency_ns"] for row in rows)
    text = (
        f"\n\nSpeed-up of the pool over eager, geometric mean: {ratio:.3f} (paper, on GPUs: {PAPER_SPEEDUP})"
    )
    return table(head, body) + text


def sweep_table(rows: Sequence[dict]) -> str:
    """Figures 4b, 4d, 5b, 5d on the CPU: time by batch, ours and PyTorch's."""
    body = []
    for row in rows:
        times = [f"{ns / 1e6:.2f}" if ns else "-" for ns in (row["latency_ns"], row["torch_ns"])]
        body.append([row["network"], row["batch"], *times])
    return table(["network", "batch", "ours (ms)", "PyTorch, CPU (ms)"], body)


def collect(
    models: Sequence[str], parts: Sequence[str], runs: int, torch: bool, batches: Sequence[int] = BATCHES
) -> dict[str, list[Row]]:
    """Rows of every table in `parts`."""
    tables: dict[str, list[Row]] = {}
    if "counts" in parts:
        tables["counts"] = [count_variables(name) for name in models]
    if "memory" in parts:
        tables["memory"] = [measure_memory(name, b, runs, torch) for name in models for b in batches]
    if "ahead" in parts:
        tables["ahead"] = [row for name in models for row in compare_ahead(name)]
    if "chosen" in parts:
        tables["chosen"] = [row for name in models for row in choose_ahead(name)]
    if "times" in parts:
        tables["times"] = [time_allocations(name, runs) for name in models]
    if "sweep" in parts:
        keys = [(name, b) for name in models for b in (SWEEP_BATCHES if name in SWEEP_NETWORKS else (1,))]
        tables["sweep"] = [time_batch(*key, runs, torch) for key in keys]
    return tables


TABLES = {
    "counts": counts_table,
    "memory": lambda rows: f"{memory_table(rows)}\n\n{headline_means(rows)}",
    "ahead": ahead_table,
    "chosen": copy_ahead_table,
    "times": times_table,
    "sweep": sweep_table,
}


def main() -> None:
    """Parse the command line, and print the tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(PAPER), help="of the zoo, or ONNX files")
    parser.add_argument("--parts", default=",".join(PARTS), help="which tables (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="inferences timed (default: %(default)s)")
    parser.add_argument("--batches", default="1,16", help="of the memory table (default: %(default)s)")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    torch = not args.no_torch and find_spec("torch") is not None
    batches = [int(batch) for batch in args.batches.split(",")]
    try:
        figures = collect(args.models, parts, args.runs, torch, batches)
    except PimflowError as error:
        sys.exit(str(error))
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        print("\n\n".join(f"### {part}\n\n{TABLES[part](rows)}" for part, rows in figures.items()))


if __name__ == "__main__":
    main()
