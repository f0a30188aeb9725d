"""Energy of DRAM-PIM commands.

There are two modes. ``full`` charges everything that the device's file has a price for:
`pimflow.hardware.pim.ENERGY` lists the keys and what each is charged for, the files give values and sources.
``ramulator-pimflow`` charges what the PIMFlow authors' Ramulator fork prints, for comparison with it: four
kinds of commands, with its own constants (`FORK`), and no activation, refresh, I/O or background.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def pim_energy_pj(
    commands: Mapping[str, int],
    gwrite_bursts: int,
    readres_bursts: int,
    pim: PimSpec,
    dtype: str,
    mode: str = "full",
    banks: int | None = None,
    write_bursts: int = 0,
) -> dict[str, float]:
    """Dynamic energy of issued commands, by part.

    Parameters
    ----------
    commands : mapping of str to int
        Issued commands of a layer or a channel, as in `TimingResult.commands`.
    gwrite_bursts, readres_bursts : int
        Column-sized bursts of all GWRITEs, and of one READRES, or WRBIAS.
    mode : str
        One of `MODES`. ``ramulator-pimflow`` uses only `commands`, which must be counted under that timing,
        where a PRE closes all banks of a channel.
    banks : int, optional
        Banks that compute in a COMP; all by default.
    write_bursts : int
        Column-sized bursts of all WRITEs; each writes a column of a bank.

    Raises
    ------
    UnknownNameError
        For another mode.
    """
    if mode not in MODES:
        raise UnknownNameError("energy mode", mode, MODES)
    if mode == "ramulator-pimflow":
        return _fork_energy_pj(commands)
    e = pim.energy
    elements = pim.elements_per_column(dtype)
    comp = (banks or pim.banks) * (
        elements * (e["multiply_pj"] + e["add_pj"]) + e["buffer_read_pj"] + e["column_read_pj"]
    )
    started = commands.get("WRBIAS", 0)
    latches = (commands["READRES"] + started) * readres_bursts
    io_bytes = (gwrite_bursts + write_bursts + latches) * pim.column_bytes
    written = {"write": write_bursts * e["column_write_pj"]} if write_bursts else {}
    if started and "latch_write_pj" in e:
        written |= {"wrbias": started * e["latch_write_pj"]}
    if commands.get("AF") and "activation_pj" in e:
        written |= {"af": commands["AF"] * e["activation_pj"]}
    return written | {
        "comp": commands["COMP"] * comp,
        "gwrite": gwrite_bursts * e["buffer_write_pj"],
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
    channels: Sequence[Mapping[str, int]],
    gwrite_bursts: Sequence[int],
    readres_bursts: int,
    pim: PimSpec,
    dtype: str,
    *,
    time_ns: float = 0.0,
    mode: str = "full",
    banks: int | None = None,
    write_bursts: Sequence[int] = (),
) -> tuple[dict[str, float], ...]:
    """Energy of each channel by part, with its ``background`` over `time_ns`.

    Parameters
    ----------
    channels : sequence of mapping of str to int
        Issued commands of each channel.
    gwrite_bursts : sequence of int
        Column-sized bursts of the GWRITEs of each channel.
    time_ns : float
        Time of the layer; every channel is powered until the last one is done. The fork charges no
        background.
    write_bursts : sequence of int
        Column-sized bursts of the WRITEs of each channel; none by default.
    """
    written = write_bursts or [0] * len(channels)
    background = {"background": background_pj(pim, 1, time_ns)} if mode == "full" else {}
    return tuple(
        pim_energy_pj(commands, bursts, readres_bursts, pim, dtype, mode, banks, stored) | background
        for commands, bursts, stored in zip(channels, gwrite_bursts, written, strict=True)
    )


def total_energy_pj(channels: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum over the channels of what `channel_energies_pj` returns; a channel may lack some parts."""
    parts = dict.fromkeys(part for channel in channels for part in channel)
    return {part: sum(channel.get(part, 0.0) for channel in channels) for part in parts}
