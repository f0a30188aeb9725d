"""``pimflow sweep``: one search for every combination of settings of a system."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pimflow.commands.command_line import output, output_options
from pimflow.commands.command_line.command_parser import CommandParser, refuse

if TYPE_CHECKING:
    from pathlib import Path

    from pimflow.commands.sweep.sweep_rows import SweepRow
    from pimflow.core.frames import Rows
    from pimflow.hardware import System
    from pimflow.hardware.settings import Setting

SUMMARY = "search networks on every combination of settings of the system"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options
    from pimflow.commands.sweep.options import MAX_POINTS, POINTS
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
        "output",
        "--compile",
        metavar="WHICH",
        choices=POINTS,
        help="with -o, also compile the best point of each network (best) or all of its front (front), each "
        "to DIR/point-N, to whose reports sweep.html links",
    )
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
    from pimflow.commands.sweep import sweep, sweep_directory
    from pimflow.core.goal import GoalOptions
    from pimflow.hardware.settings import Setting
    from pimflow.host import pictures

    if args.output:
        sweep_directory.check_output(args.output, force=args.force)
    else:
        refuse(args, ["compile"], "give a directory to write them to, with -o")
    settings = [Setting.parse(text) for text in args.settings]
    keywords = options.network(args) | args.parser.keywords(args, GoalOptions)
    with options.profiling(args) as profiling:
        target_system = options.target_system(args)
        keywords["profiling"] = profiling
        with output.bar("searching", args) as advance:
            rows = sweep.sweep(
                args.models, settings, target_system, points=args.points, progress=advance, **keywords
            )
        if args.output:
            sweep_directory.write(args.output, rows, force=args.force)
            if not pictures.can_render_images():
                output.say(f"no sweep.svg without vl-convert-python; {pictures.INSTALL}", args.quiet)
        if args.compile:
            rows = _compile(args, rows, settings, target_system, keywords)
    if args.json:
        output.print_json([row.to_json() for row in rows])
    else:
        print(sweep.text(rows))


def _compile(
    args: argparse.Namespace,
    rows: Rows[SweepRow],
    settings: Sequence[Setting],
    target_system: System,
    keywords: Mapping[str, Any],
) -> Rows[SweepRow]:
    """Compile points of the sweep, and write it again with their reports; returns the rows with these."""
    from pimflow.commands.compile.compile import compile
    from pimflow.commands.compile.options import NONE
    from pimflow.commands.sweep import sweep_directory
    from pimflow.commands.sweep.sweep import point_system
    from pimflow.core.frames import Rows

    rows = Rows(sweep_directory.with_reports(rows, args.compile, args.objective))
    combinations = len(rows) // len(args.models)
    with output.status(args) as progress:

        def compile_point(number: int, folder: Path) -> None:
            """Write the compiled directory of a row."""
            row = rows[number]
            values = tuple(row.settings.items())
            where = ", ".join([row.model, *(f"{name} {value}" for name, value in values)])
            compile(
                args.models[number // combinations],
                out=folder,
                system=point_system(target_system, settings, values),
                conventions=NONE,
                progress=lambda text: progress(f"{where}: {text}"),
                **keywords,
            )

        sweep_directory.write(args.output, rows, compile_point=compile_point, force=args.force)
    return rows
