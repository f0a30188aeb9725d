"""Time of each phase of a compilation: ``bench_compile.py [MODEL] [--json]``, measured on this machine."""

import argparse
import json
import resource
import time

import pimflow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
    }
    if args.json:
        print(json.dumps(figures, indent=1))
        return
    print(
        f"{args.model}: {figures['wall_seconds']:.1f} s, peak {figures['peak_memory_bytes'] / 2**30:.2f} GiB"
    )
    for phase, seconds in phases.items():
        print(f"  {phase:<16} {seconds:>6.2f} s")


if __name__ == "__main__":
    main()
