"""``pimflow memory``: plan the buffers of a network or a table, and say how good the plan is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pimflow.errors import UsageError

if TYPE_CHECKING:
    from pimflow.api.memory import NetworkMemory
    from pimflow.memory import MemoryPlan

SUMMARY = "place buffers in one pool of memory, and say how far it is from the smallest"
_OF_NETWORKS = (
    *("shape", "batch", "system", "dtype", "target", "weights", "no_in_place", "reorder"),
    *("decompose", "optimize_skips", "skip_criterion", "fuse_activations", "fuse"),
)
REORDER = "let layers run in another order where that takes less memory"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Arguments of the command; `run` takes them."""
    sub.add_argument(
        "source", metavar="MODEL|CSV", help="a network, or a table of buffers: id,lower,upper,size a line"
    )
    sub.add_argument(
        "--policy",
        default="exact",
        help="best, exact, ortools, first-fit, best-fit, longer-first, bigger-first (default: %(default)s)",
    )
    sub.add_argument("--capacity", metavar="BYTES", type=int, help="largest pool of a memory region")
    sub.add_argument(
        "--alignment", metavar="N", type=int, help="bytes (default: 64 for networks, 1 for tables)"
    )
    sub.add_argument("--weights", help="place weights and inputs too: resident, streamed")
    sub.add_argument("--no-in-place", action="store_true", help="no result takes over a dead operand")
    sub.add_argument("--reorder", action="store_true", help=f"of a network: {REORDER}")
    sub.add_argument(
        "--target", default="llvm+pim", help="what a network is lowered for (default: %(default)s)"
    )
    sub.add_argument("--system", metavar="NAME|FILE", default="pimflow", help="system (default: %(default)s)")
    sub.add_argument("--dtype", help="storage type of a network on a GPU: fp16, fp32")
    sub.add_argument(
        "--time-limit", metavar="S", type=float, default=60.0, help="seconds of search (default: %(default)g)"
    )
    sub.add_argument("-o", "--output", metavar="FILE.csv", help="write the plan: the buffers with offsets")
    sub.add_argument("--plot", metavar="FILE", help="draw memory over time: .png, .svg or .html")


def run(args: argparse.Namespace) -> None:
    """Plan the table of `args`, print the result, and write what is asked for."""
    from pimflow import memory
    from pimflow.host import files, pictures
    from pimflow.memory import csv_form, plot

    _check(args)
    if args.output:
        files.check_file(args.output)
    if args.plot:
        pictures.check_format(args.plot)
    network = None if _is_table(args.source) else _network(args)
    if network is None:
        lifetimes = csv_form.read(args.source, args.alignment or 1)
        if not args.quiet:
            print(f"pimflow: planning {len(lifetimes)} buffers …", file=sys.stderr)
        plan = memory.plan(lifetimes, args.policy, capacity_bytes=args.capacity, seconds=args.time_limit)
    else:
        lifetimes, plan = network.liveness.lifetimes, network.plan
    policies = memory.policy_bytes(lifetimes)
    best = min(policies, key=policies.__getitem__)
    policies["best"] = policies[best]
    policies[args.policy] = plan.pool_bytes
    if args.output:
        csv_form.write(args.output, lifetimes, plan.offsets_bytes)
    if args.plot:
        plot.write(args.plot, lifetimes, plan, Path(args.source).name)
    if args.json:
        row = _row(plan, policies, {life.name: life.size_bytes for life in lifetimes})
        print(json.dumps(row | (_network_row(network, best) if network else {}), indent=1))
    else:
        print(_text(plan, policies))
        if network:
            print(_network_text(network))


def _is_table(source: str) -> bool:
    return source.endswith(".csv") or (
        Path(source).is_file() and Path(source).suffix not in (".onnx", ".pt2")
    )


def _network(args: argparse.Namespace) -> NetworkMemory:
    from pimflow import zoo
    from pimflow.api import compile as api
    from pimflow.hardware import system

    if not args.quiet:
        print(f"pimflow: lowering {args.source} …", file=sys.stderr)
    return api.plan_memory(
        args.source,
        system(args.system, dtype=args.dtype),
        target=args.target,
        shapes=dict(map(zoo.parse_shape, args.shape)),
        batch=args.batch,
        decompose=args.decompose,
        optimize_skips=args.skip_criterion if args.optimize_skips else None,
        fuse_activations=args.fuse_activations,
        fuse=args.fuse,
        policy=args.policy,
        weights=args.weights or "",
        in_place=not args.no_in_place,
        reorder=args.reorder,
        capacity_bytes=args.capacity,
        alignment_bytes=args.alignment,
        seconds=args.time_limit,
    )


def _check(args: argparse.Namespace) -> None:
    from pimflow.cli.parser import refuse

    if _is_table(args.source):
        refuse(args, _OF_NETWORKS, f"{args.source} is a table of buffers, not a network")
    elif not args.optimize_skips:
        refuse(args, ["skip_criterion"], "says what --optimize-skips keeps; give that too")
    if args.alignment is not None and args.alignment < 1:
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


def _network_row(network: NetworkMemory, best: str) -> dict[str, Any]:
    return {
        "tvm_pool_bytes": network.tvm_pool_bytes,
        "eager_bytes": network.eager_bytes,
        "lazy_peak_bytes": network.lazy_peak_bytes,
        "best_policy": best,
        "eager_allocations": network.eager_allocations,
        "lazy_groups": network.lazy_groups,
        "overwritten": network.overwritten,
        "copies": [dataclasses.asdict(copied) for copied in network.copies],
        "order": network.order.summary() if network.order else None,
        "decomposition": network.decomposition,
        "skips": network.skips.summary() if network.skips else None,
        **network.internal.summary(),
        "fused": network.fused,
    }


def _network_text(network: NetworkMemory) -> str:
    from pimflow.api.report import order_text

    pool = max(network.plan.pool_bytes, 1)
    width = len("each tensor while it is live")
    rows = {
        "TVM's own planner": network.tvm_pool_bytes,
        "each tensor while it is live": network.lazy_peak_bytes,
        "all tensors at once": network.eager_bytes,
    }
    lines = [f"  {name:<{width}} {size:>14} B  {size / pool:.3f} x pool" for name, size in rows.items()]
    lines.append(
        f"{network.overwritten} results take over a dead operand; "
        f"{len(network.copies)} slices and concatenations are copied"
    )
    lines += [f"  {each.layer}: {each.size_bytes} B, {each.reason}" for each in network.copies]
    if network.skips:
        from pimflow.decomposition.report import skips_text

        lines.append(f"skips {skips_text(network.skips.summary())}")
    if network.order:
        lines.append(f"order {order_text(network.order.summary())}")
    if network.decomposition:
        from pimflow.decomposition.report import decomposition_text

        lines.append(decomposition_text(network.decomposition))
    if network.fused:
        lines.append(f"{len(network.fused)} runs of layers are one kernel each")
    return "\n".join(lines)


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
