"""The planner at work: ``bench_memory.py DIR|--zoo|--reorder [--seconds S] [--json]``.

DIR holds MiniMalloc's instances, ``NAME.CAPACITY.csv`` (`id,lower,upper,size`, as in google/minimalloc's
`benchmarks/`). The table shows for each instance the number of buffers, the best pool of Occamy's policies,
whether the exact planner fits the buffers into the capacity of the file's name, its seconds on one core, and
how far its smallest pool is above the lower bound.

``--zoo``: every network of the zoo, with and without results that overwrite dead operands (coalesced). The
table shows the pool and its bound, and what Occamy's policies, TVM's planner, one allocation for each tensor
(eager) and lazy allocations would take.

``--reorder``: the regions of some networks of the zoo, with activations in fp16, and randomly wired networks.
The table shows the peak of live bytes and the pool of the original and of the new order, and the lower bound
of all orders.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean

import tvm

import pimflow
from pimflow import frontend, memory, zoo
from pimflow.commands.shared import prepare
from pimflow.errors import InfeasibleError, PimflowError, UsageError
from pimflow.hardware import system
from pimflow.memory import csv_form
from pimflow.memory.reorder import StepGraph, reorder

# Watts-Strogatz graphs with the parameters that RandWire (Xie et al., ICCV 2019) reports as its best.
NEIGHBOURS, REWIRED = 4, 0.75
# Rows, channels and nodes of each wired stage; channels are ours.
RANDOMLY_WIRED = {
    "ws-32": ((56, 64, 32), (28, 128, 32), (14, 256, 32)),
    "ws-64": ((56, 64, 64),),
    "ws-100": ((56, 64, 100),),
}
HALF_BYTES = 2
REORDERED_NETWORKS = (
    "efficientnet-b0",
    "googlenet",
    "inception-v3",
    "mobilenet-v2",
    "resnet-50",
    "toy",
    "vgg-16",
)


def row(path: Path, seconds: float) -> dict:
    """Plan the buffers of one instance: the figures of a row."""
    name, _, capacity = path.stem.rpartition(".")
    if not name or not capacity.isdecimal():
        raise UsageError(f"{path}: the name has no capacity; call it NAME.BYTES.csv")
    lifetimes = csv_form.read(path)
    policies = memory.policy_bytes(lifetimes)
    figures: dict = {"instance": name, "buffers": len(lifetimes), "capacity_bytes": int(capacity), **policies}
    begin = time.process_time()  # without the time of other processes
    try:
        memory.plan(lifetimes, capacity_bytes=int(capacity), seconds=seconds)
    except InfeasibleError as error:
        return {**figures, "fits": False, "seconds": None, "error": str(error)}
    cpu_seconds = time.process_time() - begin
    smallest = memory.plan(lifetimes, seconds=seconds)
    bounds = {"pool_bytes": smallest.pool_bytes, "lower_bound_bytes": smallest.lower_bound_bytes}
    return {**figures, **bounds, "fits": True, "seconds": cpu_seconds, "optimal": smallest.optimal}


def above_bound(row: dict) -> str:
    """How far a pool is above its lower bound, as text."""
    return "0, proved" if row["optimal"] else f"{row['pool_bytes'] / row['lower_bound_bytes'] - 1:.2%}"


def table(rows: list[dict]) -> str:
    """Rows of instances as Markdown."""
    lines = [
        "| instance | buffers | capacity (B) | best of four policies (x capacity) | exact fits "
        "| CPU time (s) | smallest pool above its bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        best = min(row[policy] for policy in memory.POLICIES) / row["capacity_bytes"]
        fits = "yes" if row["fits"] else "no"
        cpu_time = "-" if row["seconds"] is None else f"{row['seconds']:.3f}"
        size = f"{row['buffers']} | {row['capacity_bytes']}"
        gap = above_bound(row) if row["fits"] else "-"
        lines.append(f"| {row['instance']} | {size} | {best:.3f} | {fits} | {cpu_time} | {gap} |")
    solved = [row["seconds"] for row in rows if row["fits"]]
    lines.append(f"\n{len(solved)} of {len(rows)} fit, in {sum(solved):.3f} s of CPU time together.")
    return "\n".join(lines)


def watts_strogatz(nodes: int, draw: random.Random) -> list[tuple[int, int]]:
    """Links of a Watts-Strogatz graph: a ring of `nodes` with NEIGHBOURS each, rewired with REWIRED.

    Each link goes from the lower to the higher node.
    """
    ring = [(node, (node + d) % nodes) for d in range(1, NEIGHBOURS // 2 + 1) for node in range(nodes)]
    links = {frozenset(link) for link in ring}
    for link in ring:
        if draw.random() < REWIRED:
            others = [n for n in range(nodes) if n != link[0] and frozenset((link[0], n)) not in links]
            links.remove(frozenset(link))
            links.add(frozenset((link[0], draw.choice(others))))
    return sorted((min(link), max(link)) for link in links)


def randomly_wired(stages: tuple[tuple[int, int, int], ...], seed: int) -> StepGraph:
    """A randomly wired network. A step is a node, which sums and convolves; a stage ends with a mean."""
    draw = random.Random(seed)
    rows, channels, _ = stages[0]
    steps, last, size_bytes = [], "input", {"input": 4 * rows * rows * channels * HALF_BYTES}
    for stage, (rows, channels, nodes) in enumerate(stages):
        links = watts_strogatz(nodes, draw)
        names = [f"{stage}.{node}" for node in range(nodes)]
        size_bytes |= dict.fromkeys([*names, f"{stage}"], rows * rows * channels * HALF_BYTES)
        for node, name in enumerate(names):
            steps.append(([names[a] for a, b in links if b == node] or [last], [name]))
        read = {a for a, _ in links}
        last = f"{stage}"
        steps.append(([name for node, name in enumerate(names) if node not in read], [last]))
    return StepGraph(steps=steps, size_bytes=size_bytes, inputs=("input",), outputs=(last,))


def step_graphs() -> Iterator[tuple[str, StepGraph]]:
    """Networks to reorder, by name."""
    for name in REORDERED_NETWORKS:
        yield name, StepGraph.from_regions(prepare.regions(frontend.load(name)), "fp16")
    for name, stages in RANDOMLY_WIRED.items():
        for seed in range(2):
            yield f"{name}, seed {seed}", randomly_wired(stages, seed)


def reorder_row(name: str, graph: StepGraph, seconds: float) -> dict:
    """Reorder the steps of a network: the figures of a row."""
    reordering = reorder(graph, seconds=seconds)
    before, after = (
        memory.plan(graph.lifetimes(order), seconds=seconds).pool_bytes for order in (None, reordering.order)
    )
    return {
        "network": name,
        "steps": len(reordering.order),
        "given_peak_bytes": reordering.original_peak_bytes,
        "peak_bytes": reordering.peak_bytes,
        "lower_bound_bytes": reordering.lower_bound_bytes,
        "optimal": reordering.optimal,
        "seconds": reordering.seconds,
        "pool_before_bytes": before,
        "pool_after_bytes": min(before, after),
    }


def reorder_table(rows: list[dict]) -> str:
    """Rows of reordered networks as Markdown."""
    lines = [
        "| network | steps | live, given order (B) | found order (B) | bound of all orders (B) | proved "
        "| pool before (B) | after (B) | time for the order (s) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        keys = ("network", "steps", "given_peak_bytes", "peak_bytes", "lower_bound_bytes")
        cells = [str(row[key]) for key in keys] + ["yes" if row["optimal"] else "no"]
        cells += [str(row["pool_before_bytes"]), str(row["pool_after_bytes"]), f"{row['seconds']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    for proved in (True, False):
        wired = [row for row in rows if row["network"].startswith("ws-") and row["optimal"] is proved]
        saved = [1 - row["peak_bytes"] / row["given_peak_bytes"] for row in wired]
        if saved:
            kind = "that is proved the best" if proved else "beyond proof in the time"
            lines.append(
                f"\nOf networks wired at random, an order {kind} saves {min(saved):.0%} to {max(saved):.0%}."
            )
    return "\n".join(lines)


def instance_rows(directory: str, seconds: float) -> list[dict]:
    """A row for each instance of a folder."""
    paths = sorted(Path(directory).glob("*.csv"))
    if not paths:
        sys.exit(f"{directory}: no .csv files")
    rows = []
    for path in paths:
        print(f"{path.name} …", file=sys.stderr)
        rows.append(row(path, seconds))
    return rows


def zoo_rows(seconds: float) -> list[dict]:
    """Two rows for each network of the zoo: coalesced and not."""
    rows = []
    for name in zoo.names():
        print(f"{name} …", file=sys.stderr)
        module = frontend.load(name).module  # once: reading weights takes longer than planning
        rows += [zoo_row(name, module, coalesced, seconds) for coalesced in (True, False)]
    return rows


def zoo_row(name: str, module: tvm.IRModule, coalesced: bool, seconds: float) -> dict:
    """Plan the memory of a network: the figures of a row."""
    memory_report = pimflow.plan_memory(module, system(), in_place=coalesced, seconds=seconds)
    plan = memory_report.plan
    policies = memory.policy_bytes(memory_report.liveness.lifetimes)
    best = min(policies, key=policies.__getitem__)
    return {
        "network": name,
        "coalesced": coalesced,
        "buffers": len(memory_report.liveness.lifetimes),
        "pool_bytes": plan.pool_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "optimal": plan.optimal,
        "seconds": plan.seconds,
        "best_policy": best,
        "best_policy_bytes": policies[best],
        "tvm_pool_bytes": memory_report.tvm_pool_bytes,
        "eager_bytes": memory_report.eager_bytes,
        "lazy_peak_bytes": memory_report.lazy_peak_bytes,
    }


def zoo_table(rows: list[dict]) -> str:
    """Rows of networks as Markdown."""
    lines = [
        "| network | coalesced | buffers | pool (B) | above the bound | time (s) | best policy (x pool) "
        "| TVM's planner (x pool) | lazy (x pool) | eager (x pool) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        pool = row["pool_bytes"]
        coalesced = "yes" if row["coalesced"] else "no"
        cells = [row["network"], coalesced, row["buffers"], pool, above_bound(row)]
        cells += [f"{row['seconds']:.3f}", f"{row['best_policy']} {row['best_policy_bytes'] / pool:.3f}"]
        cells += [f"{row[key] / pool:.3f}" for key in ("tvm_pool_bytes", "lazy_peak_bytes", "eager_bytes")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for coalesced in (True, False):
        ratios = [r["tvm_pool_bytes"] / r["pool_bytes"] for r in rows if r["coalesced"] == coalesced]
        kind = "coalesced" if coalesced else "not coalesced"
        lines.append(
            f"\nTVM's planner takes {geometric_mean(ratios):.3f} x the pool, {kind} (geometric mean)"
        )
    return "\n".join(lines)


def reorder_rows(seconds: float) -> list[dict]:
    """A row for each network to reorder."""
    rows = []
    for name, graph in step_graphs():
        print(f"{name} …", file=sys.stderr)
        rows.append(reorder_row(name, graph, seconds))
    return rows


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("directory", metavar="DIR", nargs="?", help="folder of NAME.CAPACITY.csv")
    source.add_argument("--zoo", action="store_true", help="networks of the zoo")
    source.add_argument("--reorder", action="store_true", help="orders of the steps of networks")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="limit an instance or order (default: %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    try:
        if args.zoo:
            rows, to_table = zoo_rows(args.seconds), zoo_table
        elif args.reorder:
            rows, to_table = reorder_rows(args.seconds), reorder_table
        else:
            rows, to_table = instance_rows(args.directory, args.seconds), table
    except PimflowError as error:
        sys.exit(str(error))
    print(json.dumps(rows, indent=1) if args.json else to_table(rows))


if __name__ == "__main__":
    main()
