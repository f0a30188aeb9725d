"""Layouts of tensors over the memory channels of a time-shared system."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pimflow.core.candidate import Candidate, with_fields
from pimflow.core.region import Region
from pimflow.core.rewrite import LayerRewrite, SplitRewrite
from pimflow.core.tensor_placement import (
    IN_ALL_CHANNELS,
    IN_GPU_CHANNELS,
    IN_PIM_CHANNELS,
    ChannelMode,
    ChannelSet,
    ChannelUse,
    TensorPlacement,
)
from pimflow.hardware import System
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.candidates.tasks import TaskBuilder

# A tensor with more readers, such as a mask, lies in the GPU channels, as the network's inputs do. Otherwise
# all parts of the network would have to be solved for each of its layouts.
MAX_READERS = 8
WHOLE_PLACEMENTS = (IN_GPU_CHANNELS, IN_ALL_CHANNELS, IN_PIM_CHANNELS)


def cut_tensors(generator: CandidateGenerator, candidates: Iterable[Candidate]) -> dict[str, set[int]]:
    """By tensor that a split reads or writes, the rows from which on it may lie over all channels."""
    cut_rows: dict[str, set[int]] = defaultdict(set)
    for candidate in candidates:
        rewrite = candidate.rewrite
        if isinstance(rewrite, SplitRewrite) and rewrite.axis == "rows":
            region = generator.graph.region(candidate.covers[0])
            if operand := row_operand(generator, region):
                cut_rows[operand].add(rows_read(region, rewrite))
            cut_rows[region.name].add(rewrite.split(region.layer).gpu)
    return cut_rows


def row_operand(generator: CandidateGenerator, region: Region) -> str:
    """The operand of which the parts of a layer that is split by rows read rows; empty if that is not known.

    It is the first one, unless that has no rows, such as a scale that a prologue applies.
    """
    name = region.inputs[0]
    if name not in generator.graph.readers:  # an input of the network
        return name
    dims = generator.graph.region(name).output_shape
    is_map = len(dims) > 1 and (dims[1] > 1 or region.layer.rows.extent == 1)
    return name if is_map else ""


def rows_read(region: Region, rewrite: LayerRewrite) -> int:
    """How many rows of its input, from the first on, the GPU's part of a split reads; 0 without a part."""
    rows = rewrite.split(region.layer).gpu
    return region.layer.rows.inputs(0, rows).end if rows else 0


@dataclass(frozen=True)
class ChannelLayouts:
    """The possible layouts of the tensors of one network on its system.

    Parameters
    ----------
    cut_rows : mapping
        See `cut_tensors`.
    """

    generator: CandidateGenerator
    cut_rows: Mapping[str, set[int]] = field(default_factory=dict)

    @property
    def system(self) -> System:
        return self.generator.system

    @property
    def task_builder(self) -> TaskBuilder:
        return self.generator.task_builder

    @functools.cached_property
    def spreads_tensors(self) -> bool:
        """Whether tensors may lie in several sets of channels, and switching channels is charged."""
        has_both_sets = self.system.is_time_shared and self.system.gpu_channels and self.system.pim_channels
        return bool(has_both_sets) and self.system.charges("channel-modes")

    @functools.cached_property
    def set_shares(self) -> dict[ChannelSet, float]:
        """The GPU channels and those with PIM, each as a share of all channels."""
        all_channels = self.system.gpu.memory_channels
        return {
            ChannelSet.GPU: self.system.gpu_channels / all_channels,
            ChannelSet.PIM: self.system.pim_channels / all_channels,
        }

    def result_placements(self, name: str) -> tuple[TensorPlacement, ...]:
        """Where a region's result may lie."""
        if not self.generator.graph.readers[name]:
            return (IN_ALL_CHANNELS,)
        if len(self.generator.graph.readers[name]) > MAX_READERS:
            return (IN_GPU_CHANNELS,)
        return (*WHOLE_PLACEMENTS, *map(from_row, sorted(self.cut_rows.get(name, ()))))

    def with_modes(
        self, candidate: Candidate, mode: ChannelMode, final: ChannelMode | None = None, **changes: object
    ) -> Candidate:
        """`candidate` with the `mode` that it needs, and the `final` one, by default the same.

        Both are None where a change of mode takes no time.
        """
        is_charged = bool(self.task_builder.switch_ns)
        modes = {"channel_mode": mode, "final_channel_mode": final or mode} if is_charged else {}
        return with_fields(candidate, **modes, **changes)

    def tensor_shares(self, name: str, placement: TensorPlacement) -> dict[ChannelSet, float]:
        """By set of channels, the share of a tensor that lies there."""
        if placement.channels is not ChannelSet.ALL:
            return {channels: float(channels is placement.channels) for channels in self.set_shares}
        row = placement.first_row
        rows = self.generator.graph.region(name).output_shape[1] if row else 1  # of a feature map, NHWC
        gpu_share = min(row / rows, 1.0)
        return {
            channels: gpu_share * (channels is ChannelSet.GPU) + (1 - gpu_share) * share
            for channels, share in self.set_shares.items()
        }


@functools.cache  # every candidate that reads or writes the tensor asks for all of its placements
def from_row(row: int) -> TensorPlacement:
    """A feature map in the GPU channels above a row, and over all channels from it on."""
    return replace(IN_ALL_CHANNELS, first_row=row)


def with_reader(candidate: Candidate, placement: TensorPlacement) -> TensorPlacement:
    """The input of a candidate whose time is that of `placement`: it reads others at a cost of its own."""
    return replace(placement, reader=f"{candidate.covers[0]} {candidate.name}")


def with_placements(
    candidate: Candidate, channels: ChannelUse, operands: TensorPlacement, result: TensorPlacement
) -> Candidate:
    """`candidate` with its `operands` and its `result` elsewhere."""
    name = f"{candidate.name} at {channels}"
    return with_fields(candidate, name=name, channels=channels, input=operands, output=result)
