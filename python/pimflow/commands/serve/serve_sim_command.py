"""``pimflow serve-sim``: a server of a language model under load, with PIM and on the GPU alone."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output, output_options
from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.host.files import STEP_TABLE, check_file

SUMMARY = "serve requests of a language model over simulated time, and say what they wait for"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options
    from pimflow.commands.serve.options import ServeOptions

    sub.show_first(
        "--trace", "--rate", "--requests", "--lengths", "--seed", "--max-batch", "--system", "--json"
    )
    sub.positional("model", "MODEL", "language model of the zoo, .gguf file, or folder with config.json")
    sub.add_fields(ServeOptions)
    options.system_options(sub)
    options.goal_options(sub)
    options.profiling_options(sub)
    sub.option("output", "--save-steps", metavar="FILE.json", help="write the costs of steps, for --steps")
    output_options.force_option(sub)


def run(args: argparse.Namespace) -> None:
    """Serve the requests, and print the figures."""
    from pimflow.commands.command_line import options
    from pimflow.commands.serve.options import ServeOptions
    from pimflow.commands.serve.serve import serve_sim
    from pimflow.core.goal import GoalOptions

    if args.save_steps:
        check_file(args.save_steps, STEP_TABLE, force=args.force)
    target_system = options.target_system(args)
    keywords = args.parser.keywords(args, ServeOptions, GoalOptions)
    with output.status(args) as progress, options.profiling(args) as profiling:
        serving = serve_sim(
            args.model, system=target_system, profiling=profiling, progress=progress, **keywords
        )
    if args.save_steps:
        serving.steps.save(args.save_steps)
    output.show(serving, args.json)
