"""Networks under every convention: ``compare_networks.py [MODEL…]`` prints a table in Markdown."""

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=PAPER_NETWORKS, help="of the zoo, or files")
    args = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |")
    print("|" + "---|" * len(HEADER))
    for model in args.models:
        for row in rows(model):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
