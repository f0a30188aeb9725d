"""``pimflow serve-sim``: a server of a language model under load, with PIM and on the GPU alone."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser

SUMMARY = "serve requests of a language model over simulated time, and say what they wait for"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options
    from pimflow.commands.serve.options import ServeOptions
    from pimflow.core.goal import GoalOptions
    from pimflow.core.options import declarations

    sub.show_first(
        "--trace", "--rate", "--requests", "--lengths", "--seed", "--max-batch", "--system", "--json"
    )
    sub.positional("model", "MODEL", "language model of the zoo, .gguf file, or folder with config.json")
    sub.add_fields(ServeOptions)
    options.system_options(sub)
    without = ("max_error", "primitives")  # nothing is decomposed
    sub.add_fields(GoalOptions, *(name for name in declarations(GoalOptions) if name not in without))
    options.profiling_options(sub)


def run(args: argparse.Namespace) -> None:
    """Serve the requests, and print the figures."""
    from pimflow.commands.command_line import options
    from pimflow.commands.serve.options import ServeOptions
    from pimflow.commands.serve.serve import serve_sim
    from pimflow.core.goal import GoalOptions

    target_system = options.target_system(args)
    keywords = args.parser.keywords(args, ServeOptions, GoalOptions)
    with output.status(args) as progress, options.profiling(args) as profiling:
        serving = serve_sim(
            args.model, system=target_system, profiling=profiling, progress=progress, **keywords
        )
    output.show(serving, args.json)
