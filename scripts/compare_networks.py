"""Networks under every convention: ``compare_networks.py [OPTION] [MODEL…]`` prints a table in Markdown.

``--copies``: under full accounting, with slices and concatenations laid out in memory and with them copied.
``--fuse``: under full accounting, layer by layer, and with groups of layers as one kernel where it is faster.
``--launches``: under full accounting, speed-ups and their geometric mean by the assumed PIM launch, with
launches in turn and issued ahead.

Times are cached (PIMFLOW_CACHE).
"""

import argparse
import itertools
from collections.abc import Iterable
from statistics import geometric_mean

import pimflow
from pimflow.hardware import System
from pimflow.hardware.systems import LAUNCHES, SPLITS
from pimflow.host.result_cache import ResultCache, default_path
from pimflow.placement import Profiling, SearchResult

PAPER_NETWORKS = ("efficientnet-b0", "mnasnet-1.0", "mobilenet-v2", "resnet-50", "vgg-16")
CONVENTIONS = [
    (accounting, timing) for accounting in ("full", "paper") for timing in ("strict", "ramulator-pimflow")
]
HEADER = (
    "network",
    "accounting",
    "timing",
    "splits",
    "GPU only, ms",
    "plan, ms",
    "speed-up",
    "GPU only, mJ",
    "plan, mJ",
)
COPIES_HEADER = (
    "network",
    *("copies elided: GPU only, ms", "plan, ms", "speed-up"),
    *("copies made: GPU only, ms", "plan, ms", "speed-up"),
)
FUSE_HEADER = (
    "network",
    *("GPU only: apart, ms", "fused, ms", "gain", "kernels of groups (layers)"),
    *("plan: apart, ms", "fused, ms", "gain", "kernels of groups (layers)", "PIM regions apart", "fused"),
)
LAUNCHES_NS = (0.0, 500.0, 1000.0)  # of a PIM submission, beside the system's and that of a GPU kernel


def search_network(model: str, system: System, **options: object) -> SearchResult:
    """Search `model` on a system, with the times of earlier runs."""
    return pimflow.search(model, system, profiling=Profiling(cache=ResultCache(default_path())), **options)


def rows(model: str) -> list[tuple[str, ...]]:
    """Latency and energy of `model`, one row for each convention."""
    systems = [
        pimflow.system(accounting=accounting, timing=timing, splits=splits)
        for (accounting, timing), splits in itertools.product(CONVENTIONS, SPLITS[::-1])
    ]
    return [row(model, search_network(model, system)) for system in systems]


def row(model: str, search_result: SearchResult) -> tuple[str, ...]:
    """Latency and energy of `model` under the convention that it was searched under."""
    before, after, system = search_result.baseline, search_result.evaluation, search_result.system
    return (
        model,
        system.accounting,
        system.timing,
        system.splits,
        f"{before.latency_ns / 1e6:.4f}",
        f"{after.latency_ns / 1e6:.4f}",
        f"{before.latency_ns / after.latency_ns:.3f}x",
        f"{before.energy_pj / 1e9:.2f}",
        f"{after.energy_pj / 1e9:.2f}",
    )


def copies_row(model: str) -> tuple[str, ...]:
    """Speed-ups of `model` with slices and concatenations in place, and copied."""
    cells = [model]
    for copies in ("elided", "made"):
        search_result = search_network(model, pimflow.system(copies=copies))
        before, after = search_result.baseline.latency_ns, search_result.evaluation.latency_ns
        cells += [f"{before / 1e6:.4f}", f"{after / 1e6:.4f}", f"{before / after:.3f}x"]
    return tuple(cells)


def fuse_row(model: str) -> tuple[str, ...]:
    """Gains of fused groups, on the GPU alone and in a plan."""
    search_results = [search_network(model, pimflow.system(), fuse=fuse) for fuse in (False, True)]
    gpu_only = search_network(model, pimflow.system(pim_channels=0), fuse=True)
    cells = [model]
    for figures, fused in (
        ([result.baseline.latency_ns for result in search_results], gpu_only),
        ([result.evaluation.latency_ns for result in search_results], search_results[1]),
    ):
        apart_ns, together_ns = figures
        layers = [len(covers) for covers in fused.group_tilings()]
        cells += [f"{apart_ns / 1e6:.4f}", f"{together_ns / 1e6:.4f}", f"{apart_ns / together_ns:.3f}x"]
        cells.append(f"{len(layers)} ({sum(layers)})")
    cells += [str(sum(len(c.pim_regions) for c in result.candidates)) for result in search_results]
    return tuple(cells)


def launches_ns() -> dict[float, str]:
    """PIM launches to try, shortest first, with a description of each."""
    system = pimflow.system()
    kinds = dict.fromkeys(LAUNCHES_NS, "")
    kinds |= {system.gpu.launch_ns: "as the GPU's", system.pim_launch_ns: "assumed"}
    return dict(sorted(kinds.items()))


def launch_row(launch_ns: float, kind: str, launches: str, models: Iterable[str]) -> tuple[str, ...]:
    """Speed-ups of `models` if a PIM launch takes `launch_ns`, and their geometric mean."""
    system = pimflow.system(pim_launch_ns=launch_ns, launches=launches)
    search_results = [search_network(model, system) for model in models]
    speedups = [result.baseline.latency_ns / result.evaluation.latency_ns for result in search_results]
    issued = "" if launches == LAUNCHES[0] else f", {launches}"
    cells = [f"{launch_ns:g} ns" + (f" ({kind})" if kind else "") + issued]
    return (*cells, *(f"{result:.3f}x" for result in (*speedups, geometric_mean(speedups))))


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", action="store_true", help="copies elided and made, under full accounting")
    parser.add_argument("--fuse", action="store_true", help="groups of layers, under full accounting")
    parser.add_argument("--launches", action="store_true", help="other PIM launches, in turn and ahead")
    parser.add_argument("models", nargs="*", default=PAPER_NETWORKS, help="of the zoo, or files")
    args = parser.parse_args()
    header, table_rows = HEADER, (row for model in args.models for row in rows(model))
    if args.copies:
        header, table_rows = COPIES_HEADER, map(copies_row, args.models)
    elif args.fuse:
        header, table_rows = FUSE_HEADER, map(fuse_row, args.models)
    elif args.launches:
        header = ("PIM launch", *args.models, "geometric mean")
        table_rows = (
            launch_row(ns, kind, launches, args.models)
            for launches in LAUNCHES
            for ns, kind in launches_ns().items()
        )
    print(f"| {' | '.join(header)} |")
    print("|" + "---|" * len(header))
    for row in table_rows:
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
