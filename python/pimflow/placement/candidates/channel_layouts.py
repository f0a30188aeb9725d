"""Layouts of tensors over the memory channels of a time-shared system."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pimflow.core.candidate import IN_ALL_CHANNELS, IN_GPU_CHANNELS, IN_PIM_CHANNELS, Candidate
from pimflow.core.plan import CHANNEL_SETS
from pimflow.core.region import Region
from pimflow.hardware import System
from pimflow.placement.candidates.candidates import CandidateGenerator

# A tensor with more readers, such as a mask, lies in the GPU channels, as the network's inputs do. Otherwise
# all parts of the network would have to be solved for each of its layouts.
MAX_READERS = 8
LAYOUTS = dict(zip(CHANNEL_SETS, (IN_GPU_CHANNELS, IN_ALL_CHANNELS, IN_PIM_CHANNELS), strict=True))


def cut_tensors(generator: CandidateGenerator, candidates: Iterable[Candidate]) -> dict[str, set[int]]:
    """By tensor that a split reads or writes, the rows from which on it may lie over all channels."""
    cut_rows: dict[str, set[int]] = defaultdict(set)
    for candidate in candidates:
        if candidate.rewrite.mode == "SPLIT" and candidate.rewrite.axis == "rows":
            region = generator.graph.region(candidate.covers[0])
            cut_rows[region.inputs[0]].add(rows_read(region, candidate))
            cut_rows[region.name].add(candidate.rewrite.gpu_rows)
    return cut_rows


def rows_read(region: Region, candidate: Candidate) -> int:
    """How many rows of its input, from the first on, the GPU's part of a split reads; 0 without a part."""
    rows = candidate.rewrite.gpu_rows
    return region.layer.rows.inputs(0, rows).end if rows else 0


@dataclass(frozen=True)
class ChannelLayouts:
    """The possible layouts of the tensors of one network on its system.

    Parameters
    ----------
    generator : CandidateGenerator
    cut_rows : mapping
        See `cut_tensors`.
    """

    generator: CandidateGenerator
    cut_rows: Mapping[str, set[int]] = field(default_factory=dict)

    @property
    def system(self) -> System:
        return self.generator.system

    @functools.cached_property
    def spreads_tensors(self) -> bool:
        """Whether tensors may lie in several sets of channels, and switching channels is charged."""
        has_both_sets = self.system.is_time_shared and self.system.gpu_channels and self.system.pim_channels
        return bool(has_both_sets) and self.system.charges("channel-modes")

    @functools.cached_property
    def set_shares(self) -> dict[str, float]:
        """The GPU channels and those with PIM, each as a share of all channels."""
        all_channels = self.system.gpu.memory_channels
        return {
            IN_GPU_CHANNELS: self.system.gpu_channels / all_channels,
            IN_PIM_CHANNELS: self.system.pim_channels / all_channels,
        }

    def result_layouts(self, name: str) -> dict[str, str]:
        """The possible layouts of a region's result, by their names in a plan."""
        if not self.generator.graph.readers[name]:
            return {"all": IN_ALL_CHANNELS}
        if len(self.generator.graph.readers[name]) > MAX_READERS:
            return {"left": IN_GPU_CHANNELS}
        return LAYOUTS | {f"from{row}": layout_from_row(row) for row in sorted(self.cut_rows.get(name, ()))}

    def tensor_shares(self, name: str, layout: str) -> dict[str, float]:
        """By set of channels, the share of a tensor in that layout that lies there."""
        if layout in (IN_GPU_CHANNELS, IN_PIM_CHANNELS):
            return {place: float(place == layout) for place in self.set_shares}
        row = next((row for row in self.cut_rows.get(name, ()) if layout == layout_from_row(row)), 0)
        graph = self.generator.graph
        rows = graph.region(name).output_shape[1] if row else 1  # of a feature map, NHWC
        left_share = min(row / rows, 1.0)
        return {
            place: left_share * (place == IN_GPU_CHANNELS) + (1 - left_share) * share
            for place, share in self.set_shares.items()
        }


def layout_from_row(row: int) -> str:
    """The layout of a feature map in the GPU channels above a row, and over all channels from it on."""
    return f"{IN_ALL_CHANNELS} from row {row}"


def candidate_layout(candidate: Candidate, layout: str) -> str:
    """The input layout of a candidate made for tensors in `layout`: it reads other layouts at a cost."""
    return f"{layout} by {candidate.covers[0]} {candidate.name}"


def with_layouts(candidate: Candidate, channels: str, input_layout: str, output_layout: str) -> Candidate:
    """`candidate` at `channels`, with its operands in layout `input_layout` and its result in layout
    `output_layout`.
    """
    return replace(
        candidate,
        name=f"{candidate.name} at {channels}",
        input=replace(candidate.input, layout=input_layout),
        output=replace(candidate.output, layout=output_layout),
        rewrite=replace(candidate.rewrite, channels=channels),
    )
