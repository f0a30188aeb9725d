"""How much assumed values decide the result: ``sensitivity.py [NAME…]``.

A row has the lower, the chosen and the upper value of one assumption, and the geometric mean of the speed-ups
of the paper's five networks with each (full accounting). All else stays; every plan is searched with the
value. The last row is the energy of the fastest plans against the GPU alone. Prints a table in Markdown;
times are cached (PIMFLOW_CACHE).
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import geometric_mean

from compare_networks import PAPER_NETWORKS, search_network

import pimflow
from pimflow.hardware import System
from pimflow.placement import SearchResult


@dataclass(frozen=True, kw_only=True)
class Value:
    """A value that is assumed, or that differs between the devices without a reason.

    Attributes
    ----------
    what : str
        What it is, and why its range is this one.
    changed : callable
        The system with another value.
    """

    what: str
    low: float
    chosen: float
    high: float
    changed: Callable[[System, float], System]


def values(system: System) -> dict[str, Value]:
    """All values, by name."""
    gpu, pim = system.gpu, system.pim
    return {
        "pim_launch_ns": Value(
            what="a PIM submission: none, or a kernel's launch",
            low=0.0,
            chosen=system.pim_launch_ns,
            high=gpu.launch_ns,
            changed=lambda target, ns: replace(target, pim_launch_ns=ns),
        ),
        **time_shared_values(system),
        "crossbar_bytes_per_ns": Value(
            what="bandwidth between channels and SMs: half, double",
            low=system.crossbar_bytes_per_ns / 2,
            chosen=system.crossbar_bytes_per_ns,
            high=system.crossbar_bytes_per_ns * 2,
            changed=lambda target, rate: replace(target, crossbar_bytes_per_ns=rate),
        ),
        **refresh_values(system),
        "PIM bus": Value(
            what="clocks of a burst on a PIM channel's bus: as fast as the GPU's channel; as published",
            low=max(1, round(pim.column_bytes / gpu.channel_bytes_per_ns / (pim.tCK_ps / 1000))),
            chosen=pim.timing["nBL"],
            high=pim.timing["nBL"],
            changed=lambda target, clocks: with_timing(target, nBL=int(clocks)),
        ),
        "l2_resident": constant(system, "l2_resident", 0.0, 1.0, "share of a tensor that stays in the L2"),
        "stream": constant(system, "stream", 0.25, 1.0, "share of the SIMD peak in elementwise kernels"),
    }


def refresh_values(system: System) -> dict[str, Value]:
    """How long channels refresh, and when."""
    gpu, pim = system.gpu, system.pim
    refreshing = pim.timing["nRFC"] / pim.timing["nREFI"]
    return {
        "GPU refresh": Value(
            what="share of time in which the GPU's channels refresh: none, as Accel-Sim; that of PIM's",
            low=0.0,
            chosen=0.0,
            high=refreshing,
            changed=lambda target, share: replace(
                target, gpu=replace(target.gpu, channel_bytes_per_ns=gpu.channel_bytes_per_ns * (1 - share))
            ),
        ),
        "PIM refresh": Value(
            what="share of time in which PIM's channels refresh: none, as Accel-Sim has it for the GPU's",
            low=0.0,
            chosen=refreshing,
            high=refreshing,
            changed=lambda target, share: with_timing(target, nRFC=round(pim.timing["nREFI"] * share)),
        ),
        "refreshes_ahead": Value(
            what="refreshes that PIM serves before a program at most: none, each when it is due",
            low=0.0,
            chosen=pim.refreshes_ahead,
            high=pim.refreshes_ahead,
            changed=lambda target, count: replace(
                target, pim=replace(target.pim, refreshes_ahead=int(count))
            ),
        ),
    }


def time_shared_values(system: System) -> dict[str, Value]:
    """Values that matter only if the GPU uses PIM's channels too."""
    if not system.is_time_shared:
        return {}
    switch = Value(
        what="another use of the channels that have PIM: at once, a microsecond",
        low=0.0,
        chosen=system.channel_mode_switch_ns,
        high=1000.0,
        changed=lambda target, ns: replace(target, channel_mode_switch_ns=ns),
    )
    return {"channel_mode_switch_ns": switch}


def constant(system: System, name: str, low: float, high: float, description: str) -> Value:
    """A constant of the GPU model as a value."""

    def with_value(on: System, value: float) -> System:
        return replace(on, gpu=replace(on.gpu, efficiency={**on.gpu.efficiency, name: value}))

    return Value(what=description, low=low, chosen=system.gpu.efficiency[name], high=high, changed=with_value)


def with_timing(system: System, **clocks: int) -> System:
    """The system with other clocks of the PIM device."""
    return replace(system, pim=replace(system.pim, timing={**system.pim.timing, **clocks}))


def speedup(system: System) -> float:
    """Geometric mean of the speed-ups of the networks."""
    search_results = [search_network(model, system) for model in PAPER_NETWORKS]
    return geometric_mean(
        result.baseline.latency_ns / result.evaluation.latency_ns for result in search_results
    )


def row(name: str, value: Value, system: System, speedups: dict[str, float]) -> str:
    """A row of the table; `speedups` caches the speed-ups of systems by their `repr`."""
    cells = []
    for number in (value.low, value.chosen, value.high):
        changed_system = system if number == value.chosen else value.changed(system, number)
        key = repr(changed_system)
        if key not in speedups:
            speedups[key] = speedup(changed_system)
        cells.append(f"{number:.4g}: {speedups[key]:.3f}x")
    return f"| {name} | {value.what} | {' | '.join(cells)} |"


OPERANDS = "DRAM of PIM's operands"


def operands_row(system: System) -> str:
    """A row of energies if PIM's operands and results go through the GPU's DRAM."""
    search_results = [search_network(model, system) for model in PAPER_NETWORKS]
    cells = []
    for label, dram_pj in {
        "not at all": lambda charged, moved: 0.0,
        "once": lambda charged, moved: charged,
        "at every transfer": lambda charged, moved: moved,
    }.items():
        changes = [_energy(result, dram_pj) / result.baseline.energy_pj for result in search_results]
        cells.append(f"{label}: {geometric_mean(changes) - 1:+.1%} energy")
    return (
        f"| {OPERANDS} | all in the L2; each tensor once; at every GWRITE and READRES | {' | '.join(cells)} |"
    )


def _energy(search_result: SearchResult, dram_pj: Callable[[float, float], float]) -> float:
    """Energy of a plan if `dram_pj` gives a transfer's DRAM energy, by its charge and by all its bytes."""
    energy_pj = search_result.evaluation.energy_pj
    per_byte = 8 * search_result.system.gpu.energy["dram_pj_per_bit"]
    for task in (task for candidate in search_result.candidates for task in candidate.tasks):
        charged = task.energies_pj.get("gpu_dram", 0.0) if "crossbar" in task.energies_pj else 0.0
        if "crossbar" in task.energies_pj:
            energy_pj += dram_pj(charged, task.moved_bytes * per_byte) - charged
    return energy_pj


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    system = pimflow.system()
    values_by_name: Mapping[str, Value] = values(system)
    all_names = [*values_by_name, OPERANDS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(all_names)} (default: all)")
    names = parser.parse_args().names or all_names
    if unknown := set(names) - set(all_names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(all_names)}")
    speedups: dict[str, float] = {}
    print("| value | what | low | chosen | high |")
    print("|---|---|---|---|---|")
    for name in names:
        print(
            operands_row(system) if name == OPERANDS else row(name, values_by_name[name], system, speedups),
            flush=True,
        )


if __name__ == "__main__":
    main()
