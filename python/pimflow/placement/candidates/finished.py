"""Layers that PIM finishes: it does what follows the product, and no kernel of the GPU has to.

A bias, or a tensor that is added, is what the latches start from (`PimProgram.initial`).
"""

from __future__ import annotations

from pimflow.core.region import Region
from pimflow.hardware import System


def unfinished(region: Region, system: System) -> str:
    """Why PIM cannot finish what it computes of `region`; empty if it can, or nothing follows."""
    pim, first, *more = system.pim, *(region.epilogue or ("",))
    if not first:
        return ""
    if pim.result_lanes > 1:
        return f"'{pim.name}' leaves the sums of its lanes to a kernel of the GPU"
    if system.timing != "strict":
        return f"the timing '{system.timing}' has no command for it"
    if first != "bias" and not _adds_tensor(region):
        more = [first]
    elif not pim.writes_latches:
        return f"the latches of '{pim.name}' always start from zero"
    return f"'{pim.name}' does not compute {', '.join(more)}" if more else ""


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
