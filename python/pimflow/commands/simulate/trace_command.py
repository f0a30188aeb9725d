"""``pimflow trace``: write traces of a layer or a network for other tools."""

from __future__ import annotations

import argparse
from pathlib import Path

from pimflow.commands.command_line import options, output
from pimflow.commands.command_line.command_parser import CommandParser, refuse

SUMMARY = "write the trace of a layer or a compiled network for other tools"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    sub.positional(
        "layer",
        "LAYER|DIR|MODEL",
        "layer, as conv:NxCxHxW,OUT,KHxKW[,sS][,pP][,dD] or fc:[Nx]IN,OUT; or what 'pimflow compile -o' "
        "wrote; or, for accel-sim, a network",
    )
    options.device_options(sub, gpu="GPU of accel-sim", timing="timing that picks PIM's loop order")
    sub.option("system", "--dtype", metavar="TYPE", help="storage type of a layer, one of the device's")
    sub.option(
        "output",
        "--format",
        metavar="FORMAT",
        required=True,
        help="pimprog, pim, aim, ramulator2, perfetto, accel-sim",
    )
    sub.option("output", "-o", "--output", metavar="DIR", required=True, help="directory to write")
    options.force_option(sub)


def run(args: argparse.Namespace) -> None:
    """Write the trace of the layer or network of `args`, and print a summary."""
    from pimflow.commands.simulate import trace
    from pimflow.hardware import system

    if Path(args.layer).is_dir():
        reason = f"{args.layer} has a device, a dtype, channels and loop orders of its own; leave that out"
        refuse(args, ["pim", "dtype", "pim_channels", "scheduling"], reason)
    changes = {"timing": args.timing, "scheduling": args.scheduling, "dtype": args.dtype}
    target_system = system(gpu=args.gpu, pim=args.pim, pim_channels=args.pim_channels, **changes)
    with output.bar("writing", args.quiet) as advance:
        traces = trace.trace(
            args.layer, args.output, args.format, target_system, force=args.force, advance=advance
        )
    if args.json:
        output.print_json({**traces.to_json(), "output": args.output})
    else:
        print(traces.text(args.output))
