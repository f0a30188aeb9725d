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
    sub.option("output", "-q", "--quiet", action="store_true", help="print no progress")
    sub.option(
        "output", "-v", "--verbose", action="store_true", help="print a line for each step, and its time"
    )
    sub.option(
        "output",
        "--show-config",
        action="store_true",
        help="print the value of each option, and whether it is from the command line, a pimflow.toml or a "
        "default; do nothing else",
    )
    sub.option("output", "-h", "--help", action="help", help="print this help and exit")
