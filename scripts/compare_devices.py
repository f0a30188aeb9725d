"""Which device for which network: ``compare_devices.py [--networks …] [--pims …]`` prints a Markdown table.

A row a network, a device and a way to share its channels, in full accounting and strict timing: speed-up and
energy against the GPU alone, which has all channels, and how long each resource works. The networks are the
paper's five, bert-base, and a block of a decode step of a language model.
"""

import argparse

from compare_networks import PAPER_NETWORKS

import pimflow
from pimflow.core.candidate import RESOURCES
from pimflow.hardware.systems import SHARINGS
from pimflow.placement import Searched

NETWORKS = (*PAPER_NETWORKS, "bert-base", "gpt-2")
PIMS = ("newton-gddr6", "newton-hbm2", "aim-gddr6", "hbm-pim")
HEADER = ("network", "PIM", "channels", "GPU alone, ms", "plan, ms", "speed-up", "energy", "busy", "on PIM")


def row(network: str, pim: str, sharing: str) -> tuple[str, ...]:
    """The fastest plan of `network` on one device."""
    found = pimflow.search(network, pimflow.system(pim=pim, channel_sharing=sharing))
    before, after = found.baseline, found.evaluation
    with_pim = sum(bool(candidate.pim_regions) for candidate in found.candidates)
    return (
        network,
        pim,
        sharing,
        f"{before.latency_ns / 1e6:.4f}",
        f"{after.latency_ns / 1e6:.4f}",
        f"{before.latency_ns / after.latency_ns:.3f}x",
        f"{after.energy_pj / before.energy_pj - 1:+.1%}",
        busy(found),
        f"{with_pim} of {len(found.candidates)}",
    )


def busy(found: Searched) -> str:
    """Shares of the latency in which each resource works."""
    timeline = found.evaluation.timeline
    shares = {name: timeline.busy_ps(name) / timeline.end_ps for name in RESOURCES}
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS), help="of the zoo, or files")
    parser.add_argument("--pims", default=",".join(PIMS), help="devices, or their files")
    parser.add_argument("--sharings", default=",".join(SHARINGS), help="of channels between GPU and PIM")
    args = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |")
    print("|" + "---|" * len(HEADER))
    for network in args.networks.split(","):
        for pim in args.pims.split(","):
            for sharing in args.sharings.split(","):
                print(f"| {' | '.join(row(network, pim, sharing))} |", flush=True)


if __name__ == "__main__":
    main()
