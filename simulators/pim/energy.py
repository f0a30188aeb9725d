"""Energy of DRAM-PIM commands.

There are two modes. ``full`` charges everything that the device's file has a price for:
`pimflow.hardware.pim.ENERGY` lists the keys and what each is charged for, the files give values and sources.
``ramulator-pimflow`` charges what the PIMFlow authors' Ramulator fork prints, for comparison with it: four
kinds of commands, with its own constants (`FORK`), and no activation, refresh, I/O or background.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pimflow.errors import UnknownNameError
from pimflow.hardware import PimSpec

MODES = ("full", "ramulator-pimflow")

# The constants in the fork's source, for its 16 banks of 16 fp16 multipliers and rows of 32 columns, in pJ.
FORK = {
    "banks": 16,
    "columns": 32,
    "multipliers": 16,
    "multiply_pj": 1.1,
    "add_pj": 0.4,
    "buffer_read_pj": 175.814,
    "row_read_pj": 1168.22,
    "gwrite_pj": 181.995,
    "readres_pj": 175.814,
    "precharge_bank_pj": 31.83,
}


@dataclass(frozen=True, kw_only=True)
class CommandCounts:
    """The issued commands of a layer or a channel, as far as they cost energy.

    Attributes
    ----------
    commands : mapping of str to int
        As in `TimingResult.commands`.
    gwrite_bursts, write_bursts : int
        Column-sized bursts of all GWRITEs, and of all WRITEs; each of a WRITE writes a column of a bank.
    banks : int, optional
        Banks that compute in a COMP; all by default.
    """

    commands: Mapping[str, int]
    gwrite_bursts: int = 0
    write_bursts: int = 0
    readres_bursts: int = 1
    banks: int | None = None


def pim_energy_pj(counts: CommandCounts, pim: PimSpec, dtype: str, mode: str = "full") -> dict[str, float]:
    """Dynamic energy of issued commands, by part.

    Parameters
    ----------
    mode : str
        One of `MODES`. ``ramulator-pimflow`` uses only `CommandCounts.commands`, which must be counted under
        that timing, where a PRE closes all banks of a channel.

    Raises
    ------
    UnknownNameError
        For another mode.
    """
    if mode not in MODES:
        raise UnknownNameError("energy mode", mode, MODES)
    commands = counts.commands
    if mode == "ramulator-pimflow":
        return _fork_energy_pj(commands)
    e = pim.energy
    elements = pim.elements_per_column(dtype)
    comp = (counts.banks or pim.banks) * (
        elements * (e["multiply_pj"] + e["add_pj"]) + e["buffer_read_pj"] + e["column_read_pj"]
    )
    latch_writes = commands.get("WRBIAS", 0)
    latch_bursts = (commands["READRES"] + latch_writes) * counts.readres_bursts
    io_bytes = (counts.gwrite_bursts + counts.write_bursts + latch_bursts) * pim.column_bytes
    energy = {"write": counts.write_bursts * e["column_write_pj"]} if counts.write_bursts else {}
    if latch_writes and "latch_write_pj" in e:
        energy["wrbias"] = latch_writes * e["latch_write_pj"]
    if commands.get("AF") and "activation_pj" in e:
        energy["af"] = commands["AF"] * e["activation_pj"]
    return energy | {
        "comp": commands["COMP"] * comp,
        "gwrite": counts.gwrite_bursts * e["buffer_write_pj"],
        "readres": commands["READRES"] * e["latch_read_pj"],
        "activate": commands["G_ACT"] * pim.banks_per_gang * e["activate_pj"],
        "precharge": commands["PRE"] * pim.banks_per_gang * e["precharge_pj"],
        "refresh": commands["REF"] * e["refresh_pj"],
        "io": io_bytes * 8 * e["io_pj_per_bit"],
    }


def _fork_energy_pj(commands: Mapping[str, int]) -> dict[str, float]:
    operations = FORK["columns"] * FORK["multipliers"]
    row = (
        operations * FORK["multiply_pj"]
        + FORK["columns"] * FORK["buffer_read_pj"]
        + FORK["row_read_pj"]
        + operations * FORK["add_pj"]
    )
    return {
        "comp": commands["COMP"] / FORK["columns"] * FORK["banks"] * row,
        "gwrite": commands["GWRITE"] * FORK["gwrite_pj"],
        "readres": commands["READRES"] * FORK["readres_pj"],
        "precharge": commands["PRE"] * FORK["banks"] * FORK["precharge_bank_pj"],
    }


def background_pj(pim: PimSpec, channels: int, time_ns: float) -> float:
    """Static energy of so many channels over a time."""
    return channels * pim.energy["background_mw_per_channel"] * time_ns


def channel_energies_pj(
    channels: Sequence[CommandCounts], pim: PimSpec, dtype: str, *, time_ns: float = 0.0, mode: str = "full"
) -> tuple[dict[str, float], ...]:
    """Energy of each channel by part, with its ``background`` over `time_ns`.

    Parameters
    ----------
    time_ns : float
        Time of the layer; every channel is powered until the last one is done. The fork charges no
        background.
    """
    background = {"background": background_pj(pim, 1, time_ns)} if mode == "full" else {}
    return tuple(pim_energy_pj(counts, pim, dtype, mode) | background for counts in channels)


def total_energy_pj(channels: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum over the channels of what `channel_energies_pj` returns; a channel may lack some parts."""
    parts = dict.fromkeys(part for channel in channels for part in channel)
    return {part: sum(channel.get(part, 0.0) for channel in channels) for part in parts}
