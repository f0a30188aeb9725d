"""``pimflow compare-simulator``: our models beside an installed simulator."""

from __future__ import annotations

import argparse
from pathlib import Path

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser, refuse
from pimflow.errors import UsageError

SUMMARY = "compare the models of GPU and PIM with an installed Accel-Sim or Ramulator"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options

    sub.positional(
        "source",
        "MODEL|LAYER|DIR",
        "network, layer (conv:NxCxHxW,OUT,KHxKW… or fc:IN,OUT), or what 'pimflow compile -o' wrote",
    )
    options.system_fields(sub, "gpu", "pim", "pim_channels")
    sub.option(
        "system",
        "--profiler",
        metavar="gpu=accel-sim:PATH|pim=ramulator:PATH",
        action="append",
        default=[],
        help="a simulator: gpu=accel-sim:PATH, gpu=accel-sim-logs:DIR or pim=ramulator:PATH; once for each",
    )
    sub.option(
        "system",
        "--max-cycles",
        metavar="N",
        type=int,
        help="leave out GPU kernels that take more cycles by the model: Accel-Sim takes hours for large ones",
    )


def run(args: argparse.Namespace) -> None:
    """Run the simulators of `args`, and print their times beside those of the models."""
    from pimflow.commands.command_line import options
    from pimflow.commands.shared.profilers import parse_profilers
    from pimflow.commands.simulate.comparison import compare_simulator
    from pimflow.simulators.ramulator.fork import Ramulator

    if Path(args.source).is_dir():
        refuse(args, ["pim_channels"], f"{args.source} has channels of its own; leave that out")
    gpu, pim = parse_profilers(args.profiler)
    if pim is not None and not isinstance(pim, Ramulator):
        raise UsageError("the rules of the built-in timing are those of pim=ramulator:PATH; name that")
    with output.bar("simulating", args.quiet) as advance:
        comparison = compare_simulator(
            args.source,
            options.target_system(args),
            gpu=gpu,
            pim=pim,
            max_cycles=args.max_cycles,
            progress=advance,
        )
    output.show(comparison, args.json)
