"""``pimflow compile``: search a plan for a network, build it, run it and verify it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pimflow.commands.command_line import output, output_options, streams
from pimflow.commands.command_line.command_parser import CommandParser, refuse

if TYPE_CHECKING:
    from pimflow.hardware import System

SUMMARY = "search, compile, run and verify a network"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options, primitive_options
    from pimflow.commands.compile.options import CompileOptions
    from pimflow.commands.shared.search_arguments import SearchArguments
    from pimflow.core.goal import GoalOptions
    from pimflow.primitive_selection.options import SelectionOptions

    sub.show_first(
        *("--output", "--shape", "--batch", "--target", "--system", "--pim-channels", "--dtype"),
        *("--objective", "--explain", "--json"),
    )
    options.model_argument(sub)
    sub.option("output", "-o", "--output", metavar="DIR", help="compiled directory to write")
    output_options.force_option(sub)
    options.network_options(sub)
    sub.add_fields(SearchArguments, "target")
    options.system_options(
        sub,
        pim_channels={
            "metavar": "N|auto",
            "type": options.parse_count,
            "help": "memory channels that have PIM; auto: as many as are best for the network, of eighths of "
            "all",
        },
        copy_ahead={
            "metavar": "N|auto",
            "type": options.parse_count,
            "help": "with streamed weights, begin each copy so many kernels before its weight is used: more "
            "memory, less waiting; auto: what is fastest within --memory-budget",
        },
    )
    sub.add_fields(GoalOptions)
    sub.add_fields(SearchArguments, "plan")
    options.profiling_options(sub)
    sub.add_fields(CompileOptions, "inputs", "input_values", "calibration", "pareto", "conventions")
    output_options.plot_option(sub, "the front")
    sub.option(
        "primitives",
        "--select",
        metavar="measured|predicted|mixed|FILE",
        nargs="?",
        const="measured",
        help="choose a primitive for every convolution that PIM does not do, for this machine's CPU, by the "
        "options below and by times as 'pimflow select --profile' takes them (without a value: measured). "
        "With --device cuda, primitives of the GPU are candidates of the plan",
    )
    sub.add_fields(SelectionOptions, *primitive_options.FIELDS)
    sub.option(
        "output", "--explain", metavar="REGION", help="print every candidate of a region, and write nothing"
    )
    sub.option(
        "output", "--layers", action="store_true", help="print every layer, and how the plan was found"
    )
    sub.add_fields(CompileOptions, "check_kernels", "cuda_graphs", "emit_traces", "dump_ir", "tolerance")


def run(args: argparse.Namespace) -> None:
    """Compile the network of `args`, or explain a region of it, and print the result."""
    from pimflow.commands.command_line import options, primitive_options
    from pimflow.commands.compile.conventions import convention_names
    from pimflow.commands.shared.search_arguments import SearchArguments
    from pimflow.core.goal import GoalOptions

    _check(args)
    keywords = args.parser.keywords(args, SearchArguments, GoalOptions) | options.network(args)
    target_system = options.target_system(args)
    keywords["select"] = primitive_options.selection(args, args.select) if args.select else None
    convention_names(args.conventions, target_system)  # raises for an unknown name before the work
    with options.profiling(args) as profiling:
        keywords["profiling"] = profiling
        if args.explain is not None:
            _explain(args, target_system, keywords)
        else:
            _compile(args, target_system, keywords)


def _explain(args: argparse.Namespace, target_system: System, keywords: dict[str, Any]) -> None:
    """Print every candidate of a region."""
    from pimflow.commands.compile.explain import explain
    from pimflow.commands.compile.system_choices import choose_channels
    from pimflow.commands.shared.search import search

    with output.status(args) as progress:
        if args.pim_channels == "auto":
            del keywords["plan"]
            target_system = choose_channels(args.model, target_system, progress=progress, **keywords).system
        progress("searching")
        search_result = search(args.model, target_system, **keywords)
    output.show(explain(search_result, search_result.graph.region(args.explain)), args.json)


def _compile(args: argparse.Namespace, target_system: System, keywords: dict[str, Any]) -> None:
    """Compile, and print the report as it comes."""
    from pimflow.commands.compile.compile import compile
    from pimflow.commands.compile.options import NONE, CompileOptions
    from pimflow.commands.shared import front
    from pimflow.commands.shared.report_text import conventions_text, summary, table

    keywords |= args.parser.keywords(args, CompileOptions) | {"conventions": NONE}
    with output.status(args) as progress:
        compiled = compile(
            args.model,
            args.output,
            system=target_system,
            pim_channels=args.pim_channels if args.pim_channels == "auto" else None,
            copy_ahead=args.copy_ahead if args.copy_ahead == "auto" else None,
            force=args.force,
            progress=progress,
            **keywords,
        )
    report = compiled.report
    if args.plot:
        front.draw(args.plot, report.extras.front or (), f"{report.model} on {report.system.name}")
    if not args.json:
        print((table if args.layers else summary)(report, args.output))
        streams.deliver()  # the rest takes a while, and may be interrupted
    with output.status(args) as progress:
        report = compiled.with_conventions(args.conventions, progress).report
    if args.json:
        output.print_json(report.to_json())
    elif report.conventions.searched:
        print(conventions_text(report))


def _check(args: argparse.Namespace) -> None:
    from pimflow.commands.command_line import primitive_options
    from pimflow.host import pictures

    if args.explain is not None:
        unused = ["output", "emit_traces", "dump_ir", "tolerance", "calibration", "pareto", "plot", "layers"]
        unused += ["inputs", "input_values", "conventions", "check_kernels", "cuda_graphs"]
        unused += ["target", "select"] if args.device != "cuda" else []  # a GPU's primitives are candidates
        if args.pim_channels == "auto":
            refuse(args, ["plan"], "--pim-channels auto searches plans; give a number of channels")
        refuse(args, unused, "--explain prints candidates, and makes nothing; leave out one of both")
    if not args.output:
        refuse(args, ["emit_traces"], "give a directory to write them to, with -o")
    if args.pareto is None:
        refuse(args, ["plot"], "draws the front of --pareto; give that too")
    if args.plot:
        pictures.check_format(args.plot, force=args.force)
    if not args.select:
        refuse(args, primitive_options.FIELDS, "says which primitives --select chooses; give that too")
