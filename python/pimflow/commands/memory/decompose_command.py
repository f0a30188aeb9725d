"""``pimflow decompose``: a network with decomposed layers, as an ONNX file."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import options, output
from pimflow.commands.command_line.command_parser import CommandParser

SUMMARY = "write a network with decomposed layers as ONNX, to be trained further"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    sub.show_first("--output", "--decompose", "--calibration", "--shape", "--batch", "--json")
    options.model_argument(sub, ".onnx file")
    sub.option("output", "-o", "--output", metavar="FILE.onnx", required=True, help="model to write")
    options.force_option(sub)
    options.decompose_option(sub, required=True)
    options.calibration_option(sub)
    options.network_options(sub, states=False)
    options.system_options(sub)
    options.goal_options(sub)
    options.profiling_options(sub)


def run(args: argparse.Namespace) -> None:
    """Decompose the network of `args`, write it and print how it compares with the original."""
    from pimflow.commands.memory.decompose import export_decomposed
    from pimflow.core.json_form import json_form
    from pimflow.decomposition.report import export_text

    with output.status(args.quiet) as progress, options.profiling(args) as profiling:
        network = options.network(args)
        report = export_decomposed(
            args.model,
            network.pop("decompose"),
            args.output,
            target_system=options.target_system(args),
            calibration=args.calibration,
            force=args.force,
            profiling=profiling,
            progress=progress,
            **network,
            **options.goal(args),
        )
    if args.json:
        output.print_json(json_form(report))
    else:
        print(export_text(report))
