"""``pimflow compare``: plans side by side, as a page."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output, output_options
from pimflow.commands.command_line.command_parser import CommandParser

SUMMARY = "write a page with the plans of compiled directories side by side"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    sub.show_first("--output", "--json")
    sub.positional("directories", "DIR", "what 'pimflow compile -o' wrote; two or more", nargs="+")
    sub.option(
        "output",
        "-o",
        "--output",
        metavar="FILE",
        default="comparison.html",
        help="the page to write (default: %(default)s)",
    )
    output_options.force_option(sub)


def run(args: argparse.Namespace) -> None:
    """Write the page of the directories of `args`, and print its path."""
    from pimflow.commands.pages import pages

    written = pages.write_comparison(args.directories, args.output, force=args.force)
    output.print_page(written, args.json)
