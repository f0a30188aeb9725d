"""Options that `compile` and `select` share: the choice of convolution primitives, and their times."""

from __future__ import annotations

import argparse
import os
from typing import Any

from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.errors import UsageError, hint

# Options of `add_options`.
CHOICES = ("minimize", "time_budget", "memory_model", "device", "measure")


def add_options(sub: CommandParser) -> None:
    """Add options for the choice of primitives, and for the source of their times."""
    sub.option(
        "primitives",
        "--minimize",
        metavar="WHAT",
        default="time",
        help="time, memory, or workspace of a layer (default: %(default)s)",
    )
    sub.option("primitives", "--time-budget", metavar="X[ns|us|ms|s]", help="most time, such as 12ms")
    sub.option(
        "primitives",
        "--memory-model",
        metavar="MODEL",
        default="liveness",
        help="what counts as memory: liveness (what is live at once) or sum (of all layers, as in the paper; "
        "default: %(default)s)",
    )
    sub.option(
        "primitives",
        "--device",
        metavar="cuda|rpc:…|NAME",
        help="cuda: a GPU; rpc:HOST:PORT[/KEY]: another machine, measured by TVM's RPC: a server, or what a "
        "tracker calls KEY; NAME: the machine of a profile's FILE (default: this machine's CPU)",
    )
    sub.option(
        "primitives",
        "--measure",
        metavar="N|all",
        default=None,
        help="most primitives of each layer to measure, the promising ones first (default: 12)",
    )


def selection(args: argparse.Namespace, profile: str) -> dict[str, Any]:
    """The values of `add_options` as keywords of the API; `profile` is the source of times."""
    from pimflow.placement.solvers.objectives import LATENCY_UNITS, quantity

    limit = args.time_budget
    return {
        "minimize": args.minimize,
        "time_budget_ns": None if limit is None else quantity(limit, LATENCY_UNITS, "--time-budget"),
        "memory_model": args.memory_model,
        "device": args.device,
        **times(args, profile),
    }


def times(args: argparse.Namespace, profile: str) -> dict[str, Any]:
    """The source of primitives' times, as keywords of the API."""
    from pimflow.primitive_selection.options import MEASURE
    from pimflow.primitive_selection.time_sources import MODES

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
