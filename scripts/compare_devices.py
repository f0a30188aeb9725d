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
from pimflow.commands.sweep.sweep_rows import SweepFigures
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

FiguresByPlace = dict[tuple[str, str, str], SweepFigures]


def sweep_figures(
    networks: Sequence[str],
    pims: Sequence[str],
    objective: str,
    *settings: str,
    channels: Mapping[str, Mapping[str, object]] = CHANNELS,
) -> FiguresByPlace:
    """Search every network on every device: figures by network, device and use of the channels."""
    profiling = Profiling(cache=ResultCache(default_path()))
    figures: FiguresByPlace = {}
    for name, channel_settings in channels.items():
        device_settings = [
            f"pim={','.join(pims)}",
            *(f"{name}={value}" for name, value in channel_settings.items()),
        ]
        rows = pimflow.sweep(
            networks, [*device_settings, *settings], profiling=profiling, objective=objective
        )
        for (network, pim), row in zip(itertools.product(networks, pims), rows, strict=True):
            if row.figures is None:
                raise SystemExit(f"{network} on {row.settings}: {row.error}")
            figures[network, pim, name] = row.figures
    order = itertools.product(networks, pims, channels)
    return {place: figures[place] for place in order}


def energy_change(figures: SweepFigures) -> float:
    """Change of energy against the GPU alone, as a share."""
    return figures.energy_pj / figures.energy_gpu_only_pj - 1


def limits(figures: SweepFigures) -> str:
    """Shares of the latency in which each resource is busy, the busiest first, as text."""
    busy = {"GPU": figures.gpu_busy_ns, "PIM": figures.pim_busy_ns, "crossbar": figures.crossbar_busy_ns}
    shares = sorted(((ns / figures.latency_ns, name) for name, ns in busy.items()), reverse=True)
    texts = [f"{name} {share:.0%}" for share, name in shares if share >= 0.005]
    return ", ".join([*texts, f"launches {figures.launching_ns / figures.latency_ns:.0%}"])


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
            f"{figures.latency_gpu_only_ns / 1e6:.4f}",
            f"{figures.latency_ns / 1e6:.4f}",
            f"{figures.speedup:.3f}x",
            f"{figures.energy_gpu_only_pj / 1e9:.2f}",
            f"{figures.energy_pj / 1e9:.2f}",
            f"{energy_change(figures):+.1%}",
            f"{figures.regions_with_pim} of {figures.regions}",
            limits(figures),
        )
        for place, figures in sweep_figures(networks, pims, objective).items()
    ]
    return table((*head, "energy", "with PIM", "busy"), rows)


BEST = "the best of these"


def means(networks: Sequence[str], pims: Sequence[str]) -> str:
    """A row for each device and use of the channels: geometric means of speed-up and energy.

    One more row takes for each network the use that is best by the objective of its plans.
    """
    fastest, frugal = (sweep_figures(networks, pims, entry) for entry in OBJECTIVES.values())
    rows = []
    for pim in pims:
        for channels in (*CHANNELS, BEST):
            uses = [channels] if channels in CHANNELS else list(CHANNELS)
            quick = [
                min((fastest[name, pim, entry] for entry in uses), key=lambda f: f.latency_ns)
                for name in networks
            ]
            saving = [
                min((frugal[name, pim, entry] for entry in uses), key=lambda f: f.energy_pj)
                for name in networks
            ]
            network_changes = ", ".join(
                f"{name} {energy_change(entry):+.1%}" for name, entry in zip(networks, saving)
            )
            rows.append((pim, channels, *_mean(quick), *_mean(saving), network_changes))
    head = ("PIM", "channels", "fastest: speed-up", "energy", "least energy: speed-up", "energy", "networks")
    return table(head, rows)


def _mean(plans: Sequence[SweepFigures]) -> tuple[str, str]:
    """Geometric means of speed-ups and of changes of energy, as text."""
    energy = geometric_mean(1 + energy_change(plan) for plan in plans) - 1
    return f"{geometric_mean(plan.speedup for plan in plans):.3f}x", f"{energy:+.1%}"


def launches(networks: Sequence[str], pims: Sequence[str]) -> str:
    """A row for each device and use of the channels, a column for each PIM launch."""
    columns = {
        f"{ns:g} ns" + (f" ({kind})" if kind else ""): f"pim_launch_ns={ns}"
        for ns, kind in launches_ns().items()
    }
    by_column = [sweep_figures(networks, pims, "latency", setting) for setting in columns.values()]
    rows = [
        (
            pim,
            channels,
            *(
                f"{geometric_mean(figures[network, pim, channels].speedup for network in networks):.3f}x"
                for figures in by_column
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
    cases = {"all charged": [], "a switch takes no time": ["channel_mode_switch_ns=0"]}
    for charge, description in FREE.items():
        others = "+".join(item for item in CHARGES if item != charge)
        cases[f"free: {description}"] = [f"accounting=paper+{others}"]
    cases["all of these free"] = ["accounting=paper"]
    rows = []
    for case, settings in cases.items():
        figures = sweep_figures(networks, pims, "latency", *settings, channels=shared)
        speedups = [
            [item.speedup for (_, device, _), item in figures.items() if device == pim] for pim in pims
        ]
        rows.append((case, *(f"{geometric_mean(item):.3f}x" for item in speedups)))
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


def shares(energies_pj: Mapping[str, float], total_pj: float) -> dict[str, float]:
    """Energies by cause as shares of `total_pj`; what has no cause is `others`."""
    totals = dict.fromkeys((*CAUSES, "others"), 0.0)
    for part, pj in energies_pj.items():
        cause = next((c for c, begins in CAUSES.items() if part.startswith(begins)), "others")
        totals[cause] += pj / total_pj
    return totals


def energies(networks: Sequence[str], pims: Sequence[str]) -> str:
    """Mean energy by cause, of the GPU alone and of the plan, in percent of the GPU alone."""
    profiling = Profiling(cache=ResultCache(default_path()))
    rows = []
    for pim, (name, channel_settings) in itertools.product(pims, CHANNELS.items()):
        system = pimflow.system(pim=pim, **channel_settings)
        gpu_only, plan = [], []
        for network in networks:
            search_result = pimflow.search(network, system, objective="energy", profiling=profiling)
            gpu_only_pj = search_result.gpu_only.energy_pj
            gpu_only.append(shares(search_result.gpu_only.energies_pj, gpu_only_pj))
            plan.append(shares(search_result.evaluation.energies_pj, gpu_only_pj))
        for plan_name, network_shares in (("GPU alone", gpu_only), ("plan", plan)):
            means = {cause: fmean(share[cause] for share in network_shares) for cause in network_shares[0]}
            rows.append((pim, name, plan_name, *(f"{100 * share:.1f}" for share in means.values())))
    return table(("PIM", "channels", "", *CAUSES, "others"), rows)


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="of the zoo, or files")
    parser.add_argument("--pims", default=",".join(PIMS), help="devices, or their files")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    networks, pims = args.networks.split(","), args.pims.split(",")
    papers = [network for network in PAPER_NETWORKS if network in networks] or networks
    for part in args.parts or PARTS:
        if part in OBJECTIVES:
            print(plans(networks, pims, OBJECTIVES[part]), flush=True)
        else:
            tables = {"means": means, "launches": launches, "bounds": bounds, "energies": energies}
            print(tables[part](papers, pims), flush=True)
        print()


if __name__ == "__main__":
    main()
