"""``pimflow trace``: write traces of a layer or a network for other tools."""

from __future__ import annotations

import argparse
from pathlib import Path

from pimflow.commands.command_line import output, output_options
from pimflow.commands.command_line.command_parser import CommandParser, refuse

SUMMARY = "write the trace of a layer or a compiled network for other tools"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options
    from pimflow.hardware.systems import TIMINGS

    sub.positional(
        "layer",
        "LAYER|DIR|MODEL",
        "layer, as conv:NxCxHxW,OUT,KHxKW[,sS][,pP][,dD] or fc:[Nx]IN,OUT; or what 'pimflow compile -o' "
        "wrote; or, for accel-sim, a network",
    )
    options.system_fields(sub, "gpu", help="GPU of accel-sim (default: the system's)")
    options.system_fields(sub, "pim", "pim_channels")
    timing_help = f"timing that picks PIM's loop order: {', '.join(TIMINGS)}"
    options.system_fields(sub, "timing", help=timing_help)
    options.system_fields(sub, "scheduling")
    options.system_fields(sub, "dtype", help="storage type of a layer, one of the device's")
    sub.option(
        "output",
        "--format",
        metavar="FORMAT",
        required=True,
        help="pimprog, pim, aim, ramulator2, perfetto, accel-sim",
    )
    sub.option("output", "-o", "--output", metavar="DIR", required=True, help="directory to write")
    output_options.force_option(sub)


def run(args: argparse.Namespace) -> None:
    """Write the trace of the layer or network of `args`, and print a summary."""
    from pimflow.commands.command_line import options
    from pimflow.commands.simulate import trace

    if Path(args.layer).is_dir():
        reason = f"{args.layer} has a device, a dtype, channels and loop orders of its own; leave that out"
        refuse(args, ["pim", "dtype", "pim_channels", "scheduling"], reason)
    target_system = options.target_system(args)
    with output.bar("writing", args) as advance:
        traces = trace.trace(
            args.layer, args.output, args.format, target_system, force=args.force, advance=advance
        )
    if args.json:
        output.print_json({**traces.to_json(), "output": args.output})
    else:
        print(traces.text(args.output))
