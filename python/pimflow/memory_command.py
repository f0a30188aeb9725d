"""``pimflow memory``: plan the buffers of a table, and say how good the plan is."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pimflow.errors import UsageError

if TYPE_CHECKING:
    from pimflow.memory import MemoryPlan

SUMMARY = "place buffers in one pool of memory, and say how far it is from the smallest"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Arguments of the command; `run` takes them."""
    sub.add_argument("table", metavar="CSV", help="buffers, one a line: id,lower,upper,size")
    sub.add_argument(
        "--policy",
        default="exact",
        help="best, exact, ortools, first-fit, best-fit, longer-first, bigger-first (default: %(default)s)",
    )
    sub.add_argument("--capacity", metavar="BYTES", type=int, help="largest pool of a memory region")
    sub.add_argument("--alignment", metavar="N", type=int, default=1, help="bytes (default: %(default)s)")
    sub.add_argument(
        "--time-limit", metavar="S", type=float, default=60.0, help="seconds of search (default: %(default)g)"
    )
    sub.add_argument("-o", "--output", metavar="FILE.csv", help="write the plan: the buffers with offsets")
    sub.add_argument("--plot", metavar="FILE", help="draw memory over time: .png, .svg or .html")


def run(args: argparse.Namespace) -> None:
    """Plan the table of `args`, print the result, and write what is asked for."""
    from pimflow import memory
    from pimflow.memory import csv_form, plot

    _check(args)
    if args.plot:
        plot.check_format(args.plot)
    lifetimes = csv_form.read(args.table, args.alignment)
    if not args.quiet:
        print(f"pimflow: planning {len(lifetimes)} buffers …", file=sys.stderr)
    plan = memory.plan(lifetimes, args.policy, capacity_bytes=args.capacity, seconds=args.time_limit)
    policies = memory.policy_bytes(lifetimes)
    policies["best"] = min(policies.values())
    policies[args.policy] = plan.pool_bytes
    if args.output:
        csv_form.write(args.output, lifetimes, plan.offsets_bytes)
    if args.plot:
        plot.write(args.plot, lifetimes, plan, Path(args.table).name)
    if args.json:
        print(json.dumps(_row(plan, policies, {life.name: life.size_bytes for life in lifetimes}), indent=1))
    else:
        print(_text(plan, policies))


def _check(args: argparse.Namespace) -> None:
    if args.alignment < 1:
        raise UsageError(f"--alignment {args.alignment}: give a positive number of bytes")
    if args.capacity is not None and args.capacity < 0:
        raise UsageError(f"--capacity {args.capacity}: give a number of bytes")
    if not 0 < args.time_limit < float("inf"):
        raise UsageError(f"--time-limit {args.time_limit:g}: give a positive number of seconds")


def _row(plan: MemoryPlan, policies: dict[str, int], size_bytes: dict[str, int]) -> dict[str, Any]:
    return {
        "pool_bytes": plan.pool_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "optimal": plan.optimal,
        "seconds": plan.seconds,
        "policies": policies,
        "pools": [
            {
                "memory": pool.memory,
                "pool_bytes": pool.pool_bytes,
                "lower_bound_bytes": pool.lower_bound_bytes,
                "optimal": pool.optimal,
                "policy": pool.policy,
            }
            for pool in plan.pools
        ],
        "allocations": [
            {"id": name, "offset": offset, "bytes": size_bytes[name]}
            for name, offset in plan.offsets_bytes.items()
        ],
    }


def _text(plan: MemoryPlan, policies: dict[str, int]) -> str:
    lines = []
    for pool in plan.pools:
        proof = "the smallest" if pool.optimal else f"at most {100 * pool.gap:.2f} % above the smallest"
        lines.append(
            f"{pool.memory}: {pool.pool_bytes} B ({pool.policy}), {proof}; "
            f"lower bound {pool.lower_bound_bytes} B"
        )
    lines.append(f"{len(plan.offsets_bytes)} buffers planned in {plan.seconds:.3f} s")
    width = max(map(len, policies))
    for name, size in policies.items():
        ratio = f"  {size / plan.lower_bound_bytes:.3f} x bound" if plan.lower_bound_bytes else ""
        lines.append(f"  {name:<{width}} {size:>14} B{ratio}")
    return "\n".join(lines)
