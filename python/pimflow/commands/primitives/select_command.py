"""``pimflow select``: a convolution primitive and a layout for every layer, under a budget."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pimflow.commands.command_line import output, output_options
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
    from pimflow.commands.command_line import options, primitive_options
    from pimflow.commands.shared.options import NetworkOptions
    from pimflow.primitive_selection.options import SelectionOptions

    options.model_argument(sub)
    sub.add_fields(NetworkOptions, "shapes", "batch", "context", "states", "reorder")
    options.decompose_option(sub)
    sub.add_fields(NetworkOptions, "optimize_skips")
    options.criterion_option(sub)
    sub.add_fields(SelectionOptions, "target", "gpu", "profile", *primitive_options.FIELDS)
    sub.add_fields(SelectionOptions, "memory_budget_bytes", "pareto")
    options.cache_option(sub, "primitives")
    sub.option("output", "-o", "--output", metavar="FILE", help="write a profile of the times that were used")
    output_options.force_option(sub)
    output_options.plot_option(
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
    from pimflow.commands.command_line import options, primitive_options

    keywords = primitive_options.selection(args, args.profile) | options.network(args)
    if args.plot and args.pareto is None:
        keywords["pareto"] = FRONT_BUDGETS
    from pimflow.commands.primitives.select import select
    from pimflow.core.json_form import json_form
    from pimflow.primitive_selection import selection

    cache = options.result_cache(args)
    with output.bar("measuring", args) as advance:
        result = select(args.model, cache=cache, progress=advance, **keywords)
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
