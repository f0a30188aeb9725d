"""Variants of PIM candidates whose operands or results pass through the L2, on a time-shared system.

PIM's channels move their part of a tensor as plain memory, before and after they work as PIM.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pimflow.core.candidate import AS_MEMORY, AS_PIM, IN_PIM, LEFT, OVER_ALL, Candidate, EdgeCost, Task
from pimflow.core.plan import STAGED
from pimflow.core.region import ELEMENT_BYTES, Region
from pimflow.hardware import System
from pimflow.placement.candidates.candidates import Candidates
from pimflow.placement.candidates.channel_layouts import Layouts, from_row, lying, rows_read, taken
from pimflow.placement.solvers.steps import late_operands
from pimflow.simulators.gpu.machine import RooflineMachine

KEPT, BEHIND_KEPT = "result kept", "behind kept"


def switch(maker: Candidates) -> EdgeCost:
    """The cost of switching the channels that have PIM between plain memory and PIM."""
    switch_ns = maker.tasks.switch_ns
    if not switch_ns or not maker.system.pim_channels:
        return EdgeCost()
    task = Task(label="channels switched", resource="pim", execution_ns=switch_ns, readies_channels=True)
    return EdgeCost(task=task)


@dataclass(frozen=True)
class ThroughL2:
    """Makes these variants of the candidates of one network."""

    layouts: Layouts

    @property
    def maker(self) -> Candidates:
        return self.layouts.maker

    @property
    def system(self) -> System:
        return self.layouts.system

    def staged(self, candidate: Candidate) -> list[Candidate]:
        """The variant whose input lies over all channels, but for the rows that the GPU's part reads.

        PIM's channels first read their part of it into their L2 slices, as plain memory and at their
        bandwidth; then they are switched. Empty if these slices cannot hold it.
        """
        system, rewrite = self.system, candidate.rewrite
        region = self.maker.graph.region(candidate.covers[0])
        by_rows = rewrite.mode == "PIM" or (rewrite.mode == "SPLIT" and rewrite.axis == "rows")
        others = region.inputs[1:]
        if not (self.layouts.spread and by_rows) or region.prologue or region.inputs[0] in others:
            return []
        if others != late_operands(region) or region.inputs[0] not in self.maker.graph.readers:
            return []
        rows = rows_read(region, candidate)
        part = (1 - rows / region.layer.h) * self.layouts.sets[IN_PIM]
        read_bytes = region.input_elements[0] * ELEMENT_BYTES[system.dtype] * part
        if not 0 < read_bytes <= system.gpu.l2_bytes_per_channel * system.pim_channels:
            return []
        staging = self._moved(f"{region.name} (operands to the L2)", read_bytes)
        switched = switch(self.maker).task
        before = [staging, *([replace(switched, after=(0,))] if switched else [])]
        own = []
        for task in candidate.tasks:
            waits = tuple(i + len(before) for i in task.after) or (() if task.resource == "gpu" else (0,))
            own.append(task.waiting_for(waits))
        made = replace(candidate, tasks=(*before, *own), channels_as=AS_MEMORY if switched else "")
        return [lying(made, STAGED, taken(candidate, STAGED), LEFT)]

    def _moved(self, label: str, moved_bytes: float, taking: float = 1.0) -> Task:
        """A transfer of PIM's channels as plain memory: a byte takes as long as `taking` bytes read."""
        system = self.system
        machine = RooflineMachine(system.gpu, system.dtype, system.pim_channels)
        dram_pj = moved_bytes * 8 * system.gpu.energy["dram_pj_per_bit"]
        return Task(
            label=label,
            resource="pim",
            readies_channels=True,
            execution_ns=moved_bytes * taking / machine.dram_rate / machine.cycles_per_ns,
            moved_bytes=round(moved_bytes),
            # If the crossbar is charged, the program's transfer has the energy of operands and results.
            energies_pj={} if system.charges("crossbar") else {"gpu_dram": dram_pj},
        )

    def between(self, candidate: Candidate) -> list[Candidate]:
        """The variants of a PIM candidate on a system whose channels all have PIM.

        As plain memory, the channels read its operands into the L2 before the program, and write its results
        after it. Empty if the L2 cannot hold both.
        """
        system, region = self.system, self.maker.graph.region(candidate.covers[0])
        element, layer = ELEMENT_BYTES[system.dtype], region.layer
        read_bytes = _read_elements(region, candidate) * element
        result_bytes = layer.pixels * layer.oc * system.pim.result_lanes * element
        if read_bytes + result_bytes > system.gpu.l2_bytes_per_channel * system.gpu.memory_channels:
            return []
        operands = self._moved(f"{region.name} (operands to the L2)", read_bytes)
        results = self._written(region)
        switched = switch(self.maker).task
        change = [switched] if switched else []
        kinds = [task.resource == "gpu" for task in candidate.tasks]
        first, last = kinds.index(False), len(kinds) - kinds[::-1].index(False)
        tasks = list(candidate.tasks[:first])

        def one_by_one(more: Iterable[Task]) -> None:
            for task in more:
                tasks.append(task.waiting_for((len(tasks) - 1,) if tasks else ()))

        one_by_one([operands, *change])
        begun = len(tasks)
        tasks += [task.waiting_for((begun - 1,)) for task in candidate.tasks[first:last]]
        together = tuple(range(begun, len(tasks)))
        kept = replace(candidate, tasks=tuple(tasks), channels_as=AS_MEMORY if switched else "")
        left = self.kept(replace(kept, leaves_channels_as=AS_PIM if switched else ""))
        one_by_one([*change, results, *candidate.tasks[last:]])
        tasks[together[-1] + 1] = replace(tasks[together[-1] + 1], after=together)
        use = AS_MEMORY if switched else ""
        written = replace(candidate, tasks=tuple(tasks), channels_as=use, leaves_channels_as=use)
        return [written, *(left if last == len(candidate.tasks) else ())]

    def _written(self, region: Region) -> Task:
        """The write of PIM's result from the L2 to PIM's channels, as plain memory: their share of it."""
        system, layer = self.system, region.layer
        result_bytes = layer.pixels * layer.oc * system.pim.result_lanes * ELEMENT_BYTES[system.dtype]
        machine = RooflineMachine(system.gpu, system.dtype)
        written_bytes = result_bytes * self.layouts.sets[IN_PIM] * system.gpu.write_factor
        return self._moved(f"{region.name} (results)", written_bytes, taking=1 / machine["dram_write"])

    def kept(self, candidate: Candidate) -> list[Candidate]:
        """The variant whose result lies over all channels, while the share of PIM's channels is in the L2.

        The next candidate is a kernel at all channels: during its launch these are switched back, and the
        share is written (`behind_kept`). Empty if no region follows, a kernel of its own does the epilogue,
        the result cannot have this layout, or the L2 cannot hold it beside the operands.
        """
        system, region = self.system, self.maker.graph.region(candidate.covers[0])
        position = self._order[region.name]
        behind = self.maker.graph.regions[position + 1 : position + 2]
        parallel = all(task.resource != "gpu" or not task.after for task in candidate.tasks)
        by_rows = candidate.rewrite.mode == "PIM" or candidate.rewrite.axis == "rows"
        if not (behind and parallel and by_rows) or candidate.rewrite.mode == "PIPELINE":
            return []
        layer = region.layer
        held = _read_elements(region, candidate) + layer.pixels * layer.oc * system.pim.result_lanes
        held *= ELEMENT_BYTES[system.dtype]
        if held * self.layouts.sets[IN_PIM] > system.gpu.l2_bytes_per_channel * system.pim_channels:
            return []
        rows = candidate.rewrite.gpu_rows
        layout = LEFT if not system.gpu_channels else from_row(rows) if rows else OVER_ALL
        if self.layouts.spread and layout not in self.layouts.gives(region.name).values():
            return []
        return [
            replace(
                candidate,
                name=f"{candidate.name}, {KEPT}",
                output=replace(candidate.output, layout=layout),
                rewrite=replace(candidate.rewrite, channels=_and(candidate.rewrite.channels, KEPT)),
                leaves_open=f"{KEPT} of {region.name}",
            )
        ]

    def behind_kept(self, wide: Candidate) -> list[Candidate]:
        """The variant of a kernel at all channels after a `kept` result: it executes once that is written."""
        position = self._order[wide.covers[0]]
        before = self.maker.graph.regions[position - 1] if position else None
        if before is None or wide.goes_on_with or not wide.tasks or self.maker.refusal(before):
            return []
        switched = switch(self.maker).task
        made = wide.behind(self._written(before))
        return [
            replace(
                made.behind(switched) if switched else made,
                name=f"{wide.name}, {BEHIND_KEPT}",
                rewrite=replace(wide.rewrite, channels=_and(wide.rewrite.channels, BEHIND_KEPT)),
                goes_on_with=f"{KEPT} of {before.name}",
                channels_as=AS_PIM if switched else "",
            )
        ]

    @functools.cached_property
    def _order(self) -> dict[str, int]:
        return {region.name: position for position, region in enumerate(self.maker.graph.regions)}


def _read_elements(region: Region, candidate: Candidate) -> int:
    """Elements of PIM's operands: the input, and a residual that PIM adds."""
    layer = region.layer
    added = layer.pixels * layer.oc if "add" in candidate.rewrite.finishes else 0
    return layer.n * layer.h * layer.w * layer.c + added


def _and(channels: str, more: str) -> str:
    return f"{channels}, {more}" if channels else more
