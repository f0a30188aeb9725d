"""``pimflow export``: figures of a model on a PIM device, for other tools."""

from __future__ import annotations

import argparse
import json

from pimflow.commands.command_line import output, output_options
from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.errors import UnknownNameError, UsageError
from pimflow.host.files import ATTENTION_TABLE, SERVING, check_file, replace_file

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
    sub.option(
        "output",
        "-o",
        "--output",
        metavar="FILE",
        help="file to write: .json has the line and the whole table, .csv the table of one device as the "
        "attention.csv that LLMServingSim reads",
    )
    sub.option(
        "output",
        "--devices",
        metavar="N",
        type=int,
        default=1,
        help="how many devices share the heads in a .csv file: its folder tpN (default: %(default)s)",
    )
    output_options.force_option(sub)


def run(args: argparse.Namespace) -> None:
    """Time the attention of a model, write the file, and print the result."""
    if args.tool not in TOOLS:
        raise UnknownNameError("tool", args.tool, TOOLS)
    is_csv = bool(args.output) and args.output.endswith(".csv")
    if args.devices != 1 and not is_csv:
        raise UsageError(f"--devices {args.devices}: is of a .csv file; the whole table has each number")
    if args.output:
        check_file(args.output, ATTENTION_TABLE if is_csv else SERVING, force=args.force)
    from pimflow.commands.command_line import options
    from pimflow.commands.generate.export import llmservingsim
    from pimflow.placement import Profiling

    target_system, cache = options.target_system(args), options.result_cache(args)
    with output.status(args) as progress:
        progress("timing attention")
        attention = llmservingsim(
            args.model, target_system, devices=args.devices, profiling=Profiling(cache=cache)
        )
    if cache is not None:
        cache.close()
    if args.output:
        contents = (
            attention.attention_csv(args.devices)
            if is_csv
            else f"{json.dumps(attention.to_json(), indent=1)}\n"
        )
        replace_file(args.output, contents.encode())
    if args.json:
        output.print_json(attention.to_json())
    else:
        print(attention.text() + (f"\nwrote     {args.output}" if args.output else ""))
