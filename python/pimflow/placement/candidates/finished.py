"""Device epilogues: PIM itself does the epilogue of a layer, and no GPU kernel has to.

Latches can start from a bias or a residual (`PimProgram.initial`). The product itself can add a residual
(`PimProgram.added_channels`), without such latches. An activation after them can be applied before sums are
read (`PimProgram.activation`), if its table is known to be exact. Other activations stay on the GPU; if a
device has a unit for them, `activation_ns` is a lower bound of their time.
"""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.core.region import RESHAPE, ConvGeometry, Region
from pimflow.hardware import System

# Operators that a table of an activation unit can have: functions of one result.
_ACTIVATIONS = {"nn.relu", "clip", "sigmoid", "tanh", "nn.silu", "nn.gelu", "nn.leakyrelu"}
_RELU6 = (0.0, 6.0)


@dataclass(frozen=True)
class Way:
    """How PIM does the epilogue of a layer.

    Attributes
    ----------
    initial : str
        What latches start from (`PimProgram.initial`).
    joins : bool
        Whether the product adds the residual, whose elements are further channels of its vectors.
    activation : str
        The activation applied to sums before they are read (`PimProgram.activation`).
    """

    initial: str = ""
    joins: bool = False
    activation: str = ""

    @property
    def adds_tensor(self) -> bool:
        return self.joins or self.initial == "add"

    def name(self, finishes: tuple[str, ...]) -> str:
        """The name of a candidate with this device epilogue, which does the operators `finishes`."""
        return f"PIM {'+'.join(finishes)}".rstrip() + ", joined" * self.joins

    def layer(self, geometry: ConvGeometry) -> ConvGeometry:
        """The layer that PIM computes: with further channels if the product adds the residual."""
        return geometry.joined if self.joins else geometry

    def added_channels(self, geometry: ConvGeometry) -> int:
        """How many channels of `layer` are those of the residual."""
        return geometry.oc if self.joins else 0


LEFT_UNDONE = Way()


def ways(region: Region, system: System) -> tuple[Way, ...]:
    """All device epilogues of `region`; none if PIM cannot do its epilogue, or there is none."""
    by_latches = system.pim.writes_latches and system.timing == "strict"
    added, activation = _before_activation(region), _activation(region)
    wanted = {*added} & {"bias", "add"}
    if (
        not region.epilogue
        or sorted(added) != sorted(wanted)
        or ("add" in wanted and not _adds_tensor(region))
    ):
        return ()
    if system.pim.result_lanes > 1 or ("bias" in wanted and not by_latches):
        return ()
    if activation and not (system.pim.activates and system.timing == "strict"):
        return ()
    found = [way(region, region.epilogue, joins=False)] if len(wanted) <= (1 if by_latches else 0) else []
    if "add" in wanted and region.geometry and region.geometry.pointwise:
        found.append(way(region, region.epilogue, joins=True))
    return tuple(found)


def worth_trying(region: Region, system: System) -> tuple[Way, ...]:
    """Those of `ways` that may pay: not residuals in products or tables, if epilogues are not charged."""
    free = not system.charges("epilogue")
    return tuple(way for way in ways(region, system) if not (free and (way.joins or way.activation)))


def way(region: Region, finishes: tuple[str, ...], joins: bool) -> Way:
    """The device epilogue for the operators `finishes`, all or none; `joins`: the product adds a residual."""
    if not finishes:
        return LEFT_UNDONE
    by_latches = [each for each in _before_activation(region) if not (joins and each == "add")]
    return Way(initial=by_latches[0] if by_latches else "", joins=joins, activation=_activation(region))


def _activation(region: Region) -> str:
    """The activation of `PimProgram` that ends an epilogue; empty for none."""
    last = region.epilogue[-1:]
    if last == ("clip",) and region.clipped[-1:] == (_RELU6,):
        return "relu6"
    return "relu" if last == ("nn.relu",) else ""


def _before_activation(region: Region) -> tuple[str, ...]:
    """The operators of an epilogue before the activation that ends it."""
    return region.epilogue[:-1] if _activation(region) else region.epilogue


def unfinished(region: Region, system: System) -> str:
    """Why PIM cannot do the epilogue of `region`; empty if it can, or there is none."""
    pim, more = system.pim, [*region.made_behind]
    if not more or ways(region, system):
        return ""
    if pim.result_lanes > 1:
        # The activation of a sum does not follow from the activations of its partial sums.
        unit = ", and its activation unit acts on lanes before they are added" * pim.activation_unit
        return f"'{pim.name}' leaves the sums of its lanes to a kernel of the GPU{unit}"
    if system.timing != "strict":
        return f"the timing '{system.timing}' has no command for it"
    if _activation(region) and pim.activates:
        more.pop()
    done = [each for each in ("bias", *["add"] * _adds_tensor(region)) if each in more]
    for each in done:
        more.remove(each)
    if done and not pim.writes_latches:
        return f"the latches of '{pim.name}' always start from zero{_unjoined(region, done)}"
    if more and pim.activates and set(more) <= _ACTIVATIONS:
        unknown = [each for each in more if each != "nn.relu"]
        last = f"the activation unit of '{pim.name}' comes last"
        return f"what a table of '{pim.name}' makes of {', '.join(unknown)} is not known" if unknown else last
    if not more and RESHAPE in region.epilogue:
        return "its result takes another shape behind it"
    if not more:
        return f"a latch of '{pim.name}' starts from one value{_unjoined(region, done)}"
    return f"'{pim.name}' does nothing more after a sum: {', '.join(more)}"


def _unjoined(region: Region, done: list[str]) -> str:
    """Why the product of a region cannot add the residual, to be appended to a message; else empty."""
    one_tap = region.geometry and region.geometry.pointwise
    return "" if one_tap or "add" not in done else ", and only a product of one tap adds a tensor itself"


def activation_ns(region: Region, system: System) -> float:
    """A lower bound of the time that an activation unit adds to a region; 0 if a program uses it already.

    Its tables lie in rows of the banks. So for the results of each tile, of all accumulators at once, the row
    of a table is opened, and then that of the weights again. Only these row changes count, on the busiest
    channel.
    """
    g, pim = region.geometry, system.pim
    if g is None or not pim.activates or not _ACTIVATIONS & {*region.epilogue} or ways(region, system):
        return 0.0
    tiles = -(-g.oc // pim.banks)
    sums = -(-g.pixels * tiles // system.pim_channels)
    rows = -(-sums // (pim.global_buffers * pim.accumulators))
    return rows * pim.row_switch_cycles * pim.tCK_ns


def misfit(region: Region, mode: str, finishes: tuple[str, ...], system: System) -> str:
    """Why PIM cannot do the operators `finishes` of an epilogue in this mode; empty if it can."""
    if not finishes:
        return ""
    if mode != "PIM" or finishes != region.epilogue:
        whole = ", ".join(region.epilogue) or "nothing"
        return f"PIM does {whole} of what follows a layer that is wholly its own, or none of it"
    return unfinished(region, system)


def _adds_tensor(region: Region) -> bool:
    """Whether the epilogue reads exactly one tensor, of the result's shape: a residual."""
    return region.input_shapes[region.operands :] == (region.output_shape,)
