"""``pimflow completion``: a script that completes command lines in a shell."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.errors import UnknownNameError

SUMMARY = "print a script that completes commands and options in a shell"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    sub.positional("shell", "SHELL", "bash, zsh, fish, tcsh or powershell")


def run(args: argparse.Namespace) -> None:
    """Print the script of a shell."""
    import shtab

    if args.shell not in shtab.SUPPORTED_SHELLS:
        raise UnknownNameError("shell", args.shell, shtab.SUPPORTED_SHELLS)
    script = shtab.complete(args.full_parser(), args.shell)
    if args.json:
        output.print_json({"shell": args.shell, "script": script})
    else:
        print(script)
