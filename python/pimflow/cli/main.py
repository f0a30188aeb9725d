"""The ``pimflow`` command: thin over the public API.

Exit codes: 0 ok, 1 our bug, 2 usage, 3 bad input or unwritable output, 4 infeasible, 5 verification
mismatch, 130 interrupted. Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pimflow import zoo
from pimflow.cli import fuse, memory, parser, run, streams
from pimflow.cli import select as select_command
from pimflow.cli.progress_bar import bar
from pimflow.errors import InfeasibleError, PimflowError, UsageError, one_line
from pimflow.hardware import System, description, system

if TYPE_CHECKING:
    from pimflow.placement import Profiling
    from pimflow.simulators.profiler import GpuProfiler, PimProfiler

# What --accounting implies for the timing of PIM where --timing does not say.
TIMING_OF = {"full": "strict", "paper": "ramulator-pimflow"}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    if threading.current_thread() is threading.main_thread():  # else it is somebody else's program
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up like Ctrl-C
    streams.reopen()
    with contextlib.redirect_stderr(streams.Progress(sys.stderr)):
        try:
            with streams.results():
                args = parser.parser(HANDLERS).parse_args(argv)
                args.command(args)
        except PimflowError as error:
            print(f"pimflow: error: {one_line(str(error))}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            print("pimflow: interrupted", file=sys.stderr)
            return 130
        except MemoryError:
            print("pimflow: error: it takes more memory than this machine has", file=sys.stderr)
            return InfeasibleError.exit_code
    return 0


def _system(args: argparse.Namespace) -> System:
    timing = args.timing or TIMING_OF.get((args.accounting or "").partition("+")[0])
    return system(
        args.system,
        gpu=args.gpu,
        pim=args.pim,
        pim_channels=args.pim_channels,
        timing=timing,
        scheduling=args.scheduling,
        copies=args.copies,
        padding=args.padding,
        splits=args.splits,
        accounting=args.accounting,
        dtype=args.dtype,
    )


def _profilers(
    args: argparse.Namespace, gwrite_hiding: bool = True
) -> tuple[GpuProfiler | None, PimProfiler | None]:
    if args.timing and any(text.startswith("pim=") for text in args.profiler):
        raise UsageError("--profiler pim=… times PIM by rules of its own; leave out --timing")
    from pimflow.api.profilers import parse_profilers

    def say(text: str) -> None:
        if not args.quiet:
            print(f"pimflow: {text}", file=sys.stderr)

    return parse_profilers(args.profiler, gwrite_hiding, say)


@contextlib.contextmanager
def _profiling(args: argparse.Namespace) -> Iterator[Profiling]:
    """How times are found; says at the end if they could not be kept."""
    from pimflow.host.executors import parse_executor
    from pimflow.host.result_cache import ResultCache, default_path
    from pimflow.placement import Profiling

    gpu, pim = _profilers(args)
    executor = parse_executor(args.executor, args.jobs)
    cache = None if args.cache == "none" else ResultCache(args.cache or default_path())
    with bar("timing layers", args.quiet) as advance:
        yield Profiling(
            **({"gpu": gpu} if gpu else {}),
            pim=pim,
            cache=cache,
            executor=executor,
            progress=lambda done, of: advance(done / of if of else 1.0),
        )
    if cache is not None:
        if cache.flaw and not args.quiet:
            print(f"pimflow: warning: {cache.flaw}", file=sys.stderr)
        cache.close()


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


def _goal(args: argparse.Namespace) -> dict[str, Any]:
    """What the search is asked for, as the public API takes it."""
    from pimflow.placement.solvers.objectives import ENERGY_UNITS, LATENCY_UNITS, quantity

    latency, energy = args.max_latency, args.max_energy
    return {
        "objective": args.objective,
        "solver": args.solver,
        "modes": args.modes,
        "max_latency_ns": None if latency is None else quantity(latency, LATENCY_UNITS, "--max-latency"),
        "max_energy_pj": None if energy is None else quantity(energy, ENERGY_UNITS, "--max-energy"),
    }


def _check_compile(args: argparse.Namespace) -> None:
    if args.explain is not None:
        unused = ["output", "emit_traces", "tolerance", "calibration"]
        unused += ["target", "select"] if args.device != "cuda" else []  # a GPU's primitives are candidates
        parser.refuse(args, unused, "--explain prints candidates, and makes nothing; leave out one of both")
    if not args.output:
        parser.refuse(args, ["emit_traces"], "give a directory to write them to, with -o")
    if not args.select:
        parser.refuse(args, select_command.CHOICES, "says which primitives --select chooses; give that too")
    if not args.optimize_skips:
        parser.refuse(args, ["skip_criterion"], "says what --optimize-skips keeps; give that too")


def _compile(args: argparse.Namespace) -> None:
    from pimflow.api import compile as api
    from pimflow.api import explanation, report

    _check_compile(args)
    goal = _goal(args)
    shapes = dict(zoo.parse_shape(text) for text in args.shape)
    target_system = _system(args)
    select = select_command.options(args, args.select) if args.select else None
    if args.explain is not None:
        with _progress(args.quiet) as progress, _profiling(args) as profile:
            progress("searching")
            options = {"shapes": shapes, "batch": args.batch, "decompose": args.decompose}
            options |= {"optimize_skips": args.skip_criterion if args.optimize_skips else None}
            options |= {"fuse_activations": args.fuse_activations, "fuse": args.fuse, "select": select}
            options |= {"plan": args.plan, "reorder": args.reorder, "profiling": profile}
            searched = api.search(args.model, target_system, **options, **goal)
        region = searched.graph.region(args.explain)
        if args.json:
            _print_json(explanation.explanation(searched, region))
        else:
            print(explanation.explain(searched, region))
        return
    with _progress(args.quiet) as progress, _profiling(args) as profile:
        compiled = api.compile(
            args.model,
            args.output,
            target_system=target_system,
            target=args.target,
            plan=args.plan,
            shapes=shapes,
            batch=args.batch,
            decompose=args.decompose,
            optimize_skips=args.skip_criterion if args.optimize_skips else None,
            fuse_activations=args.fuse_activations,
            fuse=args.fuse,
            select=select,
            calibration=args.calibration,
            tolerance=args.tolerance,
            emit_traces=args.emit_traces,
            reorder=args.reorder,
            profiling=profile,
            progress=progress,
            **goal,
        )
    if args.json:
        _print_json(compiled.report)
    else:
        print(report.table(compiled.report, args.output))


def _decompose(args: argparse.Namespace) -> None:
    from pimflow.api import compile as api
    from pimflow.decomposition.report import export_text

    with _progress(args.quiet) as progress, _profiling(args) as profile:
        found = api.export_decomposed(
            args.model,
            args.decompose,
            args.output,
            target_system=_system(args),
            shapes=dict(zoo.parse_shape(text) for text in args.shape),
            batch=args.batch,
            calibration=args.calibration,
            profiling=profile,
            progress=progress,
            **_goal(args),
        )
    if args.json:
        _print_json(found)
    else:
        print(export_text(found))


def _profile(args: argparse.Namespace) -> None:
    from pimflow.api import profile

    shapes = dict(zoo.parse_shape(text) for text in args.shape)
    with _profiling(args) as sources:
        found = profile.profile(args.models, _system(args), sources, shapes, args.batch, fuse=args.fuse)
    if args.json:
        _print_json(found)
    else:
        print(profile.text(found))


def _sweep(args: argparse.Namespace) -> None:
    from pimflow.api import sweep
    from pimflow.hardware.settings import Setting
    from pimflow.placement import Goal

    if args.output:
        sweep.check_output(args.output)
    goal = Goal(modes=args.modes)
    settings = [Setting.parse(text) for text in args.settings]
    shapes = dict(zoo.parse_shape(text) for text in args.shape)
    with _profiling(args) as sources, bar("searching", args.quiet) as advance:
        where = (args.models, _system(args), settings, sources, shapes, args.batch)
        rows = sweep.sweep(*where, advance, goal, fuse=args.fuse)
    if args.output:
        sweep.write(args.output, rows, settings)
    if args.json:
        _print_json(rows)
    else:
        print(sweep.text(rows, settings))


def _simulate(args: argparse.Namespace) -> None:
    from pimflow.api import simulate as simulation

    hiding = not args.no_gwrite_hiding
    _, profiler = _profilers(args, hiding)
    timing = args.timing or "strict"
    with bar("simulating", args.quiet) as advance:
        result = simulation.simulate(
            args.file, args.pim, timing=timing, gwrite_hiding=hiding, profiler=profiler, progress=advance
        )
    row = simulation.summary(result, simulation.simulated_energy_pj(args.file, result, args.pim))
    if result.empty_reads:
        print(
            f"pimflow: warning: {result.empty_reads} READRES of an empty latch: no COMP on the buffer since "
            "its last READRES (a .pim trace has one buffer)",
            file=sys.stderr,
        )
    if args.json:
        _print_json(row)
    else:
        print(simulation.text(row))


def _trace(args: argparse.Namespace) -> None:
    from pimflow.api import trace

    if Path(args.layer).is_dir():
        why = f"{args.layer} has a device, a dtype, channels and loop orders of its own; leave that out"
        parser.refuse(args, ["pim", "dtype", "pim_channels", "scheduling"], why)
    changes = {"timing": args.timing, "scheduling": args.scheduling, "dtype": args.dtype}
    target_system = system(gpu=args.gpu, pim=args.pim, pim_channels=args.pim_channels, **changes)
    with bar("writing", args.quiet) as advance:
        summary = trace.trace(args.layer, args.output, args.format, target_system, advance=advance)
    if args.json:
        _print_json({**summary, "output": args.output})
    else:
        print(trace.text(summary, args.output))


def _timeline(args: argparse.Namespace) -> None:
    from pimflow.api import timeline
    from pimflow.host import files, pictures

    if Path(args.source).is_dir():
        others = ("source", "perfetto", "plot", "json", "quiet", "command", "parser", "cache")
        why = f"{args.source} is compiled, with a plan and a system of its own; leave that out"
        parser.refuse(args, sorted(vars(args).keys() - set(others)), why)
    goal, shapes = _goal(args), dict(zoo.parse_shape(text) for text in args.shape)
    if args.plot:
        pictures.check_format(args.plot)
    if args.perfetto:
        files.check_file(args.perfetto)
    with _progress(args.quiet) as progress, _profiling(args) as profile:
        progress("searching")
        options = {"shapes": shapes, "batch": args.batch, "plan": args.plan, "profiling": profile}
        options["fuse"] = args.fuse
        found = timeline.trace_plan(args.source, _system(args), **options, **goal)
    if args.perfetto:
        timeline.write(args.perfetto, found)
    if args.plot:
        timeline.draw(args.plot, found)
    row = timeline.summary(found)
    if args.json:
        _print_json(row)
    else:
        print(timeline.text(row))


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
        found = description.catalogue()
    else:
        found = description.describe(description.load(args.device))
    if args.json:
        _print_json(found)
    else:
        print(description.catalogue_text() if args.device is None else description.text(found))


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, default=lambda x: x.item() if hasattr(x, "item") else str(x)))


HANDLERS = {
    "compile": _compile,
    "profile": _profile,
    "sweep": _sweep,
    "run": lambda args: run.run(args, _progress),
    "simulate": _simulate,
    "trace": _trace,
    "timeline": _timeline,
    "memory": memory.run,
    "fuse": lambda args: fuse.run(args, bar),
    "select": lambda args: select_command.run(args, bar),
    "decompose": _decompose,
    "models": _models,
    "devices": _devices,
}
