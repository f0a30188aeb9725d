"""The ``pimflow`` command: thin over the public API.

Exit codes: 0 ok, 1 our bug, 2 usage, 3 bad input or unwritable output, 4 infeasible, 5 verification
mismatch, 130 interrupted. Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pimflow import devices, memory_command, zoo
from pimflow.errors import ArtifactError, PimflowError, UsageError
from pimflow.hardware import System, system
from pimflow.hardware.system import ACCOUNTINGS, SCHEDULINGS, TIMINGS

if TYPE_CHECKING:
    from pimflow.simulators.profiler import PimProfiler

# What --accounting implies for the timing of PIM where --timing does not say.
TIMING_OF = {"full": "strict", "paper": "ramulator-pimflow"}
BAR_AFTER_SECONDS = 2.0


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
    sub.add_argument("--scheduling", metavar="LEVEL", help=f"PIM loop orders: {', '.join(SCHEDULINGS)}")
    sub.add_argument("--accounting", help=f"what is charged: {', '.join(ACCOUNTINGS)}")
    sub.add_argument("--dtype", help="storage type: fp16, fp32")
    sub.add_argument(
        "--profiler", metavar="pim=ramulator:PATH", help="time PIM programs with an installed Ramulator"
    )
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
    sub.add_argument("--timing", help=f"{', '.join(TIMINGS)} (default: strict)")
    sub.add_argument("--profiler", metavar="pim=ramulator:PATH", help="time it with an installed Ramulator")
    sub.add_argument(
        "--no-gwrite-hiding", action="store_true", help="ramulator-pimflow: charge 64 cycles a GWRITE"
    )

    sub = command("trace", _trace, "write the command trace of a layer or a compiled network")
    sub.add_argument(
        "layer",
        metavar="LAYER|DIR",
        help="conv:NxCxHxW,OUT,KHxKW[,sS][,pP][,dD], fc:[Nx]IN,OUT, or what 'pimflow compile -o' wrote",
    )
    sub.add_argument("--format", required=True, help="pimprog, pim, aim, ramulator2, perfetto")
    sub.add_argument("-o", "--output", metavar="DIR", required=True, help="directory to write")
    sub.add_argument("--pim", metavar="NAME|FILE", help="device (default: the system's)")
    sub.add_argument("--pim-channels", metavar="N", type=int, help="memory channels with PIM")
    sub.add_argument("--timing", help=f"what picks the loop order: {', '.join(TIMINGS)}")
    sub.add_argument("--scheduling", metavar="LEVEL", help=f"PIM loop orders: {', '.join(SCHEDULINGS)}")
    sub.add_argument("--dtype", help="storage type of a layer, one of the device's")

    memory_command.add_arguments(command("memory", memory_command.run, memory_command.SUMMARY))
    command("models", _models, "list the networks of the zoo")

    sub = command("devices", _devices, "list PIM devices, GPUs and systems, or show one with its sources")
    sub.add_argument("device", metavar="NAME|FILE", nargs="?", help="device or system to show")
    return parser


def _system(args: argparse.Namespace) -> System:
    timing = args.timing or TIMING_OF.get(args.accounting)
    return system(
        args.system,
        gpu=args.gpu,
        pim=args.pim,
        pim_channels=args.pim_channels,
        timing=timing,
        scheduling=args.scheduling,
        accounting=args.accounting,
        dtype=args.dtype,
    )


def _profiler(args: argparse.Namespace, gwrite_hiding: bool = True) -> PimProfiler | None:
    if args.profiler is None:
        return None
    if args.timing:
        raise UsageError("--profiler times PIM by rules of its own; leave out --timing")
    from pimflow.simulators.profiler import parse_profiler

    return parse_profiler(args.profiler, gwrite_hiding)


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
def _bar(text: str, quiet: bool) -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr, from two seconds on; a plain line where that is no terminal."""
    begin = time.monotonic()
    update: Callable[[float], None] | None = None
    with contextlib.ExitStack() as shown:

        def advance(share: float) -> None:
            nonlocal update
            if update is None and not quiet and time.monotonic() - begin > BAR_AFTER_SECONDS:
                update = _show_bar(text, shown)
            if update is not None:
                update(share)

        yield advance


def _show_bar(text: str, shown: contextlib.ExitStack) -> Callable[[float], None]:
    if not sys.stderr.isatty():
        print(f"pimflow: {text} …", file=sys.stderr)
        return lambda _: None
    from rich.console import Console
    from rich.progress import Progress

    bar = shown.enter_context(Progress(console=Console(stderr=True)))
    task = bar.add_task(text, total=1.0)
    return lambda share: bar.update(task, completed=share)


