"""Where tensors lie: the order of their axes, and the sets of memory channels that hold them."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class Layout(str, enum.Enum):
    """Order of a tensor's axes: the GPU's, or one of those between which primitives of a CPU choose."""

    NHWC = "NHWC"
    HWC = "HWC"
    CHW = "CHW"
    CHWC16 = "CHWc16"

    __str__ = str.__str__


class ChannelSet(str, enum.Enum):
    """A set of memory channels, as plans and reports spell it; each has a region of its own in a pool.

    The GPU channels, which serve the GPU while PIM works; all channels; those that have PIM.
    """

    GPU = "left"
    ALL = "all"
    PIM = "pim"

    __str__ = str.__str__


class ChannelMode(enum.Enum):
    """Mode of the channels that have PIM: plain memory for the GPU's kernels, or PIM programs."""

    PLAIN_MEMORY = "memory"
    PIM = "pim"


@dataclass(frozen=True, kw_only=True)
class TensorPlacement:
    """Where a tensor lies that a candidate reads or writes.

    Attributes
    ----------
    channels : ChannelSet
        The set that reaches all of its bytes.
    first_row : int
        Of a feature map over all channels, the first row that is; the rows before lie in the GPU channels.
    reader : str
        Of an input, the candidate that its time is made for: it reads other placements at a cost of its own.
    """

    layout: Layout = Layout.NHWC
    channels: ChannelSet = ChannelSet.GPU
    first_row: int = 0
    reader: str = ""

    @property
    def channels_text(self) -> str:
        """The channels as in a plan: a set, or ``from`` and the first row over all channels."""
        return f"from{self.first_row}" if self.first_row else self.channels.value


IN_GPU_CHANNELS, IN_ALL_CHANNELS, IN_PIM_CHANNELS = (
    TensorPlacement(channels=channels) for channels in ChannelSet
)


@dataclass(frozen=True, kw_only=True)
class ChannelUse:
    """How a candidate uses the channels that have PIM as plain memory; by default not at all.

    Attributes
    ----------
    reads, writes : TensorPlacement, optional
        Of a kernel over all channels: where its operands lie, and its result.
    stages_operand : bool
        Whether the operand of a PIM program lies over all channels, and is brought to the L2 first.
    result_in_l2 : bool
        Whether the share that PIM's channels have of a result stays in the L2 until the next kernel.
    operand_in_l2 : bool
        Whether a kernel follows such a result.
    """

    reads: TensorPlacement | None = None
    writes: TensorPlacement | None = None
    stages_operand: bool = False
    result_in_l2: bool = False
    operand_in_l2: bool = False

    def __str__(self) -> str:
        """The form in plans."""
        pair = f"{self.reads.channels_text}-{self.writes.channels_text}" if self.reads and self.writes else ""
        uses = ("staged" * self.stages_operand, "result kept" * self.result_in_l2)
        return ", ".join(filter(None, (pair, *uses, "behind kept" * self.operand_in_l2)))

    @classmethod
    def parse(cls, text: str) -> ChannelUse:
        """The inverse of `str`; raises `ValueError`."""
        match = _CHANNEL_USE.fullmatch(text)
        if match is None:
            names = ", ".join(ChannelSet)
            raise ValueError(f"neither 'staged' nor a pair of {names} such as 'left-all'")
        writes = TensorPlacement(
            channels=ChannelSet(match["writes"] or ChannelSet.ALL), first_row=int(match["row"] or 0)
        )
        return cls(
            reads=TensorPlacement(channels=ChannelSet(match["reads"])) if match["reads"] else None,
            writes=writes if match["reads"] else None,
            stages_operand=bool(match["staged"]),
            result_in_l2=bool(match["result"]),
            operand_in_l2=bool(match["operand"]),
        )


_SETS = "|".join(ChannelSet)
_CHANNEL_USE = re.compile(
    rf"((?P<reads>{_SETS})-((?P<writes>{_SETS})|from(?P<row>[0-9]+)))?(((?<=.), |^)(?P<operand>behind kept))?"
    r"|(?P<staged>staged)?(((?<=.), |^)(?P<result>result kept))?"
)
GPU_CHANNELS_ALONE = ChannelUse()
