"""Layouts of tensors over the memory channels of a time-shared system."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pimflow.core.candidate import IN_PIM, LEFT, OVER_ALL, Candidate
from pimflow.core.plan import PLACES
from pimflow.core.region import Region
from pimflow.hardware import System
from pimflow.placement.candidates.candidates import Candidates

# A tensor with more readers, such as a mask, lies in the GPU channels, as the network's inputs do. Otherwise
# all parts of the network would have to be solved for each of its layouts.
MOST_READERS = 8
LAYOUTS = dict(zip(PLACES, (LEFT, OVER_ALL, IN_PIM), strict=True))


def cut_tensors(maker: Candidates, candidates: Iterable[Candidate]) -> dict[str, set[int]]:
    """By tensor that a split reads or writes, the rows from which on it may lie over all channels."""
    cut: dict[str, set[int]] = defaultdict(set)
    for candidate in candidates:
        if candidate.rewrite.mode == "SPLIT" and candidate.rewrite.axis == "rows":
            region = maker.graph.region(candidate.covers[0])
            cut[region.inputs[0]].add(rows_read(region, candidate))
            cut[region.name].add(candidate.rewrite.gpu_rows)
    return cut


def rows_read(region: Region, candidate: Candidate) -> int:
    """How many rows of its input, from the first on, the GPU's part of a split reads; 0 without a part."""
    rows = candidate.rewrite.gpu_rows
    return region.layer.rows.inputs(0, rows).end if rows else 0


@dataclass(frozen=True)
class Layouts:
    """The possible layouts of the tensors of one network on its system.

    Parameters
    ----------
    maker : Candidates
    cut : mapping
        See `cut_tensors`.
    """

    maker: Candidates
    cut: Mapping[str, set[int]] = field(default_factory=dict)

    @property
    def system(self) -> System:
        return self.maker.system

    @functools.cached_property
    def spread(self) -> bool:
        """Whether tensors may lie in several sets of channels, and switching channels is charged."""
        both = self.system.time_shared and self.system.gpu_channels and self.system.pim_channels
        return bool(both) and self.system.charges("channel-modes")

    @functools.cached_property
    def sets(self) -> dict[str, float]:
        """The GPU channels and those with PIM, each as a share of all channels."""
        every = self.system.gpu.memory_channels
        return {LEFT: self.system.gpu_channels / every, IN_PIM: self.system.pim_channels / every}

    def gives(self, name: str) -> dict[str, str]:
        """The possible layouts of a region's result, by their names in a plan."""
        if not self.maker.graph.readers[name]:
            return {"all": OVER_ALL}
        if len(self.maker.graph.readers[name]) > MOST_READERS:
            return {"left": LEFT}
        return LAYOUTS | {f"from{row}": from_row(row) for row in sorted(self.cut.get(name, ()))}

    def parts(self, name: str, layout: str) -> dict[str, float]:
        """By set of channels, the share of a tensor in that layout that lies there."""
        if layout in (LEFT, IN_PIM):
            return {each: float(each == layout) for each in self.sets}
        row = next((row for row in self.cut.get(name, ()) if layout == from_row(row)), 0)
        graph = self.maker.graph
        rows = graph.region(name).output_shape[1] if row else 1  # of a feature map, NHWC
        above = min(row / rows, 1.0)
        return {each: above * (each == LEFT) + (1 - above) * share for each, share in self.sets.items()}


def from_row(row: int) -> str:
    """The layout of a feature map in the GPU channels above a row, and over all channels from it on."""
    return f"{OVER_ALL} from row {row}"


def taken(candidate: Candidate, layout: str) -> str:
    """The input layout of a candidate made for tensors in `layout`: it reads other layouts at a cost."""
    return f"{layout} by {candidate.covers[0]} {candidate.name}"


def lying(candidate: Candidate, channels: str, reads: str, gives: str) -> Candidate:
    """`candidate` at `channels`, with its operands in layout `reads` and its result in layout `gives`."""
    return replace(
        candidate,
        name=f"{candidate.name} at {channels}",
        input=replace(candidate.input, layout=reads),
        output=replace(candidate.output, layout=gives),
        rewrite=replace(candidate.rewrite, channels=channels),
    )
