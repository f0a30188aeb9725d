"""Options that several commands share, and their conversion to systems, goals and arguments of the API."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser, refuse
from pimflow.errors import UsageError
from pimflow.host.files import FORCE

if TYPE_CHECKING:
    from pimflow.hardware import System
    from pimflow.host.result_cache import ResultCache
    from pimflow.placement import Profiling
    from pimflow.simulators.profiler import GpuProfiler, PimProfiler

# By --accounting, the timing of PIM if --timing is not set.
TIMING_OF = {"full": "strict", "paper": "ramulator-pimflow"}


# Networks.


def model_argument(sub: CommandParser, kinds: str = ".onnx or .pt2 file") -> None:
    """Add the argument for a network."""
    sub.positional("model", "MODEL", f"name of the zoo (see 'pimflow models') or {kinds}")


def models_argument(sub: CommandParser) -> None:
    """Add the argument for several networks."""
    sub.positional("models", "MODEL", "names of the zoo, .onnx or .pt2 files", nargs="+")


def network_options(sub: CommandParser, *, states: bool = True) -> None:
    """Add options for the shapes of a network, and with `states` for its caches."""
    sub.option(
        "network",
        "--shape",
        metavar="NAME=1,3,224,224",
        action="append",
        default=[],
        help="shape of an input whose file leaves it open; repeat it for each input",
    )
    sub.option(
        "network",
        "--batch",
        metavar="N",
        type=int,
        help="inferences at once, for a network that is made for one",
    )
    if not states:
        return
    sub.option(
        "network",
        "--context",
        metavar="N",
        type=int,
        help="of a decoder (.onnx, .pt2, or of the zoo): caches of N tokens, which stay where they are from "
        "step to step",
    )
    sub.option(
        "network",
        "--state",
        metavar="PAST=PRESENT",
        action="append",
        default=[],
        help="with --context: an input that is a cache, and the output that it becomes, where names and "
        "shapes do not tell; repeat it for each",
    )


def target_option(sub: CommandParser, purpose: str) -> None:
    """Add the option for the target of a build."""
    sub.option(
        "system",
        "--target",
        metavar="TARGET",
        default="llvm+pim",
        help=f"{purpose}: llvm+pim, cuda+pim or c (default: %(default)s)",
    )


def reorder_option(sub: CommandParser) -> None:
    """Add the option for another order of layers."""
    sub.option(
        "memory",
        "--reorder",
        action="store_true",
        help="run the layers of a network in another order where that takes less memory",
    )


def fuse_option(sub: CommandParser) -> None:
    """Add the option for fused layers as candidates."""
    sub.option(
        "search",
        "--fuse",
        action="store_true",
        help="allow neighbouring layers as one GPU kernel over shared memory, in tiles, where that is faster",
    )


def decompose_option(sub: CommandParser, *, required: bool = False, has_search: bool = True) -> None:
    """Add the option to decompose layers, which changes results; `has_search` documents ``where=pays``."""
    pays = (
        ", ',where=pays' to replace only layers that a search finds cheaper so, by the best of several "
        "ranks, such as tucker:0.1:0.25"
    )
    sub.option(
        "decomposition",
        "--decompose",
        required=required,
        metavar="METHOD:RANK",
        help="replace layers by chains of smaller ones. METHOD is tucker, cp or tt. RANK is a ratio, "
        "energy=SHARE, vbmf or a .toml file. Append ',first=keep' to keep the first convolution, "
        f"',fc=decompose' to replace fully connected layers too{pays if has_search else ''}",
    )


def skip_options(sub: CommandParser) -> None:
    """Add options for skip connections of decomposed networks."""
    sub.option(
        "decomposition",
        "--optimize-skips",
        action="store_true",
        help="keep skip connections in their reduced form until they are used",
    )
    sub.option(
        "decomposition",
        "--skip-criterion",
        metavar="CRITERION",
        default="pool",
        help="which skips --optimize-skips keeps reduced: pool (those that make the planned pool smaller) or "
        "paper (those of TeMCO's algorithm 1; default: %(default)s)",
    )


def chain_options(sub: CommandParser) -> None:
    """Add options for rewrites of decomposed layers."""
    skip_options(sub)
    sub.option(
        "decomposition",
        "--fuse-activations",
        action="store_true",
        help="run the end of a chain, activation, pooling and the start of the next chain as one kernel",
    )


def rewriting_options(sub: CommandParser) -> None:
    """Add options for rewrites of a network before and during a search."""
    fuse_option(sub)
    reorder_option(sub)
    decompose_option(sub)
    chain_options(sub)


def calibration_option(sub: CommandParser) -> None:
    """Add the option for samples to evaluate a decomposed network."""
    sub.option(
        "decomposition",
        "--calibration",
        metavar="FILE.npz",
        help="samples by input name, and perhaps 'labels', on which the report compares the decomposed "
        "network with the original",
    )


def network(args: argparse.Namespace) -> dict[str, Any]:
    """Options for loading and rewriting a network, as keywords of the API.

    Options that the command does not have are left out.
    """
    from pimflow import zoo

    options: dict[str, Any] = {"shapes": dict(map(zoo.parse_shape, args.shape))}
    if hasattr(args, "state"):
        options["states"] = dict(map(_state, args.state))
        if options["states"] and args.context is None:
            raise UsageError("--state: says which caches --context keeps; give that too")
    names = ("batch", "context", "decompose", "fuse_activations", "fuse", "reorder")
    options |= {name: getattr(args, name) for name in names if hasattr(args, name)}
    if hasattr(args, "optimize_skips"):
        if not args.optimize_skips:
            refuse(args, ["skip_criterion"], "says what --optimize-skips keeps; give that too")
        options["optimize_skips"] = args.skip_criterion if args.optimize_skips else None
    return options


def _state(text: str) -> tuple[str, str]:
    past, equals, present = text.partition("=")
    if not (past and equals and present):
        raise UsageError(f"--state {text}: give an input and an output, such as past_key=present_key")
    return past, present


# Systems.


def _parse_channel_count(text: str) -> int | str:
    """Parse a number of channels, or ``auto``."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number nor auto") from None


