"""Gain of letting the GPU use the channels that have PIM, by the time of a switch and by their number.

Prints two tables of speed-ups against the GPU alone, which has all channels, in full accounting and strict
timing, for newton-gddr6 unless --pim names another device. Results are cached (PIMFLOW_CACHE).
"""

import argparse
import math

import pimflow
from pimflow.commands.compile.system_choices import counts
from pimflow.host.result_cache import ResultCache, default_path
from pimflow.placement import Profiling

NETWORKS = ("efficientnet-b0", "mnasnet-1.0", "mobilenet-v2", "resnet-50", "vgg-16")
SWITCHES_NS = (0.0, 200.0, 500.0, 1000.0)


def speedup(network: str, profiling: Profiling, **changes: object) -> float:
    """Speed-up of the fastest plan against the GPU alone."""
    search_result = pimflow.search(network, pimflow.system(**changes), profiling=profiling)
    return search_result.baseline.latency_ns / search_result.evaluation.latency_ns


def table(heads: list[str], columns: list[list[float]]) -> str:
    """A row for each network, and the geometric mean; columns have speed-ups in the order of `NETWORKS`."""
    rows = [[name, *(f"{column[i]:.3f}" for column in columns)] for i, name in enumerate(NETWORKS)]
    means = [math.exp(sum(map(math.log, column)) / len(column)) for column in columns]
    rows.append(["geometric mean", *(f"{mean:.3f}" for mean in means)])
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows]) + "\n"


def text(pim: str | None, channel_counts: list[int] | None) -> str:
    """Both tables as Markdown."""
    shared = {"pim": pim, "channel_sharing": "time-shared"}
    profiling = Profiling(cache=ResultCache(default_path()))
    channels = pimflow.system(pim=pim).pim_channels

    def column(**changes: object) -> list[float]:
        return [speedup(network, profiling, **changes) for network in NETWORKS]

    partitioned = column(pim=pim, channel_sharing="partitioned")
    by_switch = [column(**shared, channel_mode_switch_ns=value) for value in SWITCHES_NS]
    channel_counts = channel_counts or counts(pimflow.system(**shared))
    by_count = [column(**shared, pim_channels=value) for value in channel_counts]
    best = [max(value) for value in zip(*by_count)]
    switch_ns = pimflow.system(**shared).channel_mode_switch_ns
    return (
        f"{channels} channels with PIM, partitioned, and time-shared by the time of a switch:\n\n"
        + table(
            ["network", "partitioned", *(f"{value:g} ns" for value in SWITCHES_NS)], [partitioned, *by_switch]
        )
        + f"\nTime-shared, a switch of {switch_ns:g} ns, by the number of channels with PIM:\n\n"
        + table(["network", *map(str, channel_counts), "the best"], [*by_count, best])
    )


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pim", help="PIM device (default: the system's)")
    parser.add_argument("--counts", help="numbers of channels with PIM, such as 16,24,32 (default: eighths)")
    args = parser.parse_args()
    print(text(args.pim, [int(count) for count in args.counts.split(",")] if args.counts else None), end="")


if __name__ == "__main__":
    main()
