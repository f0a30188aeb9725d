"""``pimflow timeline``: show the timeline of a plan."""

from __future__ import annotations

import argparse
from pathlib import Path

from pimflow.commands.command_line import output, output_options
from pimflow.commands.command_line.command_parser import CommandParser, refuse

SUMMARY = "show when everything runs, on both devices and the crossbar"
# Options that are allowed with a compiled directory.
_DIRECTORY_OPTIONS = {
    *("source", "perfetto", "plot", "json", "quiet", "verbose", "show_config", "force", "command", "parser"),
    "cache",
}


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options
    from pimflow.commands.shared.search_arguments import SearchArguments
    from pimflow.core.goal import GoalOptions

    sub.show_first("--plot", "--perfetto", "--plan", "--shape", "--batch", "--system", "--json")
    sub.positional("source", "DIR|MODEL", "what 'pimflow compile -o' wrote, or a network to search for")
    output_options.plot_option(sub, "the timeline")
    sub.option("output", "--perfetto", metavar="FILE", help="write the timeline for ui.perfetto.dev")
    output_options.force_option(sub)
    sub.add_fields(SearchArguments, "plan")
    options.network_options(sub)
    options.system_options(sub)
    sub.add_fields(GoalOptions)
    options.profiling_options(sub)


def run(args: argparse.Namespace) -> None:
    """Print the timeline of a plan, and write or draw it if requested."""
    from pimflow.commands.command_line import options
    from pimflow.commands.compile import timeline
    from pimflow.commands.shared.search_arguments import SearchArguments
    from pimflow.core.goal import GoalOptions
    from pimflow.host import files, pictures

    if Path(args.source).is_dir():
        reason = f"{args.source} is compiled, with a plan and a system of its own; leave that out"
        refuse(args, sorted(vars(args).keys() - _DIRECTORY_OPTIONS), reason)
    keywords = args.parser.keywords(args, SearchArguments, GoalOptions) | options.network(args)
    if args.perfetto:
        files.check_file(args.perfetto, files.PERFETTO, force=args.force)
    if args.plot:
        pictures.check_format(args.plot, force=args.force)
    with output.status(args) as progress, options.profiling(args) as profiling:
        progress("searching")
        target_system = options.target_system(args)
        trace = timeline.trace_plan(args.source, target_system, profiling=profiling, **keywords)
    if args.perfetto:
        trace.write(args.perfetto)
    if args.plot:
        timeline.draw(args.plot, trace)
    output.show(trace.report(), args.json)
