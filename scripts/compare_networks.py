"""Networks under every convention: ``compare_networks.py [--copies] [MODEL…]`` prints a table in Markdown.

``--copies``: under full accounting, with slices and concatenations laid out in memory and with them copied.
"""

import argparse
import itertools

import pimflow
from pimflow.hardware.system import SPLITS

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


def rows(model: str) -> list[tuple[str, ...]]:
    """Latency and energy of `model`, a row a convention."""
    table = []
    for (accounting, timing), splits in itertools.product(CONVENTIONS, SPLITS[::-1]):
        found = pimflow.search(model, pimflow.system(accounting=accounting, timing=timing, splits=splits))
        before, after = found.gpu_only, found.evaluation
        table.append(
            (
                model,
                accounting,
                timing,
                splits,
                f"{before.latency_ns / 1e6:.4f}",
                f"{after.latency_ns / 1e6:.4f}",
                f"{before.latency_ns / after.latency_ns:.3f}x",
                f"{before.energy_pj / 1e9:.2f}",
                f"{after.energy_pj / 1e9:.2f}",
            )
        )
    return table


def copies_row(model: str) -> tuple[str, ...]:
    """What it gains that parts of tensors are no copies."""
    cells = [model]
    for copies in ("elided", "made"):
        found = pimflow.search(model, pimflow.system(copies=copies))
        before, after = found.gpu_only.latency_ns, found.evaluation.latency_ns
        cells += [f"{before / 1e6:.4f}", f"{after / 1e6:.4f}", f"{before / after:.3f}x"]
    return tuple(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", action="store_true", help="copies elided and made, under full accounting")
    parser.add_argument("models", nargs="*", default=PAPER_NETWORKS, help="of the zoo, or files")
    args = parser.parse_args()
    header = COPIES_HEADER if args.copies else HEADER
    print(f"| {' | '.join(header)} |")
    print("|" + "---|" * len(header))
    for model in args.models:
        for row in [copies_row(model)] if args.copies else rows(model):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
