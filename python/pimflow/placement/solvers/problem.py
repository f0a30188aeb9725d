"""A region graph and its cost table as tables, the input of the search in C++ (``placement/src/problem.h``).

Candidates that behave alike in every state have the same row, and are one group. Groups that read alike share
a reading. C++ expands the tasks of a candidate in its context, with epilogues and launches, by
the same rules as `solvers.plan_state` and `solvers.launches`. The evaluator uses these modules, and checks
the figures of each plan of the search.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from pimflow.core.candidate import Candidate, CostTable, EdgeCost, Task
from pimflow.core.region_graph import RegionGraph
from pimflow.core.tensor_placement import IN_GPU_CHANNELS, ChannelMode, ChannelSet, TensorPlacement
from pimflow.host import native
from pimflow.placement.solvers import plan_state
from pimflow.placement.solvers.capacity import uses_plain_memory
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.placement.solvers.tables import Tables
from pimflow.placement.solvers.view_aliases import ViewAliases

_problem = native.get("pimflow.placement.problem")

_MODES = (None, ChannelMode.PIM, ChannelMode.PLAIN_MEMORY)  # of PIM's channels, in the order of C++


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
        stored = (region.name for region in graph.regions if region.name not in self._aliases.choices)
        self._order = {name: position for position, name in enumerate(stored)}
        self._resources = {resource: number for number, resource in enumerate(table.resources)}
        # By region, the numbers of (placement, bytes) of its result; bytes are None if they are the graph's.
        self._results: dict[str, dict[_Result, int]] = {
            name: {(IN_GPU_CHANNELS, None): 0} for name in graph.readers
        }
        self._open_alternatives = {"": 0}  # numbers of the alternatives of layers that are left open
        self._can_defer: set[str] = set()
        self._readings: dict[Hashable, int] = {}
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

        tables = Tables()
        self._append_regions(tables)
        for index, region in enumerate(self.graph.regions):
            groups: dict[tuple[tuple[str, float], ...], list[Candidate]] = {}
            for candidate in self.table.candidates[region.name] if region.name in self._order else ():
                row = self._group_row(tables, index, candidate)
                groups.setdefault(tuple(row.items()), []).append(candidate)
            for fields, group in groups.items():
                for candidate in group:
                    self._append_candidate(tables, candidate)
                tables.append("group", **dict(fields), candidate_end=len(self.candidates))
        resources = self._resources
        tables.append(
            "header",
            launches_ahead=self.table.overlaps_launches,
            pim=resources.get("pim", -1),
            crossbar=resources.get("crossbar", -1),
            switch_task=self._append_transition(tables, self.table.switch.task),
        )
        longest = self.table.longest_launch_ns
        tables.append_numbers("longest_launch_ns", (longest.get(resource, 0.0) for resource in resources))
        return _problem(tables.tensors())

    def _append_regions(self, tables: Tables) -> None:
        lives = {life.name: life for life in self.memory.liveness.lifetimes}
        aliases: dict[str, int] = {}
        ends = [0, *itertools.accumulate(region.name in self._order for region in self.graph.regions)]
        for name in self._order:
            readers = sorted({self._order[reader] for reader in self._aliases.readers(name)})
            life = lives.get(name)
            stored_bytes = life.within_bytes + life.size_bytes if life else 0
            for placement, changed_bytes in self._results[name]:
                size = stored_bytes if changed_bytes is None else changed_bytes
                tables.append("layout", set=_SETS.index(placement.channels), bytes=size)
            tables.append(
                "region",
                can_defer=name in self._can_defer,
                is_shared=self.graph.is_shared(name),
                live_end=-1 if life is None else len(self._order) + 1 if life.pinned else ends[life.end],
                alias=aliases.setdefault(life.alias, len(aliases)) if life and life.alias else -1,
                tensor_bytes=self.memory.size_bytes[name],
                reader_end=tables.append_numbers("reader", readers),
                layout_end=tables.count("layout"),
            )

    def _group_row(self, tables: Tables, index: int, candidate: Candidate) -> dict[str, float]:
        """What decides how `candidate`, from region number `index` on, behaves, and which state it leaves."""
        graph, first, last = self.graph, candidate.covers[0], candidate.covers[-1]
        reading = self._reading_key(candidate)
        if reading not in self._readings:
            self._readings[reading] = len(self._readings)
            self._append_reading(tables, index, candidate)
        previous = graph.regions[index - 1].name if index else ""
        end = index + len(candidate.covers)
        is_view_next = end < len(graph.regions) and graph.regions[end].name in self._aliases.choices
        return {
            "begin": self._order[first],
            "end": self._order[first] + len(candidate.covers),
            "reading_number": self._readings[reading],
            "requires_open": self._open_alternatives[candidate.requires_open],
            "leaves_open": self._open_alternatives[candidate.leaves_open],
            "layout": self._results[last][self._result(candidate)],
            "required_mode": _MODES.index(candidate.channel_mode),
            "final_mode": _MODES.index(candidate.final_channel_mode),
            "defers_epilogue": bool(candidate.deferred_epilogue),
            "keeps_submission_open": candidate.keeps_submission_open,
            "continues": previous in self._order and graph.region(first).first_result_input == previous,
            "is_dead_end": bool(candidate.leaves_open) and is_view_next,  # a view is not done meanwhile
            "fuses_regions": candidate.fuses_regions,
            "leaves_partial_sum": candidate.defers_partial_sum,
            "fuses_epilogue": candidate.fuses_epilogue,
        }

    def _reading_key(self, candidate: Candidate) -> Hashable:
        """A key that is equal for candidates of the same regions if they read alike in every state."""
        return (
            candidate.covers,
            candidate.input,
            candidate.fuses_epilogue,
            candidate.requires_open,
            bool(candidate.deferred_epilogue),
            candidate.alternative.original,
            self.memory.overwritable_inputs(candidate),
        )

    def _append_reading(self, tables: Tables, index: int, candidate: Candidate) -> None:
        """Append what `candidate` and all of its reading key read, from region number `index` on."""
        graph, last = self.graph, self.graph.region(candidate.covers[-1])
        names = tuple(dict.fromkeys(plan_state.candidate_inputs(graph, candidate)))
        results = set(plan_state.results_read(graph, candidate))
        late = plan_state.late_inputs(graph, candidate, ())
        addends = set(last.inputs[last.operands :]) if candidate.deferred_epilogue else set()
        reads = defaultdict[str, list[str]](list)  # by region, it and its views that are read
        for name in names:
            if (source := self._aliases.source(name)) in self._order:
                reads[source].append(name)
        deferrable = sorted(name for name in reads if name in results and name in self._can_defer)
        overwritable = self.memory.overwritable_inputs(candidate)
        edges = self._append_input_copies(tables, candidate, names)
        for region, read_names in reads.items():
            tables.append(
                "operand",
                region=self._order[region],
                order=names.index(read_names[0]),
                is_late=late.issuperset(read_names),
                is_result=not results.isdisjoint(read_names),
                is_addend=region in addends,
                is_overwritable=region in overwritable,
                deferred=deferrable.index(region) if region in deferrable else -1,
                copy_outlives_source=self.memory.copy_bytes(region, index) > 0,
            )
            for placement, _ in self._results[region]:
                read_edges = [self._result_transform(name, placement, candidate) for name in read_names]
                self._append_read_cost(tables, "access", read_edges)
                edges += read_edges
        transform_resources = {edge.task.resource for edge in edges if edge.task}
        if len(transform_resources) > 1:
            raise AssertionError(f"transforms for '{candidate.name}' run on {sorted(transform_resources)}")
        previous = graph.regions[index - 1].name if index else ""
        epilogues = (self.table.transition(name, candidate).task for name in deferrable)
        tables.append(
            "reading",
            reads_previous=self._order[candidate.covers[0]] == 0
            or self._aliases.reads_previous(index, names),
            previous_is_late=previous in late,
            transform_resource=next((self._resources[name] for name in transform_resources), -1),
            operand_end=tables.count("operand"),
            transition_end=tables.append_numbers(
                "reading_transition",
                [self._append_transition(tables, task) for task in epilogues],
            ),
            input_copy_end=tables.count("input_copy"),
            inner_addend_end=tables.append_numbers(
                "inner_addend", sorted(self._order[name] for name in addends.intersection(candidate.covers))
            ),
        )

    def _append_input_copies(
        self, tables: Tables, candidate: Candidate, names: Sequence[str]
    ) -> list[EdgeCost]:
        """Append the cost of reading the network's inputs among `names`, and their copies."""
        edges = []
        for order, name in enumerate(names):
            if name.startswith("%"):
                edge = self._transform(name, self.table.inputs.get(name, IN_GPU_CHANNELS), candidate)
                edges.append(edge)
                if edge.task and edge.task.launched:
                    tables.append("input_copy", order=order, bytes=self.memory.size_bytes[name])
        self._append_read_cost(tables, "input_cost", edges)
        return edges

    @staticmethod
    def _append_read_cost(tables: Tables, table: str, edges: Sequence[EdgeCost]) -> None:
        tasks = [edge.task for edge in edges if edge.task]
        tables.append(
            table,
            is_possible=all(edge.possible for edge in edges),
            is_copied=any(task.launched for task in tasks),
            ns=sum(task.duration_ns for task in tasks),
            pj=sum(task.energy_pj for task in tasks),
        )

    def _append_candidate(self, tables: Tables, candidate: Candidate) -> None:
        self.candidates.append(candidate)
        for task in candidate.tasks:
            self._append_task(tables, "task", task)
        for moment in candidate.footprint.run_moments:
            buffer_bytes = self.memory.buffer_bytes(candidate, moment)
            tables.append("step", buffer_bytes=buffer_bytes, reads=moment.reads, writes=moment.writes)
        tables.append(
            "candidate",
            error=candidate.alternative.error,
            row_bytes=candidate.footprint.bank_rows * self._row_bytes,
            filter_bytes=candidate.footprint.filter_bytes,
            on_gpu=not candidate.uses_pim,
            plain_memory=uses_plain_memory(candidate),
            continues=candidate.begins_on_pim,
            task_end=tables.count("task"),
            step_end=tables.count("step"),
        )

    def _append_task(self, tables: Tables, table: str, task: Task) -> None:
        tables.append(
            table,
            resource=self._resources[task.resource],
            also=sum(1 << self._resources[resource] for resource in task.also) if task.also else 0,
            launch_ns=task.launch_ns,
            execution_ns=task.execution_ns,
            energy_pj=task.energy_pj,
            launched=task.launched,
            readies_channels=task.readies_channels,
            after_end=tables.append_numbers(f"{table}_after", task.after),
        )

    def _append_transition(self, tables: Tables, task: Task | None) -> int:
        """The number of a task of transitions, which is appended; -1 without one."""
        if task is None:
            return -1
        self._append_task(tables, "transition", task)
        return tables.count("transition") - 1

    def plan(self, numbers: Iterable[int]) -> tuple[Candidate, ...]:
        """The plan with the candidates of these numbers, in order."""
        return self._aliases.with_views([self.candidates[number] for number in numbers])

    def _result_transform(self, name: str, placement: TensorPlacement, reader: Candidate) -> EdgeCost:
        """The transform for `reader` of a result, or a view of it, if the result lies at `placement`."""
        if name in self._aliases.choices and placement not in self._aliases.choices[name]:
            return EdgeCost(possible=False)
        return self._transform(name, placement, reader)

    def _transform(self, tensor: str, placement: TensorPlacement, reader: Candidate) -> EdgeCost:
        edge = self.table.transform(tensor, placement, reader.input)
        if edge.task is not None and edge.task.also:
            raise AssertionError(f"transform {edge.task.label} holds several resources")
        return edge


_Result = tuple[TensorPlacement, int | None]
_SETS = tuple(ChannelSet)  # in the order of C++
