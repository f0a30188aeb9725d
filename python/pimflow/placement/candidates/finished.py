"""Layers that PIM finishes: it does what follows the product, and no kernel of the GPU has to.

A bias, or a tensor that is added, is what the latches start from (`PimProgram.initial`). A tensor can also be
added by the product itself (`PimProgram.added_channels`), which no latch has to start from. Activations stay
with the GPU: where the device has a unit for them, `activation_ns` says what it would take at least.
"""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.core.region import RESHAPE, ConvGeometry, Region
from pimflow.hardware import System

# Operators that tables hold: functions of one result.
_ACTIVATIONS = {"nn.relu", "clip", "sigmoid", "tanh", "nn.silu", "nn.gelu", "nn.leakyrelu"}


@dataclass(frozen=True)
class Way:
    """How PIM does what follows a product.

    Attributes
    ----------
    initial : str
        What latches start from (`PimProgram.initial`).
    joins : bool
        Whether the product adds a tensor: its elements are further channels of the vectors.
    """

    initial: str = ""
    joins: bool = False

    @property
    def adds_tensor(self) -> bool:
        return self.joins or self.initial == "add"

    def name(self, finishes: tuple[str, ...]) -> str:
        """What a candidate is called that does `finishes` of an epilogue so."""
        return f"PIM {'+'.join(finishes)}".rstrip() + ", joined" * self.joins

    def layer(self, geometry: ConvGeometry) -> ConvGeometry:
        """The product that PIM forms of a layer."""
        return geometry.joined if self.joins else geometry

    def added_channels(self, geometry: ConvGeometry) -> int:
        """Of the channels of `layer`, those of the tensor that is added."""
        return geometry.oc if self.joins else 0


LEFT_UNDONE = Way()


def ways(region: Region, system: System) -> tuple[Way, ...]:
    """How PIM can do all that follows the product of `region`; none if it cannot, or nothing follows."""
    by_latches = system.pim.writes_latches and system.timing == "strict"
    added, biased = region.epilogue.count("add"), "bias" in region.epilogue
    wanted = {"bias"} if not added else {"bias", "add"} if biased else {"add"}
    if sorted(region.epilogue) != sorted(wanted) or (added and not _adds_tensor(region)):
        return ()
    if system.pim.result_lanes > 1 or (biased and not by_latches):
        return ()
    found = [way(region.epilogue, joins=False)] if by_latches and len(wanted) == 1 else []
    if added and region.geometry and region.geometry.pointwise:
        found.append(way(region.epilogue, joins=True))
    return tuple(found)


def worth_trying(region: Region, system: System) -> tuple[Way, ...]:
    """Those of `ways` that a search tries: where epilogues are free, no product gains by an addition."""
    return tuple(way for way in ways(region, system) if not way.joins or system.charges("epilogue"))


def way(finishes: tuple[str, ...], joins: bool) -> Way:
    """The way in which PIM does `finishes` of an epilogue; its product `joins` a tensor, or does not."""
    by_latches = [each for each in finishes if not (joins and each == "add")]
    return Way(initial=by_latches[0] if by_latches else "", joins=joins)


def unfinished(region: Region, system: System) -> str:
    """Why PIM cannot finish what it computes of `region`; empty if it can, or nothing follows."""
    pim, more = system.pim, [*region.made_behind]
    if not more or ways(region, system):
        return ""
    if pim.result_lanes > 1:
        # An activation of partial sums is not that of their sum.
        unit = ", and its activation unit acts on lanes before they are added" * pim.activation_unit
        return f"'{pim.name}' leaves the sums of its lanes to a kernel of the GPU{unit}"
    if system.timing != "strict":
        return f"the timing '{system.timing}' has no command for it"
    done = [each for each in ("bias", *["add"] * _adds_tensor(region)) if each in more]
    for each in done:
        more.remove(each)
    if done and not pim.writes_latches:
        return f"the latches of '{pim.name}' always start from zero{_unjoined(region, done)}"
    if more and pim.activation_unit and set(more) <= _ACTIVATIONS:
        return f"no program uses the activation unit of '{pim.name}', for {', '.join(more)}"
    if not more and RESHAPE in region.epilogue:
        return "its result takes another shape behind it"
    if not more:
        return f"a latch of '{pim.name}' starts from one value{_unjoined(region, done)}"
    return f"'{pim.name}' does nothing more after a sum: {', '.join(more)}"


def _unjoined(region: Region, done: list[str]) -> str:
    """Why the product of a region does not add the tensor that follows it, behind a comma."""
    one_tap = region.geometry and region.geometry.pointwise
    return "" if one_tap or "add" not in done else ", and only a product of one tap adds a tensor itself"


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


def _adds_tensor(region: Region) -> bool:
    """Whether one tensor like the result is all that is read behind the product."""
    return region.input_shapes[region.operands :] == (region.output_shape,)
