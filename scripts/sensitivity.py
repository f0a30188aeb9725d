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

from compare_networks import PAPER_NETWORKS, searched

import pimflow
from pimflow.hardware import System
from pimflow.placement import Searched


@dataclass(frozen=True, kw_only=True)
class Value:
    """A value that is assumed, or that differs between the devices without a reason.

    Attributes
    ----------
    what : str
        What it is, and why its range is this one.
    low, high : float
        The ends of its range.
    chosen : float
        The value of the system.
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
    refreshing = pim.timing["nRFC"] / pim.timing["nREFI"]
    return {
        "pim_launch_ns": Value(
            what="a PIM submission: none, or a kernel's launch",
            low=0.0,
            chosen=system.pim_launch_ns,
            high=gpu.launch_ns,
            changed=lambda on, ns: replace(on, pim_launch_ns=ns),
        ),
        **time_shared_values(system),
        "crossbar_bytes_per_ns": Value(
            what="bandwidth between channels and SMs: half, double",
            low=system.crossbar_bytes_per_ns / 2,
            chosen=system.crossbar_bytes_per_ns,
            high=system.crossbar_bytes_per_ns * 2,
            changed=lambda on, rate: replace(on, crossbar_bytes_per_ns=rate),
        ),
        "GPU refresh": Value(
            what="share of time in which the GPU's channels refresh: none, as Accel-Sim; that of PIM's",
            low=0.0,
            chosen=0.0,
            high=refreshing,
            changed=lambda on, share: replace(
                on, gpu=replace(on.gpu, channel_bytes_per_ns=gpu.channel_bytes_per_ns * (1 - share))
            ),
        ),
        "PIM refresh": Value(
            what="share of time in which PIM's channels refresh: none, as Accel-Sim has it for the GPU's",
            low=0.0,
            chosen=refreshing,
            high=refreshing,
            changed=lambda on, share: with_timing(on, nRFC=round(pim.timing["nREFI"] * share)),
        ),
        "refreshes_ahead": Value(
            what="refreshes that PIM serves before a program at most: none, each when it is due",
            low=0.0,
            chosen=pim.refreshes_ahead,
            high=pim.refreshes_ahead,
            changed=lambda on, most: replace(on, pim=replace(on.pim, refreshes_ahead=int(most))),
        ),
        "PIM bus": Value(
            what="clocks of a burst on a PIM channel's bus: as fast as the GPU's channel; as published",
            low=max(1, round(pim.column_bytes / gpu.channel_bytes_per_ns / (pim.tCK_ps / 1000))),
            chosen=pim.timing["nBL"],
            high=pim.timing["nBL"],
            changed=lambda on, clocks: with_timing(on, nBL=int(clocks)),
        ),
        "l2_resident": constant(system, "l2_resident", 0.0, 1.0, "share of a tensor that stays in the L2"),
        "stream": constant(system, "stream", 0.25, 1.0, "share of the SIMD peak in elementwise kernels"),
    }


def time_shared_values(system: System) -> dict[str, Value]:
    """Values that matter only if the GPU uses PIM's channels too."""
    if not system.time_shared:
        return {}
    switch = Value(
        what="another use of the channels that have PIM: at once, a microsecond",
        low=0.0,
        chosen=system.channel_mode_switch_ns,
        high=1000.0,
        changed=lambda on, ns: replace(on, channel_mode_switch_ns=ns),
    )
    return {"channel_mode_switch_ns": switch}


def constant(system: System, name: str, low: float, high: float, what: str) -> Value:
    """A constant of the GPU model as a value."""

    def changed(on: System, value: float) -> System:
        return replace(on, gpu=replace(on.gpu, efficiency={**on.gpu.efficiency, name: value}))

    return Value(what=what, low=low, chosen=system.gpu.efficiency[name], high=high, changed=changed)


def with_timing(on: System, **clocks: int) -> System:
    """The system with other clocks of the PIM device."""
    return replace(on, pim=replace(on.pim, timing={**on.pim.timing, **clocks}))


def speedup(on: System) -> float:
    """Geometric mean of the speed-ups of the networks."""
    found = [searched(model, on) for model in PAPER_NETWORKS]
    return geometric_mean(each.baseline.latency_ns / each.evaluation.latency_ns for each in found)


def row(name: str, value: Value, on: System, known: dict[str, float]) -> str:
    """A row of the table; `known` caches the speed-ups of systems by their `repr`."""
    cells = []
    for number in (value.low, value.chosen, value.high):
        changed = on if number == value.chosen else value.changed(on, number)
        key = repr(changed)
        if key not in known:
            known[key] = speedup(changed)
        cells.append(f"{number:.4g}: {known[key]:.3f}x")
    return f"| {name} | {value.what} | {' | '.join(cells)} |"


OPERANDS = "DRAM of PIM's operands"


def operands_row(on: System) -> str:
    """A row of energies if PIM's operands and results go through the GPU's DRAM."""
    found = [searched(model, on) for model in PAPER_NETWORKS]
    cells = []
    for what, dram_pj in {
        "not at all": lambda charged, moved: 0.0,
        "once": lambda charged, moved: charged,
        "at every transfer": lambda charged, moved: moved,
    }.items():
        changes = [_energy(each, dram_pj) / each.baseline.energy_pj for each in found]
        cells.append(f"{what}: {geometric_mean(changes) - 1:+.1%} energy")
    return (
        f"| {OPERANDS} | all in the L2; each tensor once; at every GWRITE and READRES | {' | '.join(cells)} |"
    )


def _energy(found: Searched, dram_pj: Callable[[float, float], float]) -> float:
    """Energy of a plan if `dram_pj` gives a transfer's DRAM energy, by its charge and by all its bytes."""
    energy_pj, per_byte = found.evaluation.energy_pj, 8 * found.system.gpu.energy["dram_pj_per_bit"]
    for task in (task for each in found.candidates for task in each.tasks):
        charged = task.energies_pj.get("gpu_dram", 0.0) if "crossbar" in task.energies_pj else 0.0
        if "crossbar" in task.energies_pj:
            energy_pj += dram_pj(charged, task.moved_bytes * per_byte) - charged
    return energy_pj


def main() -> None:
    on = pimflow.system()
    found: Mapping[str, Value] = values(on)
    known = [*found, OPERANDS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)} (default: all)")
    names = parser.parse_args().names or known
    if unknown := set(names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    speedups: dict[str, float] = {}
    print("| value | what | low | chosen | high |")
    print("|---|---|---|---|---|")
    for name in names:
        print(operands_row(on) if name == OPERANDS else row(name, found[name], on, speedups), flush=True)


if __name__ == "__main__":
    main()