def _compile(args: argparse.Namespace) -> None:
    from pimflow import api, report

    shapes = dict(zoo.parse_shape(text) for text in args.shape)
    target_system = _system(args)
    profiler = _profiler(args)
    if args.explain is not None:
        with _progress(args.quiet) as progress:
            progress("searching")
            searched = api.search(args.model, target_system, shapes=shapes, plan=args.plan, profiler=profiler)
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
            profiler=profiler,
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
    from pimflow.simulators.energy import total_energy_pj

    hiding = not args.no_gwrite_hiding
    profiler = _profiler(args, hiding)
    timing = args.timing or "strict"
    with _bar("simulating", args.quiet) as advance:
        result = api.simulate(
            args.file, args.pim, timing=timing, gwrite_hiding=hiding, profiler=profiler, progress=advance
        )
    channels_pj = api.simulated_energy_pj(args.file, result, args.pim)
    energy_pj = total_energy_pj(channels_pj)
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
        "energy_pj": energy_pj,
        "empty_reads": result.empty_reads,
        "channels": [
            {"cycles": cycles, "commands": commands, "energy_pj": pj}
            for cycles, commands, pj in zip(result.channel_cycles, result.channel_commands, channels_pj)
        ],
    }
    if args.json:
        _print_json(row)
        return
    counts = ", ".join(f"{count} {name}" for name, count in result.commands.items())
    print(f"{result.cycles} cycles, {result.time_ns / 1e3:.3f} us on {result.pim} ({result.timing})")
    print(f"{counts}; multipliers busy {100 * result.utilisation:.1f} %")
    total_pj = sum(energy_pj.values())
    parts = ", ".join(f"{name} {100 * pj / total_pj:.1f} %" for name, pj in energy_pj.items() if pj)
    print(f"{total_pj / 1e6:.3f} uJ{': ' * bool(parts)}{parts}")
    if result.row_utilisation is not None:
        print(f"{100 * result.row_utilisation:.1f} % of the columns of opened rows used")
    if result.violations is None and result.timing == "strict":
        print(f"legality not checked: a channel has more than {api.CHECKED_COMMANDS} commands")
    elif result.violations is None:
        print("legality not checked: the published timing has no precharge")
    else:
        print(f"{result.violations} timing violations")


def _trace(args: argparse.Namespace) -> None:
    from pimflow import api

    if Path(args.layer).is_dir() and (args.dtype or args.scheduling or args.pim_channels is not None):
        options = "--dtype, --pim-channels and --scheduling"
        raise UsageError(f"{args.layer} has its own dtype, channels and loop orders; leave out {options}")
    changes = {"timing": args.timing, "scheduling": args.scheduling, "dtype": args.dtype}
    target_system = system(pim=args.pim, pim_channels=args.pim_channels, **changes)
    with _bar("writing", args.quiet) as advance:
        summary = api.trace(args.layer, args.output, args.format, target_system, advance=advance)
    if args.json:
        _print_json({**summary, "output": args.output})
        return
    for layer in summary["layers"]:
        counts = ", ".join(f"{count} {name}" for name, count in layer["commands"].items())
        print(f"{layer['layer']}: {layer['schedule']} on {layer['pim_channels']} channels")
        print(f"  {layer['cycles']} cycles, {layer['time_ns'] / 1e3:.3f} us ({summary['timing']}); {counts}")
        files = layer["files_bytes"]
        place = Path(args.output) / (next(iter(files)) if len(files) == 1 else os.path.commonpath(files))
        print(f"  {place}: {len(files)} file{'s'[: len(files) > 1]}, {sum(files.values())} bytes")


def _models(args: argparse.Namespace) -> None:
    rows = [zoo.describe(name) for name in zoo.names()]
    if args.json:
        _print_json([dict(row.__dict__) for row in rows])
        return
    print(f"{'model':<16} {'parameters':>12} {'GMAC':>8}  inputs")
    for row in rows:
        shapes = ", ".join(f"{name}={','.join(map(str, shape))}" for name, shape in row.inputs.items())
        print(f"{row.name:<16} {row.parameters:>12,} {row.macs / 1e9:>8.3f}  {shapes}")


def _devices(args: argparse.Namespace) -> None:
    if args.device is None:
        found = devices.catalogue()
    else:
        found = devices.describe(devices.load(args.device))
    if args.json:
        _print_json(found)
    else:
        print(devices.catalogue_text() if args.device is None else devices.text(found))


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
