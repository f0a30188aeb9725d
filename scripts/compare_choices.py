"""Gain of one joint choice of decompositions, fused groups and devices over a choice in stages.

``staged`` first chooses the decomposed layers without fused groups, and then fuses groups in the result.
``joint`` chooses the layers with the groups among the candidates. Both end with the same search of one
network.
"""

from __future__ import annotations

import argparse

import pimflow
from pimflow import placement
from pimflow.commands.shared import prepare
from pimflow.commands.shared.options import NetworkOptions
from pimflow.host.result_cache import ResultCache, default_path
from pimflow.placement import Costs, Goal, Profiling, SearchResult

EVERY = "tucker:0.25"
REQUEST = f"{EVERY},where=pays"
NETWORKS = ("toy", "squeezenet-1.1", "alexnet", "mobilenet-v1", "mobilenet-v2", "mnasnet-1.0", "resnet-18")
PAYING = ("mobilenet-v2", "resnet-18", "squeezenet-1.1")
PAYS_HEADS = ("network", "as given, us", "decomposed, us", "`where=pays`, us", "layers decomposed")
HEADS = (
    "network",
    "layers",
    "decomposed, staged",
    "joint",
    "groups, staged",
    "joint",
    "staged, us",
    "joint, us",
    "gain",
)


def search_in_stages(model: str, profiling: Profiling) -> SearchResult:
    """Choose the decomposed layers without fused groups, then search the result with them."""
    system = pimflow.system()
    first = pimflow.search(model, system, decompose=REQUEST, profiling=profiling)
    options, costs = NetworkOptions(decompose=REQUEST, fuse=True), Costs(system, profiling)
    request = prepare.PreparationRequest(plan=first.plan, costs=costs)
    prepared = prepare.prepare(prepare.load(model, options), options, system, request)
    return placement.search(prepared.regions, system, costs, Goal(), prepared.original_regions_for(system))


def layers(search_result: SearchResult) -> tuple[int, int]:
    """How many layers of the original network have weights, and how many of them are decomposed."""
    original = search_result.original or search_result.graph
    capable = [region.name for region in original.regions if region.geometry is not None]
    region_names = {region.name for region in search_result.graph.regions}
    return len(capable), len(set(capable) - region_names)


def row(model: str, profiling: Profiling) -> tuple[str, ...]:
    """Compare both choices for a network: a row of the table."""
    stagewise = search_in_stages(model, profiling)
    joint = pimflow.search(model, decompose=REQUEST, fuse=True, profiling=profiling)
    before_ns, after_ns = stagewise.evaluation.latency_ns, joint.evaluation.latency_ns
    gain = before_ns / after_ns - 1
    return (
        model,
        str(layers(stagewise)[0]),
        *(str(layers(result)[1]) for result in (stagewise, joint)),
        *(str(len(result.group_tilings())) for result in (stagewise, joint)),
        f"{before_ns / 1e3:.2f}",
        f"{after_ns / 1e3:.2f}",
        f"{100 * gain:+.2f} %" if abs(gain) > 5e-5 else "nothing",
    )


def pays(model: str, profiling: Profiling) -> tuple[str, ...]:
    """Plans of the original network, of one with all layers decomposed, and with profitable ones only."""
    plans = [
        pimflow.search(model, profiling=profiling, decompose=request) for request in (None, EVERY, REQUEST)
    ]
    capable, chains = layers(plans[-1])
    times = (f"{search_result.evaluation.latency_ns / 1e3:.1f}" for search_result in plans)
    return (model, *times, f"{chains} of {capable}")


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"default: {', '.join(NETWORKS)}")
    parser.add_argument("--pays", action="store_true", help=f"what {REQUEST} gains over all layers and none")
    args = parser.parse_args()
    networks, heads, make = args.networks or NETWORKS, HEADS, row
    if args.pays:
        networks, heads, make = args.networks or PAYING, PAYS_HEADS, pays
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for model in networks:
        profiling = Profiling(cache=ResultCache(default_path()))
        print(f"| {' | '.join(make(model, profiling))} |", flush=True)


if __name__ == "__main__":
    main()
