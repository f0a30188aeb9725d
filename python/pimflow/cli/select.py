"""``pimflow select``: a convolution primitive and a layout for every layer, under a budget."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

from pimflow.errors import UsageError
from pimflow.host.files import check_file

SUMMARY = "choose a convolution primitive and a layout for every layer, within budgets of memory and time"


# What `choice_options` adds.
CHOICES = ("minimize", "memory_budget", "time_budget", "memory_model", "device", "measure")
DRAWN = 12  # budgets of a front that is drawn


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Arguments of the command; `run` takes them."""
    sub.add_argument("model", metavar="MODEL", help="name of the zoo ('pimflow models'), .onnx or .pt2 file")
    choice_options(sub)
    sub.add_argument(
        "--pareto", metavar="N", type=int, help="a front of time and memory (or workspace) with N budgets"
    )
    sub.add_argument(
        "--profile",
        metavar="measured|predicted|mixed|FILE",
        default="measured",
        help="times: measured here; predicted from those that the cache holds; mixed: predicted, but those "
        "that are relied on measured; or of a file that -o wrote (default: %(default)s)",
    )
    sub.add_argument(
        "--plot",
        metavar="FILE",
        help="draw it, with a front of 12 budgets unless --pareto: .png, .svg or .html",
    )
    sub.add_argument(
        "--target",
        metavar="c|LLVM",
        default="",
        help="c: primitives as C, here or on the remote machine; or what code for the remote machine is made "
        "for, such as 'llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72', or the same with c for llvm "
        "(default: what it says of itself)",
    )
    sub.add_argument(
        "--gpu",
        metavar="NAME|FILE",
        help="with --device cuda: the GPU that is modelled (default: the system's)",
    )
    sub.add_argument("-o", "--output", metavar="FILE", help="write the times that were used, as a profile")
    sub.add_argument("--cache", metavar="FILE|none", help="where times are kept (default: PIMFLOW_CACHE)")


def choice_options(sub: argparse.ArgumentParser) -> None:
    """What is chosen, and by which times."""
    sub.add_argument(
        "--minimize", default="time", help="time, memory, workspace: of a layer (default: %(default)s)"
    )
    sub.add_argument("--memory-budget", metavar="BYTES", help="at most this memory, such as 50MiB")
    sub.add_argument("--time-budget", metavar="X[ns|us|ms|s]", help="at most this time, such as 12ms")
    sub.add_argument(
        "--memory-model",
        default="liveness",
        help="liveness: what is live at once; sum: over all layers, as in the paper (default: %(default)s)",
    )
    sub.add_argument(
        "--device",
        metavar="cuda|rpc:HOST:PORT[/KEY]|NAME",
        help="cuda: primitives for a GPU; rpc: another machine to measure, by TVM's RPC: a server, or what a "
        "tracker calls KEY; or the NAME of the one that a profile's FILE is of, if not this one",
    )
    sub.add_argument(
        "--measure",
        metavar="N",
        default=None,
        help="primitives of each layer to measure at most, the promising ones first, or all (default: 12)",
    )


def run(
    args: argparse.Namespace, bar: Callable[[str, bool], AbstractContextManager[Callable[[float], None]]]
) -> None:
    """Select for the network of `args` and print the result; `bar` shows progress."""
    from pimflow import zoo

    if args.pareto is not None and args.pareto < 2:
        raise UsageError(f"--pareto {args.pareto}: a front has at least 2 points")
    if args.output:
        check_file(args.output)
    if args.plot:
        from pimflow.host import pictures

        pictures.check_format(args.plot)
    chosen = options(args, args.profile)
    points = DRAWN if args.plot and args.pareto is None else args.pareto
    chosen |= {"target": args.target, "gpu": args.gpu}
    chosen |= {"pareto": points, "shapes": dict(map(zoo.parse_shape, args.shape)), "batch": args.batch}
    from pimflow.api import compile as api
    from pimflow.host.result_cache import ResultCache, default_path
    from pimflow.primitive_selection import selection

    cache = None if args.cache == "none" else ResultCache(args.cache or default_path())
    with bar("measuring", args.quiet) as advance:
        found = api.select(args.model, cache=cache, progress=advance, **chosen)
    if not args.quiet:
        _warn(found, cache)
    if args.output:
        found.profile.write(args.output)
    if args.plot:
        from pimflow.primitive_selection import figures

        figures.write(args.plot, found)
    print(json.dumps(selection.summary(found), indent=1) if args.json else selection.text(found))


def options(args: argparse.Namespace, profile: str) -> dict[str, object]:
    """What `choice_options` say, as the public API takes it; `profile` says where times come from."""
    from pimflow.fusion import parse_bytes
    from pimflow.placement.solvers.objectives import LATENCY_UNITS, quantity

    budget, limit = args.memory_budget, args.time_budget
    return {
        "minimize": args.minimize,
        "memory_budget_bytes": None if budget is None else parse_bytes(budget, "--memory-budget"),
        "time_budget_ns": None if limit is None else quantity(limit, LATENCY_UNITS, "--time-budget"),
        "memory_model": args.memory_model,
        "device": args.device,
        **times(args, profile),
    }


def times(args: argparse.Namespace, profile: str) -> dict[str, object]:
    """Where times come from, as the public API takes it."""
    from pimflow.errors import hint
    from pimflow.primitive_selection.time_sources import MEASURE, MODES

    if profile == "predicted" or profile not in MODES:
        if args.measure is not None:
            raise UsageError(f"--profile {profile} measures no primitives; leave out --measure")
        looks_like_a_file = os.sep in profile or "." in profile
        if not (profile in MODES or looks_like_a_file or os.path.exists(profile)):
            raise UsageError(f"unknown profile '{profile}': no file; {hint(profile, MODES)}")
        return {"profile": profile}
    if args.measure == "all":
        return {"profile": profile, "measure": None}
    try:
        count = MEASURE if args.measure is None else int(args.measure)
    except ValueError:
        count = 0
    if count < 1:
        raise UsageError(f"--measure {args.measure}: give a number of primitives from 1 on, or 'all'")
    return {"profile": profile, "measure": count}


def _warn(found, cache) -> None:
    for (name, layer), reason in found.profile.failed.items():
        print(f"pimflow: warning: {name} could not be measured for {layer}: {reason}", file=sys.stderr)
    if cache is not None and cache.flaw:
        print(f"pimflow: warning: {cache.flaw}", file=sys.stderr)
