"""Time and memory of compilation: ``bench_compile.py [MODEL…] [--picture|--zoo|--growth|--fuse] [--jobs N]``.

Without options it prints the phases of one compilation, and the time to profile the paper's five networks
from an empty and from the full cache; ``--picture`` draws the CPU time of the phases. ``--zoo`` compiles
every network of the zoo, or the named ones; ``--growth`` compiles generated networks of more and more
regions. Both start from an empty and from the full cache, each time in a new process. ``--fuse`` compiles
without and with groups of layers as candidates, from no cache. All is measured on this machine: other
processes change the wall time, hardly the CPU time.
"""

import argparse
import compileall
import importlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pimflow
from pimflow.__main__ import BLAS_ENVIRONMENT
from pimflow.host import garbage_collection, partial_tvm

NETWORKS = ("efficientnet-b0", "mnasnet-1.0", "mobilenet-v2", "resnet-50", "vgg-16")
CACHES = ("empty", "full")
PACKAGES = ("pimflow", "pimflow.relay_passes", "pimflow.pim_backend", "pimflow.simulators")
REGIONS = (50, 100, 200, 400)
SEARCHES = ("searching", "searching under other conventions")
COMPILER_PHASES = (*SEARCHES, "generating code")  # search, rewrite and code generation
# The phases of a compilation that is not written, and the rooms that do them.
PHASE_ROOMS = {
    "starting": "Python, TVM, the package",
    "loading": "zoo, frontend, relay_passes/canonical",
    "computing the reference": "frontend",
    "searching": "placement, pim_backend/programs, simulators",
    "generating code": "compiler, relay_passes, pim_backend/runtime, memory",
    "verifying": "compiler, simulators, core",
    "searching under other conventions": "commands/compile, placement",
}
BAR_CELLS = 20  # of the longest phase
TARGET_SECONDS = {"empty": 60.0, "full": 10.0}
TARGET_BYTES = 4 << 30
# Of outputs of generated networks: hundreds of layers with drawn weights add up their rounding. PIM regions
# are held to their own bound whatever it is.
GENERATED_TOLERANCE = 0.1


def compile_sources() -> None:
    """Store the bytecode of the package, as installers do: else its sources are compiled in each process.

    Python stores it too, unless ``PYTHONDONTWRITEBYTECODE`` is set.
    """
    for package in PACKAGES:
        for folder in importlib.import_module(package).__path__:
            compileall.compile_dir(folder, quiet=2)


def cpu_seconds() -> float:
    """CPU time of this process and of the child processes that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def compile_once(
    model: str,
    cache: str | None = None,
    jobs: int = 1,
    tolerance: float | None = None,
    fuse: bool = False,
) -> dict:
    """Compile a model in this process, and return the figures."""
    partial_tvm.install()  # as the command does
    garbage_collection.collect_rarely()
    from pimflow.host.executors import Processes
    from pimflow.host.result_cache import ResultCache
    from pimflow.placement import Profiling

    profiling = Profiling(cache=ResultCache(cache) if cache else None, executor=Processes(jobs))
    starts = [("starting", 0.0, time.perf_counter())]

    def mark(phase: str) -> None:
        starts.append((phase, cpu_seconds(), time.perf_counter()))

    compiled = pimflow.compile(model, profiling=profiling, tolerance=tolerance, progress=mark, fuse=fuse)
    mark("end")
    return {
        "model": model,
        "regions": len(compiled.search_result.graph.regions),
        "wall_seconds": compiled.report.wall_seconds,
        "search_seconds": compiled.report.search_seconds,
        "latency_ns": compiled.report.plan.latency_ns,
        "phase_seconds": {
            start[0]: next_start[2] - start[2] for start, next_start in itertools.pairwise(starts[1:])
        },
        "phase_cpu_seconds": {
            start[0]: next_start[1] - start[1] for start, next_start in itertools.pairwise(starts)
        },
        "cpu_seconds": cpu_seconds(),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def compile_twice(model: str, jobs: int, *extra_options: str) -> dict:
    """Run `compile_once` from an empty and from the full cache, each time in a new process."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        options = ["--once", "--jobs", str(jobs), "--cache", f"{folder}/profiles.sqlite", *extra_options]
        for cache in CACHES:
            print(f"{model}, {cache} cache …", file=sys.stderr)
            command = [sys.executable, __file__, model, *options]
            process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            figures[cache] = json.loads(process.stdout)
    return figures


