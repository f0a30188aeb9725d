"""The planner on MiniMalloc's instances: ``bench_memory.py DIR [--seconds S] [--json]``.

DIR holds tables ``NAME.CAPACITY.csv`` (`id,lower,upper,size`, as in google/minimalloc's `benchmarks/`). For
each: buffers, lower bound, pools of Occamy's policies and their best, whether the exact planner fits the
buffers within the capacity of the file's name, and the seconds that it took, on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pimflow import memory
from pimflow.errors import InfeasibleError, PimflowError, UsageError
from pimflow.memory import csv_form


def row(path: Path, seconds: float) -> dict:
    name, _, capacity = path.stem.rpartition(".")
    if not name or not capacity.isdecimal():
        raise UsageError(f"{path}: the name has no capacity; call it NAME.BYTES.csv")
    lifetimes = csv_form.read(path)
    policies = memory.policy_bytes(lifetimes)
    found: dict = {"instance": name, "buffers": len(lifetimes), "capacity_bytes": int(capacity), **policies}
    try:
        plan = memory.plan(lifetimes, capacity_bytes=int(capacity), seconds=seconds)
    except InfeasibleError as error:
        return {**found, "fits": False, "seconds": None, "error": str(error)}
    bounds = {"pool_bytes": plan.pool_bytes, "lower_bound_bytes": plan.lower_bound_bytes}
    return {**found, **bounds, "fits": True, "seconds": plan.seconds}


def table(rows: list[dict]) -> str:
    lines = [
        "| instance | buffers | capacity (B) | best of four policies (x capacity) | exact fits | time (s) |",
        "|---|---|---|---|---|---|",
    ]
    for each in rows:
        best = min(each[policy] for policy in memory.POLICIES) / each["capacity_bytes"]
        fits = "yes" if each["fits"] else "no"
        time = "-" if each["seconds"] is None else f"{each['seconds']:.3f}"
        size = f"{each['buffers']} | {each['capacity_bytes']}"
        lines.append(f"| {each['instance']} | {size} | {best:.3f} | {fits} | {time} |")
    solved = [each["seconds"] for each in rows if each["fits"]]
    lines.append(f"\n{len(solved)} of {len(rows)} fit, in {sum(solved):.3f} s together")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", metavar="DIR", help="folder of NAME.CAPACITY.csv")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="limit an instance (default: %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    paths = sorted(Path(args.directory).glob("*.csv"))
    if not paths:
        sys.exit(f"{args.directory}: no .csv files")
    rows = []
    for path in paths:
        print(f"{path.name} …", file=sys.stderr)
        try:
            rows.append(row(path, args.seconds))
        except PimflowError as error:
            sys.exit(str(error))
    print(json.dumps(rows, indent=1) if args.json else table(rows))


if __name__ == "__main__":
    main()
