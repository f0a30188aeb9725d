"""A region graph and its cost table as arrays, the input of the search in C++ (``placement/src/problem.h``).

Candidates that behave alike in every state (`steps.equivalence_key`) are one group. C++ expands the tasks of
a candidate in its context, with epilogues and launches, by the same rules as `solvers.steps` and
`solvers.launches`. The evaluator uses these modules, and checks the figures of each plan of the search.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pimflow.core.candidate import PLAIN_MEMORY_MODE, Candidate, CostTable, EdgeCost, Task
from pimflow.core.channel_sets import channel_set
from pimflow.core.plan import CHANNEL_SETS
from pimflow.core.region import RegionGraph
from pimflow.host import native
from pimflow.placement.solvers import steps
from pimflow.placement.solvers.capacity import uses_plain_memory
from pimflow.placement.solvers.plan_memory import PlanMemory

_problem = native.get("pimflow.placement.problem")
_HEADER = native.Record("pimflow.placement.problem_header")

CANONICAL = steps.CANONICAL.layout
ANY_MODE, PIM_MODE, PLAIN_MODE = range(3)  # of PIM's channels


class _Arrays:
    """Columns of numbers by name, filled number by number; a column of offsets begins with 0."""

    def __init__(self) -> None:
        self.integers: defaultdict[str, list[int]] = defaultdict(list)
        self.reals: defaultdict[str, list[float]] = defaultdict(list)
        self._columns: defaultdict[str, dict[str, list[float]]] = defaultdict(dict)

    def append(self, prefix: str, **numbers: float) -> None:
        """Append an integer, or a real number where the name ends in its unit, to each column."""
        columns = self._columns[prefix]
        for name, number in numbers.items():
            if name not in columns:
                real = name.rpartition("_")[2] in ("ns", "pj", "bytes", "error")
                columns[name] = (self.reals if real else self.integers)[f"{prefix}_{name}"]  # type: ignore[assignment]
            columns[name].append(number)

    def end_row(self, offsets: str, column: str) -> None:
        """Append to `offsets` where the next row of `column` begins."""
        begins = self.integers[offsets]
        if not begins:
            begins.append(0)
        begins.append(len(self.integers[column]))

    def tensors(self) -> dict[str, Any]:
        """The columns as tensors of tvm-ffi."""
        import tvm_ffi

        columns = {name: np.array(values, np.int64) for name, values in self.integers.items()}
        columns |= {name: np.array(values, np.float64) for name, values in self.reals.items()}
        return {name: tvm_ffi.from_dlpack(column) for name, column in columns.items()}


@dataclass(frozen=True)
class _Transform:
    """The cost for a group of reading a tensor in a layout."""

    is_possible: bool = True
    task: Task | None = None

    @classmethod
    def from_edge(cls, edge: EdgeCost) -> _Transform:
        """The transform of an edge; raises `AssertionError` if it holds several resources."""
        if edge.task is not None and edge.task.also:
            raise AssertionError(f"transform {edge.task.label} holds several resources")
        return cls(edge.possible, edge.task)

    @property
    def ns(self) -> float:
        return self.task.duration_ns if self.task else 0.0

    @property
    def pj(self) -> float:
        return self.task.energy_pj if self.task else 0.0

    @property
    def is_copy(self) -> bool:
        return bool(self.task and self.task.launched)


class PlacementProblem:
    """The problem of a graph and its cost table.

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
        self._order = {region.name: position for position, region in enumerate(graph.regions)}
        self._resources = {resource: number for number, resource in enumerate(table.resources)}
        # By region, the numbers of (layout, bytes) of its result; bytes are None if they are the graph's.
        self._layouts: dict[str, dict[_ResultForm, int]] = {
            name: {(CANONICAL, None): 0} for name in self._order
        }
        self._open_forms = {"": 0}  # numbers of the alternatives of layers that are left open
        self._can_defer: set[str] = set()
        for candidate in itertools.chain(*table.candidates.values()):
            last = candidate.covers[-1]
            for open_form in (candidate.requires_open, candidate.leaves_open):
                self._open_forms.setdefault(open_form, len(self._open_forms))
            self._layouts[last].setdefault(self._result_form(candidate), len(self._layouts[last]))
            if candidate.output.deferred_epilogue:
                self._can_defer.add(last)

    def _result_form(self, candidate: Candidate) -> _ResultForm:
        return candidate.output.layout, self.memory.size_overrides_bytes(candidate).get(candidate.covers[-1])

    @functools.cached_property
    def native(self) -> Any:
        """The problem in C++."""
        import tvm_ffi

        arrays = _Arrays()
        self._append_regions(arrays)
        transitions = _Transitions(self, arrays)
        for position, region in enumerate(self.graph.regions):
            groups: dict[object, list[Candidate]] = {}
            for candidate in self.table.candidates[region.name]:
                splits_reduction = candidate.rewrite.axis == "reduction"
                overrides = tuple(sorted(self.memory.size_overrides_bytes(candidate).items()))
                key = (
                    candidate.covers,
                    steps.equivalence_key(candidate),
                    splits_reduction,
                    candidate.fuses_regions,
                    overrides,
                )
                groups.setdefault(key, []).append(candidate)
            for group in groups.values():
                self._append_group(arrays, transitions, position, group)
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
        for name in ("reader", "group_transition", "input_copy_order", *_OPERAND):
            arrays.integers[name] += []
        for name in ("input_copy_bytes", "access_ns", "access_pj"):
            arrays.reals[name] += []
        return _problem(tvm_ffi.from_dlpack(header), arrays.tensors())

    def _append_regions(self, arrays: _Arrays) -> None:
        lives = {life.name: life for life in self.memory.liveness.lifetimes}
        aliases: dict[str, int] = {}
        arrays.integers["region_reader_begin"] = [0]
        arrays.integers["region_layout_begin"] = [0]
        for region in self.graph.regions:
            readers = sorted({self._order[name] for name in self.graph.readers[region.name]})
            arrays.integers["reader"] += readers
            arrays.integers["region_reader_begin"].append(len(arrays.integers["reader"]))
            life = lives.get(region.name)
            stored_bytes = life.within_bytes + life.size_bytes if life else 0
            for layout, changed_bytes in self._layouts[region.name]:
                size = stored_bytes if changed_bytes is None else changed_bytes
                arrays.append("layout", set=CHANNEL_SETS.index(channel_set(layout)), bytes=size)
            arrays.integers["region_layout_begin"].append(len(arrays.integers["layout_set"]))
            end = -1 if life is None else len(self._order) + 1 if life.pinned else life.end
            arrays.append(
                "region",
                can_defer=int(region.name in self._can_defer),
                is_shared=int(self.graph.is_shared(region.name)),
                live_end=end,
                alias=aliases.setdefault(life.alias, len(aliases)) if life and life.alias else -1,
                tensor_bytes=self.memory.size_bytes(region.name),
            )

    def _append_group(
        self, arrays: _Arrays, transitions: _Transitions, position: int, group: Sequence[Candidate]
    ) -> None:
        """Append the group of candidates that behave alike in every state, and begin at `position`."""
        graph, representative = self.graph, group[0]
        previous = graph.regions[position - 1].name if position else ""
        inputs_read = tuple(dict.fromkeys(steps.candidate_inputs(graph, representative)))
        results, late = (
            set(steps.results_read(graph, representative)),
            steps.late_inputs(graph, representative, ()),
        )
        region_names = [name for name in inputs_read if name in self._order]
        deferrable = sorted(name for name in region_names if name in results and name in self._can_defer)
        last = graph.region(representative.covers[-1])
        addends = set(last.inputs[last.operands :]) if representative.output.deferred_epilogue else set()
        input_names = [name for name in inputs_read if name not in self._order]
        inputs = {
            name: self._transform(name, self._input_layout(name), representative) for name in input_names
        }
        transforms = {
            name: [self._transform(name, layout, representative) for layout, _ in self._layouts[name]]
            for name in region_names
        }
        all_transforms = [*inputs.values(), *itertools.chain(*transforms.values())]
        transform_resources = {transform.task.resource for transform in all_transforms if transform.task}
        if len(transform_resources) > 1:
            raise AssertionError(
                f"transforms for '{representative.name}' run on several resources: "
                f"{sorted(transform_resources)}"
            )
        continues = position > 0 and graph.region(representative.covers[0]).first_result_input == previous
        uses_mode = functools.partial(self._mode, self.table.switch.task is not None)
        arrays.append(
            "group",
            begin=position,
            end=position + len(representative.covers),
            requires_open=self._open_forms[representative.requires_open],
            leaves_open=self._open_forms[representative.leaves_open],
            layout=self._layouts[representative.covers[-1]][self._result_form(representative)],
            required_mode=uses_mode(representative.channel_mode),
            final_mode=uses_mode(representative.final_channel_mode),
            defers_epilogue=int(bool(representative.output.deferred_epilogue)),
            keeps_submission_open=int(representative.keeps_submission_open),
            continues=int(continues and any(map(_can_continue, group))),
            is_possible=int(all(transform.is_possible for transform in inputs.values())),
            fuses_regions=int(representative.fuses_regions),
            leaves_partial_sum=int(
                representative.rewrite.axis == "reduction" and bool(representative.output.deferred_epilogue)
            ),
            fuses_epilogue=int(representative.input.fuses_epilogue),
            reads_previous=int(position == 0 or previous in inputs_read),
            previous_is_late=int(previous in late),
            transform_resource=self._resources[transform_resources.pop()] if transform_resources else -1,
            transform_ns=sum(transform.ns for transform in inputs.values()),
            transform_pj=sum(transform.pj for transform in inputs.values()),
        )
        for name, transform in inputs.items():
            if transform.is_copy:
                size = self.memory.size_bytes(name)
                arrays.append("input_copy", order=inputs_read.index(name), bytes=size)
        for name in region_names:
            arrays.append(
                "operand",
                region=self._order[name],
                order=inputs_read.index(name),
                is_late=int(name in late),
                is_result=int(name in results),
                is_addend=int(name in addends),
                deferred=deferrable.index(name) if name in deferrable else -1,
                copy_outlives_source=int(self.memory.copy_bytes(name, position) > 0),
            )
            arrays.integers["access_is_possible"] += [
                int(transform.is_possible) for transform in transforms[name]
            ]
            arrays.integers["access_is_copied"] += [int(transform.is_copy) for transform in transforms[name]]
            arrays.reals["access_ns"] += [transform.ns for transform in transforms[name]]
            arrays.reals["access_pj"] += [transform.pj for transform in transforms[name]]
        arrays.integers["inner_addend"] += sorted(
            self._order[name] for name in addends.intersection(representative.covers)
        )
        for name in deferrable:
            task = self.table.transition(name, representative).task
            arrays.integers["group_transition"].append(-1 if task is None else transitions.number(task))
        for candidate in group:
            self._append_candidate(arrays, candidate)
        for offsets, column in _OFFSETS.items():
            arrays.end_row(offsets, column)

    def _append_candidate(self, arrays: _Arrays, candidate: Candidate) -> None:
        self.candidates.append(candidate)
        arrays.append(
            "candidate",
            error=candidate.error,
            row_bytes=candidate.placed_rows * self._row_bytes,
            filter_bytes=candidate.filter_bytes,
            on_gpu=int(candidate.rewrite.mode == "GPU"),
            plain_memory=int(uses_plain_memory(candidate)),
            continues=int(_can_continue(candidate)),
        )
        self._append_tasks(arrays, "task", candidate.tasks)
        arrays.end_row("candidate_task_begin", "task_resource")
        for moment in candidate.memory_moments:
            buffer_bytes = self.memory.buffer_bytes(candidate, moment)
            arrays.append(
                "step", buffer_bytes=buffer_bytes, reads=int(moment.reads), writes=int(moment.writes)
            )
        arrays.end_row("candidate_step_begin", "step_reads")

    def _append_tasks(self, arrays: _Arrays, name: str, tasks: Iterable[Task]) -> None:
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

    def _input_layout(self, name: str) -> str:
        return self.table.inputs.get(name, steps.CANONICAL).layout

    def _transform(self, tensor: str, layout: str, reader: Candidate) -> _Transform:
        if not self.table.transforms or layout == reader.input.layout:
            return _NO_TRANSFORM
        return _Transform.from_edge(self.table.transform(tensor, layout, reader.input.layout))

    @staticmethod
    def _mode(may_switch: bool, use: str) -> int:
        if not use or not may_switch:
            return ANY_MODE
        return PLAIN_MODE if use == PLAIN_MEMORY_MODE else PIM_MODE


