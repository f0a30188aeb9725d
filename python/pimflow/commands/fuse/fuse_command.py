"""``pimflow fuse``: Deep Fusion of a network on an accelerator with on-chip memory."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pimflow.commands.command_line import options, output
from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.errors import UsageError

if TYPE_CHECKING:
    from pimflow.commands.fuse.fusion_report import FusionReport
    from pimflow.fusion import Accelerator

SUMMARY = "fuse layers into groups that pass once over on-chip memory, and say what that saves"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.fusion import HALOS, OBJECTIVES, REUSES, SEARCHES

    options.model_argument(sub)
    options.network_options(sub, states=False)
    sub.option(
        "network",
        "--baseline",
        metavar="LAYERS",
        default="unfolded",
        help="layers that are fused: unfolded, with batch norm, scale and ReLU apart, or folded, as compiled "
        "(default: %(default)s)",
    )
    sub.option(
        "system",
        "--on-chip",
        metavar="BYTES",
        default="768KiB",
        help="size of on-chip memory (default: %(default)s)",
    )
    sub.option(
        "system",
        "--bandwidth",
        metavar="RATE",
        default="1.5GB/s",
        help="bandwidth of DRAM (default: %(default)s)",
    )
    sub.option(
        "system",
        "--compute",
        metavar="RATE",
        default="200GFLOPS",
        help="peak rate of arithmetic (default: %(default)s)",
    )
    sub.choice("system", "--dtype", "TYPE", "storage type", ("fp32", "fp16", "int8"), "fp32")
    sub.option(
        "system",
        "--energy",
        metavar="NAME|FILE",
        default="deep-fusion",
        help="energy of an access and of an operation (default: %(default)s, assumed)",
    )
    sub.choice("search", "--objective", "WHAT", "what is minimised", OBJECTIVES, "traffic")
    sub.choice("search", "--search", "HOW", "how groups are found", SEARCHES, "optimal")
    sub.choice("search", "--halo", "HOW", "what is done with rows that tiles share", HALOS, "recompute")
    sub.choice("memory", "--reuse", "HOW", "reuse of on-chip memory inside a group", REUSES, "deep")
    options.decompose_option(sub, has_search=False)
    sub.option(
        "output",
        "--execute",
        action="store_true",
        help="run every group on the CPU, on random inputs; check its results, and count the bytes it moves",
    )


def accelerator(args: argparse.Namespace) -> Accelerator:
    """The accelerator that the options describe."""
    from pimflow.fusion import Accelerator, parse_bytes, parse_rate
    from pimflow.hardware.accelerator import AcceleratorEnergy

    return Accelerator(
        on_chip_bytes=parse_bytes(args.on_chip, "--on-chip"),
        bytes_per_second=parse_rate(args.bandwidth, "--bandwidth", ("B/s",), "1.5GB/s"),
        operations_per_second=parse_rate(args.compute, "--compute", ("FLOPS", "OPS"), "200GFLOPS"),
        dtype=args.dtype,
        energy=AcceleratorEnergy.load(args.energy),
    )


def run(args: argparse.Namespace) -> None:
    """Fuse the network of `args` and print the result."""
    target = accelerator(args)
    choices = {name: getattr(args, name) for name in ("baseline", "reuse", "search", "halo", "objective")}
    choices |= options.network(args)
    decompose = choices.pop("decompose")
    report = (
        _fuse_decomposed(args, target, choices, decompose)
        if decompose
        else _fuse_layers(args, target, choices)
    )
    output.show(report, args.json)


def _fuse_decomposed(
    args: argparse.Namespace, target: Accelerator, choices: dict[str, Any], decompose: str
) -> FusionReport:
    from pimflow.commands.fuse import fuse

    if args.execute:
        raise UsageError("--execute runs the layers of a network as it came; not with --decompose")
    with output.bar("decomposing and searching", args.quiet) as advance:
        return fuse.fuse_decomposed(args.model, decompose, target, **choices, progress=advance).report()


def _fuse_layers(args: argparse.Namespace, target: Accelerator, choices: dict[str, Any]) -> FusionReport:
    from pimflow.commands.fuse import fuse, fusion_report

    if args.execute:  # loads TVM, so only to execute
        from pimflow.fusion.kernels import execution

        execution.require_executable(target.dtype)
    with output.bar("searching", args.quiet) as advance:
        plan = fuse.fuse(args.model, target, **choices, progress=advance)
    report = fusion_report.FusionReport.from_plan(plan)
    if not args.execute:
        return report
    keywords = {key: choices[key] for key in ("baseline", "shapes", "batch")}
    with output.bar("executing", args.quiet) as advance:
        executable = execution.load_executable(args.model, plan, **keywords)
        execution_run = execution.execute(executable, plan, advance)
    execution_run.require(plan)
    return replace(report, executed=fusion_report.ExecutionReport.from_execution(plan, execution_run))
