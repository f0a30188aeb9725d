"""``pimflow sweep``: one search for every combination of settings of a system."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output, output_options
from pimflow.commands.command_line.command_parser import CommandParser

SUMMARY = "search networks on every combination of settings of the system"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options
    from pimflow.commands.sweep.options import MAX_POINTS
    from pimflow.core.goal import GoalOptions

    sub.show_first("--set", "--output", "--modes", "--fuse", "--shape", "--batch", "--system", "--json")
    options.models_argument(sub)
    sub.option(
        "system",
        "--set",
        metavar="NAME=V,V,…",
        action="append",
        required=True,
        dest="settings",
        help="values of a field of the system or of its devices, such as pim_channels=0,4,…,28 or "
        "pim.timing.nRCDR=10,20; repeat it for further fields",
    )
    sub.option(
        "output",
        "-o",
        "--output",
        metavar="DIR",
        help="where to write sweep.csv, sweep.json, sweep.html and sweep.svg",
    )
    output_options.force_option(sub)
    sub.option(
        "search",
        "--points",
        metavar="N",
        type=int,
        default=MAX_POINTS,
        help="searches that the values may make together, at most (default: %(default)s)",
    )
    sub.add_fields(GoalOptions)
    options.network_options(sub)
    options.system_options(sub)
    options.profiling_options(sub)


def run(args: argparse.Namespace) -> None:
    """Search the networks of `args` under all settings, print the results and write them."""
    from pimflow.commands.command_line import options
    from pimflow.commands.sweep import sweep
    from pimflow.core.goal import GoalOptions
    from pimflow.hardware.settings import Setting
    from pimflow.host import pictures

    if args.output:
        sweep.check_output(args.output, force=args.force)
    settings = [Setting.parse(text) for text in args.settings]
    keywords = options.network(args) | args.parser.keywords(args, GoalOptions)
    with options.profiling(args) as profiling, output.bar("searching", args) as advance:
        target_system = options.target_system(args)
        keywords |= {"profiling": profiling, "progress": advance}
        rows = sweep.sweep(args.models, settings, target_system, points=args.points, **keywords)
    if args.output:
        sweep.write(args.output, rows, force=args.force)
        if not pictures.can_render_images():
            output.say(f"no sweep.svg without vl-convert-python; {pictures.INSTALL}", args.quiet)
    if args.json:
        output.print_json([row.to_json() for row in rows])
    else:
        print(sweep.text(rows))
