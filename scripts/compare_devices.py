"""Which device for which network: ``compare_devices.py [PART…]`` prints tables in Markdown.

Parts: ``fastest``, the fastest plan of each network on each device; ``frugal``, the one of least energy;
``means``, both over the five networks of the PIMFlow paper; ``launches``, their mean speed-up by the assumed
PIM launch, and with launches issued ahead. The networks are those five, bert-base, and a decode step of a
language model of GPT-2's shape.

Full accounting, strict timing; 16 of 32 channels with PIM, partitioned and time-shared, and all of them with
PIM, time-shared. What was searched is kept (PIMFLOW_CACHE), so a run that was stopped goes on where it was.
"""

import argparse
import itertools
from collections.abc import Sequence
from statistics import geometric_mean

from compare_networks import LAUNCHES_NS, PAPER_NETWORKS

import pimflow
from pimflow.api.sweep_rows import SweepFigures
from pimflow.hardware.systems import LAUNCHES
from pimflow.host.result_cache import ResultCache, default_path
from pimflow.placement import Profiling

NETWORKS = (*PAPER_NETWORKS, "bert-base", "gpt-2")
PIMS = ("newton-gddr6", "newton-hbm2", "aim-gddr6", "hbm-pim")
PARTS = ("means", "fastest", "frugal", "launches")
# Who uses which memory channels, and the settings of that.
CHANNELS = {
    "partitioned": ["channel_sharing=partitioned"],
    "time-shared": ["channel_sharing=time-shared"],
    "time-shared, all": ["channel_sharing=time-shared", "pim_channels=32"],
}
OBJECTIVES = {"fastest": "latency", "frugal": "energy"}

Found = dict[tuple[str, str, str], SweepFigures]


def found(networks: Sequence[str], pims: Sequence[str], objective: str, *settings: str) -> Found:
    """By network, device and use of the channels, what a search finds."""
    profiling = Profiling(cache=ResultCache(default_path()))
    every: Found = {}
    for name, of_channels in CHANNELS.items():
        asked = [f"pim={','.join(pims)}", *of_channels, *settings]
        rows = pimflow.sweep(networks, asked, profiling=profiling, objective=objective)
        for (network, pim), row in zip(itertools.product(networks, pims), rows, strict=True):
            if row.figures is None:
                raise SystemExit(f"{network} on {row.settings}: {row.error}")
            every[network, pim, name] = row.figures
    order = itertools.product(networks, pims, CHANNELS)
    return {place: every[place] for place in order}


def change(found: SweepFigures) -> float:
    """Of energy, as a share of what the GPU alone takes."""
    return found.energy_pj / found.energy_gpu_only_pj - 1


def limits(found: SweepFigures) -> str:
    """What the plan waits for: shares of its latency in which each resource is busy, the busiest first."""
    busy = {"GPU": found.gpu_busy_ns, "PIM": found.pim_busy_ns, "crossbar": found.crossbar_busy_ns}
    shares = sorted(((ns / found.latency_ns, name) for name, ns in busy.items()), reverse=True)
    told = [f"{name} {share:.0%}" for share, name in shares if share >= 0.005]
    return ", ".join([*told, f"launches {found.launching_ns / found.latency_ns:.0%}"])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plans(networks: Sequence[str], pims: Sequence[str], objective: str) -> str:
    """A row a network, a device and a way to share its channels."""
    head = (
        "network",
        "PIM",
        "channels",
        "GPU alone, ms",
        "plan, ms",
        "speed-up",
        "GPU alone, mJ",
        "plan, mJ",
    )
    rows = [
        (
            *place,
            f"{each.latency_gpu_only_ns / 1e6:.4f}",
            f"{each.latency_ns / 1e6:.4f}",
            f"{each.speedup:.3f}x",
            f"{each.energy_gpu_only_pj / 1e9:.2f}",
            f"{each.energy_pj / 1e9:.2f}",
            f"{change(each):+.1%}",
            f"{each.regions_with_pim} of {each.regions}",
            limits(each),
        )
        for place, each in found(networks, pims, objective).items()
    ]
    return table((*head, "energy", "with PIM", "busy"), rows)


BEST = "the best of these"


def means(networks: Sequence[str], pims: Sequence[str]) -> str:
    """A row a device and a use of the channels: means of speed-up and energy, geometric.

    Then one with the best use for each network, by what its plans were searched for.
    """
    fastest, frugal = (found(networks, pims, each) for each in OBJECTIVES.values())
    rows = []
    for pim in pims:
        for channels in (*CHANNELS, BEST):
            taken = [channels] if channels in CHANNELS else list(CHANNELS)
            quick = [
                min((fastest[name, pim, each] for each in taken), key=lambda f: f.latency_ns)
                for name in networks
            ]
            saving = [
                min((frugal[name, pim, each] for each in taken), key=lambda f: f.energy_pj)
                for name in networks
            ]
            told = ", ".join(f"{name} {change(each):+.1%}" for name, each in zip(networks, saving))
            rows.append((pim, channels, *_mean(quick), *_mean(saving), told))
    head = ("PIM", "channels", "fastest: speed-up", "energy", "least energy: speed-up", "energy", "networks")
    return table(head, rows)


def _mean(found: Sequence[SweepFigures]) -> tuple[str, str]:
    """Of speed-ups and of energies."""
    energy = geometric_mean(1 + change(each) for each in found) - 1
    return f"{geometric_mean(each.speedup for each in found):.3f}x", f"{energy:+.1%}"


def launches(networks: Sequence[str], pims: Sequence[str]) -> str:
    """A row a device and a way to share its channels, a column a PIM launch; the last issued ahead."""
    system = pimflow.system()
    tried = sorted({*LAUNCHES_NS, system.pim_launch_ns, system.gpu.launch_ns})
    columns = {f"{ns:g} ns": [f"pim_launch_ns={ns}"] for ns in tried}
    columns[f"{system.pim_launch_ns:g} ns, {LAUNCHES[1]}"] = [f"launches={LAUNCHES[1]}"]
    by_column = [found(networks, pims, "latency", *settings) for settings in columns.values()]
    rows = [
        (
            pim,
            channels,
            *(
                f"{geometric_mean(every[network, pim, channels].speedup for network in networks):.3f}x"
                for every in by_column
            ),
        )
        for pim in pims
        for channels in CHANNELS
    ]
    return table(("PIM", "channels", *columns), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="of the zoo, or files")
    parser.add_argument("--pims", default=",".join(PIMS), help="devices, or their files")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    networks, pims = args.networks.split(","), args.pims.split(",")
    papers = [each for each in PAPER_NETWORKS if each in networks] or networks
    for part in args.parts or PARTS:
        if part in OBJECTIVES:
            print(plans(networks, pims, OBJECTIVES[part]), flush=True)
        else:
            print({"means": means, "launches": launches}[part](papers, pims), flush=True)
        print()


if __name__ == "__main__":
    main()
