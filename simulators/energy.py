"""Energy of DRAM-PIM commands.

Keys of `PimSpec.energy`: ``multiply_pj`` and ``add_pj`` per element, ``column_read_pj`` and
``buffer_read_pj`` per bank and column, ``buffer_write_pj`` per column written, ``latch_read_pj`` per
READRES, ``activate_pj`` and ``precharge_pj`` per bank, ``refresh_pj`` per REF, ``io_pj_per_bit`` for what
crosses the channel's pins, ``background_mw_per_channel``.
"""

from __future__ import annotations

from collections.abc import Mapping

from pimflow.hardware import PimSpec


def pim_energy_pj(
    commands: Mapping[str, int], gwrite_bursts: int, readres_bursts: int, pim: PimSpec, dtype: str
) -> dict[str, float]:
    """Dynamic energy of issued commands, by what it goes into.

    Parameters
    ----------
    commands : mapping of str to int
        Issued commands, as `TimingResult.commands` counts them.
    gwrite_bursts, readres_bursts : int
        Column-sized bursts of all GWRITEs, and of one READRES.

    Source: the authors' Ramulator fork for COMP, GWRITE, READRES and PRE; activation, refresh and I/O,
    which the fork leaves out, from the device's file.
    """
    e = pim.energy
    elements = pim.elements_per_column(dtype)
    comp = pim.banks * (
        elements * (e["multiply_pj"] + e["add_pj"]) + e["buffer_read_pj"] + e["column_read_pj"]
    )
    io_bytes = (gwrite_bursts + commands["READRES"] * readres_bursts) * pim.column_bytes
    return {
        "comp": commands["COMP"] * comp,
        "gwrite": gwrite_bursts * e["buffer_write_pj"],
        "readres": commands["READRES"] * e["latch_read_pj"],
        "activate": commands["G_ACT"] * pim.banks_per_gang * e["activate_pj"],
        "precharge": commands["PRE"] * pim.banks_per_gang * e["precharge_pj"],
        "refresh": commands["REF"] * e["refresh_pj"],
        "io": io_bytes * 8 * e["io_pj_per_bit"],
    }
