"""``pimflow fuse``: Deep Fusion of a network on an accelerator with on-chip memory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pimflow.errors import UsageError
from pimflow.fusion import HALOS, OBJECTIVES, REUSES, SEARCHES, parse_bytes, parse_rate

if TYPE_CHECKING:
    from pimflow.fusion import Accelerator

Bar = Callable[[str, bool], AbstractContextManager[Callable[[float], None]]]

SUMMARY = "fuse layers into groups that pass once over on-chip memory, and say what that saves"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Arguments of the command; `run` takes them."""
    sub.add_argument("model", metavar="MODEL", help="name of the zoo ('pimflow models'), .onnx or .pt2 file")
    sub.add_argument(
        "--on-chip", metavar="BYTES", default="768KiB", help="on-chip memory (default: %(default)s)"
    )
    sub.add_argument("--bandwidth", metavar="RATE", default="1.5GB/s", help="DRAM (default: %(default)s)")
    sub.add_argument(
        "--compute", metavar="RATE", default="200GFLOPS", help="arithmetic (default: %(default)s)"
    )
    sub.add_argument("--dtype", default="fp32", help="storage type: fp32, fp16, int8 (default: %(default)s)")
    sub.add_argument(
        "--baseline",
        default="unfolded",
        help="layers: unfolded (batch norm, scale, ReLU apart), folded (as compiled; default: %(default)s)",
    )
    sub.add_argument(
        "--reuse", default="deep", help=f"of on-chip memory: {', '.join(REUSES)} (default: %(default)s)"
    )
    sub.add_argument("--search", default="optimal", help=f"{', '.join(SEARCHES)} (default: %(default)s)")
    sub.add_argument(
        "--halo",
        default="recompute",
        help=f"rows that tiles share: {', '.join(HALOS)} (default: %(default)s)",
    )
    sub.add_argument("--objective", default="traffic", help=f"{', '.join(OBJECTIVES)} (default: %(default)s)")
    sub.add_argument(
        "--energy", metavar="NAME|FILE", default="deep-fusion", help="prices (default: %(default)s, assumed)"
    )
    sub.add_argument(
        "--decompose",
        metavar="METHOD:RANK[,first=keep][,fc=decompose]",
        help="layers into chains of smaller ones, before; see 'pimflow compile'",
    )
    sub.add_argument(
        "--execute",
        action="store_true",
        help="run every group on the CPU, on random inputs: check its results, count the bytes it moves",
    )


def accelerator(args: argparse.Namespace) -> Accelerator:
    """The one that the options describe."""
    from pimflow.fusion import Accelerator
    from pimflow.hardware.accelerator import AcceleratorEnergy

    return Accelerator(
        on_chip_bytes=parse_bytes(args.on_chip, "--on-chip"),
        bytes_per_second=parse_rate(args.bandwidth, "--bandwidth", ("B/s",), "1.5GB/s"),
        operations_per_second=parse_rate(args.compute, "--compute", ("FLOPS", "OPS"), "200GFLOPS"),
        dtype=args.dtype,
        energy=AcceleratorEnergy.load(args.energy),
    )


def run(args: argparse.Namespace, bar: Bar) -> None:
    """Fuse the network of `args` and print the result; `bar` shows progress."""
    from pimflow import zoo

    on = accelerator(args)
    options = {
        "baseline": args.baseline,
        "reuse": args.reuse,
        "search": args.search,
        "halo": args.halo,
        "objective": args.objective,
        "shapes": dict(map(zoo.parse_shape, args.shape)),
        "batch": args.batch,
    }
    if args.decompose:
        found, text = _decomposed(args, on, options, bar)
    else:
        found, text = _fused(args, on, options, bar)
    print(json.dumps(found, indent=1) if args.json else text)


def _decomposed(
    args: argparse.Namespace, on: Accelerator, options: dict[str, Any], bar: Bar
) -> tuple[dict[str, Any], str]:
    from pimflow.api import fuse

    if args.execute:
        raise UsageError("--execute runs the layers of a network as it came; not with --decompose")
    with bar("decomposing and searching", args.quiet) as advance:
        done = fuse.fuse_decomposed(args.model, args.decompose, on, **options, progress=advance)
    return done.summary(), done.text()


def _fused(
    args: argparse.Namespace, on: Accelerator, options: dict[str, Any], bar: Bar
) -> tuple[dict[str, Any], str]:
    from pimflow.api import fuse

    if args.execute:  # TVM: only who executes waits for it
        from pimflow.fusion import kernels

        kernels.require_executable(on.dtype)
    with bar("searching", args.quiet) as advance:
        plan = fuse.fuse(args.model, on, **options, progress=advance)
    found, lines = fuse.summary(plan), [fuse.text(plan)]
    if args.execute:
        same = {key: options[key] for key in ("baseline", "shapes", "batch")}
        with bar("executing", args.quiet) as advance:
            ran = kernels.execute(args.model, plan, **same, progress=advance)
        ran.require(plan)
        found["executed"] = kernels.summary(plan, ran)
        lines.append(kernels.text(plan, ran))
    return found, "\n".join(lines)
