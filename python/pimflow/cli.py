"""The ``pimflow`` command: thin over the public API.

Exit codes: 0 ok, 1 our bug, 2 usage, 3 bad input or unwritable output, 4 infeasible, 5 verification
mismatch, 130 interrupted. Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pimflow import zoo
from pimflow.errors import ArtifactError, PimflowError, UsageError
from pimflow.hardware import System, system
from pimflow.hardware.system import ACCOUNTINGS, TIMINGS

# A bar is for what takes longer.
_SILENT_S = 2.0

# What --accounting implies for the timing of PIM where --timing does not say.
TIMING_OF = {"full": "strict", "paper": "ramulator-pimflow"}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    if threading.current_thread() is threading.main_thread():  # else it is somebody else's program
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up like Ctrl-C
    try:
        args = _parser().parse_args(argv)
        args.command(args)
        sys.stdout.flush()
    except PimflowError as error:
        print(f"pimflow: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("pimflow: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pimflow", description="A TVM back end for GPUs whose DRAM computes"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=run)
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.add_argument("--quiet", action="store_true", help="no progress")
        return sub

    sub = command("compile", _compile, "search, compile, run and verify a network")
    sub.add_argument("model", metavar="MODEL", help="name of the zoo ('pimflow models'), .onnx or .pt2 file")
    sub.add_argument("-o", "--output", metavar="DIR", help="compiled directory to write")
    sub.add_argument("--plan", metavar="FILE", help="apply this plan instead of searching")
    sub.add_argument(
        "--explain", metavar="REGION", help="print every candidate of a region, and write nothing"
    )
    sub.add_argument(
        "--emit-traces", action="store_true", help="write .pim traces, a file per channel (large)"
    )
    sub.add_argument(
        "--shape", metavar="NAME=1,3,224,224", action="append", default=[], help="fix a dynamic input"
    )
    sub.add_argument("--system", metavar="NAME|FILE", default="pimflow", help="system (default: %(default)s)")
    sub.add_argument("--gpu", metavar="NAME|FILE", help="GPU of the system")
    sub.add_argument("--pim", metavar="NAME|FILE", help="PIM device of the system")
    sub.add_argument("--pim-channels", metavar="N", type=int, help="memory channels with PIM")
    sub.add_argument(
        "--target", default="llvm+pim", help="what to build for: llvm+pim, cuda+pim (default: %(default)s)"
    )
    sub.add_argument("--timing", help=f"PIM timing: {', '.join(TIMINGS)}")
    sub.add_argument("--accounting", help=f"what is charged: {', '.join(ACCOUNTINGS)}")
    sub.add_argument("--dtype", help="storage type: fp16, fp32")
    sub.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        help="largest error of the outputs, as a fraction of their largest value (2e-3 fp16, 1e-5 fp32)",
    )

    sub = command("run", _run, "run a compiled network")
    sub.add_argument("directory", metavar="DIR", help="what 'pimflow compile -o' wrote")
    sub.add_argument("--input", metavar="[NAME=]FILE.npy", action="append", default=[], help="input tensor")
    sub.add_argument("-o", "--output", metavar="FILE.npy", help="where to write the output")
    sub.add_argument("--target", help="llvm+pim, or what it was compiled for (default)")

    sub = command("simulate", _simulate, "cycles of a PIM program or command trace")
    sub.add_argument("file", metavar="FILE", help=".pimprog or .pim file")
    sub.add_argument(
        "--pim", metavar="NAME|FILE", default="newton-gddr6", help="device (default: %(default)s)"
    )
    sub.add_argument("--timing", default="strict", help=f"{', '.join(TIMINGS)} (default: %(default)s)")
    sub.add_argument(
        "--no-gwrite-hiding", action="store_true", help="ramulator-pimflow: charge 64 cycles a GWRITE"
    )

    command("models", _models, "list the networks of the zoo")
    return parser


def _system(args: argparse.Namespace) -> System:
    timing = args.timing or TIMING_OF.get(args.accounting)
    return system(
        args.system,
        gpu=args.gpu,
        pim=args.pim,
        pim_channels=args.pim_channels,
        timing=timing,
        accounting=args.accounting,
        dtype=args.dtype,
    )


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A status line on stderr; plain lines where that is no terminal, nothing if `quiet`."""
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("") as status:
            yield lambda text: status.update(f"{text} …")
    else:
        yield lambda text: print(f"pimflow: {text} …", file=sys.stderr)


