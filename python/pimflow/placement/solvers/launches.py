"""Launches that are issued ahead (`System.launches`): the part of them that earlier work does not hide.

Each device has a queue, like a CUDA stream: a launch is issued when the task before it in the queue begins to
execute. Of a launch, only what exceeds the time until its task may begin anyway is charged. That time is
bounded from below: by the executions on a path of tasks, each of which waits for the one before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pimflow.core.candidate import Task

BEGIN = "the begin"
NEVER = float("-inf")


@dataclass(frozen=True, kw_only=True)
class Running:
    """The work in progress when the next candidate is issued.

    Attributes
    ----------
    awaited_region : str
        The last region, or `BEGIN`; empty if no launch may wait for it.
    queues_ns : mapping of str to (float, float)
        By resource that was used, how much of the next launch is hidden: if its task waits only for the task
        before it in the queue, and, no less, if it also waits for the last region.
    waited_ns : float
        How much of a launch on another resource is hidden, if its task waits for the last region.
    """

    awaited_region: str = BEGIN
    queues_ns: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    waited_ns: float = 0.0

    def hidden_ns(self, resource: str, follows: bool) -> float:
        """How much of a candidate's launch is hidden; `follows`: whether it waits for the last region."""
        return self.queues_ns.get(resource, (0.0, self.waited_ns))[follows]

    def advance(self, tasks: Sequence[Task], region: str, follows: bool) -> Running:
        """The work in progress after `tasks`, with whole launches, of a candidate that ends in `region`."""
        work_ns = _path_ns(tasks)
        queues_ns: dict[str, tuple[float, float]] = {
            resource: (own_ns, behind_ns + work_ns if follows else own_ns)
            for resource, (own_ns, behind_ns) in self.queues_ns.items()
        }
        last_tasks: dict[str, int] = {}
        for number, task in enumerate(tasks):
            for resource in task.resources:
                if resource not in last_tasks or task.launch_ns or task.launched:
                    last_tasks[resource] = number
        queues_ns |= {
            resource: (tasks[number].execution_ns, _path_ns(tasks, number))
            for resource, number in last_tasks.items()
            if resource != "crossbar"
        }
        return Running(
            awaited_region=region if tasks or follows else "",  # a view is read in place of what it shows
            queues_ns=queues_ns,
            waited_ns=self.waited_ns + work_ns if follows else 0.0,
        )


def charged_tasks(
    tasks: Sequence[Task], follows: bool, hidden_ns: Callable[[str], float]
) -> tuple[Task, ...]:
    """The tasks of a candidate with the part of their launches that is charged.

    The first launch on a resource is issued before the resource is free or, if the candidate follows the last
    region, before it may begin; it also overlaps the candidate's own earlier tasks. Each further launch is
    issued when the task before it on the resource executes.

    Parameters
    ----------
    follows : bool
        Whether the candidate waits for the last region.
    hidden_ns : callable
        By resource, how much of its first launch earlier candidates hide.
    """
    ends = [start + task.execution_ns for start, task in zip(_starts_ns(tasks), tasks)]
    previous_ns: dict[str, float] = {}  # execution before the next launch on a resource that had a launch
    free: dict[str, float] = {}
    busy_ns: dict[str, float] = defaultdict(float)
    charged = []
    for task, end_ns in zip(tasks, ends):
        overlap_ns = previous_ns.get(task.resource)
        is_launched = bool(task.launch_ns) or overlap_ns is not None
        if overlap_ns is None and task.launch_ns:
            # Other resources of the task may be busy for longer, which the rest of the launch overlaps.
            begin_ns = max([free.get(task.resource, 0.0), *(ends[i] for i in task.after)])
            overlap_ns = hidden_ns(task.resource) + (begin_ns if follows else busy_ns[task.resource])
        charged.append(task.with_launch_ns(max(task.launch_ns - (overlap_ns or 0.0), 0.0)))
        if is_launched:
            previous_ns |= dict.fromkeys(task.resources, task.execution_ns)
        free |= dict.fromkeys(task.resources, end_ns)
        for resource in task.resources:
            busy_ns[resource] += task.execution_ns
    return tuple(charged)


def _path_ns(tasks: Sequence[Task], first: int | None = None) -> float:
    """A lower bound of the tasks' execution time: the longest path, or the longest from task `first` on."""
    starts = _starts_ns(tasks, first)
    return max((start + task.execution_ns for start, task in zip(starts, tasks)), default=0.0)


def _starts_ns(tasks: Sequence[Task], first: int | None = None) -> list[float]:
    """By task, a lower bound of its start after the begin (of task `first`); `NEVER` without a path there."""
    starts: list[float] = []
    free: dict[str, float] = {}
    for number, task in enumerate(tasks):
        begins = 0.0 if first in (None, number) else NEVER
        waits = [starts[i] + tasks[i].execution_ns for i in task.after]
        starts.append(max([begins, *waits, *(free.get(resource, NEVER) for resource in task.resources)]))
        free |= dict.fromkeys(task.resources, starts[-1] + task.execution_ns)
    return starts
