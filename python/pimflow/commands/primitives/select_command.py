"""``pimflow select``: a convolution primitive and a layout for every layer, under a budget."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pimflow.commands.command_line import options, output, primitive_options
from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.errors import UsageError
from pimflow.host.files import PROFILE, check_file

if TYPE_CHECKING:
    from pimflow.host.result_cache import ResultCache
    from pimflow.primitive_selection.selection import Selection

SUMMARY = "choose a convolution primitive and a layout for every layer, within budgets of memory and time"
FRONT_BUDGETS = 12  # default number of budgets of a front that is drawn


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    options.model_argument(sub)
    options.network_options(sub)
    options.reorder_option(sub)
    options.decompose_option(sub, has_search=False)
    options.skip_options(sub)
    sub.option(
        "system",
        "--target",
        metavar="c|LLVM",
        default="",
        help="c: primitives as C, here or on the remote machine; LLVM: what code for the remote machine is "
        "made for, such as 'llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72', or the same with c for llvm "
        "(default: what the machine says of itself)",
    )
    sub.option(
        "system",
        "--gpu",
        metavar="NAME|FILE",
        help="GPU that is modelled, with --device cuda (default: the system's)",
    )
    sub.option(
        "primitives",
        "--profile",
        metavar="SOURCE|FILE",
        default="measured",
        help="where times come from: measured (on this machine or --device), predicted (from those that the "
        "cache holds), mixed (predicted, but measured where the choice relies on them), or FILE, a profile "
        "that -o wrote (default: %(default)s)",
    )
    primitive_options.add_options(sub)
    options.budget_option(sub, "primitives", "most memory, such as 50MiB")
    sub.option(
        "primitives", "--pareto", metavar="N", type=int, help="find a front of time and memory with N budgets"
    )
    options.cache_option(sub, "primitives")
    sub.option("output", "-o", "--output", metavar="FILE", help="write a profile of the times that were used")
    options.force_option(sub)
    options.plot_option(
        sub, f"the choice, with a front of {FRONT_BUDGETS} budgets unless --pareto says how many"
    )


def run(args: argparse.Namespace) -> None:
    """Select primitives for the network of `args` and print the result."""
    if args.pareto is not None and args.pareto < 2:
        raise UsageError(f"--pareto {args.pareto}: a front has at least 2 points")
    if args.pareto is not None and args.pareto > 1000:
        raise UsageError(f"--pareto {args.pareto}: each budget is a search; give at most 1000")
    if args.output:
        check_file(args.output, PROFILE, force=args.force)
    if args.plot:
        from pimflow.host import pictures

        pictures.check_format(args.plot, force=args.force)
    choices = primitive_options.selection(args, args.profile)
    points = FRONT_BUDGETS if args.plot and args.pareto is None else args.pareto
    choices |= {"memory_budget_bytes": options.budget_bytes(args)}
    choices |= {"target": args.target, "gpu": args.gpu, "pareto": points, **options.network(args)}
    from pimflow.commands.primitives.select import select
    from pimflow.core.json_form import json_form
    from pimflow.primitive_selection import selection

    cache = options.result_cache(args)
    with output.bar("measuring", args.quiet) as advance:
        result = select(args.model, cache=cache, progress=advance, **choices)
    if not args.quiet:
        _warn(result, cache)
    if args.output:
        result.profile.write(args.output)
    if args.plot:
        from pimflow.primitive_selection import figures

        figures.write(args.plot, result)
    if args.json:
        output.print_json(json_form(selection.summary(result)))
    else:
        print(selection.text(result))


def _warn(selection: Selection, cache: ResultCache | None) -> None:
    for (name, layer), reason in selection.profile.failed.items():
        output.warn(f"{name} could not be measured for {layer}: {reason}")
    if cache is not None and cache.flaw:
        output.warn(cache.flaw)
