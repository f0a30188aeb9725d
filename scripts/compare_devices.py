"""Which device for which network: ``compare_devices.py [PART…]`` prints tables in Markdown.

Parts: ``fastest``, the fastest plan of each network on each device; ``frugal``, the one of least energy;
``means``, both over the five networks of the PIMFlow paper; ``launches``, their mean speed-up by the assumed
PIM launch; ``bounds``, the same without one of the charges at a time, which is the upper bound of what a
compiler can gain there; ``energies``, the energy of the frugal plans by cause. The networks are those five,
bert-base, and a decode step of a language model of GPT-2's shape.

Full accounting, strict timing; 16 of 32 channels with PIM, partitioned and time-shared, and all of them with
PIM, time-shared. Results are cached (PIMFLOW_CACHE), so that a stopped run continues where it was.
"""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean

from compare_networks import PAPER_NETWORKS, launches_ns

import pimflow
from pimflow.api.sweep_rows import SweepFigures
from pimflow.hardware.systems import CHARGES, SHARINGS
from pimflow.host.result_cache import ResultCache, default_path
from pimflow.placement import Profiling

NETWORKS = (*PAPER_NETWORKS, "bert-base", "gpt-2")
PIMS = ("newton-gddr6", "newton-hbm2", "aim-gddr6", "hbm-pim")
PARTS = ("means", "fastest", "frugal", "launches", "bounds", "energies")
# Who uses which memory channels, and the settings of that.
CHANNELS = {
    "partitioned": {"channel_sharing": "partitioned"},
    "time-shared": {"channel_sharing": "time-shared"},
    "time-shared, all": {"channel_sharing": "time-shared", "pim_channels": 32},
}
OBJECTIVES = {"fastest": "latency", "frugal": "energy"}

Found = dict[tuple[str, str, str], SweepFigures]


def found(
    networks: Sequence[str],
    pims: Sequence[str],
    objective: str,
    *settings: str,
    channels: Mapping[str, Mapping[str, object]] = CHANNELS,
) -> Found:
    """Search every network on every device: figures by network, device and use of the channels."""
    profiling = Profiling(cache=ResultCache(default_path()))
    every: Found = {}
    for name, of_channels in channels.items():
        asked = [f"pim={','.join(pims)}", *(f"{name}={each}" for name, each in of_channels.items())]
        rows = pimflow.sweep(networks, [*asked, *settings], profiling=profiling, objective=objective)
        for (network, pim), row in zip(itertools.product(networks, pims), rows, strict=True):
            if row.figures is None:
                raise SystemExit(f"{network} on {row.settings}: {row.error}")
            every[network, pim, name] = row.figures
    order = itertools.product(networks, pims, channels)
    return {place: every[place] for place in order}


def change(found: SweepFigures) -> float:
    """Change of energy against the GPU alone, as a share."""
    return found.energy_pj / found.energy_gpu_only_pj - 1


def limits(found: SweepFigures) -> str:
    """Shares of the latency in which each resource is busy, the busiest first, as text."""
    busy = {"GPU": found.gpu_busy_ns, "PIM": found.pim_busy_ns, "crossbar": found.crossbar_busy_ns}
    shares = sorted(((ns / found.latency_ns, name) for name, ns in busy.items()), reverse=True)
    told = [f"{name} {share:.0%}" for share, name in shares if share >= 0.005]
    return ", ".join([*told, f"launches {found.launching_ns / found.latency_ns:.0%}"])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plans(networks: Sequence[str], pims: Sequence[str], objective: str) -> str:
    """A row for each network, device and use of the channels."""
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
    """A row for each device and use of the channels: geometric means of speed-up and energy.

    One more row takes for each network the use that is best by the objective of its plans.
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
    """Geometric means of speed-ups and of changes of energy, as text."""
    energy = geometric_mean(1 + change(each) for each in found) - 1
    return f"{geometric_mean(each.speedup for each in found):.3f}x", f"{energy:+.1%}"


def launches(networks: Sequence[str], pims: Sequence[str]) -> str:
    """A row for each device and use of the channels, a column for each PIM launch."""
    columns = {
        f"{ns:g} ns" + (f" ({kind})" if kind else ""): f"pim_launch_ns={ns}"
        for ns, kind in launches_ns().items()
    }
    by_column = [found(networks, pims, "latency", setting) for setting in columns.values()]
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


FREE = {
    "pim-launch": "PIM launches",
    "crossbar": "transfers over the crossbar",
    "epilogue": "what PIM leaves undone, partial sums",
    "layout": "layout transforms, rows of zeros",
    "channel-modes": "switches, and where tensors lie",
}


def bounds(networks: Sequence[str], pims: Sequence[str]) -> str:
    """Mean speed-up of time-shared plans: a row for each omitted charge, a column for each device."""
    shared = {name: CHANNELS[name] for name in SHARINGS[:1]}
    ways = {"all charged": [], "a switch takes no time": ["channel_mode_switch_ns=0"]}
    for charge, what in FREE.items():
        others = "+".join(each for each in CHARGES if each != charge)
        ways[f"free: {what}"] = [f"accounting=paper+{others}"]
    ways["all of these free"] = ["accounting=paper"]
    rows = []
    for way, settings in ways.items():
        every = found(networks, pims, "latency", *settings, channels=shared)
        speedups = [[each.speedup for (_, at, _), each in every.items() if at == pim] for pim in pims]
        rows.append((way, *(f"{geometric_mean(each):.3f}x" for each in speedups)))
    return table(("16 channels, time-shared", *pims), rows)


# By cause, how the parts of an energy begin, the first that fits.
CAUSES = {
    "constant power": ("gpu_static",),
    "PIM's background": ("pim_static",),
    "arithmetic": ("gpu_arithmetic",),
    "L2": ("gpu_l2",),
    "DRAM": ("gpu_dram",),
    "crossbar": ("crossbar",),
    "PIM commands": ("pim_",),
}


def shares(energies_pj: Mapping[str, float], of_pj: float) -> dict[str, float]:
    """Energies by cause as shares of `of_pj`; what has no cause is `others`."""
    found = dict.fromkeys((*CAUSES, "others"), 0.0)
    for part, pj in energies_pj.items():
        cause = next((c for c, begins in CAUSES.items() if part.startswith(begins)), "others")
        found[cause] += pj / of_pj
    return found


def energies(networks: Sequence[str], pims: Sequence[str]) -> str:
    """Mean energy by cause, of the GPU alone and of the plan, in percent of the GPU alone."""
    profiling = Profiling(cache=ResultCache(default_path()))
    rows = []
    for pim, (name, of_channels) in itertools.product(pims, CHANNELS.items()):
        system = pimflow.system(pim=pim, **of_channels)
        alone, plan = [], []
        for network in networks:
            searched = pimflow.search(network, system, objective="energy", profiling=profiling)
            whole_pj = searched.gpu_only.energy_pj
            alone.append(shares(searched.gpu_only.energies_pj, whole_pj))
            plan.append(shares(searched.evaluation.energies_pj, whole_pj))
        for what, of_networks in (("GPU alone", alone), ("plan", plan)):
            means = {cause: fmean(each[cause] for each in of_networks) for cause in of_networks[0]}
            rows.append((pim, name, what, *(f"{100 * each:.1f}" for each in means.values())))
    return table(("PIM", "channels", "", *CAUSES, "others"), rows)


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
            made = {"means": means, "launches": launches, "bounds": bounds, "energies": energies}
            print(made[part](papers, pims), flush=True)
        print()


if __name__ == "__main__":
    main()
