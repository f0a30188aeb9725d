"""Ways that are worth going on with: not those after which nothing can be better than after another."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from dataclasses import replace

from pimflow.core.candidate import CostTable, Task
from pimflow.core.region import RegionGraph
from pimflow.placement.solvers.steps import CANONICAL, State
from pimflow.placement.solvers.ways import Way, Ways, Weights


class Dominance:
    """Compares partial covers of the same regions by what they take, and by the states they end in.

    Whatever is done next, one state costs no more than another but for launches of which it hides less,
    results that have to be brought where the other has them, and channels that are used in another way.
    A cover that is cheaper by as much is as good.

    Parameters
    ----------
    graph, table, weights
        What is searched.
    moving : bool
        Whether states are compared in which results lie in other layouts, or channels are used in another
        way: not where memory is limited, of which copies take some, nor where times do not add up.
    """

    def __init__(self, graph: RegionGraph, table: CostTable, weights: Weights, moving: bool):
        self.graph, self.table, self.weights = graph, table, weights
        self.moving = moving and bool(table.transforms or table.switch.task)
        self._moved: dict[tuple[str, str, str], float] = {}

    def worth_going_on(self, ways: Ways, position: int) -> Ways:
        """Those of `ways`, which do all regions before `position`, after which one may be best."""
        if not self.moving and not self.table.launched_ahead:
            return ways
        alike: dict[Hashable, list[Way]] = {}
        compared: dict[Hashable, list[Way]] = {}
        gaps: dict[Hashable, float] = {}
        for way in sorted(ways.items(), key=lambda way: way[1].value):
            state, partial = way
            rest = self._never_compared(state)
            kept = alike.setdefault(rest, [])
            gaps[rest] = max(gaps.get(rest, 0.0), partial.value - partial.bound)
            # What runs behind other regions hides neither more nor less, where time counts.
            of = state.running.of if state.running and self.weights.per_ns else ""
            near = compared.setdefault((rest, of), [])
            if not any(self._as_good(one, way, position) for one in near):
                kept.append(way)
                near.append(way)
        return {
            state: replace(partial, bound=partial.value - gaps[rest]) if gaps[rest] else partial
            for rest, kept in alike.items()
            for state, partial in kept
        }

    def _never_compared(self, state: State) -> Hashable:
        if not self.moving:
            return state.apart_from_running
        use = None if self._switch_value is not None and state.running is None else state.as_memory
        return state.pending, state.on_pim, state.open, use

    def _as_good(self, one: Way, other: Way, position: int) -> bool:
        (state, partial), (other_state, other_partial) = one, other
        gap = other_partial.value - partial.value
        return self._more(state, other_state, position, gap) <= gap

    def _more(self, one: State, other: State, position: int, enough: float) -> float:
        """How much more may be taken from `one` on than from `other`, or more than `enough`."""
        more = 0.0
        if one.as_memory != other.as_memory:
            more += self._switch_value or 0.0
        if one.layouts != other.layouts:
            own, others = dict(one.layouts), dict(other.layouts)
            for name in sorted(own.keys() | others.keys()):
                given, wanted = own.get(name, CANONICAL.layout), others.get(name, CANONICAL.layout)
                if given != wanted:
                    left = sum(reader >= position for reader in self._readers[name])
                    more += left * self._moved_value(name, given, wanted) if left else 0.0
        if one.running and other.running and self.weights.per_ns and more <= enough:
            more += self.weights.per_ns * one.running.lacks_ns(other.running, self.table.longest_launch_ns)
        return more

    @functools.cached_property
    def _readers(self) -> dict[str, list[int]]:
        order = {region.name: position for position, region in enumerate(self.graph.regions)}
        return {name: [order[reader] for reader in found] for name, found in self.graph.readers.items()}

    @functools.cached_property
    def _switch_value(self) -> float | None:
        """What another use of PIM's channels takes; None if a candidate does not say how it leaves them."""
        every = (each for candidates in self.table.candidates.values() for each in candidates)
        if any(each.channels_as and not each.leaves_channels_as for each in every):
            return None
        return self._value(self.table.switch.task)

    @functools.cached_property
    def _taken(self) -> dict[str, set[str]]:
        """By tensor, the layouts that a transform makes."""
        found: dict[str, set[str]] = {}
        for tensor, _, taken in self.table.transforms:
            found.setdefault(tensor, set()).add(taken)
        return found

    def _moved_value(self, tensor: str, own: str, other: str) -> float:
        """How much more a reader may take for a tensor that lies in its `own` layout than in the `other`."""
        key = (tensor, own, other)
        if key not in self._moved:
            taken = (
                (self._read_value(tensor, own, into), self._read_value(tensor, other, into))
                for into in self._taken.get(tensor, ())
            )
            self._moved[key] = max([0.0, *(here - there for here, there in taken if there < math.inf)])
        return self._moved[key]

    def _read_value(self, tensor: str, given: str, taken: str) -> float:
        if given == taken:
            return 0.0
        edge = self.table.transform(tensor, given, taken)
        return self._value(edge.task) if edge.possible else math.inf

    def _value(self, task: Task | None) -> float:
        return self.weights.of(task.duration_ns, task.energy_pj, ()) if task else 0.0
