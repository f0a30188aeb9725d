"""Columns and rows for launches that are issued ahead, in `program.Program`.

Behind each region, by device, two columns: how long the next launch has been on its way when the device is
free again, and when besides the region has ended (`launches.Queue`). Both are free to be less. Before the
first region they are at most what the state hides that the problem begins in. What a launch delays is then
less by one of the two: a row beside that without the launch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pimflow.core.integer_program import Column, Entries, IntegerProgram, Row
from pimflow.placement.solvers.steps import State
from pimflow.placement.solvers.variants import SegmentProblem, Variant

Taken = list[tuple[Column, Variant]]


class LaunchRows:
    """Of one `Program`, whose problem says what runs before it.

    Parameters
    ----------
    problem : SegmentProblem
    program : IntegerProgram
        Where they are added.
    last : mapping
        By position, the variants that end there, with their columns.
    begun : mapping
        By state that the problem may begin in, its column.
    unit_ns : float
        What times are counted in.
    """

    def __init__(
        self,
        problem: SegmentProblem,
        program: IntegerProgram,
        last: Mapping[int, Taken],
        begun: Mapping[State, Column],
        unit_ns: float,
    ):
        self.problem, self.program, self.last = problem, program, last
        self.begun, self.unit_ns = begun, unit_ns
        self.devices = [each for each in problem.resources if each in problem.table.longest_launch_ns]
        self._hidden: dict[tuple[str, int, bool], Column] = {}

    def hidden(self, device: str, position: int, follows: bool) -> Column:
        """The column of what is hidden behind the region at `position`."""
        key = (device, position, follows)
        if key not in self._hidden:
            most = self._scaled(self.problem.table.longest_launch_ns[device])
            here = self._hidden[key] = self.program.column(upper=most)
            if position < self.problem.segment[0]:
                hides_ns = ((s, each.hides_ns(device, follows)) for s, each in self.problem.running.items())
                begun = [(self.begun[state], -min(self._scaled(ns), most)) for state, ns in hides_ns]
                self.program.row([(here, 1.0), *begun], high=0.0)
        return self._hidden[key]

    def _scaled(self, ns: float) -> float:
        return ns / self.unit_ns

    def launching(self, variants: Taken) -> Iterator[tuple[Taken, Column]]:
        """Variants with their delays if nothing of a launch is hidden, and the column of what is."""
        groups: dict[tuple[str, int, bool], Taken] = defaultdict(list)
        for column, v in variants:
            for device, delays in v.launching.items():
                groups[device, v.begin - 1, v.follows].append((column, replace(v, delays_ns=delays)))
        for key, taken in groups.items():
            yield taken, self.hidden(*key)

    def queues(self, position: int) -> None:
        """Add rows: what may be hidden behind a region is what its variant leaves, or was before it."""
        for device in self.devices:
            most = self._scaled(self.problem.table.longest_launch_ns[device])
            for behind in (False, True):
                left: Entries = []
                kept: dict[tuple[int, bool], Taken] = defaultdict(list)
                for column, v in self.last[position]:
                    queue = next((each for each in v.queues if each.resource == device), None)
                    if queue is None:
                        kept[v.begin - 1, behind and v.follows].append((column, v))
                        left.append((column, -most))
                    else:
                        own_ns = queue.behind_ns if behind else queue.own_ns
                        left.append((column, -min(self._scaled(own_ns), most)))
                here = self.hidden(device, position, behind)
                self.program.row([(here, 1.0), *left], high=0.0)
                for (before, follows), taken in kept.items():
                    entries: Entries = [(here, 1.0), (self.hidden(device, before, follows), -1.0)]
                    for column, v in taken:
                        more = min(self._scaled(v.executing_ns), most) if follows else 0.0
                        entries.append((column, most - more))
                    self.program.row(entries, high=most)

    def requiring(self, device: str, at_least_ns: float) -> Row:
        """The row: so much is hidden of a launch that waits for the last region."""
        here = self.hidden(device, self.problem.segment[1] - 1, True)
        return [(here, 1.0)], self._scaled(at_least_ns), math.inf
