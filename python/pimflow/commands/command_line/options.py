"""Options that several commands share, and their conversion to systems, goals and arguments of the API."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser, refuse
from pimflow.commands.shared.options import WHERE_HELP, NetworkOptions
from pimflow.core.goal import GoalOptions
from pimflow.core.options import declarations
from pimflow.core.rewrite import Mode
from pimflow.errors import UsageError

if TYPE_CHECKING:
    from pimflow.hardware import System
    from pimflow.host.result_cache import ResultCache
    from pimflow.placement import Profiling
    from pimflow.simulators.profiler import GpuProfiler, PimProfiler

# By --accounting, the timing of PIM if --timing is not set.
DEFAULT_TIMING = {"full": "strict", "paper": "ramulator-pimflow"}


# Networks.


def model_argument(sub: CommandParser, kinds: str = ".onnx or .pt2 file") -> None:
    """Add the argument for a network."""
    sub.positional("model", "MODEL", f"name of the zoo (see 'pimflow models') or {kinds}")


def models_argument(sub: CommandParser) -> None:
    """Add the argument for several networks."""
    sub.positional("models", "MODEL", "names of the zoo, .onnx or .pt2 files", nargs="+")


def network_options(sub: CommandParser) -> None:
    """Add options for loading and rewriting a network, before and during a search."""
    sub.add_fields(NetworkOptions)
    criterion_option(sub)


def criterion_option(sub: CommandParser) -> None:
    """Add the value of --optimize-skips, which has a flag of its own."""
    sub.option(
        "decomposition",
        "--skip-criterion",
        metavar="CRITERION",
        default="pool",
        help="which skips --optimize-skips keeps reduced: pool (those that make the planned pool smaller) or "
        "paper (those of TeMCO's algorithm 1; default: %(default)s)",
    )


def decompose_option(sub: CommandParser) -> None:
    """Add the option to decompose layers for a command without a search."""
    help_text = declarations(NetworkOptions)["decompose"].help.removesuffix(WHERE_HELP)
    sub.add_fields(NetworkOptions, "decompose", help=help_text)


def network(args: argparse.Namespace) -> dict[str, Any]:
    """Options for loading and rewriting a network, as keywords of the API."""
    keywords: dict[str, Any] = args.parser.keywords(args, NetworkOptions)
    if "optimize_skips" in keywords:
        if not args.optimize_skips:
            refuse(args, ["skip_criterion"], "says what --optimize-skips keeps; give that too")
        keywords["optimize_skips"] = args.skip_criterion if args.optimize_skips else None
    return keywords


# Systems.


def parse_count(text: str) -> int | str:
    """Parse a number, or ``auto``."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number nor auto") from None


def system_option(sub: CommandParser) -> None:
    """Add the option for the system, whose fields other options replace."""
    sub.option(
        "system", "--system", metavar="NAME|FILE", default="pimflow", help="system (default: %(default)s)"
    )


def system_fields(sub: CommandParser, *names: str, **details: Any) -> None:
    """Add options for fields of the system, which keep their value by default."""
    from pimflow.hardware import System  # loads NumPy

    sub.add_fields(System, *names, default=None, **details)


def system_options(sub: CommandParser, **details: Mapping[str, Any]) -> None:
    """Add options for the system, with `details` of some by field."""
    from pimflow.hardware import System

    system_option(sub)
    for name in declarations(System):
        system_fields(sub, name, **details.get(name, {}))


def goal_options(sub: CommandParser) -> None:
    """Add the options of a goal for a command that decomposes nothing."""
    without = ("max_error", "primitives")
    sub.add_fields(GoalOptions, *(name for name in declarations(GoalOptions) if name not in without))


def target_system(args: argparse.Namespace) -> System:
    """The system that the options of the command describe.

    Raises
    ------
    UsageError
        If one of them has no effect with the modes that layers may have.
    """
    from pimflow.hardware import System, system

    _require_modes(args)
    changes = args.parser.keywords(args, System)
    changes = {name: value for name, value in changes.items() if value != "auto"}  # chosen later
    if "accounting" in changes and not changes["timing"]:
        changes["timing"] = DEFAULT_TIMING.get((args.accounting or "").partition("+")[0])
    return system(getattr(args, "system", "pimflow"), **changes)


# Options of the system that only some modes heed, with these modes.
_MODES_OF_OPTIONS = {"splits": (Mode.SPLIT,), "scheduling": (Mode.PIM, Mode.SPLIT, Mode.PIPELINE)}


def _require_modes(args: argparse.Namespace) -> None:
    if getattr(args, "modes", None) is None:
        return
    allowed = GoalOptions(modes=args.modes).modes
    for name, modes in _MODES_OF_OPTIONS.items():
        if getattr(args, name, None) is not None and not set(modes) & set(allowed):
            raise UsageError(
                f"--{name} {getattr(args, name)} has no effect with --modes "
                f"{','.join(allowed).lower()}: leave it out, or allow {' or '.join(modes).lower()}"
            )


# Searches.


def profiling_options(sub: CommandParser) -> None:
    """Add options for the sources of times, and for their cache."""
    sub.option(
        "search",
        "--profiler",
        metavar="gpu=…|pim=…",
        action="append",
        default=[],
        help="where times come from, such as gpu=analytic or pim=ramulator:PATH; once for each device",
    )
    sub.option("search", "--jobs", metavar="N", type=int, help="worker processes (default: one a processor)")
    sub.option(
        "search",
        "--executor",
        metavar="NAME|dask://…",
        default="processes",
        help="what times PIM programs: processes, or a cluster at dask://HOST:PORT (default: %(default)s)",
    )
    cache_option(sub, "search")


def cache_option(sub: CommandParser, group: str) -> None:
    """Add the option for the cache of times."""
    sub.option(group, "--cache", metavar="FILE|none", help="where times are kept (default: $PIMFLOW_CACHE)")


def profilers(
    args: argparse.Namespace, gwrite_hiding: bool = True
) -> tuple[GpuProfiler | None, PimProfiler | None]:
    """The profilers of GPU and PIM that --profiler names; None for a device without one."""
    if args.timing and any(text.startswith("pim=") for text in args.profiler):
        raise UsageError("--profiler pim=… times PIM by rules of its own; leave out --timing")
    if not args.profiler:
        return None, None
    from pimflow.commands.shared.profilers import parse_profilers

    return parse_profilers(args.profiler, gwrite_hiding, lambda line: output.say(line, args.quiet))


def result_cache(args: argparse.Namespace) -> ResultCache | None:
    """The cache that --cache names."""
    from pimflow.host.result_cache import ResultCache, default_path

    return None if args.cache == "none" else ResultCache(args.cache or default_path())


@contextlib.contextmanager
def profiling(args: argparse.Namespace) -> Iterator[Profiling]:
    """The profiling of the options; closes the cache at the end, and warns if it could not be written."""
    from pimflow.host.executors import parse_executor
    from pimflow.placement import Profiling

    gpu, pim = profilers(args)
    executor = parse_executor(args.executor, args.jobs)
    cache = result_cache(args)
    with output.bar("timing layers", args) as advance:
        yield Profiling(
            **({"gpu": gpu} if gpu else {}),
            pim=pim,
            cache=cache,
            executor=executor,
            progress=lambda done, total: advance(done / total if total else 1.0),
        )
    if cache is not None:
        if cache.flaw:
            output.warn(cache.flaw, args.quiet)
        cache.close()
