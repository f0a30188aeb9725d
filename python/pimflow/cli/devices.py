"""``pimflow devices``: PIM devices, GPUs and systems, with the sources of their figures."""

from __future__ import annotations

import argparse

from pimflow.cli import output
from pimflow.cli.command_parser import CommandParser

SUMMARY = "list PIM devices, GPUs and systems, or show one with its sources"


def add_arguments(sub: CommandParser) -> None:
    """Arguments of the command; `run` takes them."""
    sub.positional("device", "NAME|FILE", "device or system to show", nargs="?")


def run(args: argparse.Namespace) -> None:
    """Print the device of `args`, or all of them."""
    from pimflow.hardware import description

    if args.device is None:
        found = description.catalogue()
    else:
        found = description.describe(description.load(args.device))
    if args.json:
        output.print_json(found)
    else:
        print(description.catalogue_text() if args.device is None else description.description_text(found))
