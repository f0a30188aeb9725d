"""Time of each phase of a compilation, and of profiling: ``bench_compile.py [MODEL] [--json]``.

Profiles the paper's five networks from an empty cache and from the full one, each time by a command of its
own, its start included. Measured on this machine.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time

import pimflow

NETWORKS = ("efficientnet-b0", "mnasnet-1.0", "mobilenet-v2", "resnet-50", "vgg-16")


def profile_seconds() -> dict[str, float]:
    """Of ``pimflow profile`` for all networks, by what the cache holds."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["profile", *NETWORKS, "--quiet", "--cache", f"{folder}/profiles.sqlite"]
        seconds = {}
        for cache in ("empty", "full"):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-m", "pimflow", *options], check=True, capture_output=True)
            seconds[cache] = time.perf_counter() - begin
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="mobilenet-v2")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    begins: list[tuple[str, float]] = []
    compiled = pimflow.compile(args.model, progress=lambda phase: begins.append((phase, time.perf_counter())))
    ends = [begin for _, begin in begins[1:]] + [time.perf_counter()]
    phases = {phase: end - begin for (phase, begin), end in zip(begins, ends)}
    figures = {
        "model": args.model,
        "wall_seconds": compiled.report["wall_seconds"],
        "search_seconds": compiled.report["search_seconds"],
        "phase_seconds": phases,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "profile_seconds": profile_seconds(),
    }
    if args.json:
        print(json.dumps(figures, indent=1))
        return
    print(
        f"{args.model}: {figures['wall_seconds']:.1f} s, peak {figures['peak_memory_bytes'] / 2**30:.2f} GiB"
    )
    for phase, seconds in phases.items():
        print(f"  {phase:<23} {seconds:>6.2f} s")
    print(f"{len(NETWORKS)} networks profiled")
    for cache, seconds in figures["profile_seconds"].items():
        print(f"  {f'{cache} cache':<23} {seconds:>6.2f} s")


if __name__ == "__main__":
    main()