_NO_TRANSFORM = _Transform()
_ResultForm = tuple[str, int | None]
_OPERAND = (
    *(f"operand_{name}" for name in ("region", "order", "is_late", "is_result", "is_addend", "deferred")),
    *("operand_copy_outlives_source", "access_is_possible", "access_is_copied"),
)
# By column of offsets where a group's rows begin, the column that it indexes.
_OFFSETS = {
    "group_operand_begin": "operand_region",
    "group_transition_begin": "group_transition",
    "group_candidate_begin": "candidate_on_gpu",
    "group_input_copy_begin": "input_copy_order",
    "group_inner_addend_begin": "inner_addend",
}


class _Transitions:
    """The tasks of transitions between candidates, each stored once."""

    def __init__(self, problem: PlacementProblem, arrays: _Arrays):
        self.problem, self.arrays = problem, arrays
        self._numbers: dict[int, int] = {}

    def number(self, task: Task) -> int:
        """The number of a task, which is appended if it is new."""
        if id(task) not in self._numbers:
            self._numbers[id(task)] = len(self._numbers)
            self.problem._append_tasks(self.arrays, "transition", (task,))
        return self._numbers[id(task)]


def _can_continue(candidate: Candidate) -> bool:
    """Whether it needs no launch if it continues a submission (`Candidate.with_shared_submission`)."""
    first_resources = (task.resource for task in candidate.tasks if not task.after)
    return candidate.rewrite.mode == "PIM" and "gpu" not in first_resources
