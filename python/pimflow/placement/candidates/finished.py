"""Layers that PIM finishes: it does what follows the product, and no kernel of the GPU has to.

A bias, or a tensor that is added, is what the latches start from (`PimProgram.initial`). Activations stay
with the GPU: where the device has a unit for them, `activation_ns` says what it would take at least.
"""

from __future__ import annotations

from pimflow.core.region import RESHAPE, Region
from pimflow.hardware import System

# Operators that tables hold: functions of one result.
_ACTIVATIONS = {"nn.relu", "clip", "sigmoid", "tanh", "nn.silu", "nn.gelu", "nn.leakyrelu"}


def unfinished(region: Region, system: System) -> str:
    """Why PIM cannot finish what it computes of `region`; empty if it can, or nothing follows."""
    pim, first, *more = system.pim, *(region.epilogue or ("",))
    more = [kind for kind in more if kind != RESHAPE]
    if not region.made_behind:
        return ""
    if pim.result_lanes > 1:
        # An activation of partial sums is not that of their sum.
        unit = ", and its activation unit acts on lanes before they are added" * pim.activation_unit
        return f"'{pim.name}' leaves the sums of its lanes to a kernel of the GPU{unit}"
    if system.timing != "strict":
        return f"the timing '{system.timing}' has no command for it"
    if first != "bias" and not _adds_tensor(region):
        more = [first]
    elif not pim.writes_latches:
        return f"the latches of '{pim.name}' always start from zero"
    if more and pim.activation_unit and set(more) <= _ACTIVATIONS:
        return f"no program uses the activation unit of '{pim.name}', for {', '.join(more)}"
    return f"'{pim.name}' does nothing more after a sum: {', '.join(more)}" if more else ""


def activation_ns(region: Region, system: System) -> float:
    """What the activation unit of the device would add to the region's time, at least; 0 where it has none.

    Its tables lie in rows of the banks, so one is opened for the results of each tile, of all accumulators at
    once, and the row of weights again. Of that only the change of rows counts, on the busiest channel.
    """
    g, pim = region.geometry, system.pim
    if g is None or not pim.activation_unit or pim.result_lanes > 1 or not _ACTIVATIONS & {*region.epilogue}:
        return 0.0
    tiles = -(-g.oc // pim.banks)
    sums = -(-g.pixels * tiles // system.pim_channels)
    rows = -(-sums // (pim.global_buffers * pim.accumulators))
    return rows * pim.row_switch_cycles * pim.tCK_ns


def misfit(region: Region, mode: str, finishes: tuple[str, ...], system: System) -> str:
    """Why PIM cannot do `finishes` of a region's epilogue in this mode; empty if it can."""
    if not finishes:
        return ""
    if mode != "PIM" or finishes != region.epilogue:
        whole = ", ".join(region.epilogue) or "nothing"
        return f"PIM does {whole} of what follows a layer that is wholly its own, or none of it"
    return unfinished(region, system)


def initial(finishes: tuple[str, ...]) -> str:
    """What latches start from (`PimProgram.initial`) where PIM does `finishes` of an epilogue."""
    return finishes[0] if finishes else ""


def _adds_tensor(region: Region) -> bool:
    """Whether the first that follows the product adds one tensor like the result to it."""
    added = region.input_shapes[region.operands :]
    return region.epilogue[:1] == ("add",) and added == (region.output_shape,)
