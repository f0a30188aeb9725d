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
from pimflow.placement import Profiling, Searched

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


def searched(model: str, on: System, **asked: object) -> Searched:
    """Search `model` on a system, with the times of earlier runs."""
    return pimflow.search(model, on, profiling=Profiling(cache=ResultCache(default_path())), **asked)


def rows(model: str) -> list[tuple[str, ...]]:
    """Latency and energy of `model`, one row for each convention."""
    systems = [
        pimflow.system(accounting=accounting, timing=timing, splits=splits)
        for (accounting, timing), splits in itertools.product(CONVENTIONS, SPLITS[::-1])
    ]
    return [row(model, searched(model, on)) for on in systems]


def row(model: str, found: Searched) -> tuple[str, ...]:
    """Latency and energy of `model` under the convention that it was searched under."""
    before, after, on = found.baseline, found.evaluation, found.system
    return (
        model,
        on.accounting,
        on.timing,
        on.splits,
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
        found = searched(model, pimflow.system(copies=copies))
        before, after = found.baseline.latency_ns, found.evaluation.latency_ns
        cells += [f"{before / 1e6:.4f}", f"{after / 1e6:.4f}", f"{before / after:.3f}x"]
    return tuple(cells)


def fuse_row(model: str) -> tuple[str, ...]:
    """Gains of fused groups, on the GPU alone and in a plan."""
    found = [searched(model, pimflow.system(), fuse=fuse) for fuse in (False, True)]
    alone = searched(model, pimflow.system(pim_channels=0), fuse=True)
    cells = [model]
    for figures, fused in (
        ([each.baseline.latency_ns for each in found], alone),
        ([each.evaluation.latency_ns for each in found], found[1]),
    ):
        apart_ns, together_ns = figures
        layers = [len(covers) for covers in fused.tiled()]
        cells += [f"{apart_ns / 1e6:.4f}", f"{together_ns / 1e6:.4f}", f"{apart_ns / together_ns:.3f}x"]
        cells.append(f"{len(layers)} ({sum(layers)})")
    cells += [str(sum(len(c.pim_regions) for c in each.candidates)) for each in found]
    return tuple(cells)


def launches_ns() -> dict[float, str]:
    """PIM launches to try, shortest first, with a description of each."""
    system = pimflow.system()
    named = dict.fromkeys(LAUNCHES_NS, "")
    named |= {system.gpu.launch_ns: "as the GPU's", system.pim_launch_ns: "assumed"}
    return dict(sorted(named.items()))


def launch_row(launch_ns: float, kind: str, launches: str, models: Iterable[str]) -> tuple[str, ...]:
    """Speed-ups of `models` if a PIM launch takes `launch_ns`, and their geometric mean."""
    on = pimflow.system(pim_launch_ns=launch_ns, launches=launches)
    found = [searched(model, on) for model in models]
    speedups = [each.baseline.latency_ns / each.evaluation.latency_ns for each in found]
    issued = "" if launches == LAUNCHES[0] else f", {launches}"
    cells = [f"{launch_ns:g} ns" + (f" ({kind})" if kind else "") + issued]
    return (*cells, *(f"{each:.3f}x" for each in (*speedups, geometric_mean(speedups))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", action="store_true", help="copies elided and made, under full accounting")
    parser.add_argument("--fuse", action="store_true", help="groups of layers, under full accounting")
    parser.add_argument("--launches", action="store_true", help="other PIM launches, in turn and ahead")
    parser.add_argument("models", nargs="*", default=PAPER_NETWORKS, help="of the zoo, or files")
    args = parser.parse_args()
    header, found = HEADER, (row for model in args.models for row in rows(model))
    if args.copies:
        header, found = COPIES_HEADER, map(copies_row, args.models)
    elif args.fuse:
        header, found = FUSE_HEADER, map(fuse_row, args.models)
    elif args.launches:
        header = ("PIM launch", *args.models, "geometric mean")
        found = (
            launch_row(ns, kind, launches, args.models)
            for launches in LAUNCHES
            for ns, kind in launches_ns().items()
        )
    print(f"| {' | '.join(header)} |")
    print("|" + "---|" * len(header))
    for row in found:
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
