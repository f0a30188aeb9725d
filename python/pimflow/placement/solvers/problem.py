"""A region graph and its cost table as arrays, the input of the search in C++ (``placement/src/problem.h``).

Candidates that behave alike in every state (`plan_state.equivalence_key`) are one group. Groups that read
alike share a reading. C++ expands the tasks of a candidate in its context, with epilogues and launches, by
the same rules as `solvers.plan_state` and `solvers.launches`. The evaluator uses these modules, and checks
the figures of each plan of the search.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from pimflow.core.candidate import Candidate, CostTable, Task
from pimflow.core.region import RegionGraph
from pimflow.core.tensor_placement import IN_GPU_CHANNELS, ChannelMode, ChannelSet, TensorPlacement
from pimflow.host import native
from pimflow.placement.solvers import plan_state
from pimflow.placement.solvers.arrays import Arrays
from pimflow.placement.solvers.capacity import uses_plain_memory
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.placement.solvers.reads import ReadCost, Reads
from pimflow.placement.solvers.view_aliases import ViewAliases

_problem = native.get("pimflow.placement.problem")
_HEADER = native.Record("pimflow.placement.problem_header")

ANY_MODE, PIM_MODE, PLAIN_MODE = range(3)  # of PIM's channels


class PlacementProblem:
    """The problem of a graph and its cost table.

    Views that are read as their sources (`view_aliases`) are no part of it.

    Attributes
    ----------
    graph, table, memory
        Its sources; `memory` has the lifetimes of results.
    candidates : list of Candidate
        In the order of their numbers in C++.
    """

    def __init__(self, graph: RegionGraph, table: CostTable, memory: PlanMemory, row_size_bytes: float):
        self.graph, self.table, self.memory = graph, table, memory
        self.candidates: list[Candidate] = []
        self._row_bytes = row_size_bytes
        self._aliases = ViewAliases.from_table(graph, table)
        stored = (region.name for region in graph.regions if region.name not in self._aliases.sources)
        self._order = {name: position for position, name in enumerate(stored)}
        self._resources = {resource: number for number, resource in enumerate(table.resources)}
        # By region, the numbers of (placement, bytes) of its result; bytes are None if they are the graph's.
        self._results: dict[str, dict[_Result, int]] = {
            name: {(IN_GPU_CHANNELS, None): 0} for name in graph.readers
        }
        self._open_alternatives = {"": 0}  # numbers of the alternatives of layers that are left open
        self._can_defer: set[str] = set()
        for candidate in itertools.chain(*table.candidates.values()):
            last = candidate.covers[-1]
            for open_alternative in (candidate.requires_open, candidate.leaves_open):
                self._open_alternatives.setdefault(open_alternative, len(self._open_alternatives))
            self._results[last].setdefault(self._result(candidate), len(self._results[last]))
            if candidate.deferred_epilogue:
                self._can_defer.add(last)

    def _result(self, candidate: Candidate) -> _Result:
        return candidate.output, self.memory.size_overrides_bytes(candidate).get(candidate.covers[-1])

    @functools.cached_property
    def native(self) -> Any:
        """The problem in C++."""
        import tvm_ffi

        arrays = Arrays()
        self._append_regions(arrays)
        transitions, readings = _Transitions(self, arrays), dict[Hashable, int]()
        for index, region in enumerate(self.graph.regions):
            if region.name not in self._order:
                continue
            groups: dict[object, list[Candidate]] = {}
            for candidate in self.table.candidates[region.name]:
                overrides = tuple(sorted(self.memory.size_overrides_bytes(candidate).items()))
                key = (
                    candidate.covers,
                    plan_state.equivalence_key(candidate),
                    candidate.fuses_regions,
                    overrides,
                )
                groups.setdefault(key, []).append(candidate)
            for group in groups.values():
                self._append_group(arrays, transitions, readings, index, group)
        switch = self.table.switch.task
        resources = self._resources
        header = _HEADER.row(
            positions=len(self._order),
            resources=len(resources),
            launches_ahead=self.table.overlaps_launches,
            pim=resources.get("pim", -1),
            crossbar=resources.get("crossbar", -1),
            switch_task=-1 if switch is None else transitions.number(switch),
        )
        longest = self.table.longest_launch_ns
        arrays.reals["longest_launch_ns"] = [longest.get(resource, 0.0) for resource in resources]
        for name in ("task", "transition"):
            self._append_tasks(arrays, name, ())  # makes empty columns if there are no tasks
        for name in ("reader", "reading_transition", "input_copy_order", *_OPERAND):
            arrays.integers[name] += []
        for name in ("input_copy_bytes", "access_ns", "access_pj"):
            arrays.reals[name] += []
        return _problem(tvm_ffi.from_dlpack(header), arrays.tensors())

    def _append_regions(self, arrays: Arrays) -> None:
        lives = {life.name: life for life in self.memory.liveness.lifetimes}
        aliases: dict[str, int] = {}
        arrays.integers["region_reader_begin"] = [0]
        arrays.integers["region_layout_begin"] = [0]
        ends = [0, *itertools.accumulate(region.name in self._order for region in self.graph.regions)]
        for region in self.graph.regions:
            if region.name not in self._order:
                continue
            readers = sorted({self._order[name] for name in self._aliases.readers(region.name)})
            arrays.integers["reader"] += readers
            arrays.integers["region_reader_begin"].append(len(arrays.integers["reader"]))
            life = lives.get(region.name)
            stored_bytes = life.within_bytes + life.size_bytes if life else 0
            for placement, changed_bytes in self._results[region.name]:
                size = stored_bytes if changed_bytes is None else changed_bytes
                arrays.append("layout", set=_SETS.index(placement.channels), bytes=size)
            arrays.integers["region_layout_begin"].append(len(arrays.integers["layout_set"]))
            end = -1 if life is None else len(self._order) + 1 if life.pinned else ends[life.end]
            arrays.append(
                "region",
                can_defer=int(region.name in self._can_defer),
                is_shared=int(self.graph.is_shared(region.name)),
                live_end=end,
                alias=aliases.setdefault(life.alias, len(aliases)) if life and life.alias else -1,
                tensor_bytes=self.memory.size_bytes(region.name),
            )

    def _append_group(
        self,
        arrays: Arrays,
        transitions: _Transitions,
        readings: dict[Hashable, int],
        index: int,
        group: Sequence[Candidate],
    ) -> None:
        """Append the group of candidates that behave alike in every state, from region number `index` on."""
        graph, representative = self.graph, group[0]
        reading = self._reading_key(representative)
        if reading not in readings:
            readings[reading] = len(readings)
            self._append_reading(arrays, transitions, index, representative)
        previous = graph.regions[index - 1].name if index else ""
        continues = (
            previous in self._order and graph.region(representative.covers[0]).first_result_input == previous
        )
        # A view cannot be done while an alternative is open.
        end = index + len(representative.covers)
        is_dead_end = bool(representative.leaves_open) and self._aliases.begins_at(end)
        position = self._order[representative.covers[0]]
        may_switch = self.table.switch.task is not None
        arrays.append(
            "group",
            begin=position,
            end=position + len(representative.covers),
            reading=readings[reading],
            requires_open=self._open_alternatives[representative.requires_open],
            leaves_open=self._open_alternatives[representative.leaves_open],
            layout=self._results[representative.covers[-1]][self._result(representative)],
            required_mode=self._mode(may_switch, representative.channel_mode),
            final_mode=self._mode(may_switch, representative.final_channel_mode),
            defers_epilogue=int(bool(representative.deferred_epilogue)),
            keeps_submission_open=int(representative.keeps_submission_open),
            continues=int(continues and any(candidate.begins_on_pim for candidate in group)),
            is_dead_end=int(is_dead_end),
            fuses_regions=int(representative.fuses_regions),
            leaves_partial_sum=int(representative.defers_partial_sum),
            fuses_epilogue=int(representative.fuses_epilogue),
        )
        for candidate in group:
            self._append_candidate(arrays, candidate)
        arrays.end_row("group_candidate_begin", "candidate_on_gpu")

    @staticmethod
    def _reading_key(candidate: Candidate) -> Hashable:
        """A key that is equal for candidates of the same regions if they read alike in every state."""
        return (
            candidate.covers,
            candidate.input,
            candidate.fuses_epilogue,
            candidate.requires_open,
            bool(candidate.deferred_epilogue),
            candidate.alternative.original,
        )

    def _append_reading(
        self, arrays: Arrays, transitions: _Transitions, index: int, candidate: Candidate
    ) -> None:
        """Append what `candidate` and all of its reading key read, from region number `index` on."""
        reads = self._reads(candidate)
        resource = reads.transform_resource(candidate.name)
        input_transforms = reads.input_transforms.values()
        is_first = self._order[candidate.covers[0]] == 0
        previous = self.graph.regions[index - 1].name if index else ""
        arrays.append(
            "reading",
            is_possible=int(all(transform.is_possible for transform in input_transforms)),
            reads_previous=int(is_first or self._aliases.reads_previous(index, reads.names)),
            previous_is_late=int(previous in reads.late),
            transform_resource=self._resources[resource] if resource else -1,
            transform_ns=sum(transform.ns for transform in input_transforms),
            transform_pj=sum(transform.pj for transform in input_transforms),
        )
        self._append_operands(arrays, reads, index)
        arrays.integers["inner_addend"] += sorted(
            self._order[name] for name in reads.addends.intersection(candidate.covers)
        )
        for name in reads.deferrable:
            task = self.table.transition(name, candidate).task
            arrays.integers["reading_transition"].append(-1 if task is None else transitions.number(task))
        for offsets, column in _READING_OFFSETS.items():
            arrays.end_row(offsets, column)

    def _reads(self, candidate: Candidate) -> Reads:
        """What a candidate reads, and what it costs to read it."""
        names = tuple(dict.fromkeys(plan_state.candidate_inputs(self.graph, candidate)))
        results = set(plan_state.results_read(self.graph, candidate))
        regions = defaultdict[str, list[str]](list)
        for name in names:
            if (source := self._aliases.source(name)) in self._order:
                regions[source].append(name)
        last = self.graph.region(candidate.covers[-1])
        return Reads(
            names=names,
            regions=regions,
            results=results,
            late=plan_state.late_inputs(self.graph, candidate, ()),
            deferrable=sorted(name for name in regions if name in results and name in self._can_defer),
            addends=set(last.inputs[last.operands :]) if candidate.deferred_epilogue else set(),
            input_transforms={
                name: self._transform(name, self.table.inputs.get(name, IN_GPU_CHANNELS), candidate)
                for name in names
                if name.startswith("%")
            },
            result_transforms={
                region: [
                    functools.reduce(
                        operator.add, (self._result_transform(name, placement, candidate) for name in read)
                    )
                    for placement, _ in self._results[region]
                ]
                for region, read in regions.items()
            },
        )

    def _append_operands(self, arrays: Arrays, reads: Reads, index: int) -> None:
        for name, transform in reads.input_transforms.items():
            if transform.is_copy:
                size = self.memory.size_bytes(name)
                arrays.append("input_copy", order=reads.names.index(name), bytes=size)
        for name, read_names in reads.regions.items():
            deferrable, transforms = reads.deferrable, reads.result_transforms[name]
            arrays.append(
                "operand",
                region=self._order[name],
                order=reads.names.index(read_names[0]),
                is_late=int(reads.late.issuperset(read_names)),
                is_result=int(not reads.results.isdisjoint(read_names)),
                is_addend=int(name in reads.addends),
                deferred=deferrable.index(name) if name in deferrable else -1,
                copy_outlives_source=int(self.memory.copy_bytes(name, index) > 0),
            )
            arrays.integers["access_is_possible"] += [int(transform.is_possible) for transform in transforms]
            arrays.integers["access_is_copied"] += [int(transform.is_copy) for transform in transforms]
            arrays.reals["access_ns"] += [transform.ns for transform in transforms]
            arrays.reals["access_pj"] += [transform.pj for transform in transforms]

    def _append_candidate(self, arrays: Arrays, candidate: Candidate) -> None:
        self.candidates.append(candidate)
        arrays.append(
            "candidate",
            error=candidate.alternative.error,
            row_bytes=candidate.footprint.bank_rows * self._row_bytes,
            filter_bytes=candidate.footprint.filter_bytes,
            on_gpu=int(not candidate.uses_pim),
            plain_memory=int(uses_plain_memory(candidate)),
            continues=int(candidate.begins_on_pim),
        )
        self._append_tasks(arrays, "task", candidate.tasks)
        arrays.end_row("candidate_task_begin", "task_resource")
        for moment in candidate.footprint.run_moments:
            buffer_bytes = self.memory.buffer_bytes(candidate, moment)
            arrays.append(
                "step", buffer_bytes=buffer_bytes, reads=int(moment.reads), writes=int(moment.writes)
            )
        arrays.end_row("candidate_step_begin", "step_reads")

    def _append_tasks(self, arrays: Arrays, name: str, tasks: Iterable[Task]) -> None:
        columns, reals = arrays.integers, arrays.reals
        begins = columns[f"{name}_after_begin"]
        if not begins:
            begins.append(0)
            for column in ("resource", "also", "launched", "readies_channels", "after"):
                columns[f"{name}_{column}"] += []
            for column in ("launch_ns", "execution_ns", "energy_pj"):
                reals[f"{name}_{column}"] += []
        for task in tasks:
            columns[f"{name}_resource"].append(self._resources[task.resource])
            columns[f"{name}_also"].append(sum(1 << self._resources[resource] for resource in task.also))
            columns[f"{name}_launched"].append(int(task.launched))
            columns[f"{name}_readies_channels"].append(int(task.readies_channels))
            columns[f"{name}_after"] += task.after
            begins.append(len(columns[f"{name}_after"]))
            reals[f"{name}_launch_ns"].append(task.launch_ns)
            reals[f"{name}_execution_ns"].append(task.execution_ns)
            reals[f"{name}_energy_pj"].append(task.energy_pj)

    def plan(self, numbers: Iterable[int]) -> tuple[Candidate, ...]:
        """The plan with the candidates of these numbers, in order."""
        return self._aliases.with_views([self.candidates[number] for number in numbers])

    def _result_transform(self, name: str, placement: TensorPlacement, reader: Candidate) -> ReadCost:
        """The transform for `reader` of a result, or a view of it, if the result lies at `placement`."""
        actual = self._aliases.placement(name, placement)
        return ReadCost(is_possible=False) if actual is None else self._transform(name, actual, reader)

    def _transform(self, tensor: str, placement: TensorPlacement, reader: Candidate) -> ReadCost:
        if not self.table.transforms or placement == reader.input:
            return _NO_TRANSFORM
        return ReadCost.from_edge(self.table.transform(tensor, placement, reader.input))

    @staticmethod
    def _mode(may_switch: bool, mode: ChannelMode | None) -> int:
        if mode is None or not may_switch:
            return ANY_MODE
        return PLAIN_MODE if mode is ChannelMode.PLAIN_MEMORY else PIM_MODE


_NO_TRANSFORM = ReadCost()
_Result = tuple[TensorPlacement, int | None]
_SETS = tuple(ChannelSet)  # in the order of C++
_OPERAND = (
    *(f"operand_{name}" for name in ("region", "order", "is_late", "is_result", "is_addend", "deferred")),
    *("operand_copy_outlives_source", "access_is_possible", "access_is_copied"),
)
# By column of offsets where the rows of a reading begin, the column that it indexes.
_READING_OFFSETS = {
    "reading_operand_begin": "operand_region",
    "reading_transition_begin": "reading_transition",
    "reading_input_copy_begin": "input_copy_order",
    "reading_inner_addend_begin": "inner_addend",
}


class _Transitions:
    """The tasks of transitions between candidates, each stored once."""

    def __init__(self, problem: PlacementProblem, arrays: Arrays):
        self.problem, self.arrays = problem, arrays
        self._numbers: dict[int, int] = {}

    def number(self, task: Task) -> int:
        """The number of a task, which is appended if it is new."""
        if id(task) not in self._numbers:
            self._numbers[id(task)] = len(self._numbers)
            self.problem._append_tasks(self.arrays, "transition", (task,))
        return self._numbers[id(task)]
