"""``pimflow best``: the best points of a sweep."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser

SUMMARY = "print the best point of each network of a sweep"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    sub.positional("directory", "SWEEP", "what 'pimflow sweep -o' wrote")
    sub.option(
        "search",
        "--within",
        metavar="COLUMN<VALUE",
        action="append",
        default=[],
        help="a condition on a column of sweep.csv, with <, <=, >, >=, = or !=, such as 'energy_pj<2e9'; "
        "repeat it for each",
    )
    sub.option(
        "search",
        "--objective",
        metavar="NAME",
        default="latency",
        help="what is best: latency, energy, edp or speedup (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    """Print the best points."""
    from pimflow.commands.sweep.best import best_points

    output.show(best_points(args.directory, args.within, args.objective), args.json)
