"""``pimflow report``: a compiled directory as a page."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output, output_options
from pimflow.commands.command_line.command_parser import CommandParser

SUMMARY = "write the page of a compiled directory: timeline, layers, energy, memory, to explore in a browser"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    sub.show_first("--output", "--json")
    sub.positional("directory", "DIR", "what 'pimflow compile -o' wrote")
    sub.option(
        "output", "-o", "--output", metavar="FILE", help="the page to write (default: report.html in DIR)"
    )
    output_options.force_option(sub)


def run(args: argparse.Namespace) -> None:
    """Write the page of the directory of `args`, and print its path."""
    from pimflow.commands.pages import pages

    written = pages.write_report(args.directory, args.output, force=args.force)
    output.print_page(written, args.json)
