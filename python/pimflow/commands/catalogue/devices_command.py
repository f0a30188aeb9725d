"""``pimflow devices``: PIM devices, GPUs and systems, with the sources of their figures."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.errors import UsageError

SUMMARY = "list PIM devices, GPUs and systems, or show one with its sources"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    sub.positional("device", "NAME|FILE", "device or system to show", nargs="?")
    sub.option("output", "--toml", action="store_true", help="print its file, to start one of your own from")


def run(args: argparse.Namespace) -> None:
    """Print the device of `args`, or all of them."""
    from pimflow.hardware import description

    if args.toml:
        if args.device is None:
            raise UsageError("--toml prints the file of one device; name it")
        if args.json:
            raise UsageError("--toml prints TOML, --json JSON; leave out one of both")
        print(description.file_text(args.device), end="")
        return
    if args.device is None:
        if args.json:
            output.print_json(description.catalogue())
        else:
            print(description.catalogue_text())
        return
    device = description.describe(description.load(args.device))
    if args.json:
        output.print_json(device)
    else:
        print(description.description_text(device))
