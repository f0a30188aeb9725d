"""Networks under every convention: ``compare_networks.py [OPTION] [MODEL…]`` prints a table in Markdown.

``--copies``: under full accounting, with slices and concatenations laid out in memory and with them copied.
``--fuse``: under full accounting, layer by layer, and with groups of layers as one kernel where it is faster.
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
FUSE_HEADER = (
    "network",
    *("GPU only: apart, ms", "fused, ms", "gain", "kernels of groups (layers)"),
    *("plan: apart, ms", "fused, ms", "gain", "kernels of groups (layers)", "PIM regions apart", "fused"),
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


def fuse_row(model: str) -> tuple[str, ...]:
    """What it gains that groups of layers are one kernel, on the GPU alone and in a plan."""
    found = [pimflow.search(model, pimflow.system(), fuse=fuse) for fuse in (False, True)]
    alone = pimflow.search(model, pimflow.system(pim_channels=0), fuse=True)
    cells = [model]
    for figures, fused in (
        ([each.gpu_only.latency_ns for each in found], alone),
        ([each.evaluation.latency_ns for each in found], found[1]),
    ):
        apart_ns, together_ns = figures
        layers = [len(covers) for covers in fused.tiled()]
        cells += [f"{apart_ns / 1e6:.4f}", f"{together_ns / 1e6:.4f}", f"{apart_ns / together_ns:.3f}x"]
        cells.append(f"{len(layers)} ({sum(layers)})")
    cells += [str(sum(len(c.pim_regions) for c in each.candidates)) for each in found]
    return tuple(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", action="store_true", help="copies elided and made, under full accounting")
    parser.add_argument("--fuse", action="store_true", help="groups of layers, under full accounting")
    parser.add_argument("models", nargs="*", default=PAPER_NETWORKS, help="of the zoo, or files")
    args = parser.parse_args()
    header = COPIES_HEADER if args.copies else FUSE_HEADER if args.fuse else HEADER
    print(f"| {' | '.join(header)} |")
    print("|" + "---|" * len(header))
    for model in args.models:
        one = copies_row if args.copies else fuse_row if args.fuse else None
        for row in [one(model)] if one else rows(model):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
