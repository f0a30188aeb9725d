"""Variants of PIM candidates whose operands or results pass through the L2, on a time-shared system.

PIM's channels move their part of a tensor as plain memory, before and after they work as PIM.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import TypeGuard

from pimflow.core.candidate import Candidate, in_sequence, with_fields
from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.core.region import Region
from pimflow.core.rewrite import LayerRewrite, PimRewrite, Rewrite, SplitRewrite
from pimflow.core.tensor_placement import (
    IN_ALL_CHANNELS,
    IN_GPU_CHANNELS,
    ChannelMode,
    ChannelSet,
    ChannelUse,
)
from pimflow.placement.candidates.channel_layouts import (
    ChannelLayouts,
    from_row,
    rows_read,
    with_placements,
    with_reader,
)
from pimflow.placement.candidates.tasks import TaskList


class L2Reuse(ChannelLayouts):
    """Makes these variants of the candidates of one network."""

    def operand_variants(self, candidate: Candidate) -> list[Candidate]:
        """The variant whose input lies over all channels, but for the rows that the GPU's part reads.

        PIM's channels first read their part of it into their L2 slices, as plain memory and at their
        bandwidth; then they are switched. Empty if these slices cannot hold it.
        """
        region, rewrite = self.generator.graph.region(candidate.covers[0]), candidate.rewrite
        if not (self.spreads_tensors and _is_by_rows(rewrite)) or region.prologue:
            return []
        first_operand, *other_operands = region.inputs
        is_late = tuple(other_operands) == region.late_operands and first_operand not in other_operands
        if not is_late or first_operand not in self.generator.graph.readers:
            return []
        pim_share = (1 - rows_read(region, rewrite) / region.layer.h) * self.set_shares[ChannelSet.PIM]
        read_bytes = region.input_elements[0] * ELEMENT_BYTES[self.system.dtype] * pim_share
        if not 0 < read_bytes <= self.system.gpu.l2_bytes_per_channel * self.system.pim_channels:
            return []
        preceding = in_sequence(self.task_builder.staging_tasks(region.name, read_bytes))
        shifted_tasks = []
        for task in candidate.tasks:
            waits = tuple(i + len(preceding) for i in task.after) or (() if task.resource == "gpu" else (0,))
            shifted_tasks.append(task.with_dependencies(waits))
        tasks, operand = (*preceding, *shifted_tasks), with_reader(candidate, IN_ALL_CHANNELS)
        variant = self.with_modes(candidate, ChannelMode.PLAIN_MEMORY, ChannelMode.PIM, tasks=tasks)
        return [with_placements(variant, ChannelUse(stages_operand=True), operand, IN_GPU_CHANNELS)]

    def pim_only_variants(self, candidate: Candidate) -> list[Candidate]:
        """The variants of a PIM candidate on a system whose channels all have PIM.

        As plain memory, the channels read its operands into the L2 before the program, and write its results
        after it. Empty if the L2 cannot hold both.
        """
        system, region = self.system, self.generator.graph.region(candidate.covers[0])
        read_bytes = _read_elements(region, candidate) * ELEMENT_BYTES[system.dtype]
        result_bytes = self._result_bytes(region)
        if read_bytes + result_bytes > system.gpu.l2_bytes_per_channel * system.gpu.memory_channels:
            return []
        builder, kinds = self.task_builder, [task.resource == "gpu" for task in candidate.tasks]
        first, last = kinds.index(False), len(kinds) - kinds[::-1].index(False)
        tasks = TaskList(candidate.tasks[:first])
        waits = tasks.append_sequence(builder.staging_tasks(region.name, read_bytes), tasks.positions[-1:])
        waits = tasks.append_after(candidate.tasks[first:last], waits)
        resident = self.with_modes(candidate, ChannelMode.PLAIN_MEMORY, ChannelMode.PIM, tasks=tuple(tasks))
        writeback_tasks = builder.writeback_tasks(region.name, result_bytes)
        tasks.append_sequence((*writeback_tasks, *candidate.tasks[last:]), waits)
        written_back = self.with_modes(candidate, ChannelMode.PLAIN_MEMORY, tasks=tuple(tasks))
        return [written_back, *(self.result_variants(resident) if last == len(kinds) else ())]

    def result_variants(self, candidate: Candidate) -> list[Candidate]:
        """The variant whose result lies over all channels, while the share of PIM's channels is in the L2.

        The next candidate is a kernel at all channels: during its launch these are switched back, and the
        share is written (`writeback_variants`). Empty if no region follows, a kernel of its own does the
        epilogue, the result cannot have this layout, or the L2 cannot hold it beside the operands.
        """
        system, region = self.system, self.generator.graph.region(candidate.covers[0])
        rewrite, is_last = candidate.rewrite, region is self.generator.graph.regions[-1]
        is_parallel = all(task.resource != "gpu" or not task.after for task in candidate.tasks)
        if is_last or not is_parallel or not _is_by_rows(rewrite):
            return []
        read_bytes = _read_elements(region, candidate) * ELEMENT_BYTES[system.dtype]
        live_bytes = (read_bytes + self._result_bytes(region)) * self.set_shares[ChannelSet.PIM]
        if live_bytes > system.gpu.l2_bytes_per_channel * system.pim_channels:
            return []
        result = from_row(rewrite.split(region.layer).gpu) if system.gpu_channels else IN_GPU_CHANNELS
        if self.spreads_tensors and result not in self.result_placements(region.name):
            return []
        return [
            with_fields(
                candidate,
                name=f"{candidate.name}, {_RESULT_IN_L2}",
                output=result,
                channels=replace(candidate.channels, result_in_l2=True),
                leaves_open=f"{_RESULT_IN_L2} of {region.name}",
            )
        ]

    def writeback_variants(self, wide_candidate: Candidate) -> list[Candidate]:
        """The variant of a kernel at all channels after a `result_variants` result.

        It executes once that is written.
        """
        predecessor = self._predecessors.get(wide_candidate.covers[0])
        if predecessor is None or self.generator.unsupported_reason(predecessor):
            return []
        if wide_candidate.requires_open or not wide_candidate.tasks:
            return []
        variant, result_bytes = wide_candidate, self._result_bytes(predecessor)
        for task in reversed(self.task_builder.writeback_tasks(predecessor.name, result_bytes)):
            variant = variant.with_first_task(task)
        return [
            self.with_modes(
                variant,
                ChannelMode.PIM,
                ChannelMode.PLAIN_MEMORY,
                name=f"{wide_candidate.name}, {ChannelUse(operand_in_l2=True)}",
                channels=replace(wide_candidate.channels, operand_in_l2=True),
                requires_open=f"{_RESULT_IN_L2} of {predecessor.name}",
            )
        ]

    @functools.cached_property
    def _predecessors(self) -> dict[str, Region]:
        regions = self.generator.graph.regions
        return {region.name: predecessor for predecessor, region in itertools.pairwise(regions)}

    def _result_bytes(self, region: Region) -> int:
        """Bytes of PIM's result, with all partial sums of lanes."""
        lanes, layer = self.system.pim.result_lanes, region.layer
        return layer.pixels * layer.oc * lanes * ELEMENT_BYTES[self.system.dtype]


_RESULT_IN_L2 = str(ChannelUse(result_in_l2=True))


def _is_by_rows(rewrite: Rewrite) -> TypeGuard[LayerRewrite]:
    """Whether PIM computes the last rows of a layer, or all of them."""
    return isinstance(rewrite, PimRewrite) or (isinstance(rewrite, SplitRewrite) and rewrite.axis == "rows")


def _read_elements(region: Region, candidate: Candidate) -> int:
    """Elements of PIM's operands: the input, and a residual that PIM adds."""
    layer, rewrite = region.layer, candidate.rewrite
    adds_residual = isinstance(rewrite, PimRewrite) and "add" in rewrite.device_epilogue
    return layer.input_elements + (layer.pixels * layer.oc if adds_residual else 0)
