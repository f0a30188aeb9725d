"""The kinds of candidates: what the passes write for each, and what a plan file says of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from pimflow.core.kernel import ConvGeometry
from pimflow.core.split import WHOLE, Axis, Split


class Mode(str, enum.Enum):
    """Which devices compute regions, as plans and reports spell it."""

    GPU = "GPU"
    PIM = "PIM"
    SPLIT = "SPLIT"
    PIPELINE = "PIPELINE"

    __str__ = str.__str__
    __repr__ = str.__repr__


MODES = tuple(Mode)
TILES = "tiles"  # first word of the text of a tiling


@dataclass(frozen=True, kw_only=True)
class GpuRewrite:
    """One region as kernels of the GPU; where a network runs only on a CPU, as kernels of that.

    Attributes
    ----------
    primitive : str
        The convolution primitive that computes it; empty for the kernels of its operators.
    """

    mode: ClassVar[Mode] = Mode.GPU
    gpu_share: ClassVar[float | None] = 1.0

    primitive: str = ""


@dataclass(frozen=True, kw_only=True)
class FusedGroupRewrite:
    """Several regions as one GPU kernel over tiles.

    Attributes
    ----------
    tiling : str
        As `fusion.GroupTiling` prints it; empty in a plan for the fastest.
    """

    mode: ClassVar[Mode] = Mode.GPU
    gpu_share: ClassVar[float | None] = 1.0

    tiling: str = ""


@dataclass(frozen=True, kw_only=True)
class SubstitutionRewrite:
    """Several regions as other operators on the GPU (`placement.candidates.substitutions`)."""

    mode: ClassVar[Mode] = Mode.GPU
    gpu_share: ClassVar[float | None] = 1.0

    substitution: str = ""


@dataclass(frozen=True, kw_only=True)
class PimRewrite:
    """The products of one region as a PIM program.

    Attributes
    ----------
    schedule : str
        Loop order, as `pim_backend.programs.schedule.Schedule` prints it; empty in a plan for the fastest.
    device_epilogue : tuple of str
        Operators that PIM does of the region's epilogue: all, or none.
    accumulates_residual : bool
        Whether the product itself does the addition in `device_epilogue`, with the residual as additional
        channels of its vectors (`PimProgram.added_channels`). If False, it does so only where the latches
        cannot.
    """

    mode: ClassVar[Mode] = Mode.PIM
    gpu_share: ClassVar[float | None] = 0.0

    schedule: str = ""
    device_epilogue: tuple[str, ...] = ()
    accumulates_residual: bool = False

    def split(self, geometry: ConvGeometry) -> Split:
        """PIM computes the whole layer."""
        return WHOLE


@dataclass(frozen=True, kw_only=True)
class SplitRewrite:
    """One region in two parts, the GPU's first.

    Attributes
    ----------
    gpu_share : float
        The extent of the GPU's part over that of the axis.
    schedule : str
        Loop order of PIM's part; empty in a plan for the fastest.
    """

    mode: ClassVar[Mode] = Mode.SPLIT

    axis: Axis = "rows"
    gpu_share: float
    schedule: str = ""

    @classmethod
    def from_split(cls, split: Split, geometry: ConvGeometry, schedule: str = "") -> SplitRewrite:
        """The rewrite that splits a layer of `geometry` so."""
        return cls(axis=split.axis, gpu_share=split.gpu / split.extent(geometry), schedule=schedule)

    def split(self, geometry: ConvGeometry) -> Split:
        """The split of a layer of `geometry`, with the GPU's part rounded to a whole extent."""
        return Split(self.axis, round(self.gpu_share * Split(self.axis).extent(geometry)))


@dataclass(frozen=True, kw_only=True)
class PipelineRewrite:
    """A chain of regions in stages of rows (`core.stages.Pipeline`).

    Attributes
    ----------
    cuts : tuple of int
        Output rows of the last region at which a stage ends and the next begins.
    modes : tuple of Mode
        By region, ``GPU`` or ``PIM``.
    schedules : tuple of str
        By region, the loop order, empty for ``GPU``; in a plan, empty for the fastest.
    """

    mode: ClassVar[Mode] = Mode.PIPELINE
    gpu_share: ClassVar[float | None] = None

    cuts: tuple[int, ...]
    modes: tuple[Mode, ...]
    schedules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AttentionRewrite:
    """Attention over a cache with both products on PIM, and the appends to the cache.

    Attributes
    ----------
    schedule : str
        As `pim_backend.programs.cache_schedule.CacheSchedule` prints it; empty in a plan for the fastest.
    """

    mode: ClassVar[Mode] = Mode.PIM
    gpu_share: ClassVar[float | None] = 0.0

    schedule: str = ""


OPERATOR_KERNELS = GpuRewrite()
LayerRewrite = PimRewrite | SplitRewrite  # one layer, of which PIM computes all or a part
GroupRewrite = FusedGroupRewrite | SubstitutionRewrite  # several regions on the GPU
Rewrite = GpuRewrite | GroupRewrite | LayerRewrite | PipelineRewrite | AttentionRewrite
