"""``pimflow memory``: plan the buffers of a network or a table, and say how good the plan is."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pimflow.commands.command_line import output, output_options
from pimflow.commands.command_line.command_parser import CommandParser, refuse
from pimflow.errors import UsageError

if TYPE_CHECKING:
    from pimflow.commands.memory.memory import NetworkMemory
    from pimflow.memory import MemoryPlan

SUMMARY = "place buffers in one pool of memory, and say how far it is from the smallest"
_NETWORK_OPTIONS = (
    *("values", "inputs", "input_values", "shapes", "batch", "context", "states", "system", "dtype"),
    *("target", "weights", "copy_ahead", "in_place", "reorder"),
    *("decompose", "optimize_skips", "skip_criterion", "fuse_activations", "fuse"),
)


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options
    from pimflow.commands.memory.options import MemoryOptions
    from pimflow.commands.shared.inputs import InputOptions
    from pimflow.commands.shared.search_arguments import SearchArguments

    sub.show_first("--policy", "--capacity", "--shape", "--batch", "--output", "--plot", "--json")
    sub.positional("source", "MODEL|CSV", "a network, or a table of buffers with lines id,lower,upper,size")
    sub.add_fields(MemoryOptions)
    inputs_help = "inputs by name, whose shapes fix those that the file leaves open"
    sub.add_fields(InputOptions, "inputs", help=inputs_help)
    sub.add_fields(InputOptions, "input_values", help="an input, FILE.npy; repeat it for each")
    options.network_options(sub)
    sub.option("output", "-o", "--output", metavar="FILE.csv", help="write the buffers with their offsets")
    output_options.force_option(sub)
    output_options.plot_option(sub, "memory over time")
    lowered_for = "what a network is lowered for: llvm+pim, cuda+pim or c (default: %(default)s)"
    sub.add_fields(SearchArguments, "target", help=lowered_for)
    options.system_option(sub)
    options.system_fields(sub, "dtype", help="storage type of a network on a GPU: fp16, fp32")
    options.system_fields(sub, "weights", "copy_ahead")


def run(args: argparse.Namespace) -> None:
    """Plan the network or table of `args`, print the result, and write the requested files."""
    from pimflow import memory
    from pimflow.host import files, pictures
    from pimflow.memory import csv_form, plot

    _check(args)
    if args.output:
        files.check_file(args.output, files.CSV, force=args.force)
    if args.plot:
        pictures.check_format(args.plot, force=args.force)
    network = None if _is_table(args.source) else _network(args)
    if network is None:
        lifetimes = tuple(csv_form.read(args.source, args.alignment_bytes or 1))
        output.say(f"planning {len(lifetimes)} buffers …", args.quiet)
        plan = memory.plan(lifetimes, args.policy, capacity_bytes=args.capacity_bytes, seconds=args.seconds)
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
        row = network.to_json() | {"best_policy": best} if network else plan.to_json()
        output.print_json(row | {"policies": policies})
    else:
        print(_text(plan, policies))
        if network:
            print(_network_text(network))


def _is_table(source: str) -> bool:
    return source.endswith(".csv") or (
        Path(source).is_file() and Path(source).suffix not in (".onnx", ".pt2")
    )


def _network(args: argparse.Namespace) -> NetworkMemory:
    from pimflow.commands.command_line import options
    from pimflow.commands.memory.memory import plan_memory
    from pimflow.commands.memory.options import MemoryOptions
    from pimflow.commands.shared.inputs import InputOptions

    output.say(f"lowering {args.source} …", args.quiet)
    keywords = args.parser.keywords(args, MemoryOptions, InputOptions) | options.network(args)
    return plan_memory(args.source, options.target_system(args), target=args.target, **keywords)


def _check(args: argparse.Namespace) -> None:
    if _is_table(args.source):
        refuse(args, _NETWORK_OPTIONS, f"{args.source} is a table of buffers, not a network")
    if args.alignment_bytes is not None and args.alignment_bytes < 1:
        raise UsageError(f"--alignment {args.alignment_bytes}: give a positive number of bytes")
    if args.capacity_bytes is not None and args.capacity_bytes < 0:
        raise UsageError(f"--capacity {args.capacity_bytes}: give a number of bytes")
    if not 0 < args.seconds < float("inf"):
        raise UsageError(f"--time-limit {args.seconds:g}: give a positive number of seconds")


def _network_text(network: NetworkMemory) -> str:
    from pimflow.commands.shared.report_text import order_text

    pool = max(network.plan.pool_bytes, 1)
    width = len("each tensor while it is live")
    rows = {
        "TVM's own planner": network.tvm_pool_bytes,
        "each tensor while it is live": network.lazy_peak_bytes,
        "all tensors at once": network.eager_bytes,
    }
    lines = [f"  {name:<{width}} {size:>14} B  {size / pool:.3f} x pool" for name, size in rows.items()]
    elsewhere = f"{network.input_bytes} B of inputs"
    if network.weights == "resident":
        elsewhere += f" and {network.internal.weight_bytes} B of weights (fp32)"
    lines.append(f"{elsewhere} lie elsewhere")
    lines.append(
        f"{network.overwritten} results take over a dead operand; "
        f"{len(network.copies)} slices and concatenations are copied"
    )
    lines += [f"  {copied.layer}: {copied.size_bytes} B, {copied.reason}" for copied in network.copies]
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
