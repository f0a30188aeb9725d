"""``pimflow decompose``: a network with decomposed layers, as an ONNX file."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output, output_options
from pimflow.commands.command_line.command_parser import CommandParser

SUMMARY = "write a network with decomposed layers as ONNX, to be trained further"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options
    from pimflow.commands.shared.inputs import InputOptions
    from pimflow.commands.shared.options import CalibrationOptions, NetworkOptions, ShapeOptions
    from pimflow.core.goal import GoalOptions

    sub.show_first("--output", "--decompose", "--calibration", "--shape", "--batch", "--json")
    options.model_argument(sub, ".onnx file")
    sub.option("output", "-o", "--output", metavar="FILE.onnx", required=True, help="model to write")
    output_options.force_option(sub)
    sub.add_fields(NetworkOptions, "decompose", required=True)
    sub.add_fields(NetworkOptions, "values")
    sub.add_fields(InputOptions)
    sub.add_fields(CalibrationOptions)
    sub.add_fields(ShapeOptions)
    options.system_options(sub)
    sub.add_fields(GoalOptions)
    options.profiling_options(sub)


def run(args: argparse.Namespace) -> None:
    """Decompose the network of `args`, write it and print how it compares with the original."""
    from pimflow.commands.command_line import options
    from pimflow.commands.memory.decompose import export_decomposed
    from pimflow.commands.shared.inputs import InputOptions
    from pimflow.core.goal import GoalOptions
    from pimflow.core.json_form import json_form
    from pimflow.decomposition.report import export_text

    with output.status(args) as progress, options.profiling(args) as profiling:
        network = options.network(args)
        report = export_decomposed(
            args.model,
            network.pop("decompose"),
            args.output,
            system=options.target_system(args),
            calibration=args.calibration,
            force=args.force,
            profiling=profiling,
            progress=progress,
            **network,
            **args.parser.keywords(args, GoalOptions, InputOptions),
        )
    if args.json:
        output.print_json(json_form(report))
    else:
        print(export_text(report))
