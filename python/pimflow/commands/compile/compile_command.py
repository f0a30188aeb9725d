"""``pimflow compile``: search a plan for a network, build it, run it and verify it."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import options, output, primitive_options, streams
from pimflow.commands.command_line.command_parser import CommandParser, refuse

SUMMARY = "search, compile, run and verify a network"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    sub.show_first(
        *("--output", "--shape", "--batch", "--target", "--system", "--pim-channels", "--dtype"),
        *("--objective", "--explain", "--json"),
    )
    options.model_argument(sub)
    sub.option("output", "-o", "--output", metavar="DIR", help="compiled directory to write")
    options.force_option(sub)
    options.network_options(sub)
    options.target_option(sub, "what to build for")
    options.system_options(sub, auto=True)
    options.goal_options(sub)
    options.plan_option(sub)
    options.rewriting_options(sub)
    options.profiling_options(sub)
    options.calibration_option(sub)
    sub.option(
        "search",
        "--pareto",
        metavar="N",
        type=int,
        help="find a front too: at most N plans, none as good as another in latency, energy and memory; with "
        "-o, DIR/front has their files",
    )
    options.plot_option(sub, "the front")
    sub.option(
        "search",
        "--conventions",
        metavar="none|all|NAME,…",
        default="all",
        help="other conventions than the system's to search under once the network is verified and written, "
        "such as pim-launch=0,accounting=paper (default: %(default)s)",
    )
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
    primitive_options.add_options(sub)
    sub.option(
        "output", "--explain", metavar="REGION", help="print every candidate of a region, and write nothing"
    )
    sub.option(
        "output", "--layers", action="store_true", help="print every layer, and how the plan was found"
    )
    sub.option(
        "output", "--emit-traces", action="store_true", help="write .pim traces, a file a channel (large)"
    )
    sub.option(
        "output",
        "--dump-ir",
        metavar="FOLDER",
        help="write the module after every pass to a directory, numbered, as TVMScript",
    )
    sub.option(
        "output",
        "--tolerance",
        metavar="X",
        type=float,
        help="largest error of the outputs, as a fraction of their largest value (default: 2e-3 in fp16, "
        "1e-5 in fp32, or twice what roundings alone do to the reference)",
    )


def run(args: argparse.Namespace) -> None:
    """Compile the network of `args`, or explain a region of it, and print the result."""
    _check(args)
    goal, network = options.goal(args), options.network(args)
    target_system = options.target_system(args)
    network["select"] = primitive_options.selection(args, args.select) if args.select else None
    from pimflow.commands.compile.channel_counts import choose_channels
    from pimflow.commands.compile.compile import compile
    from pimflow.commands.compile.conventions import NONE, convention_names
    from pimflow.commands.compile.explain import explain
    from pimflow.commands.shared import front
    from pimflow.commands.shared.report_text import conventions_text, summary, table
    from pimflow.commands.shared.search import search

    convention_names(args.conventions, target_system)  # raises for an unknown name before the work
    auto = args.pim_channels if args.pim_channels == "auto" else None
    with options.profiling(args) as profiling:
        keywords = {"target": args.target, "profiling": profiling, **network, **goal}
        if args.explain is not None:
            with output.status(args.quiet) as progress:
                if auto:
                    choice = choose_channels(args.model, target_system, progress=progress, **keywords)
                    target_system = choice.system
                progress("searching")
                search_result = search(args.model, target_system, plan=args.plan, **keywords)
            output.show(explain(search_result, search_result.graph.region(args.explain)), args.json)
            return
        with output.status(args.quiet) as progress:
            compiled = compile(
                args.model,
                args.output,
                target_system=target_system,
                pim_channels=auto,
                plan=args.plan,
                calibration=args.calibration,
                tolerance=args.tolerance,
                pareto=args.pareto,
                conventions=NONE,
                emit_traces=args.emit_traces,
                dump_ir=args.dump_ir,
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
        with output.status(args.quiet) as progress:
            report = compiled.with_conventions(args.conventions, progress).report
    if args.json:
        output.print_json(report.to_json())
    elif report.conventions.searched:
        print(conventions_text(report))


def _check(args: argparse.Namespace) -> None:
    from pimflow.host import pictures

    if args.explain is not None:
        unused = ["output", "emit_traces", "dump_ir", "tolerance", "calibration", "pareto", "plot", "layers"]
        unused += ["conventions"]
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
        refuse(args, primitive_options.CHOICES, "says which primitives --select chooses; give that too")
