"""``pimflow fuse``: Deep Fusion of a network on an accelerator with on-chip memory."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.errors import UsageError

if TYPE_CHECKING:
    from pimflow.commands.fuse.fusion_report import FusionReport
    from pimflow.fusion import Accelerator

SUMMARY = "fuse layers into groups that pass once over on-chip memory, and say what that saves"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options
    from pimflow.commands.fuse.options import FuseOptions
    from pimflow.commands.shared.options import ShapeOptions
    from pimflow.core.options import declarations
    from pimflow.fusion import Accelerator, FusionRules

    options.model_argument(sub)
    sub.add_fields(ShapeOptions)
    sub.add_fields(FuseOptions, "baseline", *declarations(FusionRules))
    sub.add_fields(Accelerator)
    options.decompose_option(sub)
    sub.option(
        "output",
        "--execute",
        action="store_true",
        help="run every group on the CPU, on random inputs; check its results, and count the bytes it moves",
    )


def run(args: argparse.Namespace) -> None:
    """Fuse the network of `args` and print the result."""
    from pimflow.commands.fuse.options import FuseOptions
    from pimflow.fusion import Accelerator

    target = Accelerator(**args.parser.keywords(args, Accelerator))
    choices = args.parser.keywords(args, FuseOptions)
    fuse = _fuse_decomposed if args.decompose else _fuse_layers
    output.show(fuse(args, target, choices), args.json)


def _fuse_decomposed(args: argparse.Namespace, target: Accelerator, choices: dict[str, Any]) -> FusionReport:
    from pimflow.commands.fuse import fuse

    if args.execute:
        raise UsageError("--execute runs the layers of a network as it came; not with --decompose")
    with output.bar("decomposing and searching", args) as advance:
        return fuse.fuse_decomposed(args.model, args.decompose, target, **choices, progress=advance).report()


def _fuse_layers(args: argparse.Namespace, target: Accelerator, choices: dict[str, Any]) -> FusionReport:
    from pimflow.commands.fuse import fuse, fusion_report

    if args.execute:  # loads TVM, so only to execute
        from pimflow.fusion.kernels import execution

        execution.require_executable(target.dtype)
    with output.bar("searching", args) as advance:
        plan = fuse.fuse(args.model, target, **choices, progress=advance)
    report = fusion_report.FusionReport.from_plan(plan)
    if not args.execute:
        return report
    keywords = {key: choices[key] for key in ("baseline", "shapes", "batch")}
    with output.bar("executing", args) as advance:
        execution_run = execution.execute(args.model, plan, **keywords, progress=advance)
    execution_run.require(plan)
    return replace(report, executed=fusion_report.ExecutionReport.from_execution(plan, execution_run))
