"""Occamy's tables and figures on our networks and kernels: ``reproduce_occamy.py [MODEL…] [--json]``.

Paper: Lee et al., "Occamy: Memory-efficient GPU Compiler for DNN Inference", Table I, sections II and IV,
Figures 1, 2, 4, 5. ``--parts`` says which tables: counts, memory, sweep, times; see docs/results_occamy.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from statistics import geometric_mean

from papers import occamy_operators

import pimflow
from pimflow.errors import PimflowError
from pimflow.hardware import system

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
LARGE_BATCH = dict.fromkeys(PAPER, 32) | {"srgan": 2}  # the paper's, Figure 4
SWEEP_NETWORKS, BATCHES = ("resnet-50", "yolov1"), (1, 4, 16, 32)  # Figure 5
PARTS = ("counts", "memory", "sweep", "times")
MB = 1e6


def plan_memory(name: str, batch: int, torch: bool) -> dict:
    """Memory of our kernels, weights copied before their first use, and of PyTorch if `torch`."""
    print(f"{name}, batch {batch} …", file=sys.stderr)
    allocation_plan = pimflow.plan_memory(name, system(), batch=batch, weights="streamed")
    return {
        "network": name,
        "batch": batch,
        "kernels": allocation_plan.liveness.steps,
        "variables": allocation_plan.eager_allocations,
        "lazy_groups": allocation_plan.lazy_groups,
        "pool_bytes": allocation_plan.plan.pool_bytes,
        "optimal": allocation_plan.plan.optimal,
        "lazy_peak_bytes": allocation_plan.lazy_peak_bytes,
        "eager_bytes": allocation_plan.eager_bytes,
        "torch_peak_bytes": occamy_operators.torch_peak_bytes(name, batch=batch) if torch else None,
    }


def count_variables(name: str, ours: dict) -> dict:
    """Operators, variables and allocation groups of a network, beside the paper's."""
    operators = occamy_operators.count_operators(name)
    return {
        "network": name,
        "paper": dict(zip(("operators", "variables", "lazy_groups"), PAPER.get(name, ()), strict=False)),
        "operators": {
            "operators": operators.operators,
            "variables": operators.variables,
            "lazy_groups": operators.lazy_groups,
            "pool_to_lazy": operators.plan.pool_bytes / operators.lazy_peak_bytes,
        },
        "kernels": {key: ours[key] for key in ("kernels", "variables", "lazy_groups")},
    }


def time_allocations(name: str, runs: int) -> dict:
    """Latencies and allocations of a network by how memory is allocated: pool, eager, lazy."""
    print(f"{name}, {runs} runs …", file=sys.stderr)
    runs_by_allocation = pimflow.measure_allocations(name, runs=runs)
    return {
        "network": name,
        **{allocation: vars(allocation_run) for allocation, allocation_run in runs_by_allocation.items()},
    }


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def counts_table(rows: list[dict]) -> str:
    """Table I: operators, variables and lazy allocation groups."""
    head = ["network", "paper: #Op / #Var / lazy MMG", "our ONNX operators", "our kernels"]
    body = []
    for row in rows:
        cells = [" / ".join(map(str, row["paper"].values())) or "-"]
        cells.append(" / ".join(str(row["operators"][k]) for k in ("operators", "variables", "lazy_groups")))
        cells.append(" / ".join(str(row["kernels"][k]) for k in ("kernels", "variables", "lazy_groups")))
        body.append([row["network"], *cells])
    return table(head, body)


def memory_table(rows: list[dict]) -> str:
    """Sizes of the pool, of lazy and of eager allocation, and PyTorch's peak."""
    head = ["network", "batch", "pool (MB)", "lazy (MB)", "eager (MB)", "pool / lazy", "pool / eager"]
    head += ["PyTorch, CPU (MB)", "pool / PyTorch"]
    body = []
    for row in rows:
        sizes = [row[key] for key in ("pool_bytes", "lazy_peak_bytes", "eager_bytes")]
        cells = [f"{size / MB:.3f}" for size in sizes] + [f"{sizes[0] / size:.3f}" for size in sizes[1:]]
        torch = row["torch_peak_bytes"]
        cells += [f"{torch / MB:.3f}", f"{sizes[0] / torch:.3f}"] if torch else ["-", "-"]
        body.append([row["network"], row["batch"], *cells])
    return table(head, body)


def headline_means(rows: list[dict]) -> str:
    """Geometric means at the paper's batch sizes, beside those that the paper states."""
    large = [row for row in rows if row["batch"] == LARGE_BATCH.get(row["network"], 32)]
    text = "Geometric means at the paper's batches: pool to lazy "
    ratio = geometric_mean(row["pool_bytes"] / row["lazy_peak_bytes"] for row in large)
    text += f"{ratio:.3f} (paper: {PAPER_POOL_TO_LAZY})"
    if all(row["torch_peak_bytes"] for row in large):
        ratio = geometric_mean(row["pool_bytes"] / row["torch_peak_bytes"] for row in large)
        text += f", pool to PyTorch {ratio:.3f} (paper: {PAPER_POOL_TO_TORCH})"
    return text


def times_table(rows: list[dict]) -> str:
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


def collect(models: list[str], parts: list[str], runs: int, torch: bool) -> dict[str, list[dict]]:
    """Rows of every table in `parts`; each pair of network and batch is planned once."""
    keys: list[tuple[str, int]] = []
    if "counts" in parts or "memory" in parts:
        keys += [(name, 1) for name in models]
    if "memory" in parts:
        keys += [(name, LARGE_BATCH.get(name, 32)) for name in models]
    if "sweep" in parts:
        keys += [(name, batch) for name in SWEEP_NETWORKS if name in models for batch in BATCHES]
    plans = {key: plan_memory(*key, torch) for key in sorted(set(keys), key=keys.index)}
    tables: dict[str, list[dict]] = {}
    if "counts" in parts:
        tables["counts"] = [count_variables(name, plans[name, 1]) for name in models]
    if "memory" in parts:
        tables["memory"] = [plans[name, b] for name in models for b in (1, LARGE_BATCH.get(name, 32))]
    if "sweep" in parts and set(SWEEP_NETWORKS) & set(models):
        tables["sweep"] = [plans[name, b] for name in SWEEP_NETWORKS if name in models for b in BATCHES]
    if "times" in parts:
        tables["times"] = [time_allocations(name, runs) for name in models]
    return tables


TABLES = {
    "counts": counts_table,
    "memory": lambda rows: f"{memory_table(rows)}\n\n{headline_means(rows)}",
    "sweep": memory_table,
    "times": times_table,
}


def main() -> None:
    """Parse the command line, and print the tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(PAPER), help="of the zoo, or ONNX files")
    parser.add_argument("--parts", default=",".join(PARTS), help="which tables (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="inferences timed (default: %(default)s)")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    torch = not args.no_torch and find_spec("torch") is not None
    try:
        figures = collect(args.models, parts, args.runs, torch)
    except PimflowError as error:
        sys.exit(str(error))
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        print("\n\n".join(f"### {part}\n\n{TABLES[part](rows)}" for part, rows in figures.items()))


if __name__ == "__main__":
    main()
