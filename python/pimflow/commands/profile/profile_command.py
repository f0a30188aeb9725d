"""``pimflow profile``: time the candidates of a search, and cache the times."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser

SUMMARY = "time everything that a search needs, and keep it"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options

    options.models_argument(sub)
    options.network_options(sub)
    options.system_options(sub)
    options.profiling_options(sub)


def run(args: argparse.Namespace) -> None:
    """Time the candidates of the networks of `args`, and print their numbers."""
    from pimflow.commands.command_line import options
    from pimflow.commands.profile import profile

    network = options.network(args)
    with options.profiling(args) as profiling:
        report = profile.profile(args.models, options.target_system(args), profiling, **network)
    output.show(report, args.json)