def device_options(
    sub: CommandParser, gpu: str = "GPU", timing: str = "PIM's timing", *, auto: bool = False
) -> None:
    """Add options for those fields of a system that matter to a single layer.

    `gpu` and `timing` are the help of their options.

    With `auto`, the number of channels that have PIM may be searched.
    """
    from pimflow.hardware.systems import SCHEDULINGS

    sub.option("system", "--gpu", metavar="NAME|FILE", help=f"{gpu} (default: the system's)")
    sub.option("system", "--pim", metavar="NAME|FILE", help="PIM device (default: the system's)")
    sub.option(
        "system",
        "--pim-channels",
        metavar="N|auto" if auto else "N",
        type=_parse_channel_count if auto else int,
        help="memory channels that have PIM"
        + ("; auto: as many as are best for the network, of eighths of all" if auto else ""),
    )
    timing_option(sub, timing)
    sub.choice("system", "--scheduling", "LEVEL", "loop orders of PIM", SCHEDULINGS)


def timing_option(sub: CommandParser, purpose: str = "PIM's timing", default: str = "") -> None:
    """Add the option for PIM's timing rules."""
    from pimflow.hardware.systems import TIMINGS

    default_text = f" (default: {default})" if default else ""
    sub.option("system", "--timing", metavar="RULES", help=f"{purpose}: {', '.join(TIMINGS)}{default_text}")


def system_option(sub: CommandParser) -> None:
    """Add the option for the system, whose fields other options replace."""
    sub.option(
        "system", "--system", metavar="NAME|FILE", default="pimflow", help="system (default: %(default)s)"
    )


def system_options(sub: CommandParser, *, auto: bool = False) -> None:
    """Add options for the system; for `auto` see `device_options`."""
    from pimflow.core.region import NETWORK_DTYPES
    from pimflow.hardware.systems import ACCOUNTINGS, CHARGES, COPIES, LAUNCHES, PADDINGS, SHARINGS, SPLITS

    system_option(sub)
    device_options(sub, auto=auto)
    sub.choice("system", "--dtype", "TYPE", "storage type", NETWORK_DTYPES)
    sub.option(
        "system", "--copies", metavar="HOW", help=f"copies of parts of tensors are {' or '.join(COPIES)}"
    )
    sub.choice("system", "--padding", "HOW", "padding of GPU convolutions", PADDINGS)
    splits = "splits of layers, at the best place or at tenths of their rows"
    sub.choice("system", "--splits", "HOW", splits, SPLITS)
    sharing = "who uses the channels that have PIM: GPU kernels too while no PIM program runs, or PIM alone"
    sub.choice("system", "--channel-sharing", "HOW", sharing, SHARINGS)
    launches = "a launch begins when its task could, or is issued while the task before it runs"
    sub.choice("system", "--launches", "HOW", f"{launches}, on the GPU alone too", LAUNCHES)
    sub.option(
        "system",
        "--accounting",
        metavar="HOW",
        help=f"what is charged: {', '.join(ACCOUNTINGS)}, or paper+… with some of {', '.join(CHARGES)}",
    )