def compile_fused(model: str) -> list[dict]:
    """Run `compile_once` without and with fused groups as candidates, each time in a new process."""
    figures = []
    for options in ([], ["--fuse"]):
        print(f"{model} {' '.join(options)} …", file=sys.stderr)
        command = [sys.executable, __file__, model, "--once", *options]
        process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures.append(json.loads(process.stdout))
    return figures


def fuse_table(rows: list[list[dict]]) -> str:
    """A Markdown table of `compile_fused`: what groups as candidates cost, and what the plan gains."""
    lines = [
        "| network | plan: apart (ms) | with groups (ms) | search: apart (s) | with groups (s) "
        "| rewrite and code: apart (s) | with groups (s) | whole: apart (s) | with groups (s) | more |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for apart, fused in rows:
        cells = [apart["model"], *(f"{row['latency_ns'] / 1e6:.4f}" for row in (apart, fused))]
        cells += [f"{phases_seconds(row, SEARCHES):.1f}" for row in (apart, fused)]
        cells += [f"{row['phase_cpu_seconds']['generating code']:.1f}" for row in (apart, fused)]
        cells += [f"{row['cpu_seconds']:.1f}" for row in (apart, fused)]
        more = fused["cpu_seconds"] / apart["cpu_seconds"] - 1
        lines.append(f"| {' | '.join(cells)} | {100 * more:.0f}% |")
    return "\n".join(lines)


def compile_generated(kind: str, regions: int, jobs: int) -> dict:
    """Run `compile_twice` on a generated network."""
    from build_zoo import strip
    from growing_networks import KINDS

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{kind}-{regions}.onnx"
        path.write_bytes(strip(KINDS[kind](regions), path.stem).SerializeToString())
        figures = compile_twice(str(path), jobs, "--tolerance", str(GENERATED_TOLERANCE))
    for cache_figures in figures.values():
        cache_figures["model"] = path.stem
    return figures


def compiler_seconds(row: dict, key: str = "phase_cpu_seconds") -> float:
    """Seconds of search, rewrite and code generation."""
    return phases_seconds(row, COMPILER_PHASES, key)


def phases_seconds(row: dict, phases: Sequence[str], key: str = "phase_cpu_seconds") -> float:
    """Sum of the seconds of several phases."""
    return sum(row[key][phase] for phase in phases)


def table(rows: list[dict]) -> str:
    """A Markdown table: one row for each network, in CPU seconds of one process."""
    lines = [
        "| network | regions | search, empty cache (s) | full (s) | rewrite and code (s) | verify (s) "
        "| whole, empty cache (s) | full (s) | peak (GiB) | within the targets |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        empty, full = row["empty"], row["full"]
        phases = full["phase_cpu_seconds"]
        peak_bytes = max(row[cache]["peak_memory_bytes"] for cache in CACHES)
        late = [c for c in CACHES if compiler_seconds(row[c]) > TARGET_SECONDS[c]]
        beyond = [f"no: {cache} cache" for cache in late]
        beyond += ["no: memory"] if peak_bytes > TARGET_BYTES else []
        figures = (
            phases_seconds(empty, SEARCHES),
            phases_seconds(full, SEARCHES),
            phases["generating code"],
            phases["verifying"],
            empty["cpu_seconds"],
            full["cpu_seconds"],
        )
        cells = [empty["model"], str(empty["regions"]), *(f"{figure:.1f}" for figure in figures)]
        lines.append(f"| {' | '.join(cells)} | {peak_bytes / 2**30:.2f} | {', '.join(beyond) or 'yes'} |")
    return "\n".join(lines)


def profile_seconds() -> dict[str, float]:
    """Seconds of ``pimflow profile`` for all networks, from each kind of cache."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["profile", *NETWORKS, "--quiet", "--cache", f"{folder}/profiles.sqlite"]
        seconds = {}
        for cache in CACHES:
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-m", "pimflow", *options], check=True, capture_output=True)
            seconds[cache] = time.perf_counter() - begin
        return seconds


def phases_text(figures: dict) -> str:
    """The text that is printed without options."""
    peak_gib = figures["peak_memory_bytes"] / 2**30
    lines = [f"{figures['model']}: {figures['wall_seconds']:.1f} s, peak {peak_gib:.2f} GiB"]
    lines += [f"  {phase:<33} {seconds:>6.2f} s" for phase, seconds in figures["phase_seconds"].items()]
    lines.append(f"{len(NETWORKS)} networks profiled")
    for cache, seconds in figures["profile_seconds"].items():
        lines.append(f"  {f'{cache} cache':<33} {seconds:>6.2f} s")
    return "\n".join(lines)


def picture(figures: dict) -> str:
    """The phases as bars of CPU time, with the rooms that do them."""
    seconds = figures["phase_cpu_seconds"]
    longest = max(seconds.values())
    lines = [f"{figures['model']}: {sum(seconds.values()):.1f} s of CPU time, nothing cached"]
    for phase, rooms in PHASE_ROOMS.items():
        bar = "█" * max(round(BAR_CELLS * seconds[phase] / longest), 1)
        lines.append(f"{phase:<34}{seconds[phase]:>5.1f} s  {bar:<{BAR_CELLS}}  {rooms}")
    return "\n".join(lines)


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    # As after an installation, whatever the machine has as its default: a process that may not keep bytecode
    # compiles the package, which takes half a second.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ |= BLAS_ENVIRONMENT  # as the command does: NumPy, which reads it, is not imported yet
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: mobilenet-v2; with --zoo, all")
    parser.add_argument("--picture", action="store_true", help="bars of CPU time, for docs/architecture.md")
    parser.add_argument("--zoo", action="store_true", help="from an empty and from the full cache")
    parser.add_argument("--growth", action="store_true", help="generated networks, in the same way")
    parser.add_argument("--fuse", action="store_true", help="without and with groups of layers as candidates")
    parser.add_argument(
        "--regions", type=int, nargs="+", default=REGIONS, help="of those; default: %(default)s"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes; CPU time is that of the first")
    parser.add_argument("--once", action="store_true", help="one compilation, as JSON")
    parser.add_argument("--cache", help="of that; default: none")
    parser.add_argument("--tolerance", type=float, help="of that; see pimflow.compile")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.once:
        figures = compile_once(args.models[0], args.cache, args.jobs, args.tolerance, args.fuse)
        print(json.dumps(figures))
    elif args.zoo or args.growth:
        rows = []
        compile_sources()
        if args.zoo:
            from pimflow import zoo

            rows += [compile_twice(name, args.jobs) for name in args.models or zoo.names()]
        if args.growth:
            from growing_networks import KINDS

            rows += [
                compile_generated(kind, regions, args.jobs) for kind in KINDS for regions in args.regions
            ]
        print(json.dumps(rows, indent=1) if args.json else table(rows))
    elif args.fuse:
        compile_sources()
        fused = [compile_fused(name) for name in args.models or ["mobilenet-v2"]]
        print(json.dumps(fused, indent=1) if args.json else fuse_table(fused))
    elif args.picture:
        print(picture(compile_once((args.models or ["mobilenet-v2"])[0])))
    else:
        figures = compile_once((args.models or ["mobilenet-v2"])[0])
        figures["profile_seconds"] = profile_seconds()
        print(json.dumps(figures, indent=1) if args.json else phases_text(figures))


if __name__ == "__main__":
    main()
