"""Options for what a command writes and prints."""

from __future__ import annotations

from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.host.files import FORCE


def force_option(sub: CommandParser) -> None:
    """Add the option to replace files, for commands that write files."""
    sub.option(
        "output",
        FORCE,
        action="store_true",
        help="write beside files of others, which stay; replace a file that pimflow did not write only if "
        "it is the one that is named, or changed since",
    )


def plot_option(sub: CommandParser, subject: str) -> None:
    """Add the option for a chart of the result."""
    sub.option("output", "--plot", metavar="FILE", help=f"draw {subject}: .png, .svg or .html")


def output_options(sub: CommandParser) -> None:
    """Add the options of every command."""
    sub.option("output", "--json", action="store_true", help="print JSON")
    sub.option("output", "--quiet", action="store_true", help="print no progress")
    sub.option("output", "-h", "--help", action="help", help="print this help and exit")