def target_system(args: argparse.Namespace) -> System:
    """The system that `system_options` describe."""
    from pimflow.hardware import system

    timing = args.timing or TIMING_OF.get((args.accounting or "").partition("+")[0])
    names = ("gpu", "pim", "scheduling", "copies", "padding", "splits", "channel_sharing", "launches")
    changes = {name: getattr(args, name) for name in (*names, "accounting", "dtype")}
    pim_channels = None if args.pim_channels == "auto" else args.pim_channels
    return system(args.system, pim_channels=pim_channels, timing=timing, **changes)


# Searches.


def goal_options(sub: CommandParser, *, errors: bool = True) -> None:
    """Add options for the goal of a search; with `errors` a bound on errors of decomposed layers."""
    sub.option(
        "search",
        "--objective",
        metavar="WHAT",
        default="latency",
        help="what is minimised: latency, energy, edp (latency times energy) or memory (the pool that "
        "is built) (default: %(default)s)",
    )
    sub.option(
        "search",
        "--solver",
        metavar="NAME",
        default="label",
        help="label: label-setting search over partial plans; exhaustive: every plan, of at most 8 regions "
        "(default: %(default)s)",
    )
    sub.option(
        "search",
        "--search-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="how long a search is exact; what it finds after that is reported with its gap (default: "
        "%(default)g)",
    )
    sub.option(
        "search",
        "--modes",
        metavar="MODE,…",
        default="gpu,pim,split,pipeline",
        help="ways in which layers may run; gpu is always one of them (default: %(default)s)",
    )
    sub.option("search", "--max-latency", metavar="X[ns|us|ms]", help="take no plan that is slower")
    sub.option("search", "--max-energy", metavar="X[pJ|nJ|uJ|mJ]", help="take no plan that needs more energy")
    if errors:
        sub.option(
            "search",
            "--max-error",
            metavar="X",
            type=float,
            help="with --decompose: take no plan whose layers have errors of a larger sum, each a share of "
            "the largest output (with --calibration) or of the norm of the filters",
        )
    budget_option(sub, "memory", "take no plan that needs more memory, such as 50MiB")


def budget_option(sub: CommandParser, group: str, purpose: str) -> None:
    """Add the option for a bound on memory."""
    sub.option(group, "--memory-budget", metavar="BYTES", help=purpose)


def budget_bytes(args: argparse.Namespace) -> int | None:
    """The value of `budget_option` in bytes."""
    from pimflow.fusion import parse_bytes

    return None if args.memory_budget is None else parse_bytes(args.memory_budget, "--memory-budget")


def plan_option(sub: CommandParser) -> None:
    """Add the option for a plan in place of a search."""
    sub.option(
        "search",
        "--plan",
        metavar="FILE",
        help="apply this plan.json instead of searching; change a layer's mode or gpu_share in a "
        "copy first, and remove 'channels' everywhere",
    )


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


def goal(args: argparse.Namespace) -> dict[str, Any]:
    """The goal of the search, as keywords of the API."""
    from pimflow.placement.solvers.objectives import ENERGY_UNITS, LATENCY_UNITS, quantity

    names = ("objective", "solver", "search_seconds", "modes", "max_error")
    fields = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if args.max_latency is not None:
        fields["max_latency_ns"] = quantity(args.max_latency, LATENCY_UNITS, "--max-latency")
    if args.max_energy is not None:
        fields["max_energy_pj"] = quantity(args.max_energy, ENERGY_UNITS, "--max-energy")
    return fields | {"max_memory_bytes": budget_bytes(args)}


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
    with output.bar("timing layers", args.quiet) as advance:
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


# Output.


def force_option(sub: CommandParser) -> None:
    """Add the option to replace files, for commands that write files."""
    sub.option(
        "output",
        FORCE,
        action="store_true",
        help="write beside files of others, which stay; replace a file that pimflow did not write only if "
        "it is the one that is named, or changed since",
    )


def plot_option(sub: CommandParser, subject: str) -> None:
    """Add the option for a chart of the result."""
    sub.option("output", "--plot", metavar="FILE", help=f"draw {subject}: .png, .svg or .html")


def output_options(sub: CommandParser) -> None:
    """Add the options of every command."""
    sub.option("output", "--json", action="store_true", help="print JSON")
    sub.option("output", "--quiet", action="store_true", help="print no progress")
    sub.option("output", "-h", "--help", action="help", help="print this help and exit")