@contextlib.contextmanager
def _progress_bar(quiet: bool, text: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr for a share in [0, 1], after two seconds; lines where that is no terminal."""
    begin_s, shown = time.monotonic(), 0.0
    with contextlib.ExitStack() as stack:
        show = None

        def bar(share: float) -> None:
            nonlocal show, shown
            if quiet or time.monotonic() - begin_s < _SILENT_S:
                return
            if not sys.stderr.isatty():
                if share - shown >= 0.1:
                    print(f"pimflow: {text}, {100 * share:.0f} % …", file=sys.stderr)
                    shown = share
                return
            if show is None:
                from rich.console import Console
                from rich.progress import Progress

                progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
                task = progress.add_task(text, total=1.0)
                show = functools.partial(progress.update, task)
            show(completed=share)

        yield bar


def _compile(args: argparse.Namespace) -> None:
    from pimflow import api, report

    shapes = dict(zoo.parse_shape(text) for text in args.shape)
    target_system = _system(args)
    if args.explain is not None:
        with _progress(args.quiet) as progress:
            progress("searching")
            searched = api.search(args.model, target_system, shapes=shapes, plan=args.plan)
        region = searched.graph.region(args.explain)
        if args.json:
            _print_json(report.explanation(searched, region))
        else:
            print(report.explain(searched, region))
        return
    with _progress(args.quiet) as progress:
        compiled = api.compile(
            args.model,
            args.output,
            target_system=target_system,
            target=args.target,
            plan=args.plan,
            shapes=shapes,
            tolerance=args.tolerance,
            emit_traces=args.emit_traces,
            progress=progress,
        )
    if args.json:
        _print_json(compiled.report)
    else:
        print(report.table(compiled.report, args.output))


def _run(args: argparse.Namespace) -> None:
    from pimflow import api

    inputs: dict[str, np.ndarray] | np.ndarray | None = None
    for text in args.input:
        name, equals, path = text.rpartition("=")
        array = _read_array(path)
        if not equals and len(args.input) == 1:
            inputs = array
        elif not equals:
            raise UsageError("several inputs: give each as --input NAME=FILE.npy")
        else:
            inputs = {**(inputs or {}), name: array}
    outputs = api.run(args.directory, inputs, target=args.target)
    if args.output:
        for index, y in enumerate(outputs):
            path = Path(args.output)
            _write_array(path if index == 0 else path.with_name(f"{path.stem}.{index}{path.suffix}"), y)
    summary = [
        {"output": index, "shape": list(y.shape), "dtype": str(y.dtype), "min": y.min(), "max": y.max()}
        for index, y in enumerate(outputs)
    ]
    if args.json:
        _print_json({"outputs": summary, "wrote": args.output})
    else:
        for row in summary:
            print(
                f"output {row['output']}: {row['dtype']} {row['shape']}, {row['min']:.6g} .. {row['max']:.6g}"
            )


def _simulate(args: argparse.Namespace) -> None:
    from pimflow import api

    with _progress_bar(args.quiet, "simulating") as progress:
        result = api.simulate(
            args.file,
            args.pim,
            timing=args.timing,
            gwrite_hiding=not args.no_gwrite_hiding,
            progress=progress,
        )
    if result.empty_reads:
        print(
            f"pimflow: warning: {result.empty_reads} READRES of an empty latch: no COMP on the buffer since "
            "its last READRES (a .pim trace has one buffer)",
            file=sys.stderr,
        )
    row = {
        "cycles": result.cycles,
        "time_ns": result.time_ns,
        "commands": result.commands,
        "timing": result.timing,
        "pim": result.pim,
        "utilisation": result.utilisation,
        "row_utilisation": result.row_utilisation,
        "timing_violations": result.violations,
        "empty_reads": result.empty_reads,
        "channels": [
            {"cycles": cycles, "commands": commands}
            for cycles, commands in zip(result.channel_cycles, result.channel_commands)
        ],
    }
    if args.json:
        _print_json(row)
        return
    counts = ", ".join(f"{count} {name}" for name, count in result.commands.items())
    print(f"{result.cycles} cycles, {result.time_ns / 1e3:.3f} us on {result.pim} ({result.timing})")
    print(f"{counts}; multipliers busy {100 * result.utilisation:.1f} %")
    if result.row_utilisation is not None:
        print(f"{100 * result.row_utilisation:.1f} % of the columns of opened rows used")
    if result.violations is None and result.timing == "strict":
        print(f"legality not checked: a channel has more than {api.CHECKED_COMMANDS} commands")
    elif result.violations is None:
        print("legality not checked: the published timing has no precharge")
    else:
        print(f"{result.violations} timing violations")


def _models(args: argparse.Namespace) -> None:
    rows = [zoo.describe(name) for name in zoo.names()]
    if args.json:
        _print_json([dict(row.__dict__) for row in rows])
        return
    print(f"{'model':<16} {'parameters':>12} {'GMAC':>8}  inputs")
    for row in rows:
        shapes = ", ".join(f"{name}={','.join(map(str, shape))}" for name, shape in row.inputs.items())
        print(f"{row.name:<16} {row.parameters:>12,} {row.macs / 1e9:>8.3f}  {shapes}")


def _read_array(path: str) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise ArtifactError(f"{path}: not a .npy file") from error
    if not isinstance(array, np.ndarray):
        raise ArtifactError(f"{path}: holds several arrays; give a .npy file")
    return array


def _write_array(path: Path, array: np.ndarray) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            np.save(file, array)
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise ArtifactError(f"{path}: cannot be written: {error.strerror}") from error


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, default=lambda x: x.item() if hasattr(x, "item") else str(x)))


if __name__ == "__main__":
    sys.exit(main())
