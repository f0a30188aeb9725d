"""``pimflow export``: figures of a model on a PIM device, for other tools."""

from __future__ import annotations

import argparse
import json

from pimflow.commands.command_line import output, output_options
from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.errors import UnknownNameError
from pimflow.host.files import SERVING, check_file, replace_file

SUMMARY = "write what another tool wants to know of a model on a PIM device"
TOOLS = ("llmservingsim",)


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options

    sub.positional("tool", "TOOL", "llmservingsim: attention in PIM as a line over the tokens of a cache")
    sub.positional("model", "MODEL", "language model of the zoo, or .gguf file")
    options.system_option(sub)
    options.system_fields(sub, "pim", "pim_channels", "dtype")
    options.cache_option(sub, "system")
    sub.option("output", "-o", "--output", metavar="FILE.json", help="file to write")
    output_options.force_option(sub)


def run(args: argparse.Namespace) -> None:
    """Time the attention of a model, write the file, and print the result."""
    if args.tool not in TOOLS:
        raise UnknownNameError("tool", args.tool, TOOLS)
    if args.output:
        check_file(args.output, SERVING, force=args.force)
    from pimflow.commands.command_line import options
    from pimflow.commands.generate.export import llmservingsim
    from pimflow.placement import Profiling

    target_system, cache = options.target_system(args), options.result_cache(args)
    with output.status(args) as progress:
        progress("timing attention")
        attention = llmservingsim(args.model, target_system, profiling=Profiling(cache=cache))
    if cache is not None:
        cache.close()
    if args.output:
        replace_file(args.output, f"{json.dumps(attention.to_json(), indent=1)}\n".encode())
    if args.json:
        output.print_json(attention.to_json())
    else:
        print(attention.text() + (f"\nwrote     {args.output}" if args.output else ""))
