"""``pimflow models``: the networks of the zoo."""

from __future__ import annotations

import argparse

from pimflow.cli import output
from pimflow.cli.command_parser import CommandParser

SUMMARY = "list the networks of the zoo"


def add_arguments(sub: CommandParser) -> None:
    """The command takes none of its own."""


def run(args: argparse.Namespace) -> None:
    """Print a line for every network."""
    from pimflow import zoo

    rows = [zoo.describe(name) for name in zoo.names()]
    if args.json:
        output.print_json([dict(row.__dict__) for row in rows])
        return
    print(f"{'model':<16} {'parameters':>12} {'GMAC':>8}  inputs")
    for row in rows:
        shapes = ", ".join(f"{name}={','.join(map(str, shape))}" for name, shape in row.inputs.items())
        trained = "  trained (docs/zoo.md)" if row.trained else ""
        print(f"{row.name:<16} {row.parameters:>12,} {row.macs / 1e9:>8.3f}  {shapes}{trained}")
