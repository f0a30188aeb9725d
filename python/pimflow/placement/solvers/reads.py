"""What candidates read, and what it costs to read it where it lies."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from pimflow.core.candidate import EdgeCost, Task


@dataclass(frozen=True)
class ReadCost:
    """The cost for a group of reading a tensor in a layout, or several views of it."""

    is_possible: bool = True
    tasks: tuple[Task, ...] = ()

    @classmethod
    def from_edge(cls, edge: EdgeCost) -> ReadCost:
        """The transform of an edge; raises `AssertionError` if it holds several resources."""
        if edge.task is not None and edge.task.also:
            raise AssertionError(f"transform {edge.task.label} holds several resources")
        return cls(edge.possible, (edge.task,) if edge.task else ())

    def __add__(self, other: ReadCost) -> ReadCost:
        if self.is_possible and not self.tasks:
            return other
        return ReadCost(self.is_possible and other.is_possible, self.tasks + other.tasks)

    @functools.cached_property
    def ns(self) -> float:
        return sum(task.duration_ns for task in self.tasks)

    @functools.cached_property
    def pj(self) -> float:
        return sum(task.energy_pj for task in self.tasks)

    @functools.cached_property
    def is_copy(self) -> bool:
        return any(task.launched for task in self.tasks)


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What the candidates of a group read.

    Attributes
    ----------
    names : tuple of str
        Regions and graph inputs, the first operand first.
    regions : dict of str to list of str
        By region among them, or that one among them is an alias of, the names that are read of it.
    results : set of str
        Regions whose results are read, not only tensors kept beside them.
    late : frozenset of str
        Those that no task waits for (`plan_state.late_inputs`).
    deferrable : list of str
        Regions whose epilogue may be deferred to these candidates.
    addends : set of str
        What the candidates' own deferred epilogue adds.
    input_transforms, result_transforms : dict
        By graph input, the cost of reading it; by region, that for each placement of its result.
    """

    names: tuple[str, ...]
    regions: dict[str, list[str]]
    results: set[str]
    late: frozenset[str]
    deferrable: list[str]
    addends: set[str]
    input_transforms: dict[str, ReadCost]
    result_transforms: dict[str, list[ReadCost]]

    def transform_resource(self, name: str) -> str:
        """The resource of all transforms for candidate `name`; empty without any."""
        transforms = itertools.chain(self.input_transforms.values(), *self.result_transforms.values())
        resources = {task.resource for transform in transforms for task in transform.tasks}
        if len(resources) > 1:
            raise AssertionError(f"transforms for '{name}' run on several resources: {sorted(resources)}")
        return next(iter(resources), "")
