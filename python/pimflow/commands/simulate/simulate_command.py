"""``pimflow simulate``: cycles and energy of a PIM program or a command trace."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser

SUMMARY = "count the cycles of a PIM program or a command trace"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options
    from pimflow.hardware.systems import TIMINGS

    sub.positional("file", "FILE", "PIM program (.pimprog) or command trace (.pim)")
    options.system_fields(
        sub, "pim", help="PIM device (default: the one that the file was compiled for, else newton-gddr6)"
    )
    options.system_fields(sub, "timing", help=f"PIM's timing: {', '.join(TIMINGS)} (default: strict)")
    sub.option(
        "system",
        "--profiler",
        metavar="pim=ramulator:PATH",
        action="append",
        default=[],
        help="take cycles from an installed Ramulator",
    )
    sub.option(
        "system",
        "--no-gwrite-hiding",
        action="store_true",
        help="under ramulator-pimflow, charge 64 cycles for every GWRITE",
    )


def run(args: argparse.Namespace) -> None:
    """Simulate the file of `args` and print its cycles and energy."""
    from pimflow.commands.command_line import options
    from pimflow.commands.simulate import simulate as simulation

    hiding = not args.no_gwrite_hiding
    _, profiler = options.profilers(args, hiding)
    timing = args.timing or "strict"
    with output.bar("simulating", args) as advance:
        result = simulation.simulate(
            args.file, args.pim, timing=timing, gwrite_hiding=hiding, profiler=profiler, progress=advance
        )
    report = simulation.simulation_report(args.file, result, args.pim)
    if result.empty_reads:
        output.warn(
            f"{result.empty_reads} READRES of an empty latch: no COMP on the buffer since its last READRES "
            "(a .pim trace has one buffer)"
        )
    output.show(report, args.json)
